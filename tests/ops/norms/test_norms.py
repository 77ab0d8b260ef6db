"""What is special about norms: what is rounded when, rows at two distances, and sums over rows in a fixed order."""

import pytest
import torch

import tilery
from tilery import languages
from tilery.base.errors import BadInput
from tilery.base.spec import case
from tilery.core.op import REGISTRY
from tilery.measure.check import check
from tilery.measure.place import place
from tilery.ops.quantize import formats

X, RESIDUAL = torch.randn(6, 96).bfloat16(), torch.randn(6, 96).bfloat16()
W = torch.randn(96).bfloat16()


def test_the_norm_is_of_the_rounded_sum():
    y, total = tilery.add_rms_norm(X, RESIDUAL, W)
    assert torch.equal(total, X + RESIDUAL)
    assert torch.equal(y, tilery.rms_norm(total, W))
    exact = X.float() + RESIDUAL.float()
    assert not torch.equal(total.float(), exact)  # else this shows nothing


def test_the_fused_norm_quantises_what_the_norm_gives():
    x, w = X.float(), W.float()
    values, scales = tilery.rms_norm_fp8(x, w, per="group")
    wanted, wanted_scales = formats.quantized(tilery.rms_norm(x, w), "group", "e4m3", False)
    assert torch.allclose(scales, wanted_scales, rtol=1e-6)
    assert (values.float() - wanted.to(values.dtype).float()).norm() <= 1e-2 * wanted.norm()
    fused, fused_scales, total = tilery.add_rms_norm_fp8(x, torch.zeros_like(x), w, per="group")
    assert torch.equal(fused.float(), values.float()) and torch.equal(fused_scales, scales) and torch.equal(total, x)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "add_rms_norm", "rms_norm_fp8", "add_rms_norm_fp8"])
def test_rows_that_are_read_again_end_where_no_block_does(monkeypatch, name, long):
    """As many long rows are, from L1 or from memory; the last program has one row of two."""
    if why := languages.missing("triton"):
        pytest.skip(why)
    from tilery.ops.norms.triton import tiles

    if long:
        monkeypatch.setattr(tiles, "_l1_rows", lambda x, inputs: 0)
    op, config = REGISTRY[name], tiles.Config(2, 128, 4)
    for per in ("token", "group") if name.endswith("fp8") else (None,):
        params = {"m": 5, "n": 300, "dtype": "fp32"} | ({} if per is None else {"per": per})
        assert check(op, "triton", case(**params), place(op, "triton").device, config=config).refused is None


def test_scales_in_columns_are_those_in_rows():
    row, column = (tilery.rms_norm_fp8(X, W, per="group", layout=layout) for layout in ("row", "column"))
    assert torch.equal(row[1], column[1]) and column[1].stride() == (1, 8)
    with pytest.raises(BadInput, match="layout column is for per='group'"):
        tilery.rms_norm_fp8(X, W, per="token", layout="column")
    with pytest.raises(BadInput, match="per must be one of token, group"):
        tilery.rms_norm_fp8(X, W, per="tensor")


def test_heads_of_packed_qkv_need_no_copy():
    qkv = torch.randn(2, 5, 6, 16)  # two sequences of five tokens, four heads of q and one of k and v each
    q, w = qkv[:, :, :4], torch.randn(16)
    assert torch.equal(tilery.rms_norm(q, w), tilery.rms_norm(q.contiguous(), w))
    with pytest.raises(BadInput, match="evenly spaced but for one dimension"):
        tilery.rms_norm(qkv.transpose(0, 1)[:, :, :4], w)


def test_an_empty_dimension_lies_anywhere():
    assert tilery.rms_norm(torch.ones(3, 0, 8), torch.ones(8)).shape == (3, 0, 8)


@pytest.mark.parametrize("parallel", [False, True])
def test_gradients_of_weights_have_the_same_bits_in_ten_runs(parallel):
    from tilery.ops.rows.numba_rows import Config

    dy, x, w = torch.randn(999, 40), torch.randn(999, 40), torch.randn(40)
    for op, more in ((tilery.rms_norm_backward, (1e-6, 0.0)), (tilery.layer_norm_backward, (1e-5,))):
        first = op(dy, x, w, *more, backend="numba", config=Config(parallel))
        for _ in range(9):
            again = op(dy, x, w, *more, backend="numba", config=Config(parallel))
            assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_only_one_of_the_two_outputs_has_a_gradient():
    def gradients(choose):
        given = [t.float().clone().requires_grad_() for t in (X, RESIDUAL, W)]
        choose(*tilery.add_rms_norm(*given)).sum().backward()
        return [t.grad for t in given]

    dx, dresidual, dw = gradients(lambda y, total: total)
    assert torch.equal(dx, torch.ones_like(dx)) and torch.equal(dresidual, dx) and not dw.any()
    dx, dresidual, dw = gradients(lambda y, total: y)
    other = [(X.float() + RESIDUAL.float()).requires_grad_(), W.float().clone().requires_grad_()]
    tilery.rms_norm(*other).sum().backward()
    assert torch.allclose(dx, other[0].grad, atol=1e-5) and torch.allclose(dw, other[1].grad, atol=1e-5)
    assert torch.equal(dx, dresidual) and dx is not dresidual
