"""RoPE beyond its cases: Hugging Face's convention, what is refused, gradients of the angles, the norm's scalars."""

import pytest
import torch

import tilery
from tilery.base.errors import BadInput
from tilery.ops.rope import contract
from tilery.ops.rope.heads import LAYOUTS

BACKENDS = ["numba", "triton"]


def drawn(**more):
    given = contract.draw(**{"m": 5, "dtype": "fp32", "n": 16, "device": torch.get_default_device(), "seed": 3} | more)
    del given["v"]
    return given


@pytest.mark.parametrize("backend", BACKENDS)
def test_takes_half_of_hugging_faces_table(backend):
    """There q · cos + rotate_half(q) · sin, with cos and sin [1, S, D] whose halves are alike, and q [B, H, S, D]."""

    def rotate_half(x):
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    angle = torch.outer(torch.arange(5.0), 10000 ** -torch.arange(0, 1, 1 / 8)).repeat(1, 2)[None]
    cos, sin = angle.cos(), angle.sin()
    made = tilery.rope(q, k, cos[0, :, :8], sin[0, :, :8], layout="bhsd", backend=backend)
    for x, y in zip((q, k), made):
        assert torch.allclose(y, x * cos[:, None] + rotate_half(x) * sin[:, None], atol=1e-6)


def test_layouts_mean_the_same():
    q, k, cos, sin, positions, *_ = drawn(batch=2, places="int64").values()
    q_out, k_out = tilery.rope(q, k, cos, sin, positions)
    other = tilery.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, positions, layout="bhsd")
    packed = tilery.rope(q.flatten(0, 1), k.flatten(0, 1), cos, sin, positions.flatten(), layout="thd")
    assert torch.equal(other[0].transpose(1, 2), q_out) and torch.equal(other[1].transpose(1, 2), k_out)
    assert torch.equal(packed[0].view_as(q_out), q_out) and torch.equal(packed[1].view_as(k_out), k_out)


def test_none_counts_positions_from_zero():
    given = drawn(batch=2)
    counted = torch.arange(5).repeat(2, 1)
    assert all(map(torch.equal, tilery.rope(**given), tilery.rope(**given | {"positions": counted})))


@pytest.mark.parametrize("interleaved", [False, True])
def test_backward_undoes_forward(interleaved):
    given = drawn(places="int32", rotary=8, interleaved=interleaved)
    rotated = tilery.rope(**given)
    given["dq"], given["dk"] = rotated
    back = tilery.rope_backward(**{name: v for name, v in given.items() if name not in ("q", "k")})
    assert torch.allclose(back[0], given["q"], atol=1e-6) and torch.allclose(back[1], given["k"], atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("order", LAYOUTS)
def test_angles_have_gradients_too(order, interleaved):
    """Positions repeat, so rows of the table gather from several tokens."""
    given = drawn(batch=2, order=order, places="int64", rotary=8, interleaved=interleaved)
    tensors = [given[name].detach().double() for name in ("q", "k", "cos", "sin")]
    how = given["positions"] % 3, order, interleaved

    def gradients(call, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        q, k = call(*leaves, *how)
        (q.square().sum() + (k * k.detach().cos()).sum()).backward()
        return [t.grad.double() for t in leaves]

    for ours, theirs in zip(gradients(tilery.rope, torch.float32), gradients(tilery.rope.reference, torch.float64)):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_a_gradient_for_q_alone_leaves_k_alone():
    given = drawn()
    q, k = given["q"].requires_grad_(), given["k"]
    tilery.rope(**given)[0].sum().backward()
    assert q.grad is not None and k.grad is None


def test_in_place_writes_views_of_a_packed_tensor_and_nothing_else():
    qkv = torch.randn(5, (3 + 2 + 2) * 16)
    before, given = qkv.clone(), drawn(order="thd", places="int32")
    q, k, _ = (x.unflatten(-1, (-1, 16)) for x in qkv.split([48, 32, 32], -1))
    tilery.rope_(q, k, given["cos"], given["sin"], given["positions"], layout="thd")
    assert torch.equal(qkv[:, 80:], before[:, 80:]) and not torch.equal(qkv[:, :80], before[:, :80])


@pytest.mark.parametrize("backend", BACKENDS)
def test_norm_takes_eps_and_offset_at_run_time(backend):
    given = drawn(rotary=8)
    weights = torch.randn(2, 16)
    q, k, cos, sin, positions, *how = given.values()
    for eps, offset in ((1e-6, 0.0), (0.5, 1.0)):
        scalars = (cos, sin, positions, eps, offset, *how)
        expected = [q.double(), k.double()]
        tilery.qk_norm_rope_.reference(*expected, *weights, *scalars)
        found = [q.clone(), k.clone()]
        tilery.qk_norm_rope_(*found, *weights, *scalars, backend=backend)
        assert all(torch.allclose(a.double(), b, atol=1e-5) for a, b in zip(found, expected))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layout": "shbd"}, "layout must be one of bshd, bhsd, thd, got 'shbd'"),
        ({"layout": "thd"}, "q must be .T, H, D. as layout 'thd' says"),
        ({"k": torch.randn(1, 4, 2, 16)}, "k must differ from q in the number of heads alone"),
        ({"k": torch.randn(1, 5, 2, 16).half()}, "k must be fp32 as q is, got fp16"),
        ({"cos": torch.randn(5, 16), "sin": torch.randn(5, 16)}, "pass the first, cos"),
        ({"sin": torch.randn(10, 7)}, "sin must be as cos"),
        ({"cos": torch.randn(4, 8), "sin": torch.randn(4, 8)}, "a row for each of the 5 positions, got 4"),
        ({"positions": torch.arange(5)}, r"positions must be \[1, 5\], one per token, got \[5\]"),
        ({"positions": torch.ones(1, 5)}, "positions must be int32 or int64, got fp32"),
    ],
)
def test_refuses_in_a_sentence(change, says):
    with pytest.raises(BadInput, match=says):
        tilery.rope(**drawn() | change)


def test_packed_tokens_must_say_where_they_are():
    with pytest.raises(BadInput, match="positions must be given for layout 'thd'"):
        tilery.rope(**drawn(order="thd") | {"positions": None})
