"""MLA: what conformance does not ask of mla and mla_decode."""

from dataclasses import replace

import pytest
import torch

import tilery
from compilers import most_spills
from tilery import languages
from tilery.base.errors import BadInput, CompileFailed, NoBackward
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for, specs_for
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.measure.check import check
from tilery.measure.place import place

mla, mla_decode = REGISTRY["mla"], REGISTRY["mla_decode"]
SMALL = {"heads": 3, "latent": 32, "rope": 16}
V3 = {"latent": 512, "rope": 64, "dtype": "bf16"}
SIZES = {"cuda.hopper": SMALL | {"latent": 512, "rope": 64}}  # of kernels that do not take the small ones


def kernels(op, but=()):
    return [pytest.param(k, id=k) for k in op.kernels if k not in but]


def home(op, kernel):
    """Where the kernel runs here."""
    if why := languages.missing(kernel):
        pytest.skip(why)
    where = place(op, kernel).device
    if where is None:
        pytest.skip("needs a GPU")
    return where


def decode(where, kernel, seed=3, **params):
    return mla_decode.complete((), mla_decode.inputs(**SIZES.get(kernel, SMALL) | params, device=where, seed=seed))


def launched(op, kernel, args):
    """Outputs that were full of NaN."""
    plan = policy.decide(op, op.call(op.specs(args)), kernel, None)
    outs = tuple(spec.empty().fill_(float("nan")) for spec in plan.outs)
    plan.launch(outs, args)
    return outs


def alone(args, s, blocks=None):
    """The arguments of sequence s alone, its table cut to so many blocks."""
    q, q_rope, cache, lengths, table, scale = args
    own = slice(s, s + 1)
    table = None if table is None else table[own, :blocks].contiguous()
    return q[own], q_rope[own], cache if table is not None else cache[own], lengths[own], table, scale


# mla


def test_values_of_16_are_not_multiplied_by_what_ptxas_128_left_unset(compiler_36):
    """Keys and values at odd addresses: a call that the fuzzer drew gave wrong rows and illegal accesses on an H200."""
    specs = specs_for(mla, case(m=70, heads=1, nope=32, rope=16, value=16, dtype="fp16"))
    odd = {"k": 35, "v": 19}  # elements from token to token
    specs = tuple(
        x._replace(strides=(70 * odd[name], odd[name], odd[name], 1), aligned=False) if name in odd else x
        for name, x in zip(mla.names, specs)
    )
    with device.pretend("sm_90"):
        call, kernel = mla.call(specs), mla.kernel("triton")
        configs, wide = [kernel.default(call), *kernel.configs(call)], replace(kernel.default(call), block_n=64)
        assert "ptxas" in kernel.refusal(call, wide)
    for config in configs:
        compiler_36.compile("mla", "triton", specs, "sm_90", config)
    with pytest.raises(CompileFailed, match="TRITON_PTXAS_PATH"):  # why it is refused
        compiler_36.compile("mla", "triton", specs, "sm_90", wide)


def test_a_cache_at_odd_addresses_is_refused_where_ptxas_128_leaves_registers_unset(compiler_36):
    """But on 16 bytes it is not; a latent of 512 columns takes registers that are not there, and was wrong."""
    sizes = {"m": 2, "context": 70, "heads": 1, "rope": 64, "dtype": "fp16"}
    odd = specs_for(mla_decode, case(latent=64, layout="misaligned", **sizes))
    with pytest.raises(CompileFailed, match="reads a uniform register that nothing sets"):
        compiler_36.compile("mla_decode", "triton", odd, "sm_90")
    compiler_36.compile("mla_decode", "triton", specs_for(mla_decode, case(latent=64, **sizes)), "sm_90")
    for layout, refused in (("contiguous", False), ("padded", True), ("misaligned", True)):
        call = call_for(mla_decode, case(latent=512, layout=layout, **sizes))
        assert ("multiples of 16" in (mla_decode.kernel("triton").refusal(call) or "")) == refused


# mla_decode


