"""attention_decode by TMA and wgmma: what it refuses and chooses, what the driver gets, that two blocks fit."""

import re
from dataclasses import replace

import pytest
import torch
from hopper_checks import card, on_card, softmax_overlaps_products
from hopper_launches import run

from tilery import languages
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for, specs_for
from tilery.hardware import device
from tilery.ops.attention.attention_decode import attention_decode
from tilery.ops.attention.paged_cases import decode_inputs as inputs

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.hardware import toolkit
from tilery.ops.attention.cuda.paged import Config

kernel = attention_decode.kernel("cuda.hopper")
LLAMA = {"m": 16, "keys": 8192, "heads": 32, "kv_heads": 8, "n": 128, "dtype": "bf16"}
SMALL = {"m": 4, "keys": 701, "lengths": "701+0+77+131", "heads": 8, "kv_heads": 2, "n": 128, "dtype": "bf16"}
SIZES = (16, 32, 64, 80, 96, 128, 192, 256)
FEW = Config(64, 5, 16, block_m=64, min_blocks=2)
REGISTERS, MEMORY, RESERVED = 65536, 228 * 1024, 1024  # of an SM; of its memory, for each block


def specs(**more):
    return specs_for(attention_decode, case(**LLAMA | more))


def call(**more):
    return call_for(attention_decode, case(**LLAMA | more))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dtype": "fp32"}, "multiplies fp16 and bf16 alone, got fp32"),
        ({"format": "e4m3", "sinks": True}, "takes no more than a window, got an fp8 cache, sinks"),
        ({"softcap": 3.0}, "got softcap"),
        ({"layout": "misaligned"}, "k_cache must start at a multiple of 16 bytes"),
        ({"heads": 28, "kv_heads": 4, "queries": 16}, None),  # 112 rows are one tile
        (
            {"heads": 24, "kv_heads": 2, "queries": 16},
            "must be a power of two up to 128 for TMA to load as rows, got 12",
        ),
        ({"heads": 256, "kv_heads": 1}, "up to 128 for TMA to load as rows, got 256"),
        ({"layout": "padded", "window": 100}, None),
        ({"layout": "together", "block_size": 16, "queries": 16}, None),
        ({"keys": 8191, "m": 3}, None),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_takes_what_tma_can_load_and_nothing_added_to_scores(more, said):
    why = kernel.refusal(call(**more))
    assert why is None if said is None else said in why


@pytest.mark.usefixtures("hopper")
def test_tokens_of_sequences_that_lie_apart_are_refused():
    q, *rest = specs(queries=2, m=3)
    apart = q._replace(strides=(q.strides[0] + 8, *q.strides[1:]))
    assert "tokens of q must be equally far apart" in kernel.refusal(attention_decode.call((apart, *rest)))
    one = attention_decode.call_type(
        attention_decode.signature.references((apart._replace(shape=(1, *q.shape[1:])), *rest))
    )
    assert kernel.refusal(one) is None


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        (replace(FEW, block_n=128), {}, "block_n of heads of 128 in tiles of 64 rows must be 64 or 32, got 128"),
        (FEW, {"n": 256}, "heads of 256 in tiles of 64 rows must be that of larger tiles, got 64"),
        (replace(FEW, stages=6), {}, "stages must be 2 to 5 for shared memory to hold them, got 6"),
        (replace(FEW, block_m=96), {}, "block_m must be 128 or 64, got 96"),
        (replace(FEW, min_blocks=0), {}, "min_blocks 1 or more, got 16, 1 and 0"),
        (FEW, {"heads": 28, "kv_heads": 4, "queries": 16}, "must be a power of two up to 64"),
        (FEW, {"heads": 128, "kv_heads": 4, "queries": 16}, None),  # tiles of two queries
        (Config(128, 6, 16), {}, None),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_says_why_it_refuses_a_config(config, more, said):
    why = kernel.refusal(call(**more), config)
    assert why is None if said is None else said in why


