"""The backward of attention beyond its cases: autograd through the ops, what is refused, what no sequence has."""

import pytest
import torch

import tilery
from tilery.errors import BadInput, NoBackward
from tilery.op import REGISTRY

OP = REGISTRY["attention_backward"]
BACKENDS = ["numba", pytest.param("triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted"))]


def drawn(**params):
    return OP.inputs(**{"m": 9, "heads": 4, "kv_heads": 2, "n": 32, "dtype": "fp32"} | params, device="cpu", seed=2)


def gradients(call, given, dtype, **more):
    """Of q, k and v, through autograd, with the case's dout and dlse."""
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
def test_options_without_gradients_are_refused_in_a_sentence(name, option, value):
    with pytest.raises(NoBackward, match=f"{name} has no gradients with {option}: .* call it under torch.no_grad"):
        gradients(REGISTRY[name], drawn(), torch.float32, **{option: value})


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