@pytest.mark.parametrize("kernel", kernels(mla_decode))
@pytest.mark.parametrize("block_size", [0, 16, 64])
def test_a_sequence_gives_the_same_bits_in_any_batch(kernel, block_size):
    where = home(mla_decode, kernel)
    lengths = torch.tensor([600, 0, 1, *range(10, 140, 10)], dtype=torch.int32, device=where)
    args = decode(where, kernel, m=16, context=640, queries=2, dtype="fp16", block_size=block_size)
    args = (*args[:3], lengths, *args[4:])
    out, lse = launched(mla_decode, kernel, args)
    for s in (0, 1, 2, 5, 15):
        blocks = max(-(-int(lengths[s]) // block_size), 1) if block_size else None  # a narrower table, too
        found, found_lse = launched(mla_decode, kernel, alone(args, s, blocks))
        assert torch.equal(found[0], out[s]) and torch.equal(found_lse[0], lse[s])


@pytest.mark.parametrize("kernel", kernels(mla_decode))
def test_pages_are_what_one_piece_is(kernel):
    """The same keys, block after block in any order."""
    where = home(mla_decode, kernel)
    q, q_rope, cache, lengths, _, scale = decode(where, kernel, m=3, context=128, dtype="fp16", block_size=0, queries=3)
    blocks = cache.unflatten(1, (8, 16)).flatten(0, 1)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).to(where)
    pool = torch.empty_like(blocks)
    pool[order] = blocks
    table = order.view(3, 8).to(torch.int32)
    lengths = torch.tensor([128, 77, 3], dtype=torch.int32, device=where)
    one = launched(mla_decode, kernel, (q, q_rope, cache, lengths, None, scale))
    paged = launched(mla_decode, kernel, (q, q_rope, pool, lengths, table, scale))
    assert all(torch.equal(a, b) for a, b in zip(one, paged))


@pytest.mark.parametrize("kernel", kernels(mla_decode))
def test_tokens_before_the_first_key_see_nothing(kernel):
    where = home(mla_decode, kernel)
    q, q_rope, cache, lengths, table, scale = decode(
        where, kernel, m=3, context=40, dtype="fp16", queries=4, block_size=16
    )
    lengths = torch.tensor([2, 0, 4], dtype=torch.int32, device=where)
    out, lse = launched(mla_decode, kernel, (q, q_rope, cache, lengths, table, scale))
    blind = torch.tensor([[True, True, False, False], [True] * 4, [False] * 4], device=where)
    assert (out[blind] == 0).all() and (out[~blind] != 0).all()
    assert torch.equal(lse == -torch.inf, blind[:, None].expand_as(lse)) and not lse.isnan().any()
    # The third token of the first sequence sees one key: its value is what comes out.
    first = cache[int(table[0, 0]), 0, : q.shape[3]]
    assert torch.allclose(out[0, 2], first.expand(3, -1))


@pytest.mark.parametrize("kernel", kernels(mla_decode, but=SIZES))
def test_decode_is_prefill_in_the_latent(kernel):
    """One query at the end of a sequence, its keys unfolded from the latent, as mla sees them."""
    where, g = home(mla_decode, kernel), torch.Generator().manual_seed(5)
    keys, heads, latent, rope, nope = 50, 4, 32, 16, 16
    up_k, up_v = (torch.randn(heads, nope, latent, generator=g) / 4 for _ in range(2))
    cache = torch.randn(1, keys, latent + rope, generator=g)
    q, q_rope = torch.randn(1, 1, heads, nope, generator=g), torch.randn(1, 1, heads, rope, generator=g)
    k, v = (torch.einsum("btl,hnl->bthn", cache[..., :latent], up) for up in (up_k, up_v))
    want = mla.reference(q, q_rope, k, cache[:, :, None, latent:], v, scale=0.2, causal=True)
    absorbed = torch.einsum("bqhn,hnl->bqhl", q, up_k)
    lengths = torch.tensor([keys], dtype=torch.int32)
    args = [x if x is None else x.to(where) for x in (absorbed, q_rope, cache, lengths, None)]
    out, _ = launched(mla_decode, kernel, (*args, 0.2))
    found = torch.einsum("bqhl,hnl->bqhn", out.cpu(), up_v)
    assert torch.allclose(found, want, atol=1e-5)


def test_lengths_beyond_the_bound_give_nan():
    args = decode(home(mla_decode, "triton"), "triton", m=2, context=64, dtype="fp16", block_size=16)
    longer = (*args[:3], args[3] + 1000, *args[4:])
    assert all(x.isnan().all() for x in launched(mla_decode, "triton", longer))


def test_every_tile_is_right_in_triton():
    """Those of a GPU, too, which the interpreter's default is not: many rows, and few with sides swapped."""
    where = home(mla_decode, "triton")
    config = mla_decode.kernel("triton").Config
    many, some, few = (64, 64, False, 64, 32, 8, 2), (32, 64, True, 64, 2, 8, 2), (16, 64, True, 128, 64, 4, 3)
    for tile, block_size in ((many, 0), (many, 16), (some, 64), (few, 16), (few, 128)):
        sizes = {"heads": 7, "latent": 32, "rope": 16}
        drawn = case(m=3, context=150, queries=5, dtype="fp16", lengths="ragged", block_size=block_size, **sizes)
        assert check(mla_decode, "triton", drawn, where, config=config(*tile)).refused is None


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("block_size", [0, 16, 64])
def test_the_sizes_of_models_spill_no_registers(heads, block_size, compiler):
    """64 rows take all 255 of them: a 64 x 512 accumulator over eight warps, and keys on their way."""
    specs = specs_for(mla_decode, case(m=16, context=4096, heads=heads, block_size=block_size, **V3))
    made = compiler.compile("mla_decode", "triton", specs, "sm_90")
    assert made.spills <= most_spills("triton", 8) and "wgmma" in made.code["ptx"]  # Triton 3.6 with CUDA 13.0's ptxas


def test_a_bucket_knows_no_batch():
    """A config that is tuned splits sequences: how one is split must not depend on how many there are."""
    one, many = (call_for(mla_decode, case(m=m, context=4096, heads=16, **V3)) for m in (1, 64))
    assert mla_decode.bucket(one) == mla_decode.bucket(many)
    with device.pretend("sm_90"):
        assert mla_decode.kernel("triton").default(one) == mla_decode.kernel("triton").default(many)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(2, 17, 3, 32)}, "1 to 16 queries"),
        ({"q": torch.randn(2, 1, 3, 48)}, "L of 16, 32"),
        ({"q_rope": torch.randn(2, 1, 2, 16)}, "q_rope must be"),
        ({"q_rope": torch.randn(2, 1, 3, 16).half()}, "q_rope must be fp32"),
        ({"cache": torch.randn(8, 16, 47)}, "32 of the latent and 16 of the turned part"),
        ({"cache": torch.randn(8, 24, 48)}, "block_size of 16, 32"),
        ({"cache": torch.randn(8, 16, 96)[..., ::2]}, "cache must have stride 1"),
        ({"block_table": None}, "a paged one needs block_table"),
        ({"lengths": torch.tensor([1, 2])}, "lengths must be int32"),
        ({"lengths": torch.tensor([1], dtype=torch.int32)}, r"lengths must be \[2\]"),
        ({"block_table": torch.zeros(2, dtype=torch.int32)}, "block_table must be"),
    ],
)
def test_decode_says_what_is_wrong(change, message):
    drawn = mla_decode.inputs(m=2, context=40, dtype="fp32", block_size=16, device="cpu", **SMALL)
    with pytest.raises(BadInput, match=message):
        tilery.mla_decode(**{**drawn, **change})


