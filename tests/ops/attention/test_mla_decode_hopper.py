"""mla_decode by TMA and wgmma: what it refuses and chooses, what the driver gets, its machine code, splits."""

import re

import pytest
import torch
from hopper_checks import on_card
from hopper_launches import run

from tilery import languages
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for, specs_for
from tilery.hardware import device
from tilery.measure.check import check
from tilery.measure.place import place
from tilery.ops.attention.mla_decode import mla_decode

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.hardware import toolkit
from tilery.ops.attention.cuda.mla_decode import Config

kernel = mla_decode.kernel("cuda.hopper")
V3 = {"latent": 512, "rope": 64, "dtype": "bf16"}
LARGE = V3 | {"m": 128, "context": 4096, "heads": 128, "block_size": 64}
SMALL = V3 | {"m": 3, "context": 700, "heads": 22, "lengths": "ragged", "block_size": 64}
REGISTERS = 65536  # of an SM


def call(**more):
    return call_for(mla_decode, case(**LARGE | more))


def where():
    found = place(mla_decode, "cuda.hopper").device
    if found is None:
        pytest.skip("needs a Hopper GPU or the emulator")
    return found


def drawn(seed=3, **more):
    return mla_decode.complete((), mla_decode.inputs(**SMALL | more, device=str(where()), seed=seed))


