"""Attention beyond its cases: what positions, lengths and bounds mean, what is never read, and what is refused."""

import itertools
from dataclasses import replace

import pytest
import torch

import tilery
from tilery.base.errors import BadInput
from tilery.base.spec import TensorSpec, case
from tilery.core import policy
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.ops.attention.call import visible_pairs
from tilery.ops.attention.cases import inputs

OP, LSE = REGISTRY["attention"], REGISTRY["attention_lse"]
BACKENDS = ["numba", "triton"]
EITHER = pytest.mark.parametrize("backend", BACKENDS)


def drawn(**more):
    where = torch.get_default_device()
    return inputs(**{"m": 20, "heads": 4, "kv_heads": 2, "n": 32, "dtype": "fp32", "device": where, "seed": 3} | more)


def close(a, b):
    return torch.allclose(a, b, atol=2e-6)


@EITHER
def test_layouts_mean_the_same(backend):
    given = drawn(batch=2)
    q, k, v = (given[name] for name in "qkv")
    out, lse = tilery.attention_lse(q, k, v, causal=True, backend=backend)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    assert close(tilery.attention(*turned, causal=True, layout="bhsd", backend=backend).transpose(1, 2), out)
    ends = torch.tensor([0, 20, 40], dtype=torch.int32)
    how = {"causal": True, "layout": "thd", "max_seqlen_q": 20, "max_seqlen_k": 20, "backend": backend}
    packed, packed_lse = tilery.attention_lse(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends, **how)
    assert close(packed.view_as(out), out) and close(packed_lse.view(4, 2, 20).transpose(0, 1), lse)


@pytest.mark.parametrize("bias", ["none", "fp32", "shared"])
def test_the_reference_holds_the_scores_of_one_key_head_at_a_time(monkeypatch, bias):
    """All scores of 32 heads and 16384 tokens would take 64 GiB: no GPU could check that case."""
    given, sizes, einsum = drawn(bias=bias, slopes=True, sinks=True, softcap=3.0, window=9), [], torch.einsum
    monkeypatch.setattr(torch, "einsum", lambda *x: [made := einsum(*x), sizes.append(made.numel())][0])
    out, lse = LSE.reference(*LSE.complete((), given))
    assert max(sizes[::2]) == 2 * 20 * 20
    wide = given | {name: given[name].repeat_interleave(2, 2) for name in "kv"}
    assert all(map(close, LSE.reference(*LSE.complete((), wide)), (out, lse)))


@EITHER
def test_the_last_query_is_at_the_last_key(backend):
    """So a chunk of queries against all keys gives what the whole gives."""
    given = drawn(window=7)
    q, k, v = (given[name] for name in "qkv")
    for how in ({}, {"window": 7}):
        whole = tilery.attention(q, k, v, causal=True, backend=backend, **how)
        assert close(tilery.attention(q[:, 13:], k, v, causal=True, backend=backend, **how), whole[:, 13:])


@EITHER
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_of_ten_thousand(backend, sign):
    """Every other key has the largest logit, 10,000 or -10,000: their values are averaged, exactly."""
    q, k, v = torch.zeros(1, 3, 1, 16), torch.zeros(1, 70, 1, 16), torch.randn(1, 70, 1, 16)
    q[..., 0], k[..., 0] = 100.0, sign * 100.0
    k[:, 1::2, :, 0] -= 1.0
    out, lse = tilery.attention_lse(q, k, v, scale=1.0, backend=backend)
    assert close(out, v[:, ::2].mean(1, keepdim=True).expand_as(out))
    assert torch.allclose(lse, torch.tensor(sign * 1e4) + torch.tensor(35.0).log())


@EITHER
def test_what_sees_nothing_is_zero(backend):
    given = drawn(keys=6)  # the first 14 queries are before the first key
    out, lse = tilery.attention_lse(**given, backend=backend)
    assert not out[:, :14].any() and (lse[..., :14] == -torch.inf).all()
    assert out[:, 14:].all() and lse[..., 14:].isfinite().all()
    sinks = torch.randn(4)
    out, lse = tilery.attention_lse(**given | {"sinks": sinks}, backend=backend)
    assert not out[:, :14].any() and close(lse[..., :14], sinks[None, :, None].expand(1, 4, 14))
    out, lse = tilery.attention_lse(**given | {"sinks": torch.full((4,), -torch.inf)}, backend=backend)
    assert not out[:, :14].any() and (lse[..., :14] == -torch.inf).all()


