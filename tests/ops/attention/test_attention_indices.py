"""Lengths, offsets and pages that are wrong: no kernel of attention leaves its tensors, and every row is written."""

import math

import pytest
import torch

import tilery
from tilery.base import settings
from tilery.base.errors import BadInput
from tilery.core import policy
from tilery.core.op import REGISTRY

PACKED = ("attention", "attention_lse", "attention_backward", "mla")
CACHED = ("attention_decode", "attention_chunked", "mla_decode", "attention_cascade")
BACKENDS = ["numba", "triton"]  # tests/ops/conftest.py puts their tensors where these run
EITHER = pytest.mark.parametrize("backend", BACKENDS)
GUARD, PATTERN = 2**16, 0x5A  # bytes before and behind a tensor, of which none may change
FARTHEST = "2147483647", "-2147483648"


def drawn(name, **more):
    """34 packed tokens of three sequences, or three sequences of 64 keys in pages of 16."""
    small = {"attention": {"m": 20, "spare": 6}, "mla": {"m": 20, "nope": 16, "rope": 16, "value": 16}}
    small |= {"attention_lse": small["attention"], "attention_backward": {"m": 0}}
    small |= {"attention_cascade": {"m": 3, "queries": 2, "prefix": 32}}
    small |= {"attention_decode": {"m": 3, "queries": 2}, "attention_chunked": {"m": 24, "chunks": "9+3+12"}}
    small |= {"mla_decode": {"m": 3, "queries": 2, "context": 64, "latent": 16, "rope": 16, "block_size": 16}}
    given = {"heads": 2, "dtype": "fp32"} | small[name]
    if "mla" not in name:
        given |= {"kv_heads": 1, "n": 16}
    if name in PACKED:
        given |= {"order": "thd", "lengths": "5+9+20"}
    elif name != "mla_decode":
        given |= {"keys": 64, "block_size": 16}
    return REGISTRY[name].inputs(**given | more, device=torch.get_default_device(), seed=4)


def guarded(spec):
    """The tensor, and all bytes around and in it."""
    size = math.prod(spec.shape) * spec.dtype.itemsize
    around = torch.full((2 * GUARD + size,), PATTERN, dtype=torch.uint8)
    return around[GUARD : GUARD + size].view(spec.dtype).view(spec.shape), around


def launched(name, backend, given, config=None):
    """The outputs, written between guards that are there still, as are those of the workspace."""
    op = REGISTRY[name]
    args = op.complete((), given)
    plan = policy.decide(op, op.call(op.specs(args)), backend, config)
    outs, workspace = ([guarded(spec) for spec in specs] for specs in (plan.outs, plan.workspace))
    plan.launch(tuple(out for out, _ in outs), args, tuple(x for x, _ in workspace))
    for _, around in (*outs, *workspace):
        assert (around[:GUARD] == PATTERN).all() and (around[-GUARD:] == PATTERN).all(), f"{backend} wrote outside"
    for out, _ in outs:
        untouched = out.reshape(-1).view(torch.uint8).view(-1, out.itemsize) == PATTERN
        assert not untouched.all(-1).any(), f"{backend} left rows as they were"
    return tuple(out for out, _ in outs)


ENTRIES = [
    "q3:41",
    "q2:38+q3:58",
    "q1:2147483647+q2:-2147483648",
    "q1:-5",
    "q0:7+q1:3+q2:1",
    "k2:1073741824+k3:-1073741824",
    "k0:-2147483648+k1:36+k2:2",
    "q0:30+q1:20+q2:10+q3:0+k0:3+k1:2+k2:1+k3:0",
]


@EITHER
@pytest.mark.parametrize("wrong", ENTRIES)
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_stay_inside(name, wrong, backend):
    launched(name, backend, drawn(name, wrong=wrong))


@EITHER
@pytest.mark.parametrize("name", PACKED)
def test_a_sequence_longer_than_declared_is_nan_and_the_others_are_right(name, backend):
    given = drawn(name)
    right = launched(name, backend, given)
    for bound in ("max_seqlen_q", "max_seqlen_k"):
        for found, whole in zip(launched(name, backend, given | {bound: 9}), right):
            tokens = found.transpose(0, 1) if found.dim() == 2 else found  # an lse has heads first
            whole = whole.transpose(0, 1) if whole.dim() == 2 else whole
            assert tokens[14:34].isnan().all()
            for kept in (slice(0, 14), slice(34, None)):
                assert torch.equal(tokens[kept], whole[kept])


