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

OP = REGISTRY["attention_backward"]
BACKENDS = ["numba", "triton"]


def drawn(**params):
    sizes = {"m": 9, "heads": 4, "kv_heads": 2, "n": 32, "dtype": "fp32"}
    return OP.inputs(**sizes | params, device=torch.get_default_device(), seed=2)


def gradients(call, given, dtype, **more):
    """Gradients of q, k and v, through autograd, with the case's dout and dlse."""
    leaves = [given[name].to(dtype).detach().requires_grad_() for name in ("q", "k", "v")]
    names = ("cu_seqlens_q", "cu_seqlens_k", "causal", "layout", "max_seqlen_q", "max_seqlen_k")
    made = call(*leaves, **{name: given[name] for name in names} | more)
    outs = made if isinstance(made, tuple) else (made,)
    loss = (outs[0] * given["dout"].to(dtype)).sum()
    if len(outs) > 1:
        loss = loss + torch.where(outs[1].isfinite(), outs[1], 0.0).mul(given["dlse"].to(dtype)).sum()
    return torch.autograd.grad(loss, leaves)


def reference(op):
    return lambda *args, **kwargs: op.reference(*op.complete(args, kwargs))


@pytest.mark.parametrize("name", ["attention", "attention_lse"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"keys": 20},
        {"m": 20, "keys": 6},  # the first queries see nothing
        {"causal": False, "order": "bhsd", "batch": 2},
        {"order": "thd", "lengths": "4:7+0:3+9:5+2:0"},
        {"n": 64, "value": 32},
    ],
    ids=str,
)
def test_autograd_through_the_op_is_that_of_its_reference(name, params):
    op, given = REGISTRY[name], drawn(**params)
    found = gradients(op, given, torch.float32, scale=0.3)
    expected = gradients(reference(op), given, torch.float64, scale=0.3)
    for ours, theirs in zip(found, expected):
        assert (ours - theirs).norm() <= 3e-6 * theirs.norm()


def test_the_lse_alone_has_gradients():
    given = drawn()
    q, k, v = (given[name].requires_grad_() for name in ("q", "k", "v"))
    dq, dk, dv = torch.autograd.grad(tilery.attention_lse(q, k, v)[1].sum(), (q, k, v))
    assert dq.any() and dk.any() and not dv.any()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("window", 3),
        ("softcap", 2.0),
        ("bias", torch.zeros(1, 1, 9, 9)),
        ("slopes", torch.zeros(4)),
        ("sinks", torch.zeros(4)),
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
    ],
)
def test_refuses_in_a_sentence(change, says):
    with pytest.raises(BadInput, match=says):
        OP(**drawn() | change)


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
