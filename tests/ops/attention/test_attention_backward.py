"""The backward of attention beyond its cases: autograd through the ops, what is refused, what no sequence has."""

import pytest
import torch

import tilery
from tilery.base.errors import BadInput, NoBackward
from tilery.base.spec import TensorSpec, case
from tilery.core import policy
from tilery.core.cases import call_for, specs_for
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.ops.attention import attention as contract

OP, SINKS = REGISTRY["attention_backward"], REGISTRY["attention_sinks_backward"]
BACKENDS = ["numba", "triton"]
EITHER = pytest.mark.parametrize("backend", BACKENDS)


def drawn(**params):
    sizes = {"m": 9, "heads": 4, "kv_heads": 2, "n": 32, "dtype": "fp32"}
    return OP.inputs(**sizes | params, device=torch.get_default_device(), seed=2)


def gradients(call, given, dtype, sinks=None, **more):
    """Gradients of q, k, v and sinks if they are given, through autograd, with the case's dout and dlse."""
    leaves = [given[name].to(dtype).detach().requires_grad_() for name in ("q", "k", "v")]
    names = ("cu_seqlens_q", "cu_seqlens_k", "causal", "layout", "max_seqlen_q", "max_seqlen_k", "window", "softcap")
    options = {name: given[name] for name in names} | more
    if sinks is not None:
        leaves.append(sinks.to(dtype).detach().requires_grad_())
        options["sinks"] = leaves[-1]
    made = call(*leaves[:3], **options)
    outs = made if isinstance(made, tuple) else (made,)
    loss = (outs[0] * given["dout"].to(dtype)).sum()
    if len(outs) > 1:
        loss = loss + torch.where(outs[1].isfinite(), outs[1], 0.0).mul(given["dlse"].to(dtype)).sum()
    return torch.autograd.grad(loss, leaves)


def reference(op):
    return lambda *args, **kwargs: op.reference(*op.complete(args, kwargs))


@pytest.mark.parametrize("backend", [*BACKENDS, "cuda.hopper"])
def test_a_query_whose_lse_says_that_it_saw_nothing_has_no_gradient(backend):
    """Whatever keys it is said to see: its probabilities are zero, not infinite."""
    given = drawn(m=20, n=64, dtype="fp16", causal=False, dlse=False)
    given["lse"][:, :, 3] = -torch.inf
    if why := policy.refusal(OP, backend, OP.call(OP.specs(OP.complete((), given)))):
        pytest.skip(why)  # it needs a Hopper GPU, or the emulator
    found = OP(**given, backend=backend)
    floats = {name for name, x in given.items() if torch.is_tensor(x) and x.is_floating_point()}
    right = OP.reference(**{name: x.double() if name in floats else x for name, x in given.items()})
    assert (found[0][:, 3] == 0).all() and (found[0][:, 4] != 0).any()
    for ours, exact in zip(found, right):
        assert torch.allclose(ours.double(), exact, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", ["attention", "attention_lse"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"window": 4},
        {"m": 70, "keys": 90, "window": 33, "causal": False},
        {"softcap": 0.5, "heads": 6},
        {"m": 20, "window": 3, "softcap": 2.0, "order": "bhsd", "batch": 2},
        {"order": "thd", "lengths": "4:7+0:3+40:35+2:0", "window": 6, "softcap": 1.0},
        {"keys": 20},
        {"m": 20, "keys": 6},  # the first queries see nothing
        {"causal": False, "order": "bhsd", "batch": 2},
        {"order": "thd", "lengths": "4:7+0:3+9:5+2:0"},
        {"n": 64, "value": 32},
    ],
    ids=str,
)
def test_autograd_through_the_op_is_that_of_its_reference(name, params, with_sinks):
    """The reference's gradients are torch's own, of float64."""
    op, given = REGISTRY[name], drawn(**params)
    sinks = torch.randn(params.get("heads", 4)) if with_sinks else None
    found = gradients(op, given, torch.float32, sinks, scale=0.3)
    expected = gradients(reference(op), given, torch.float64, sinks, scale=0.3)
    assert len(found) == len(expected) == 3 + with_sinks
    for ours, theirs, most in zip(found, expected, (3e-6, 3e-6, 3e-6, 2e-5)):  # a sink's may cancel
        assert (ours - theirs).norm() <= most * theirs.norm()


