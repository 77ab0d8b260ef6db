"""merge_attention beyond its cases: parts of the keys give what all of them give, gradients, what is refused."""

import pytest
import torch

import tilery
from tilery.base.errors import BadInput
from tilery.base.spec import case
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY

OP, BACKWARD = REGISTRY["merge_attention"], REGISTRY["merge_attention_backward"]
EITHER = pytest.mark.parametrize("backend", ["numba", "triton"])


def parts_of_attention(q, k, v, cuts, layout, **how):
    """Results of parts of the keys, stacked."""
    dim = layout.index("s")
    pieces = zip(k.tensor_split(cuts, dim), v.tensor_split(cuts, dim))
    made = [tilery.attention_lse(q, a.contiguous(), b.contiguous(), layout=layout, **how) for a, b in pieces]
    return torch.stack([out for out, _ in made]), torch.stack([lse for _, lse in made])


@EITHER
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("cuts", [(30,), (1, 2, 69), (0, 40, 40, 70)])  # some parts have no key
def test_parts_of_the_keys_give_what_all_keys_give(layout, cuts, backend):
    q, k, v = torch.randn(2, 5, 4, 32), torch.randn(2, 70, 2, 32), torch.randn(2, 70, 2, 32)
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    whole, whole_lse = tilery.attention_lse(q, k, v, layout=layout, backend=backend)
    out, lse = OP(*parts_of_attention(q, k, v, cuts, layout, backend=backend), layout=layout, backend=backend)
    assert torch.allclose(out, whole, atol=1e-6) and torch.allclose(lse, whole_lse, atol=1e-6)


@EITHER
def test_packed_parts_give_what_all_keys_give(backend):
    """Two sequences of 3 and 5 tokens, with a prefix that both see and the keys of each."""
    q, k, v = torch.randn(8, 2, 16), torch.randn(20, 1, 16), torch.randn(20, 1, 16)
    ends = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 8], [0, 12, 20], [0, 8], [0, 9])]
    bounds = {"layout": "thd", "max_seqlen_q": 8, "max_seqlen_k": 20, "backend": backend}
    own = tilery.attention_lse(q, k, v, ends[0], ends[1], **bounds)
    prefix = tilery.attention_lse(q, k[:9] + 1, v[:9] - 1, ends[2], ends[3], **bounds)
    out, lse = OP(*(torch.stack(pair) for pair in zip(own, prefix)), layout="thd", backend=backend)
    for rows, keys in ((slice(0, 3), slice(0, 12)), (slice(3, 8), slice(12, 20))):
        joined = torch.cat((k[:9] + 1, k[keys])), torch.cat((v[:9] - 1, v[keys]))
        whole = tilery.attention_lse(*(x[None] for x in (q[rows], *joined)), backend=backend)
        assert torch.allclose(out[rows], whole[0][0], atol=1e-6) and torch.allclose(
            lse[:, rows], whole[1][0], atol=1e-6
        )


@EITHER
def test_sums_are_in_the_order_of_the_parts(backend):
    """Largest, least and the negative of the largest: another order gives another sum, or 0."""
    values = torch.tensor([1.0, 2.0**-24, -1.0])
    outs = values.view(3, 1, 1, 1, 1).expand(3, 1, 9, 2, 16).contiguous()
    out, _ = OP(outs, torch.zeros(3, 1, 2, 9), backend=backend)
    total = torch.tensor(0.0)
    for value in values:
        total = total + value
    assert torch.equal(out, (total * (1 / torch.tensor(3.0))).expand_as(out))