# mla


EXACT = [pytest.param(k, "fp16" if k == "cuda.hopper" else "fp32", id=k) for k in mla.kernels]
ERROR = {"fp16": 2e-3, "fp32": 1e-6}


@pytest.mark.parametrize(("kernel", "dtype"), EXACT)
def test_packed_sequences_are_what_each_is_alone(kernel, dtype):
    where = home(mla, kernel)
    drawn = mla.inputs(
        m=70, heads=2, nope=32, rope=16, value=32, dtype=dtype, order="thd", lengths="70+9", device=where
    )
    args = mla.complete((), drawn)
    (out,) = launched(mla, kernel, args)
    for first, last in ((0, 70), (70, 79)):
        each = tuple(x[None, first:last] for x in args[:5])
        (found,) = launched(mla, kernel, (*each, None, None, args[7], True, "bshd", 0, 0))
        assert torch.allclose(out[first:last], found[0], atol=ERROR[dtype])
    assert (out[79:] == 0).all()  # tokens of no sequence


def test_tma_reads_no_value_of_the_next_sequence():
    """Its tiles go on past the end of a packed one; the last tokens are NaN."""
    where, config = home(mla, "triton"), mla.kernel("triton").Config
    drawn = case(m=70, heads=2, nope=32, rope=16, value=32, dtype="fp16", order="thd", lengths="9+0+70")
    for causal in (False, True):
        packed = case(**drawn.params, causal=causal)
        assert check(mla, "triton", packed, where, config=config(64, 32, 4, 2, tma=True)).refused is None