def test_the_lse_alone_has_gradients():
    given = drawn()
    q, k, v = (given[name].requires_grad_() for name in ("q", "k", "v"))
    dq, dk, dv = torch.autograd.grad(tilery.attention_lse(q, k, v)[1].sum(), (q, k, v))
    assert dq.any() and dk.any() and not dv.any()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("bias", torch.zeros(1, 1, 9, 9)),
        ("slopes", torch.zeros(4)),
        ("key_mask", torch.ones(1, 9, dtype=torch.bool)),
    ],
)
@pytest.mark.parametrize("name", ["attention", "attention_lse"])
def test_options_without_gradients_are_refused_at_the_call(name, option, value):
    given, words = drawn(), f"{name}: there are no gradients with {option}, .*; call it under torch.no_grad"
    tensors = [given[n].requires_grad_() for n in ("q", "k", "v")]
    with pytest.raises(NoBackward, match=words):
        getattr(tilery, name)(*tensors, **{option: value})
    with torch.no_grad():
        getattr(tilery, name)(*tensors, **{option: value})


def test_a_window_that_masks_nothing_has_gradients():
    given = drawn()
    plain, wide = (gradients(tilery.attention, given, torch.float32, window=window) for window in (0, 2**63 - 1))
    assert all(map(torch.equal, plain, wide))


def test_fp8_has_no_gradients():
    q, k, v = (given.to(torch.float8_e4m3fn).requires_grad_() for given in torch.randn(3, 1, 5, 1, 32))
    with pytest.raises(NoBackward, match="there are no gradients with q_scale, k_scale, v_scale, fp8"):
        tilery.attention(q, k, v, q_scale=torch.ones(1), k_scale=torch.ones(1), v_scale=torch.ones(1))


@EITHER
@pytest.mark.parametrize("params", [{"window": 7}, {"softcap": 0.7}, {"window": 20, "softcap": 3.0, "causal": False}])
def test_the_backward_is_the_derivative_of_the_forward(params, backend):
    """By differences, in float64, of the reference alone: what it and the kernels are held to is no slip of both."""
    given = drawn(m=11, keys=14, n=16, heads=2, kv_heads=1, **params)
    names = ("scale", "causal", "layout", "window", "softcap")
    how, leaves = {name: given[name] for name in names}, [given[name].double() for name in ("q", "k", "v")]

    def loss(*tensors):
        out, lse = reference(REGISTRY["attention_lse"])(*tensors, **how)
        return (out * given["dout"].double()).sum() + (lse * given["dlse"].double()).sum()

    for i, gradient in enumerate(OP(**given, backend=backend)):
        away = torch.zeros_like(leaves[i])
        away[0, 3, 0, 5] = 1e-5
        up, down = (loss(*(x + sign * away if i == j else x for j, x in enumerate(leaves))) for sign in (1, -1))
        assert abs((up - down) / 2e-5 - gradient[0, 3, 0, 5]) <= 1e-4 * gradient.abs().max()


def test_no_gradient_is_computed_that_nobody_asked_for(monkeypatch):
    """Of sinks alone, as where all but a model's sinks is frozen; and of all but the sinks."""
    asked = []
    for name in ("attention_backward", "attention_sinks_backward"):
        op = REGISTRY[name]
        monkeypatch.setattr(contract, name, lambda *a, op=op, **k: asked.append(op.name) or op(*a, **k))
    given, sinks = drawn(), torch.randn(4, requires_grad=True)
    q, k, v = (given[name] for name in ("q", "k", "v"))
    tilery.attention(q, k, v, sinks=sinks).sum().backward()
    assert asked == ["attention_sinks_backward"] and sinks.grad.any()
    tilery.attention(q.requires_grad_(), k, v, sinks=sinks.detach()).sum().backward()
    assert asked[1:] == ["attention_backward"] and q.grad.any()


@EITHER
def test_the_gradient_of_sinks_gives_the_same_bits_for_any_other_heads(backend):
    given = SINKS.inputs(m=70, heads=3, n=32, batch=2, dtype="fp32", device=torch.get_default_device(), seed=3)
    found = SINKS(**given, backend=backend)
    by_head = dict.fromkeys(("dout", "result"), 2) | {"dlse": 1, "lse": 1, "sinks": 0}
    one = {name: given[name].narrow(dim, 1, 1).contiguous() for name, dim in by_head.items()}
    assert torch.equal(SINKS(**one, backend=backend), found[1:2])


@EITHER
def test_keys_outside_of_a_window_are_not_read(backend):
    """So that a long sequence costs what its window does: NaN there would come through."""
    given = drawn(m=300, n=16, heads=2, kv_heads=1, window=10, order="thd", lengths="5:300")
    given["k"][:200] = given["v"][:200] = float("nan")
    dq, dk, dv = OP(**given, backend=backend)
    assert dq.isfinite().all() and dk[200:].isfinite().all() and dv[200:].isfinite().all()


