"""Attention to a KV cache: the same bits in any batch, what is never read, how keys are split, what is refused."""

import dataclasses

import pytest
import torch

import tilery
from tilery import languages
from tilery.base.errors import BadInput, NoBackward
from tilery.base.spec import case
from tilery.core.cases import call_for, specs_for
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.measure.check import check
from tilery.measure.place import place
from tilery.ops.attention.call import max_splits

DECODE, CHUNKED = REGISTRY["attention_decode"], REGISTRY["attention_chunked"]
LENGTHS = "150+1+0+131+64+17+149+3+65+128+90+50+2+150+77+31"
BATCH = {"m": 16, "keys": 150, "queries": 2, "heads": 2, "kv_heads": 1, "n": 16, "dtype": "fp32", "lengths": LENGTHS}
SHORT = {
    "m": 2,
    "keys": 200,
    "heads": 4,
    "kv_heads": 1,
    "n": 16,
    "dtype": "fp16",
    "lengths": "200+33",
    "block_size": 16,
}
LLAMA = {"keys": 8192, "heads": 32, "kv_heads": 8, "n": 128, "dtype": "bf16"}


def drawn(op, where, **params):
    return op.inputs(**params, device=where, seed=5)


def run(args, kernel):
    return tilery.attention_decode(**args, backend=kernel)


def kernel_place(kernel):
    where = place(DECODE, kernel).device
    if where is None:
        pytest.skip("needs a GPU")
    return where


@pytest.mark.parametrize("kernel", ["numba", "triton"])
@pytest.mark.parametrize("block_size", [0, 16, 64])
def test_a_sequence_gives_the_same_bits_alone_as_in_a_batch_of_16(kernel, block_size):
    args = drawn(DECODE, kernel_place(kernel), **BATCH, block_size=block_size)
    together = run(args, kernel)
    for b in (0, 2, 3, 15):
        one = {name: args[name][b : b + 1] for name in ("q", "lengths")}
        if block_size:
            one["block_table"] = args["block_table"][b : b + 1]
        else:
            one |= {name: args[name][b : b + 1] for name in ("k_cache", "v_cache")}
        assert torch.equal(run(args | one, kernel)[0], together[b]), f"sequence {b}"


def test_a_wider_table_gives_the_same_bits():
    args = drawn(DECODE, kernel_place("triton"), **BATCH | {"m": 3, "lengths": "150+33+64"}, block_size=16)
    wider = torch.nn.functional.pad(args["block_table"], (0, 40), value=2**30)
    assert torch.equal(run(args, "triton"), run(args | {"block_table": wider}, "triton"))


@pytest.mark.parametrize("params", [{}, {"queries": 4}, {"queries": 16}, {"n": 256}, {"format": "e4m3"}])
def test_nothing_that_decides_bits_depends_on_the_batch(params):
    alone, many = (call_for(DECODE, case(m=m, **LLAMA | params)) for m in (1, 16))
    kernel = DECODE.kernel("triton")
    with device.pretend("sm_90"):
        assert kernel.default(alone) == kernel.default(many)
        assert kernel.configs(alone) == kernel.configs(many)
    assert DECODE.bucket(alone) == DECODE.bucket(many)  # or another config were chosen where one is tuned


if not languages.missing("triton"):
    import triton
    import triton.language as tl

    from tilery.ops.attention.triton.softmax import split_keys

    @triton.jit
    def split_all(out_ptr, COUNT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, MIN_KEYS: tl.constexpr):
        length = tl.arange(0, COUNT)
        tl.store(out_ptr + length, split_keys(length, 1, 0, SPLITS, BLOCK, MIN_KEYS, False)[1])