@pytest.mark.parametrize("page", [0, 16, 256])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.usefixtures("hopper")
def test_the_default_and_all_configs_are_taken(queries, n, page):
    problem = call(queries=queries, n=n, block_size=page)
    found = kernel.configs(problem)
    assert kernel.default(problem) == found[0] and 5 <= len(found) == len(set(found)) <= 25
    assert all(kernel.refusal(problem, c) is None for c in found)
    assert all(kernel.estimate(problem, c).blocks > 0 for c in found)


@pytest.mark.usefixtures("hopper")
def test_nothing_that_decides_bits_depends_on_the_batch_or_the_most_keys():
    for more in ({}, {"queries": 4}, {"queries": 16}, {"n": 256}, {"block_size": 16}):
        chosen = {kernel.default(call(**more | {"m": m, "keys": keys})) for m in (1, 16) for keys in (64, 8192)}
        assert len(chosen) == 1


@pytest.mark.usefixtures("hopper")
def test_one_sequence_is_split_for_about_as_many_blocks_as_there_are_sms():
    def chosen(**more):
        config = kernel.default(call(**more))
        return config.splits, config.block_m

    assert chosen() == (16, 64) and chosen(queries=16) == (4, 64) and chosen(queries=16, heads=64) == (4, 128)
    assert chosen(kv_heads=1) == (32, 64) and chosen(kv_heads=32) == (4, 64) and chosen(n=256) == (16, 128)


@pytest.mark.usefixtures("hopper")
def test_splits_that_can_have_no_key_have_no_workspace():
    def shapes(**more):
        return [x.shape for x in kernel.workspace(call(**more), FEW).values()]

    assert shapes(keys=128) == [] and shapes(keys=129)[0] == (2, 16, 32, 128)
    assert shapes(queries=2) == [(16, 32, 32, 128), (2, 16, 32, 32)]


@pytest.mark.usefixtures("hopper")
def test_is_asked_before_triton_which_takes_what_it_refuses(monkeypatch):
    monkeypatch.setattr(device, "name", lambda where: "a GPU that nothing is tuned for")
    assert attention_decode.plan(specs()).kernel == "cuda.hopper"
    if why := languages.missing("triton"):
        pytest.skip(why)
    assert attention_decode.plan(specs(format="e4m3", block_size=64)).kernel == "triton"


FORMS = [
    (FEW, 128, "bf16"),
    (FEW, 128, "fp16"),
    (Config(32, 8, 16, block_m=64), 128, "bf16"),
    (FEW, 80, "bf16"),
    (Config(128, 6, 16, block_m=64), 64, "bf16"),
    (Config(128, 6, 16, block_m=64), 16, "bf16"),
    (Config(64, 8, 16, block_m=64), 64, "bf16"),
    (Config(32, 7, 16, block_m=64), 192, "bf16"),
]


@pytest.mark.parametrize(("config", "n", "dtype"), FORMS, ids=lambda v: str(v))
@pytest.mark.usefixtures("hopper")
def test_two_blocks_fit_an_sm_and_p_is_computed_while_it_multiplies(config, n, dtype):
    problem = call(n=n, dtype=dtype)
    assert kernel.refusal(problem, config) is None
    made = policy.compiled(attention_decode, "cuda.hopper", problem, config, "sm_90")
    assert made.spills == 0 and made.registers == 128 and 2 * 256 * made.registers == REGISTERS
    first, *_ = kernel.launches(policy.with_workspace(attention_decode, kernel, problem, config)[1], config)
    assert 2 * (first.options["shared"] + RESERVED) <= MEMORY and first.options["threads"] == 256
    sass = toolkit.sass(made.cubin)
    # What a consumer takes and the producer gives is what both started with.
    taken = sorted(int(x, 16) for x in re.findall(r"USETMAXREG.*?(0x[0-9a-f]+) ;", sass))
    assert taken == [40, 216] and sum(taken) == 2 * made.registers
    assert f"HGMMA.64x{config.block_n}x16.F32" in sass and "UTMALDG.4D" in sass and "MULTICAST" not in sass
    assert "BAR.ARV" not in sass  # there are no turns to pass on
    assert softmax_overlaps_products(sass, config.block_n)


