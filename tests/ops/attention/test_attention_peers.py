"""Who attention is held against: that each computes what the op does, on a CPU with stand-ins for what a GPU has."""

import contextlib
from itertools import pairwise

import pytest
import torch

from tilery.base.spec import case
from tilery.core.op import REGISTRY
from tilery.measure.check import check_baseline
from tilery.ops.attention import paged_peers, peers
from tilery.ops.attention.reference import attend

DECODE = {"m": 3, "keys": 96, "n": 32, "heads": 4, "kv_heads": 2, "dtype": "fp16"}
CHUNKED = {"m": 21, "keys": 96, "chunks": "16+0+5", "n": 32, "dtype": "fp16"}
LATENT = {"m": 3, "context": 80, "heads": 3, "latent": 32, "rope": 16, "dtype": "fp16"}
FULL = [
    ("attention", {"m": 40, "dtype": "fp16", "batch": 2}),
    ("attention", {"m": 20, "keys": 33, "dtype": "bf16", "order": "bhsd"}),
    ("attention_decode", DECODE),
    ("attention_decode", DECODE | {"queries": 4}),
    ("attention_decode", DECODE | {"queries": 16, "block_size": 16}),
    ("attention_decode", DECODE | {"queries": 2, "block_size": 16, "format": "e4m3", "per": "head"}),
    ("attention_chunked", CHUNKED),
    ("attention_chunked", CHUNKED | {"scattered": False}),
]
RAGGED = [
    ("attention_decode", DECODE | {"lengths": "96+0+33", "queries": 3}),
    ("attention_decode", DECODE | {"lengths": "90+1+33", "block_size": 16, "window": 9}),
    ("attention_decode", DECODE | {"lengths": "90+1+33", "block_size": 32, "format": "e5m2"}),
    ("attention_chunked", CHUNKED | {"lengths": "90+7+5", "window": 6}),
    ("attention_chunked", CHUNKED | {"lengths": "9+7+5"}),
]
PACKED = [
    ("attention", {"m": 30, "keys": 40, "dtype": "fp16", "order": "thd", "lengths": "5+30", "key_lengths": "40+31"}),
    ("attention", {"m": 30, "dtype": "fp16", "window": 8}),
    ("attention", {"m": 30, "dtype": "fp16", "window": 8, "causal": False}),
]


def named(cases):
    return [pytest.param(op, params, id=f"{op}-{i}") for i, (op, params) in enumerate(cases)]


def right(op, peer, params):
    return check_baseline(REGISTRY[op], f"baseline:{peer}", case(**params), "cpu", seed=3).errors


@pytest.mark.parametrize(
    ("op", "params"),
    named([*FULL, *RAGGED, ("mla_decode", LATENT | {"queries": 3, "lengths": "ragged", "block_size": 16})]),
)
def test_torch_gives_what_the_op_does(op, params):
    assert right(op, "torch", params)


@pytest.mark.parametrize(("op", "params"), named([*FULL[:1], *FULL[2:], *RAGGED]))
def test_what_cudnn_is_given_means_the_same(op, params, monkeypatch):
    """Without forcing it: a CPU has none."""
    module = peers if op == "attention" else paged_peers
    monkeypatch.setattr(module, "sdpa_kernel", lambda _: contextlib.nullcontext())
    assert right(op, "cudnn", params)