@EITHER
@pytest.mark.parametrize("name", PACKED)
def test_no_sequence_at_all_gives_zeros(name, backend):
    given = drawn(name)
    for start in (0, 5, -3):
        ends = torch.tensor([start], dtype=torch.int32)
        for found in launched(name, backend, given | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}):
            assert not found[found.isfinite()].any() and not found.isnan().any()


@EITHER
@pytest.mark.parametrize("length", ["-1", "65", *FARTHEST])
@pytest.mark.parametrize("name", CACHED)
def test_lengths_that_cannot_be_give_nan(name, length, backend):
    right = launched(name, backend, drawn(name))
    for found, whole in zip(launched(name, backend, drawn(name, wrong=f"l1:{length}")), right):
        first, second = (0, 9), (9, 12)  # tokens of chunks
        if name != "attention_chunked":
            first, second = (0, 1), (1, 2)
        assert found[slice(*second)].isnan().all()
        assert torch.equal(found[slice(*first)], whole[slice(*first)])
        assert torch.equal(found[second[1] :], whole[second[1] :])


def among_ones(given):
    """The same with a page of ones before and behind each cache: to read these would give no NaN."""
    for name in [name for name in given if name.endswith("cache")]:
        cache = given[name]
        around = torch.ones(cache.shape[0] + 2, *cache.shape[1:], dtype=cache.dtype)
        around[1:-1] = cache
        given[name] = around[1:-1]
    return given


@EITHER
@pytest.mark.parametrize("page", ["-1", "past", *FARTHEST])
@pytest.mark.parametrize("more", [{}, {"sinks": True, "softcap": 5.0}, {"dtype": "fp16", "block_size": 64}])
@pytest.mark.parametrize("name", CACHED)
def test_pages_that_are_not_there_give_nan(name, page, more, backend):
    """The page of the second sequence's first keys, which all of its queries see; the others have the same bits."""
    if name == "mla_decode":
        more = {key: value for key, value in more.items() if key in ("dtype", "block_size")}
    entry = 1 if "block_size" in more else 4
    given = among_ones(drawn(name, **more))
    caches = [value for key, value in given.items() if key.endswith("cache")]
    assert caches
    page = caches[0].shape[0] if page == "past" else page
    right = launched(name, backend, given)
    second = (9, 12) if name == "attention_chunked" else (1, 2)
    wrong = among_ones(drawn(name, **more, wrong=f"t{entry}:{page}"))
    for found, whole in zip(launched(name, backend, wrong), right):
        assert found[slice(*second)].isnan().all()
        assert torch.equal(found[: second[0]], whole[: second[0]]) and torch.equal(
            found[second[1] :], whole[second[1] :]
        )


@EITHER
@pytest.mark.parametrize("name", ["attention_decode", "attention_chunked"])
@pytest.mark.parametrize("window", [16, 20])
def test_pages_before_a_window_may_be_anything(name, window, backend):
    right = launched(name, backend, drawn(name, window=window))
    found = launched(name, backend, drawn(name, window=window, wrong="t0:-1+t4:2147483647"))
    assert torch.equal(found[0], right[0]) and right[0].isfinite().all()