# What is handed to the driver, without one.


SHAPES = (
    "sequences", "tokens", "kv_heads", "heads_per_kv", "tiles_per_head", "splits", "target_splits",
    "min_blocks_per_split", "q_rows", "page_size", "max_seqlen_q", "max_seqlen_k", "window_left",
)  # fmt: skip
POINTERS = ("page_table", "cu_seqlens_q", "seqlens_k", "out", "partial_out", "partial_stats")


def some(args, names):
    return [args[name] for name in names]


def launched(launches, config, **more):
    args = attention_decode.complete((), inputs(**SMALL | {"device": "cpu"} | more))
    return args, run(attention_decode, config, args, launches)


def test_launches_a_cache_in_one_piece(launches):
    (q, k, v, lengths, *_), made = launched(launches, FEW, queries=3, layout="padded")
    ((one, grid, args), (two, blocks, rest)), (out,), kept = made
    assert "paged_attention<__nv_bfloat16, 128, 64, 1, 5, 1>" in one.name and (one.threads, one.pdl) == (256, True)
    assert grid == 4 * 6 * 2  # sequences, splits of 128 keys, heads
    addresses, sizes, steps, boxes, _ = zip(*launches[1])
    assert addresses == (q.data_ptr(), k.data_ptr(), v.data_ptr()) and boxes == ((4, 1, 3), (64,), (64,))
    assert sizes == ((128, 4, 2, 12), (128, 701, 2, 4), (128, 701, 2, 4))
    assert steps[0] == (128, 512, 1280) and steps[1] == steps[2] == (k.stride(1), k.stride(2), k.stride(0))
    partials = kept["partial_out"], kept["partial_stats"]
    assert some(args, ("q_map", "k_map", "v_map")) == [1, 2, 3]
    assert some(args, POINTERS) == [0, 0, *(x.data_ptr() for x in (lengths, out, *partials))]
    assert args["page_table_stride"] == 0 and args["softmax_scale"] == pytest.approx(128**-0.5)
    assert some(args, SHAPES) == [4, 12, 2, 4, 1, 6, 16, 2, 12, 2**30, 3, 701, 2**29]
    assert (two.threads, two.pdl, blocks) == (128, True, 24)
    assert some(rest, POINTERS[3:]) == [x.data_ptr() for x in (out, *partials)]
    assert (rest["rows"], rest["splits"]) == (96, 6)


def test_launches_pages_a_window_and_one_split_alone(launches):
    more = {"block_size": 16, "window": 40, "scale": -0.5, "keys": 100, "lengths": "100+0+7+1"}
    (_, _, _, _, table, *_), (((_, grid, args),), _, kept) = launched(launches, FEW, **more)
    assert not kept and grid == 4 * 2 and [how[3] for how in launches[1]] == [(4, 1, 1), (16,), (16,)]
    assert some(args, POINTERS[:2]) == [table.data_ptr(), 0] and some(args, POINTERS[4:]) == [0, 0]
    assert args["page_table_stride"] == 7 and args["softmax_scale"] == -0.5
    assert some(args, SHAPES) == [4, 4, 2, 4, 1, 1, 1, 2, 4, 16, 1, 112, 39]


def test_persistent_blocks_are_as_many_as_run_at_once(launches):
    many = {"m": 64, "heads": 8, "kv_heads": 8, "lengths": "", "keys": 32, "n": 16}
    config = Config(128, 6, 16, block_m=64)
    for chosen, blocks in ((config, 264), (replace(config, persistent=False), 512)):
        _, (((_, grid, _),), _, _) = launched(launches, chosen, **many)
        assert grid == blocks