@pytest.fixture
def flash(monkeypatch):
    """Stand-ins that take arguments as torch's own do: masks stand at the last key, heads share keys."""

    aten = torch.ops.aten
    names = {
        op: [argument.name for argument in op.default._schema.arguments]
        for op in (aten._flash_attention_forward, aten._scaled_dot_product_flash_attention)
    }

    def taken(op, args, more):
        found = dict(zip(names[op], args)) | more
        assert set(found) <= set(names[op]) and found["dropout_p"] == 0.0
        return found

    def one(q, k, v, given):
        left, right = given.get("window_size_left"), given.get("window_size_right")
        assert left is None or right == (0 if given["is_causal"] else left)
        window = 0 if left is None else left + 1
        scale = given["scale"] or q.shape[-1] ** -0.5
        return attend(q, k, v, scale, causal=given["is_causal"], window=window)

    def forward(*args, op=aten._flash_attention_forward, **more):
        given = taken(op, args, more)
        q, k, v = (given[name] for name in ("query", "key", "value"))
        if given["cum_seq_q"] is None:
            outs, lses = zip(*(one(*each, given) for each in zip(q, k, v)))
            return torch.stack(outs), torch.stack(lses), None, None, None
        ends = [given[name].tolist() for name in ("cum_seq_q", "cum_seq_k")]
        assert [given["max_q"], given["max_k"]] == [max(b - a for a, b in pairwise(e)) for e in ends]
        spans = zip(*map(pairwise, ends))
        outs, lses = zip(*(one(q[a:b], k[c:d], v[c:d], given) for (a, b), (c, d) in spans))
        return torch.cat(outs), torch.cat(lses, 1), None, None, None

    def scaled(*args, op=aten._scaled_dot_product_flash_attention, **more):
        given = taken(op, args, more)
        turned = [given[name].transpose(1, 2) for name in ("query", "key", "value")]
        outs, lses = zip(*(one(*each, given) for each in zip(*turned)))
        return torch.stack(outs).transpose(1, 2), torch.stack(lses), *[None] * 7

    for name, stand_in in (("_flash_attention_forward", forward), ("_scaled_dot_product_flash_attention", scaled)):
        monkeypatch.setattr(aten, name, stand_in)


@pytest.mark.parametrize(("op", "params"), named([*[c for c in FULL if "format" not in c[1]], *PACKED]))
def test_what_flash_attention_is_given_means_the_same(op, params, flash):
    assert right(op, "flash", params)


@pytest.mark.parametrize(("op", "params"), named([FULL[0], *PACKED]))
def test_flash_attention_gives_an_lse(op, params, flash):
    assert len(right("attention_lse", "flash", params)) == 2


@pytest.mark.parametrize(
    ("op", "peer", "params", "says"),
    [
        ("attention", "cudnn", {"m": 20, "keys": 33, "dtype": "fp16"}, "fewer queries than keys"),
        ("attention", "cudnn", {"m": 20, "window": 3, "dtype": "fp16"}, "cuDNN, as torch calls it, has no window"),
        ("attention", "torch", PACKED[0][1] | {"scale": -0.5}, "gives NaN where a scale is not positive"),
        ("attention_decode", "torch", DECODE | {"sinks": True}, "torch's attention has no sinks"),
        ("attention_decode", "flash", DECODE | {"lengths": "96+0+33"}, "full sequences alone"),
        ("attention_decode", "flash", DECODE | {"window": 5}, "torch's FlashAttention has no window"),
        ("attention_chunked", "flash", CHUNKED | {"softcap": 5.0}, "torch's FlashAttention has no softcap"),
        ("attention_chunked", "torch", CHUNKED | {"format": "e4m3"}, "torch's attention has no k_scale"),
    ],
)
def test_what_a_peer_does_not_know_it_refuses_in_a_sentence(op, peer, params, says):
    with pytest.raises(NotImplementedError, match=says):
        right(op, peer, params)


@pytest.mark.parametrize(
    ("op", "params"),
    named([FULL[4], FULL[6], RAGGED[0], ("mla_decode", LATENT | {"queries": 2, "block_size": 16})]),
)
def test_pages_are_gathered_and_masks_made_once(op, params, monkeypatch):
    """So they are in no arm's time."""
    found, made = REGISTRY[op], []
    for saved in (paged_peers._gathered, paged_peers.masks, paged_peers.masks_of_chunks, paged_peers.host_list):
        forward = saved._forward
        monkeypatch.setattr(saved, "_forward", lambda *given, f=forward: [made.append(f), f(*given)][1])
    args = found.complete((), found.inputs(**params, device="cpu", seed=3))
    found.baselines["baseline:torch"](*args)
    assert made
    made.clear()
    found.baselines["baseline:torch"](*args)
    assert not made