@EITHER
@pytest.mark.parametrize("name", CACHED)
def test_a_cache_without_pages_gives_nan_and_reads_nothing(name, backend):
    for dtype in ("fp32", "fp16"):
        given = drawn(name, dtype=dtype)
        empty = {key: x[:0] for key, x in given.items() if key in ("cache", "k_cache", "v_cache")}
        for found in launched(name, backend, given | empty):
            assert found.isnan().all()


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize(("splits", "block_m", "block_n"), [(1, 16, 16), (4, 16, 32), (1, 64, 32), (4, 64, 16)])
def test_pages_in_every_loop_of_the_kernel(splits, block_m, block_n, backend):
    """Blocks with masks and without, of one page and of several, split among programs and not."""
    op = REGISTRY["attention_chunked"]
    config = op.kernel("triton").Config(block_m, block_n, splits, num_warps=4, num_stages=2)
    params = {"keys": 208, "chunks": "20+3", "m": 23, "lengths": "208+20", "heads": 2, "kv_heads": 1, "n": 16}
    for entry in (3, 12):
        where = torch.get_default_device()
        given = op.inputs(**params, dtype="fp16", block_size=16, wrong=f"t{entry}:-1", device=where, seed=2)
        (found,) = launched("attention_chunked", backend, given, config)
        seen = torch.arange(188, 208) >= entry * 16
        assert torch.equal(found[:20].isnan().all(-1).all(-1), seen) and found[20:].isfinite().all()
        assert torch.equal(found[:20].isnan().any(-1).any(-1), seen)


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize("splits", [1, 4])
def test_chunks_that_no_program_was_launched_for(splits, backend):
    """Rows beyond what max_seqlen_q has tiles for are written too, and tokens of no sequence."""
    config = REGISTRY["attention_chunked"].kernel("triton").Config(16, 16, splits, num_warps=4, num_stages=2)
    given = drawn("attention_chunked", m=80, chunks="5+60+15", wrong="q3:70")
    (found,) = launched("attention_chunked", backend, given | {"max_seqlen_q": 5}, config)
    assert found[:5].isfinite().all() and found[5:65].isnan().all()
    assert found[65:70].isfinite().all() and not found[70:].any()


# The host's check


WRONG = {
    "attention": ("q3:41", r"attention: cu_seqlens_q\[3\] must be from 0 to 40, got 41"),
    "attention_lse": ("k2:2", r"attention_lse: cu_seqlens_k\[2\] must be 5 or more, as the entry before, got 2"),
    "attention_backward": ("q0:1", r"attention_backward: cu_seqlens_q\[0\] must be 0, got 1"),
    "mla": ("k1:-1", r"mla: cu_seqlens_k\[1\] must be from 0 to 39, got -1"),
    "attention_decode": ("t9:15", r"attention_decode: block_table\[2, 1\] must be from 0 to 14, got 15"),
    "attention_chunked": ("l2:65", r"attention_chunked: lengths\[2\] must be from 0 to 64, got 65"),
    "attention_cascade": ("p1:99", r"attention_cascade: prefix_table\[0, 1\] must be from 0 to 16, got 99"),
    "mla_decode": ("t4:-1", r"mla_decode: block_table\[1, 0\] must be from 0 to 14, got -1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_first_wrong_entry_is_named(name):
    wrong, message = WRONG[name]
    op = REGISTRY[name]
    op(**drawn(name, wrong=wrong))  # nobody looks
    with settings.override(check_indices=True):
        op(**drawn(name))
        with pytest.raises(BadInput, match=message):
            op(**drawn(name, wrong=wrong))


def test_a_sequence_longer_than_declared_is_named():
    words = "cu_seqlens_q gives sequence {} {} tokens, more than the {} that are declared"
    with settings.override(check_indices=True):
        with pytest.raises(BadInput, match=words.format(2, 20, 19)):
            tilery.attention(**drawn("attention") | {"max_seqlen_q": 19})
        with pytest.raises(BadInput, match=words.format(0, 9, 3)):
            tilery.attention_chunked(**drawn("attention_chunked") | {"max_seqlen_q": 3})


@pytest.mark.parametrize("more", [{"window": 16}, {"lengths": "64+0+33"}])
def test_pages_that_nobody_reads_are_not_looked_at(more):
    """Before a window, behind the last key."""
    given = drawn("attention_decode", **more, wrong="t4:-1+t11:99" if "lengths" in more else "t0:-1+t4:99")
    with settings.override(check_indices=True):
        assert tilery.attention_decode(**given).isfinite().all()


def test_every_op_of_the_family_looks():
    mine = {name for name, op in REGISTRY.items() if op.indices is not None and ("attention" in name or "mla" in name)}
    assert mine == set(WRONG) == {*PACKED, *CACHED}


def test_all_cases_without_wrong_entries_pass_the_check():
    for name in WRONG:
        op = REGISTRY[name]
        for one in op.cases["test"]:
            if "wrong" not in one.params and one.params.get("layout") != "far":
                args = op.complete((), op.inputs(**one.params, device="cpu", seed=1))
                op.indices(op.given(args))