def configs_that_differ():
    """By TMA, and not."""
    default = OP.kernel("triton").default(call_for(OP, case(m=200, n=32, dtype="fp16"), "cpu"))
    return [replace(default, tma=tma, block_m=16, block_n=16) for tma in (False, True)]


@EITHER
def test_a_sequence_does_not_see_its_neighbours(backend):
    """Not even where they are NaN, nor a bound that is larger than it needs to be."""
    given = drawn(order="thd", lengths="9+20+5", dtype="fp16")
    for name in "kv":
        given[name][:9] = given[name][29:] = float("nan")
    alone = tilery.attention(*(given[name][9:29].unsqueeze(0) for name in "qkv"), causal=True, backend=backend)
    for config in [None] if backend == "numba" else configs_that_differ():
        for most in (20, 100):
            bounds = {"max_seqlen_q": most, "max_seqlen_k": most}
            out = tilery.attention(**given | bounds, backend=backend, config=config)
            assert torch.allclose(out[9:29], alone[0], atol=2e-3) and out[:9].isnan().all() and out[29:].isnan().all()


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize("how", [{}, {"window": 9}, {"causal": False, "window": 9}, {"order": "thd"}, {"keys": 50}])
def test_tma_or_not_gives_the_same_bits(how, backend):
    given = drawn(m=40, dtype="fp16", batch=2, **how)
    plain, by_tma = (tilery.attention(**given, backend=backend, config=config) for config in configs_that_differ())
    assert torch.equal(plain, by_tma)


@EITHER
def test_one_plan_serves_every_scale(backend):
    """Also one that is not positive, for which Triton has code of its own."""
    given = drawn()

    def attention(q=given["q"], **more):
        return tilery.attention(**given | {"q": q} | more, backend=backend)

    OP.plans.clear()
    half = attention(scale=0.5)
    assert close(attention(given["q"] * 0.5, scale=1), half)
    assert close(attention(-given["q"], scale=-0.5), half) and close(attention(scale=0.5), half)
    assert close(attention(), attention(scale=32**-0.5))
    assert len(OP.plans) == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 20])
def test_cost_counts_pairs_that_see_each_other(causal, window):
    for queries, keys in itertools.product((0, 1, 5, 9), (0, 1, 4, 12)):
        positions = [(i + keys - queries, key) for i in range(queries) for key in range(keys)]
        seen = [(not causal or key <= i) and (not window or abs(i - key) < window) for i, key in positions]
        assert visible_pairs(queries, keys, causal, window) == sum(seen)