@pytest.mark.parametrize(("splits", "block", "least"), [(1, 16, 128), (4, 32, 128), (16, 64, 128), (32, 32, 64)])
def test_no_sequence_has_more_splits_than_the_launch(splits, block, least):
    found = torch.empty(4096, dtype=torch.int32, device=kernel_place("triton"))
    split_all[(1,)](found, 4096, splits, block, least)
    most = 1
    for keys, size in enumerate(found.tolist()):
        assert size % block == 0 and size >= least
        most = max(most, -(-keys // size))
        assert most <= max_splits(splits, keys, least) <= most + 1


@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"window": 40, "sinks": True},
        {"queries": 16, "heads": 5, "window": 70},  # rows of two tiles, and blocks that need no mask
        {"queries": 16, "softcap": 3.0, "sinks": True},
        {"queries": 9, "format": "e4m3", "block_size": 64},
    ],
)
def test_keys_split_among_so_many_programs(splits, params):
    problem = case(**SHORT | params)
    where = kernel_place("triton")
    config = DECODE.kernel("triton").default(call_for(DECODE, problem, str(where)))
    config = dataclasses.replace(config, splits=splits, block_n=32)
    assert check(DECODE, "triton", problem, where, config=config).refused is None


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("params", [{}, {"window": 50, "sinks": True}, {"window": 3}, {"softcap": 3.0}])
def test_chunks_in_tiles_with_keys_split(splits, params):
    many = {"chunks": "40+0+20+5", "lengths": "200+90+61+2", "keys": 200}
    problem = case(**{"m": 65, "n": 16, "heads": 2, "kv_heads": 1, "dtype": "fp16"} | many | params)
    where = kernel_place("triton")
    config = CHUNKED.kernel("triton").Config(64, 16, splits, num_warps=4, num_stages=2)
    assert check(CHUNKED, "triton", problem, where, config=config).refused is None


def test_tokens_of_no_sequence_are_zeros_where_keys_are_split():
    args = drawn(CHUNKED, kernel_place("triton"), m=40, chunks="30+10", keys=200, n=32, dtype="fp16")
    args["cu_seqlens_q"] -= torch.tensor([0, 0, 4], dtype=torch.int32, device=args["q"].device)
    config = CHUNKED.kernel("triton").Config(32, 32, 4, num_warps=4, num_stages=2)
    out = tilery.attention_chunked(**args, backend="triton", config=config)
    assert not out[36:].any() and out[:36].any(-1).all()


def test_cutile_takes_fewer_keys_where_they_lie_off_16_bytes():
    """They pass through registers: 64 would spill 1.5 KB of a thread, and take a minute to compile."""
    kernel = pytest.importorskip("cuda.tile") and DECODE.kernel("cutile")
    for layout, most in (("padded", 64), ("misaligned", 32)):
        call = call_for(DECODE, case(m=2, keys=64, n=64, dtype="bf16", block_size=16, layout=layout))
        with device.pretend("sm_90"):
            found, default = kernel.configs(call), kernel.default(call)
        assert max(c.keys for c in found) == most and default == found[0]


@pytest.mark.parametrize(("queries", "window"), [(1, 0), (4, 0), (4, 3), (16, 9), (16, 0)])
def test_cost_counts_what_queries_see(queries, window):
    """Bytes too: of a window, and of sequences in one piece that are full."""
    keys, head = 12, 2 * 16  # numbers of k and v in a head
    call = call_for(
        DECODE, case(m=3, keys=keys, queries=queries, heads=4, kv_heads=2, n=16, dtype="fp16", window=window)
    )
    position = torch.arange(queries).unsqueeze(1) + keys - queries
    key = torch.arange(keys)
    seen = (key <= position) & ((position - key < window) if window else True)
    cost, q = DECODE.cost(call), 3 * queries * 4 * 16 * 2
    assert cost.flops == 3 * 4 * 2 * head * seen.sum()
    assert (cost.reads, cost.writes) == (q + 3 * 2 * head * 2 * int(seen.any(0).sum()), q)


def test_decode_is_a_chunk_of_few_tokens():
    args = drawn(DECODE, "cpu", m=2, keys=100, queries=5, n=32, dtype="fp32", lengths="100+61", block_size=16)
    chunk = {n: v for n, v in args.items() if n != "q"} | {"q": args["q"].flatten(0, 1)}
    chunk["cu_seqlens_q"] = torch.tensor([0, 5, 10], dtype=torch.int32)
    assert torch.allclose(CHUNKED.reference(**chunk).view_as(args["q"]), DECODE.reference(**args))