def launched(args, config):
    """Outputs that were full of NaN."""
    plan = policy.decide(mla_decode, mla_decode.call(mla_decode.specs(args)), "cuda.hopper", config)
    outs = tuple(spec.empty().fill_(float("nan")) for spec in plan.outs)
    plan.launch(outs, args)
    return outs


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, None),
        ({"dtype": "fp32"}, "multiplies fp16 and bf16 alone, got fp32"),
        ({"latent": 256}, "takes keys of 512 values of the latent and 64 turned ones alone, got 256 and 64"),
        ({"rope": 32}, "got 512 and 32"),
        ({"layout": "misaligned"}, "q must start at a multiple of 16 bytes for TMA to load from it"),
        ({"layout": "padded", "queries": 4, "block_size": 0}, None),
        ({"context": 2**29, "block_size": 0, "m": 0}, "numbers rows, keys and blocks up to 536870912"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_takes_what_tma_can_load(more, said):
    why = kernel.refusal(call(**more))
    assert why is None if said is None else said in why


@pytest.mark.usefixtures("hopper")
def test_heads_of_tokens_must_be_equally_far_apart():
    q, *rest = specs_for(mla_decode, case(**LARGE | {"queries": 2}))
    sequence, token, head, one = q.strides
    apart = mla_decode.call((q._replace(strides=(sequence + 16, token + 8, head, one)), *rest))
    assert "heads of all tokens of q must be equally far apart" in kernel.refusal(apart)


@pytest.mark.parametrize("config", [Config(0, 8), Config(33, 8), Config(8, 0)])
@pytest.mark.usefixtures("hopper")
def test_says_why_it_refuses_a_config(config):
    assert "splits must be 1 to 32 and min_blocks 1 or more" in kernel.refusal(call(), config)


@pytest.mark.usefixtures("hopper")
def test_nothing_that_decides_bits_depends_on_the_batch_or_the_most_keys():
    for more in ({}, {"heads": 16}, {"queries": 16}):
        chosen = {kernel.default(call(**more | {"m": m, "context": keys})) for m in (1, 64) for keys in (64, 8192)}
        assert len(chosen) == 1
        assert all(kernel.refusal(call(**more), c) is None for c in kernel.configs(call(**more)))


@pytest.mark.parametrize(("gpu", "splits"), [("h200", 4), ("h100-pcie", 2)])
def test_one_sequence_is_split_for_about_as_many_blocks_as_there_are_sms(gpu, splits):
    with device.pretend(gpu):
        assert kernel.default(call(heads=16)).splits == 32  # a tile
        assert kernel.default(call(queries=16)).splits == splits  # 32 tiles


@pytest.mark.usefixtures("hopper")
def test_is_asked_after_triton(monkeypatch):
    """It has not been measured."""
    if why := languages.missing("triton"):
        pytest.skip(why)
    monkeypatch.setattr(device, "name", lambda where: "a GPU that nothing is tuned for")
    assert mla_decode.plan(specs_for(mla_decode, case(**LARGE))).kernel == "triton"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.usefixtures("hopper")
def test_no_spills_and_wgmmas_in_flight(dtype):
    problem = call(dtype=dtype)
    made = policy.compiled(mla_decode, "cuda.hopper", problem, kernel.default(problem), "sm_90")
    assert made.spills == 0 and 512 * made.registers == REGISTERS and made.shared <= 227 * 1024
    sass = toolkit.sass(made.cubin)
    kept = [int(x, 16) for x in re.findall(r"USETMAXREG.*?(0x[0-9a-f]+) ;", sass)]
    values, softmax, producer = kept
    assert 128 * (2 * values + softmax + producer) == REGISTERS
    steps = re.findall(r"HGMMA\.64x(\d+)x16|(WARPGROUP\.DEPBAR)", sass)
    # All of S, and all of P · V, is issued before anything waits.
    assert steps == 8 * [("128", "")] + [("", "WARPGROUP.DEPBAR")] + 36 * [("64", "")] + [("", "WARPGROUP.DEPBAR")]


# What is handed to the driver, without one.


def test_launches_pages_and_splits(launches):
    args = mla_decode.complete((), mla_decode.inputs(**SMALL | {"device": "cpu", "queries": 3, "block_size": 16}))
    q, q_rope, cache, lengths, table, scale = args
    (first, second), (out, lse), kept = run(mla_decode, Config(32, 4), args, launches)
    assert first.kernel.threads == 512 and first.kernel.pdl and first.grid == 3 * 2 * 3  # sequences, tiles, splits
    addresses, sizes, steps, boxes, _ = zip(*launches[1])
    assert addresses == (q.data_ptr(), q_rope.data_ptr(), cache.data_ptr()) and boxes == ((64,), (64,), (16,))
    assert sizes == ((512, 66, 3), (64, 66, 3), (576, 16, cache.shape[0]))
    assert steps == ((512, 66 * 512), (64, 66 * 64), (576, 576 * 16))
    partials = {name: kept[name].data_ptr() for name in ("partial_out", "partial_stats")}
    tensors = {"page_table": table, "seqlens_k": lengths, "out": out, "lse": lse}
    numbers = {
        "page_table_stride": 44, "sequences": 3, "heads": 22, "queries": 3, "row_tiles": 2, "splits": 3,
        "target_splits": 32, "min_blocks_per_split": 4, "page_size": 16, "pages": 135, "max_seqlen_k": 704,
    }  # fmt: skip
    expected = {name: x.data_ptr() for name, x in tensors.items()} | partials | numbers
    assert {name: first.args[name] for name in expected} == expected
    assert first.args["softmax_scale"] == pytest.approx(scale)
    assert second.kernel.name == "combine_splits<__nv_bfloat16, 512>" and second.grid == -(-3 * 66 // 4)
    assert [second.args[x] for x in ("lse", "rows", "splits", "heads", "queries")] == [lse.data_ptr(), 198, 3, 22, 3]


def test_launches_one_split_alone_and_a_cache_without_keys(launches):
    args = mla_decode.complete((), mla_decode.inputs(**V3, m=2, context=0, heads=4, device="cpu"))
    (first,), _, kept = run(mla_decode, Config(32, 4), args, launches)
    assert not kept and first.grid == 2 and first.args["max_seqlen_k"] == 0 and first.args["page_size"] == 2**30
    assert launches[1][2][0] == args[0].data_ptr()  # of nothing there is no map


# What it computes.


@pytest.mark.parametrize("more", [{}, {"block_size": 16, "queries": 3}, {"block_size": 0, "heads": 64}], ids=str)
def test_any_splits_are_right_and_the_same_bits_twice(more):
    args = drawn(**more)
    whole = launched(args, Config(1, 1))
    for config in (Config(32, 1), Config(2, 3)):
        split = launched(args, config)
        assert all(torch.equal(a, b) for a, b in zip(split, launched(args, config)))
        assert all(torch.allclose(a.float(), b.float(), atol=2e-3, rtol=2e-2) for a, b in zip(whole, split))
        assert not torch.equal(whole[0], split[0])
        assert check(mla_decode, "cuda.hopper", case(**SMALL | more), where(), config=config).refused is None


@pytest.mark.parametrize("logits", [-3.0, 0.0, 1e4])
def test_any_scale_is_right(logits):
    one = case(**SMALL | {"logits": logits, "queries": 2, "m": 2})
    assert check(mla_decode, "cuda.hopper", one, where()).refused is None


@pytest.mark.parametrize("config", [Config(1, 1), Config(32, 1)], ids=str)
@pytest.mark.parametrize(
    "more",
    [
        {"wrong": "l0:-1+l1:2147483647"},
        {"wrong": "t2:-1+t30:1000000"},  # of pages of 64 keys: rows that see one of them are NaN in every split
        {"block_size": 16, "wrong": "t43:-2147483648", "queries": 5},
    ],
    ids=str,
)
def test_wrong_indices_give_nan_to_their_rows_alone(more, config):
    one = case(**SMALL | {"lengths": "full"} | more)
    assert check(mla_decode, "cuda.hopper", one, where(), config=config).refused is None


@pytest.mark.parametrize("block_size", [0, 16])
def test_lengths_that_a_cache_without_keys_cannot_have_give_nan(block_size):
    """Of a cache without pages a table may name some; tokens before the first key have zeros all the same."""
    drawn = mla_decode.inputs(**V3, m=3, context=40, heads=2, queries=2, block_size=16, device=str(where()))
    drawn["q"][0, 1] = float("nan")  # its map stands for that of the cache
    drawn["lengths"] = torch.tensor([1, 0, -1], dtype=torch.int32, device=where())
    drawn["cache"] = drawn["cache"][:0] if block_size else drawn["cache"].new_empty(3, 0, 576)
    drawn["block_table"] = drawn["block_table"] if block_size else None
    out, lse = launched(mla_decode.complete((), drawn), Config(1, 1))
    nan = torch.tensor([[not block_size, True], [False, False], [True, True]], device=where())
    assert torch.equal(out.isnan().all(-1).all(-1), nan) and torch.equal(lse.isnan().all(1), nan)
    assert not out[~nan].any() and (lse.transpose(1, 2)[~nan] == -torch.inf).all()


# On a card: sizes that take the emulator long.


@pytest.mark.parametrize("config", [None, Config(1, 1), Config(32, 4)], ids=str)
@pytest.mark.parametrize("block_size", [0, 16, 64, 256])
@pytest.mark.parametrize("more", [{}, {"heads": 16}, {"queries": 4, "dtype": "fp16"}], ids=str)
def test_many_heads_and_long_sequences_are_right(more, block_size, config):
    on_card(mla_decode, case(**LARGE | {"m": 9, "lengths": "ragged", "block_size": block_size} | more), config)