@EITHER
def test_a_row_gives_the_same_bits_alone(backend):
    given = OP.inputs(parts=5, m=9, heads=3, n=80, batch=2, dtype="fp16", device=torch.get_default_device(), seed=3)
    out, lse = OP(**given, backend=backend)
    one = OP(given["outs"][:, 1:, 4:5].contiguous(), given["lses"][:, 1:, :, 4:5].contiguous(), backend=backend)
    assert torch.equal(one[0], out[1:, 4:5]) and torch.equal(one[1], lse[1:, :, 4:5])


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
def test_autograd_through_the_op_is_that_of_its_reference(layout):
    given = OP.inputs(parts=3, m=7, heads=2, n=32, dtype="fp32", batch=2, order=layout, device="cpu", seed=4)
    weights = torch.randn_like(given["outs"][0]), torch.randn_like(given["lses"][0])

    def gradients(call, dtype):
        leaves = [given[name].to(dtype).requires_grad_() for name in ("outs", "lses")]
        made = call(*leaves, layout, None)
        return torch.autograd.grad(sum((a * b.to(dtype)).sum() for a, b in zip(made, weights)), leaves)

    for ours, theirs in zip(gradients(OP, torch.float32), gradients(OP.reference, torch.float64)):
        assert (ours - theirs).norm() <= 2e-6 * theirs.norm()


def test_the_lse_alone_has_gradients():
    outs, lses = torch.randn(2, 1, 3, 2, 16, requires_grad=True), torch.randn(2, 1, 2, 3, requires_grad=True)
    douts, dlses = torch.autograd.grad(OP(outs, lses)[1].sum(), (outs, lses))
    assert not douts.any() and torch.allclose(dlses, lses.softmax(0), atol=1e-6)


@EITHER
def test_an_empty_part_gets_zeros_for_gradients(backend):
    given = BACKWARD.inputs(parts=3, m=5, heads=2, n=32, empty="some", device=torch.get_default_device(), seed=1)
    douts, dlses = BACKWARD(**given, backend=backend)
    empty = given["lses"] == -torch.inf
    assert empty.any() and not dlses[empty].any() and not douts.transpose(2, 3)[empty].any()
    assert douts.isfinite().all() and dlses.isfinite().all()


def test_a_bucket_for_every_number_of_parts_and_dtype():
    problems = [{"parts": p, "dtype": d, "out": o} for p in (2, 3) for d in ("fp32", "fp16") for o in ("fp16", "bf16")]
    assert len({OP.bucket(call_for(OP, case(m=9, n=32, **problem))).exact for problem in problems}) == 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"outs": torch.zeros(2, 3, 4, 16)}, r"outs must be \[P, B, S, H, D\] by layout 'bshd', got \[2, 3, 4, 16\]"),
        (
            {"lses": torch.zeros(2, 1, 3, 4)},
            r"lses must be fp32\[2, 1, 4, 3\], heads before tokens, got fp32\[2, 1, 3, 4",
        ),
        ({"lses": torch.zeros(2, 1, 4, 3).double()}, r"lses must be fp32\[2, 1, 4, 3\]"),
        ({"outs": torch.zeros(2, 1, 3, 4, 16).double()}, "outs must be one of fp32, fp16, bf16, got float64"),
        ({"outs": torch.zeros(2, 1, 3, 4, 1025)}, "heads of 1 to 1024, got 1025"),
        ({"outs": torch.zeros(2, 1, 3, 4, 32)[..., ::2]}, "stride 1 along its last dimension"),
        ({"layout": "sbhd"}, "layout must be one of bshd, bhsd, thd, got 'sbhd'"),
        ({"out_dtype": "e4m3"}, "out_dtype must be None .*, fp32, fp16, bf16, got 'e4m3'"),
    ],
)
def test_refuses_in_a_sentence(change, says):
    given = {"outs": torch.zeros(2, 1, 3, 4, 16), "lses": torch.zeros(2, 1, 4, 3)}
    with pytest.raises(BadInput, match=says):
        OP(**given | change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dout": torch.zeros(1, 3, 4, 8)}, r"dout must be \[1, 3, 4, 16\]"),
        ({"dout": torch.zeros(1, 3, 4, 16).half()}, "dout must be fp32 as result is, got fp16"),
        ({"dlse": torch.zeros(1, 3, 4)}, r"dlse must be fp32\[1, 4, 3\], got fp32\[1, 3, 4\]"),
    ],
)
def test_the_backward_refuses_in_a_sentence(change, says):
    with pytest.raises(BadInput, match=says):
        BACKWARD(**BACKWARD.inputs(parts=2, m=3, heads=4, n=16, device="cpu") | change)