@pytest.mark.parametrize("block_size", [16, 64])
def test_pages_cost_no_loads_in_flight(compiler, block_size):
    """A page that is looked up in the turn that reads it would be taken for a stage: half of the tiles in flight."""
    whole, paged = (
        compiler.compile("attention_decode", "triton", specs_for(DECODE, case(m=1, **LLAMA, **more)), "sm_90")
        for more in ({}, {"block_size": block_size})
    )
    assert whole.shared == paged.shared > 3 * 2 * 32 * 128 * 2  # three tiles of keys and of values


@pytest.mark.parametrize(("arch", "pdl"), [("sm_80", False), ("sm_90", True), ("sm_120", True)])
def test_launches_overlap_where_they_can(compiler, arch, pdl):
    made = compiler.compile("attention_decode", "triton", specs_for(DECODE, case(m=1, **LLAMA)), arch)
    ptx = made.code["ptx"]
    assert ("griddepcontrol.wait" in ptx) == ("griddepcontrol.launch_dependents" in ptx) == pdl
    if pdl:  # nothing is read before what came before is done
        assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")


def bad(op, match, **changes):
    decode = op is DECODE
    more = {"queries": 2} if decode else {}
    args = drawn(op, "cpu", m=2 if decode else 6, keys=64, n=32, dtype="fp16", block_size=16, **more)
    with pytest.raises(BadInput, match=match):
        op(**args | {name: make(args) for name, make in changes.items()})


@pytest.mark.parametrize(
    ("match", "name", "make"),
    [
        (r"1 to 16 query tokens, got 17; attention_chunked", "q", lambda a: a["q"].new_zeros(2, 17, 4, 32)),
        (r"q must be \[B, Q, H, D\]", "q", lambda a: a["q"][0]),
        ("head size of 16, 32", "q", lambda a: a["q"].new_zeros(2, 2, 4, 40)),
        ("multiple of k_cache's 2 heads, got 3", "q", lambda a: a["q"].new_zeros(2, 2, 3, 32)),
        (r"v_cache must be as k_cache", "v_cache", lambda a: a["v_cache"].float()),
        ("lengths must be int32", "lengths", lambda a: a["lengths"].long()),
        (r"lengths must be \[sequences\]", "lengths", lambda a: a["lengths"][:1]),
        (r"block_table must be \[sequences", "block_table", lambda a: a["block_table"][:1]),
        ("block_table must be contiguous", "block_table", lambda a: a["block_table"].t().contiguous().t()),
        (r"k_cache must be \[2, keys, 2, 32\] without a block_table", "block_table", lambda a: None),
        ("k_scale is for an fp8 cache", "k_scale", lambda a: torch.ones(1)),
        (r"sinks must be fp32\[4\]", "sinks", lambda a: torch.ones(3)),
        ("window must be 0", "window", lambda a: -1),
        ("softcap must be 0", "softcap", lambda a: -1.0),
    ],
)
def test_bad_input_is_named(match, name, make):
    bad(DECODE, match, **{name: make})


@pytest.mark.parametrize(
    ("match", "name", "make"),
    [
        (r"q must be \[T, H, D\]", "q", lambda a: a["q"][None]),
        (r"cu_seqlens_q must be \[sequences \+ 1\]", "cu_seqlens_q", lambda a: a["lengths"]),
        ("max_seqlen_q must be 0", "max_seqlen_q", lambda a: -2),
    ],
)
def test_bad_chunks_are_named(match, name, make):
    bad(CHUNKED, match, **{name: make})


def test_gradients_are_refused():
    args = drawn(DECODE, "cpu", m=1, keys=16, n=16, dtype="fp32")
    with pytest.raises(NoBackward, match="attention_decode has no backward and q requires grad"):
        tilery.attention_decode(**args | {"q": args["q"].requires_grad_()})