ENDS = torch.tensor([0, 20], dtype=torch.int32)
BAD = {
    "layout must be one of bshd, bhsd, thd, got 'sbhd'": {"layout": "sbhd"},
    "q must be .T, H, D. as layout 'thd' says": {"layout": "thd"},
    "k must be fp32 as q is, got fp16": {"k": torch.zeros(1, 20, 2, 32, dtype=torch.float16)},
    "q must be one of fp32, fp16, bf16, e4m3, e5m2, got float64": {"q": torch.zeros(1, 20, 4, 32).double()},
    "k must have stride 1 along its last dimension": {"k": torch.zeros(1, 20, 32, 2).transpose(2, 3)},
    "q's heads must be of 16, 32, 64, 80, 96, 128, 192, 256, got 40": {"q": torch.zeros(1, 20, 4, 40)},
    "q's heads must be a multiple of k's, got 3 and 2": {"q": torch.zeros(1, 20, 3, 32)},
    "v as k but for a head's size": {"v": torch.zeros(1, 19, 2, 32)},
    "no larger than k's": {"v": torch.zeros(1, 20, 2, 64)},
    "cu_seqlens_q and max_seqlen_q are for layout 'thd', got them with 'bshd'": {"cu_seqlens_q": ENDS},
    "cu_seqlens_k and max_seqlen_k are for layout 'thd'": {"max_seqlen_k": 20},
    r"key_mask must be bool\[1, 20\]": {"key_mask": torch.ones(1, 20)},
    r"bias must be fp32 \[1 or 1, 1 or 4, 20, 20\], got fp32\[1, 2, 20, 20\]": {"bias": torch.zeros(1, 2, 20, 20)},
    r"slopes must be fp32\[4\], one for each head of q": {"slopes": torch.zeros(2)},
    r"sinks must be fp32\[4\]": {"sinks": torch.zeros(4, dtype=torch.float16)},
    "q_scale is for fp8 tensors, those of fp32 take None": {"q_scale": torch.ones(1)},
    "window must be 0 .none. or the number of keys that a query sees, got -1": {"window": -1},
    "softcap must be 0 .none. or a positive number from 1e-30 to 1e30, got -2.0": {"softcap": -2.0},
    "softcap must be 0 .none. or a positive number from 1e-30 to 1e30, got nan": {"softcap": float("nan")},
    "scale must be float or None or int, got str": {"scale": "1"},
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_named(words):
    with pytest.raises(BadInput, match=words):
        tilery.attention(**drawn() | BAD[words])


PACKED_BAD = {
    "max_seqlen_q must be given for layout 'thd', the longest sequence or more, got 0": {"max_seqlen_q": 0},
    "cu_seqlens_k must be given for layout 'thd', got None": {"cu_seqlens_k": None},
    r"cu_seqlens_q must be int32 .sequences \+ 1. and contiguous, got int64": {"cu_seqlens_q": ENDS.long()},
    r"cu_seqlens_k must be as long as cu_seqlens_q, \[2\]": {"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)},
    "bias is for layouts bshd and bhsd, got it with layout 'thd'": {"bias": torch.zeros(1, 4, 20, 20)},
    "key_mask is for layouts bshd and bhsd": {"key_mask": torch.ones(1, 20, dtype=torch.bool)},
}


@pytest.mark.parametrize("words", PACKED_BAD)
def test_bad_packing_is_named(words):
    with pytest.raises(BadInput, match=words):
        tilery.attention(**drawn(order="thd") | PACKED_BAD[words])


@pytest.mark.parametrize("scale", [None, torch.ones(2), torch.ones(1, dtype=torch.float16)])
def test_fp8_needs_its_scales(scale):
    with pytest.raises(BadInput, match=r"k_scale must be fp32\[1\] for tensors of e4m3, got"):
        tilery.attention(**drawn(dtype="e4m3") | {"k_scale": scale})


@pytest.mark.parametrize(
    ("change", "arch", "words"),
    [
        ({"block_m": 96}, "sm_90", "powers of two from 16 to 256"),
        ({"num_stages": 9}, "sm_90", "bytes of shared memory, a block has 232448"),
        ({"tma": True, "num_stages": 1}, "sm_80", "TMA is there from sm_90 on, this is sm_80"),
    ],
)
def test_configs_that_cannot_be_are_refused(change, arch, words):
    call = call_for(OP, case(m=512, n=128, dtype="bf16"))
    with device.pretend(arch):
        config = replace(OP.kernel("triton").default(call), **change)
        assert words in policy.problem_refusal(OP, "triton", call, config)


def test_tensors_off_16_bytes_and_empty_ones_go_without_tma():
    for params in ({"m": 40, "layout": "misaligned"}, {"m": 40, "keys": 0}):
        call = call_for(OP, case(**params, n=64, dtype="bf16"))
        with device.pretend("sm_90"):
            default = OP.kernel("triton").default(call)
            assert not default.tma
            assert "TMA takes" in policy.problem_refusal(OP, "triton", call, replace(default, tma=True))


def test_keys_that_all_sequences_share_in_memory_go_without_tma():
    """It has no stride of 0."""
    given = drawn(batch=2, m=20, dtype="fp16")
    given |= {name: given[name][:1].expand(2, -1, -1, -1) for name in "kv"}
    specs = tuple(
        s._replace(device=torch.device("cuda:0")) if isinstance(s, TensorSpec) else s
        for s in OP.specs(OP.complete((), given))
    )
    call = OP.call_type(OP.signature.references(specs))  # not checked: dispatch takes no stride of 0
    with device.pretend("sm_90"):
        default = OP.kernel("triton").default(call)
        assert not default.tma
        assert "one in memory" in policy.problem_refusal(OP, "triton", call, replace(default, tma=True))