@EITHER
def test_queries_outside_of_a_window_are_not_read(backend):
    given = drawn(m=300, n=16, heads=2, kv_heads=1, window=10)
    given["q"][:, 200:] = given["dout"][:, 200:] = float("nan")
    _, dk, dv = OP(**given, backend=backend)
    assert dk[:, :60].isfinite().all() and dv[:, :60].isfinite().all() and dk[:, :60].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_no_sequence_have_zero_and_are_not_read(backend):
    given = drawn(order="thd", lengths="5:3+4:6")
    for name in ("dout", "q", "k", "v", "result"):
        given[name][9:] = float("nan")
    for got in OP(**given, backend=backend):
        assert got[:9].isfinite().all() and got[:9].any() and not got[9:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_ten_thousand_have_finite_gradients(backend):
    given = drawn()
    q, k, v, dout = (given[name] for name in ("q", "k", "v", "dout"))
    out, lse = tilery.attention_lse(q, k, v, scale=3e3, causal=True)
    found = OP(dout, None, q, k, v, out, lse, scale=3e3, causal=True, backend=backend)
    wide = (x.double() for x in (q, k, v, out, lse))
    _, _, expected = OP.reference(dout.double(), None, *wide, scale=3e3, causal=True)
    assert lse.abs().max() > 1e4 and all(x.isfinite().all() for x in found)
    assert (found[2] - expected).norm() <= 1e-2 * expected.norm()  # fp32 scores of 10,000 are off by 1e-3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dout": torch.zeros(1, 9, 4, 16)}, r"dout must be fp32\[1, 9, 4, 32\], got fp32\[1, 9, 4, 16\]"),
        ({"result": torch.zeros(1, 9, 4, 32).half()}, r"result must be fp32\[1, 9, 4, 32\], got fp16"),
        ({"lse": torch.zeros(1, 9, 4)}, r"lse must be fp32\[1, 4, 9\] and contiguous"),
        ({"dlse": torch.zeros(1, 4, 9).double()}, r"dlse must be fp32\[1, 4, 9\] and contiguous"),
        ({"max_seqlen_q": 9}, "cu_seqlens_q and max_seqlen_q are for layout 'thd'"),
        ({"window": -1}, "window must be 0"),
        ({"softcap": -1.0}, "softcap must be 0"),
    ],
)
def test_refuses_in_a_sentence(change, says):
    with pytest.raises(BadInput, match=says):
        OP(**drawn() | change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sinks": torch.zeros(3)}, r"sinks must be fp32\[4\], one for each head of q"),
        ({"lse": torch.zeros(1, 9, 4)}, r"lse must be fp32\[1, 4, 9\] and contiguous"),
        ({"result": torch.zeros(1, 9, 4, 32).half()}, r"result must be fp32\[1, 9, 4, 32\], got fp16"),
        ({"layout": "sbhd"}, "layout must be one of bshd, bhsd, thd"),
    ],
)
def test_the_gradient_of_sinks_refuses_in_a_sentence(change, says):
    with pytest.raises(BadInput, match=says):
        SINKS(**SINKS.inputs(m=9, heads=4, n=32, dtype="fp32", device="cpu") | change)


def test_the_reference_holds_the_scores_of_one_key_head_at_a_time(monkeypatch):
    """Those of all heads of 16384 tokens would not fit in a GPU."""
    given = OP.inputs(m=9, keys=12, heads=6, kv_heads=3, n=16, dtype="fp32", device="cpu")
    sizes, einsum = [], torch.einsum
    monkeypatch.setattr(torch, "einsum", lambda *x: [made := einsum(*x), sizes.append(made.numel())][0])
    dq, dk, dv = OP.reference(*OP.complete((), given))
    assert max(sizes) < 3 * 2 * 9 * 12
    wide = given | {name: given[name].repeat_interleave(2, 2) for name in "kv"}
    each = OP.reference(*OP.complete((), wide))
    summed = [x.unflatten(2, (3, 2)).sum(3) for x in each[1:]]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip((dq, dk, dv), (each[0], *summed)))


def test_more_sequences_than_a_grid_has_are_refused():
    given = case(m=0, heads=2, kv_heads=1, n=32, dtype="fp16", order="thd", lengths="3+5")
    specs = [
        s._replace(shape=(65537,)) if isinstance(s, TensorSpec) and s.dtype == torch.int32 else s
        for s in specs_for(OP, given)
    ]
    assert "65535 sequences, got 65536" in OP.kernel("triton").refusal(OP.call(tuple(specs)))


def test_offsets_are_wide_for_tokens_far_apart_alone():
    """Not for sequences: of these every offset is wide."""
    kernel = OP.kernel("triton")
    for params, wide in (({"m": 4096, "batch": 4, "heads": 32}, False), ({"m": 6, "layout": "far"}, True)):
        call = call_for(OP, case(**params, n=128, dtype="bf16"))
        with device.pretend("sm_90"):
            config = kernel.default(call)
            made = kernel.launches(policy.with_workspace(OP, kernel, call, config)[1], config)
        assert {launch.constants["FAR"] for launch in made if "FAR" in launch.constants} == {wide}