@pytest.mark.parametrize(("op", "params"), named(PACKED))
def test_torch_takes_windows_and_packed_sequences(op, params):
    assert right(op, "torch", params)


@pytest.mark.parametrize("params", [{"queries": 4}, {"queries": 16, "block_size": 16}])
def test_cudnn_called_for_each_token_gives_what_the_op_does(params, monkeypatch):
    monkeypatch.setattr(paged_peers, "sdpa_kernel", lambda _: contextlib.nullcontext())
    assert right("attention_decode", "cudnn_each", DECODE | params)


def test_cudnn_called_for_each_token_is_for_several_tokens_of_full_sequences():
    for params, why in (({"queries": 1}, "one token"), ({"queries": 3, "lengths": "96+0+33"}, "full sequences alone")):
        with pytest.raises(NotImplementedError, match=why):
            right("attention_decode", "cudnn_each", DECODE | params)


@pytest.mark.parametrize("more", [{}, {"causal": False, "keys": 33}, {"order": "bhsd"}], ids=str)
def test_what_cudnns_backward_is_given_means_the_same(more, monkeypatch):
    """It is given what its own forward saved, once for an input."""
    forwards = []

    def forward(q, k, v, bias, with_lse, dropout, causal, debug, *, scale):
        assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
        assert forwards.append(q.shape) is None
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse, "q", "k", q.shape[2], k.shape[2], "seed", "offset", None

    def backward(dout, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, most_q, most_k, dropout, causal, *, scale):
        assert (seed, offset, bias, cu_q, cu_k, dropout) == ("seed", "offset", None, "q", "k", 0.0)
        assert (most_q, most_k) == (q.shape[2], k.shape[2])
        group = q.shape[1] // k.shape[1]
        wide = (x.repeat_interleave(group, 1) for x in (k, v))
        of_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, *both = of_cpu(dout, q, *wide, out, lse, 0.0, causal, scale=scale)
        return dq, *(x.unflatten(1, (-1, group)).sum(2) for x in both)

    monkeypatch.setattr(peers, "_cudnn_op", lambda more="": backward if more else forward)
    params = {"m": 20, "n": 32, "dtype": "fp32", "batch": 2, "dlse": False} | more
    assert right("attention_backward", "cudnn", params) and len(forwards) == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        pytest.param(
            {},
            "cuDNN runs on a GPU alone",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told"),
        ),
        ({"keys": 33}, "no longer keys"),
        ({"softcap": 3.0}, "neither windows nor soft caps"),
        ({"dlse": True}, "no gradient of lse"),
    ],
    ids=str,
)
def test_what_cudnns_backward_does_not_know_is_said(more, says):
    params = {"m": 20, "n": 32, "dtype": "fp16", "dlse": False} | more
    with pytest.raises(NotImplementedError, match=says):
        right("attention_backward", "cudnn", params)


@pytest.mark.parametrize(
    ("op", "params"),
    [
        ("attention_cascade", {"m": 5, "queries": 3, "groups": "2+3", "prefix_lengths": "200+33", "prefix": 200}),
        ("attention_cascade", {"m": 6, "groups": "2+0+1", "lengths": "64+1+33+64+12+5", "prefix_lengths": "256+9+0"}),
        ("merge_attention_backward", {"parts": 5, "m": 9, "n": 128, "batch": 3, "order": "bhsd"}),
        ("merge_attention_backward", {"parts": 3, "m": 9, "order": "thd", "dlse": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_torch_gives_what_merges_and_cascades_do(op, params, dtype):
    assert right(op, "torch", params | {"dtype": dtype})