@pytest.mark.parametrize(("kernel", "dtype"), EXACT)
def test_the_turned_key_is_one_for_all_heads(kernel, dtype):
    """Attention of whole heads, the turned part copied, is the same."""
    where = home(mla, kernel)
    drawn = mla.inputs(m=20, keys=30, heads=3, nope=32, rope=16, value=16, dtype=dtype, device=where)
    args = mla.complete((), drawn)
    q, q_rope, k, k_rope, v = args[:5]
    q, k = torch.cat((q, q_rope), -1), torch.cat((k, k_rope.expand(-1, -1, 3, -1)), -1)
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    mask = torch.ones(20, 30, dtype=torch.bool, device=where).tril(10)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
    (out,) = launched(mla, kernel, args)
    assert torch.allclose(out.double(), want, atol=ERROR[dtype])


def test_prefill_spills_no_registers(compiler):
    for order in ("bshd", "thd"):
        drawn = case(m=4096, heads=16, nope=128, rope=64, value=128, dtype="bf16", order=order)
        made = compiler.compile("mla", "triton", specs_for(mla, drawn), "sm_90")
        assert made.spills == 0 and "wgmma" in made.code["ptx"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(1, 8, 2, 80)}, "heads must be|k must be as q"),
        ({"k": torch.randn(1, 8, 1, 32), "v": torch.randn(1, 8, 1, 32)}, "as many heads as q, 2, got 1"),
        ({"k_rope": torch.randn(1, 8, 2, 16)}, r"k_rope must be \[1, 8, 1\]"),
        ({"k_rope": torch.randn(1, 8, 1, 32)}, "k_rope's heads must be of 16"),
        ({"q_rope": torch.randn(1, 7, 2, 16)}, r"q_rope must be \[1, 8, 2\]"),
        ({"layout": "thd"}, "as layout 'thd' says"),
        ({"max_seqlen_q": 8}, "are for layout 'thd'"),
    ],
)
def test_prefill_says_what_is_wrong(change, message):
    drawn = mla.inputs(m=8, heads=2, nope=32, rope=16, value=32, dtype="fp32", device="cpu")
    with pytest.raises(BadInput, match=message):
        tilery.mla(**{**drawn, **change})


def test_neither_has_a_backward():
    drawn = mla.inputs(m=8, heads=2, nope=32, rope=16, value=32, dtype="fp32", device="cpu")
    with pytest.raises(NoBackward, match="q requires grad"):
        tilery.mla(**{**drawn, "q": drawn["q"].requires_grad_()})
    drawn = mla_decode.inputs(m=2, context=40, dtype="fp32", device="cpu", **SMALL)
    with pytest.raises(NoBackward, match="cache requires grad"):
        tilery.mla_decode(**{**drawn, "cache": drawn["cache"].requires_grad_()})