def test_rows_are_written_where_there_are_no_keys(launches):
    """Lengths may say otherwise, and their rows are NaN then. What is mapped as keys is never read."""
    _, (((_, grid, args),), _, _) = launched(launches, FEW, keys=0, lengths="")
    assert grid == 4 * 2 and args["max_seqlen_k"] == 0
    assert [how[1] for how in launches[1][1:]] == [(128, 1, 2, 1)] * 2


# On a card.


@pytest.mark.parametrize("page", [0, 16, 64, 256])
@pytest.mark.parametrize("queries", [1, 5, 16])
@pytest.mark.parametrize("n", SIZES)
def test_every_size_is_right(n, queries, page):
    on_card(attention_decode, case(**SMALL | {"n": n, "queries": queries, "block_size": page}))


@pytest.mark.parametrize("splits", [1, 8, 32])
@pytest.mark.parametrize(
    "form", [{}, {"min_blocks": 1}, {"block_n": 32}, {"persistent": False}, {"stages": 2}], ids=str
)
@pytest.mark.parametrize("page", [0, 16])
def test_every_form_is_right(splits, form, page):
    on_card(attention_decode, case(**SMALL | {"queries": 2, "block_size": page}), replace(FEW, splits=splits, **form))


@pytest.mark.parametrize(
    "more",
    [
        {"window": 100},
        {"window": 3, "queries": 8, "block_size": 16},
        {"scale": -0.1},
        {"scale": 300.0},
        {"lengths": "3+0+1+2", "queries": 7},
        {"heads": 14},
        {"heads": 64, "queries": 16},  # tiles of 128 rows
        {"heads": 2},
        {"m": 300, "lengths": "", "keys": 129},  # more tiles than blocks
    ],
    ids=str,
)
def test_windows_scales_groups_and_queries_that_see_nothing_are_right(more):
    on_card(attention_decode, case(**SMALL | more))


@pytest.mark.parametrize("splits", [1, 8, 32])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "more",
    [
        {"wrong": "l0:-1+l2:702+l3:2147483647"},
        {"block_size": 16, "wrong": "l0:-2147483648+t92:-1+t132:179+t135:2147483647"},
        {"block_size": 64, "wrong": "t0:-1+t9:1000000+t22:-2147483648"},
        {"block_size": 64, "wrong": "t0:-1+t10:-1+t34:99", "window": 3},
    ],
    ids=str,
)
def test_wrong_indices_give_nan_to_their_rows_alone(more, queries, splits):
    config = replace(FEW, splits=splits, min_blocks=1)
    on_card(attention_decode, case(**SMALL | {"queries": queries} | more), config)


def test_a_cache_without_keys_gives_nan_where_lengths_say_that_there_are_some():
    drawn = inputs(**SMALL | {"device": str(card(attention_decode)), "keys": 0, "lengths": ""})
    drawn["lengths"][1:3] = torch.tensor([1, -1])
    out = attention_decode(**drawn, backend="cuda.hopper")
    assert out[1:3].isnan().all() and not out[[0, 3]].any()


@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize("queries", [1, 4])
def test_a_sequence_gives_the_same_bits_in_any_batch_and_table(queries, page):
    params = SMALL | {
        "m": 16,
        "keys": 900,
        "queries": queries,
        "block_size": page,
        "device": str(card(attention_decode)),
    }
    args = inputs(**params | {"lengths": "900+1+0+131+64+17+149+3+65+128+90+50+2+777+77+31"})
    together = attention_decode(**args, backend="cuda.hopper")
    assert torch.equal(attention_decode(**args, backend="cuda.hopper"), together)
    for b in (0, 2, 3, 13, 15):
        one = {name: args[name][b : b + 1] for name in ("q", "lengths")}
        if page:
            row = args["block_table"][b : b + 1]
            one["block_table"] = torch.nn.functional.pad(row, (0, 40), value=2**30)
        else:
            one |= {name: args[name][b : b + 1] for name in ("k_cache", "v_cache")}
        assert torch.equal(attention_decode(**args | one, backend="cuda.hopper")[0], together[b]), f"sequence {b}"
