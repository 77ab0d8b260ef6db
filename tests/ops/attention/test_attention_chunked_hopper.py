"""attention_chunked by TMA and wgmma: what it refuses and chooses, what the driver gets, that every form builds."""

from dataclasses import replace

import pytest
import torch
from hopper_checks import card, on_card, softmax_overlaps_products
from hopper_launches import run

from compilers import most_spills
from tilery import languages
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for, specs_for
from tilery.hardware import device
from tilery.ops.attention.attention_chunked import attention_chunked
from tilery.ops.attention.paged_cases import chunked_inputs as inputs

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from cuda.bindings import driver

from tilery.hardware import toolkit
from tilery.languages import cuda_glue, tensor_maps
from tilery.ops.attention.cuda.forward import shared_bytes
from tilery.ops.attention.cuda.paged import Config

kernel = attention_chunked.kernel("cuda.hopper")
PLAIN = {"m": 256, "keys": 4096, "heads": 8, "kv_heads": 1, "n": 128, "dtype": "bf16", "block_size": 64}
SMALL = {"m": 45, "keys": 700, "chunks": "40+0+5", "lengths": "700+77+131", "kv_heads": 2}
SIZES = (16, 32, 64, 80, 96, 128, 192, 256)


def call(**more):
    return call_for(attention_chunked, case(**PLAIN | more))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dtype": "fp32"}, "multiplies fp16 and bf16 alone, got fp32"),
        ({"format": "e4m3", "sinks": True}, "takes no more than a window, got an fp8 cache, sinks"),
        ({"softcap": 3.0}, "got softcap"),
        (
            {"heads": 6, "kv_heads": 2},
            "heads that share keys must be a power of two up to 128 for TMA to load as rows, got 3",
        ),
        ({"heads": 256}, "got 256"),
        ({"layout": "misaligned"}, "k_cache must start at a multiple of 16 bytes"),
        ({"layout": "padded", "window": 100}, None),
        ({"layout": "together", "heads": 128, "block_size": 256}, None),
        ({"keys": 2**20, "m": 2**16, "heads": 128}, None),
        ({"keys": 2**21, "m": 2**16, "heads": 32, "kv_heads": 32}, None),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_takes_what_tma_can_load_and_nothing_added_to_scores(more, said):
    why = kernel.refusal(call(**more))
    assert why is None if said is None else said in why


@pytest.mark.usefixtures("hopper")
def test_more_than_it_can_number_is_refused():
    q, k, v, cu, lengths, table, *rest = specs_for(attention_chunked, case(**PLAIN))
    wide = table._replace(shape=(1, 2**23), strides=(2**23, 1))
    why = kernel.refusal(attention_chunked.call((q, k, v, cu, lengths, wide, *rest)))
    assert f"numbers rows, keys and tiles up to {2**29}, got {2**29}" in why


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        (Config(144, 4), {}, "block_n of heads of 128 in tiles of 128 rows must be 160 or 128 or 176, got 144"),
        (Config(128, 4), {"n": 256}, "heads of 256 in tiles of 128 rows must be 80 or 64, got 128"),
        (Config(128, 7), {}, "stages must be 2 to 6 for shared memory to hold them, got 7"),
        (Config(128, 6, 33), {}, "splits must be 1 to 32, multicast 1 or 2 and min_blocks 1 or more, got 33, 1 and 1"),
        (Config(128, 6, 0), {}, "got 0, 1 and 1"),
        (Config(128, 6, 8, multicast=3), {}, "got 8, 3 and 1"),
        (Config(176, 4, 7, multicast=2), {}, None),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_says_why_it_refuses_a_config(config, more, said):
    why = kernel.refusal(call(**more), config)
    assert why is None if said is None else said in why


@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("m", [1, 200, 4096])
@pytest.mark.usefixtures("hopper")
def test_the_default_and_all_configs_are_taken(m, n, page):
    problem = call(m=m, n=n, block_size=page)
    found = kernel.configs(problem)
    assert kernel.default(problem) in found and 4 <= len(found) == len(set(found)) <= 13
    assert all(kernel.refusal(problem, c) is None for c in found)
    assert all(kernel.estimate(problem, c).blocks > 0 for c in found)


@pytest.mark.usefixtures("hopper")
def test_keys_are_split_until_the_sms_are_filled_once():
    def chosen(**more):
        problem = call(**{"keys": 32768} | more)
        config = kernel.default(problem)
        return config.splits, kernel.estimate(problem, config).blocks

    assert chosen() == (8, 128) and chosen(m=512) == (4, 128)
    assert chosen(keys=8192, heads=32, kv_heads=8) == (2, 128) and chosen(m=2048, heads=32, kv_heads=8) == (1, 512)
    assert chosen(m=1, keys=65536) == (32, 32)  # of a warp's lanes
    assert chosen(keys=4096) == (3, 48)  # or a split would have less than eight blocks
    assert chosen(window=2000) == (1, 16)


@pytest.mark.usefixtures("hopper")
def test_splits_that_can_have_no_key_have_no_workspace():
    def shapes(splits, **more):
        return [x.shape for x in kernel.workspace(call(**more), Config(128, 6, splits)).values()]

    assert shapes(1) == [] and shapes(8, keys=100) == []
    assert shapes(8) == [(8, 256, 8, 128), (2, 8, 256, 8)]
    assert shapes(8, keys=300)[0] == (3, 256, 8, 128)
    assert shapes(32, window=100)[0] == (4, 256, 8, 128)  # 355 keys, from anywhere in a block on


def test_stands_before_triton():
    kernels = list(attention_chunked.kernels)
    assert kernels.index("cuda.hopper") < kernels.index("triton")


FORMS = [
    (Config(128, 6, 8), 128, "bf16"),
    (Config(128, 6, multicast=2), 128, "fp16"),
    (Config(176, 4), 128, "bf16"),
    (Config(176, 4, multicast=2), 128, "bf16"),
    (Config(160, 4), 128, "bf16"),
    (Config(128, 8), 64, "bf16"),
    (Config(192, 8), 64, "bf16"),
    (Config(128, 6), 80, "bf16"),
    (Config(112, 4), 192, "bf16"),
    (Config(80, 4, multicast=2), 256, "bf16"),
]


@pytest.mark.parametrize(("config", "n", "dtype"), FORMS, ids=lambda v: str(v))
@pytest.mark.usefixtures("hopper")
def test_every_form_builds_and_computes_p_while_it_multiplies(config, n, dtype):
    problem = call(n=n, dtype=dtype)
    assert kernel.refusal(problem, config) is None
    made = policy.compiled(attention_chunked, "cuda.hopper", problem, config, "sm_90")
    shared = shared_bytes(128, config.block_n, config.stages, -(-n // 64) * 64)
    most = device.gpu(torch.device("cuda", 0)).shared_per_block
    assert made.spills <= most_spills("cuda", newer=8 if n == 192 else 0)  # by NVRTC 13.5
    assert made.shared == shared + 1024 <= most
    assert made.registers == 168  # as many as all threads may start with
    sass = toolkit.sass(made.cubin)
    assert f"HGMMA.64x{config.block_n}x16.F32" in sass and "UTMALDG.4D" in sass
    assert ("MULTICAST" in sass) == (config.multicast > 1)
    assert softmax_overlaps_products(sass, config.block_n)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.usefixtures("hopper")
def test_splits_are_combined_without_spills(n):
    problem, config = call(n=n), Config(128 if n <= 128 else 64, 2, 8)
    _, complete = policy.with_workspace(attention_chunked, kernel, problem, config)
    _, combination = kernel.launches(complete, config)
    made = cuda_glue.compile(combination, "sm_90")
    assert combination.kernel.name == "combine_splits" and made.spills == 0 and made.registers <= 128


# What is handed to the driver, without one.


SHAPES = (
    "sequences", "tokens", "kv_heads", "heads_per_kv", "tiles_per_head", "splits", "target_splits",
    "min_blocks_per_split", "q_rows", "page_size", "max_seqlen_q", "max_seqlen_k", "window_left",
)  # fmt: skip
POINTERS = ("page_table", "cu_seqlens_q", "seqlens_k", "out", "partial_out", "partial_stats")


def some(args, names):
    return [args[name] for name in names]


def launched(launches, config, **more):
    args = attention_chunked.complete((), inputs(**PLAIN | {"device": "cpu"} | more))
    return args, run(attention_chunked, config, args, launches)


def test_launches_as_planned(launches):
    config = Config(128, 6, 2)
    given, made = launched(launches, config, **SMALL, layout="padded")
    q, k, v, cu, lengths, table, *_ = given
    ((one, grid, args), (two, blocks, rest)), (out,), kept = made
    assert (one.threads, one.shared, one.cluster, one.pdl) == (384, shared_bytes(128, 128, 6, 128), 1, True)
    assert "paged_attention<__nv_bfloat16, 128, 128, 2, 6, 1>" in one.name
    assert grid == 3 * 2 * 2 * 2  # sequences, splits, heads, tiles of 160 rows
    addresses, sizes, steps, boxes, _ = zip(*launches[1])
    assert addresses == (q.data_ptr(), k.data_ptr(), v.data_ptr()) and boxes == ((4, 1, 32), (64,), (64,))
    assert sizes == ((128, 4, 2, 45), (128, 64, 2, 36), (128, 64, 2, 36))
    assert steps == ((128, 512, 1280), (384, 128, 24576), (384, 128, 24576))
    partials = kept["partial_out"], kept["partial_stats"]
    assert some(args, ("q_map", "k_map", "v_map")) == [1, 2, 3]
    assert some(args, POINTERS) == [x.data_ptr() for x in (table, cu, lengths, out, *partials)]
    assert args["page_table_stride"] == 11 and args["softmax_scale"] == pytest.approx(128**-0.5)
    assert some(args, SHAPES) == [3, 45, 2, 4, 2, 2, 2, 1, 128, 64, 40, 704, 2**29]
    assert [how[5:] for how in launches[1]] == [(), (torch.bfloat16,), ()]  # keys that are not there are NaN
    assert (two.threads, two.pdl, blocks) == (128, True, 90) and "combine_splits<__nv_bfloat16, 128>" in two.name
    assert some(rest, POINTERS[3:]) == [x.data_ptr() for x in (out, *partials)]
    assert (rest["rows"], rest["splits"]) == (360, 2)


def test_launches_a_single_split_alone_and_parts_of_large_pages(launches):
    more = {"keys": 100, "window": 40, "scale": -0.5, "block_size": 256, "heads": 1}
    _, (((one, grid, args),), _, kept) = launched(launches, Config(176, 4, multicast=2), **more)
    assert not kept and (one.cluster, grid) == (2, 2)  # one tile of 256 rows, for two blocks
    assert [how[3] for how in launches[1]] == [(1, 1, 128), (8,), (8,)]
    assert some(args, POINTERS[4:]) == [0, 0] and args["softmax_scale"] == -0.5
    assert some(args, SHAPES) == [1, 256, 1, 1, 1, 1, 1, 1, 128, 256, 256, 256, 39]


def test_persistent_blocks_are_as_many_as_run_at_once(launches):
    for config, blocks in ((Config(128, 6), 132), (Config(128, 6, persistent=False), 256)):
        _, (((_, grid, _),), _, _) = launched(launches, config, m=512, heads=64)
        assert grid == blocks


def given(**changed):
    drawn = inputs(**PLAIN | {"device": "cpu"})
    return attention_chunked.complete((), drawn | {name: change(drawn[name]) for name, change in changed.items()})


@pytest.mark.parametrize(
    ("changed", "grid", "max_keys"),
    [
        ({"block_table": lambda x: x[:, :0]}, 16, 0),
        ({"k_cache": lambda x: x[:0], "v_cache": lambda x: x[:0]}, 16, 4096),
        (
            {
                "cu_seqlens_q": lambda x: x[:1],
                "lengths": lambda x: x[:0],
                "block_table": lambda x: x[:0],
            },
            1,
            4096,
        ),
    ],
    ids=["no tables", "no pages", "no sequences"],
)
def test_rows_are_written_where_there_is_nothing_to_see(launches, changed, grid, max_keys):
    _, k, _, _, _, table, *_ = tensors = given(**changed)
    ((_, blocks, args),), _, kept = run(attention_chunked, Config(128, 6), tensors, launches)
    assert (blocks, args["max_seqlen_k"]) == (grid, max_keys)
    if not k.shape[0]:  # a page that no table names is mapped, and no page of the table is one
        assert [how[1] for how in launches[1][1:]] == [(128, 64, 1, 1)] * 2
        assert args["page_table"] == kept["empty_table"].data_ptr() != table.data_ptr()
        assert kept["empty_table"].shape == table.shape and (kept["empty_table"] == -1).all()


@pytest.mark.parametrize(
    ("nan", "kind", "fill"),
    [
        (None, "UINT16", "NONE"),
        (torch.float16, "FLOAT16", "NAN_REQUEST_ZERO_FMA"),
        (torch.bfloat16, "BFLOAT16", "NAN_REQUEST_ZERO_FMA"),
    ],
)
def test_a_map_says_what_lies_outside(monkeypatch, nan, kind, fill):
    made = []
    monkeypatch.setattr(tensor_maps, "_encode", lambda: lambda *given: made.append(given) or 0)
    tensor_maps._made.__wrapped__(4096, (64, 16, 2, 3), (128, 64, 2048), (16,), 2, nan)
    ((_, values, *_, outside),) = made
    assert values == int(getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"))
    assert outside == int(getattr(driver.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}"))


@pytest.mark.parametrize("window", [2**29, 2**31, 2**62])
def test_windows_of_any_size_are_numbers_that_int32_holds(launches, window):
    _, (((_, _, args),), _, _) = launched(launches, Config(128, 6), window=window)
    assert 4096 < args["window_left"] < 2**31


# On a card.


@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("n", SIZES)
def test_every_size_is_right(n, page):
    on_card(attention_chunked, case(**PLAIN | SMALL | {"n": n, "block_size": page}))


@pytest.mark.parametrize("keys", [128, 160, 176])
@pytest.mark.parametrize(
    "form", [{}, {"splits": 8}, {"multicast": 2, "splits": 3}, {"persistent": False}, {"stages": 2}], ids=str
)
@pytest.mark.parametrize("page", [16, 64, 256])
def test_every_form_is_right(keys, form, page):
    config = replace(Config(keys, 4), **form)
    on_card(
        attention_chunked,
        case(**PLAIN | {"m": 700, "keys": 3000, "chunks": "650+50", "lengths": "2900+777", "block_size": page}),
        config,
    )


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(
    "more", [{"window": 100}, {"scale": -0.1}, {"scale": 300.0}, {"lengths": "20+0+3"}, {"heads": 64}]
)
def test_windows_scales_and_queries_that_see_nothing_are_right(more, splits):
    on_card(attention_chunked, case(**PLAIN | SMALL | more), Config(128, 6, splits))


@pytest.mark.parametrize(
    "wrong",
    [
        "q0:1",
        "q0:-1+q2:1073741824",
        "q1:20",  # more tokens than tiles were launched for
        "q2:660",  # tokens that no sequence has
        "l0:-1+l1:2147483647",
        "t1:-1+t2:-2147483648",
        "t11:1000000+t12:2147483647",
    ],
)
@pytest.mark.parametrize(
    "form",
    [{}, {"splits": 8}, {"multicast": 2, "splits": 3}, {"block_n": 176, "multicast": 2}, {"persistent": False}],
    ids=str,
)
@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("window", [0, 300])
def test_wrong_indices_give_nan_to_their_rows_alone(wrong, form, page, window):
    config = replace(Config(128, 4), **form)
    more = {"m": 700, "keys": 3000, "chunks": "650+50", "lengths": "2900+777", "block_size": page, "window": window}
    on_card(attention_chunked, case(**PLAIN | more | {"wrong": wrong}), config)


def test_a_cache_without_pages_or_sequences_gives_nan_or_zeros():
    where = str(card(attention_chunked))
    q, k, v, cu, lengths, table, *_ = attention_chunked.complete((), inputs(**PLAIN | {"device": where}))
    short = torch.full_like(lengths, 200)  # the first 56 queries see nothing
    out = attention_chunked(q, k[:0], v[:0], cu, short, table, backend="cuda.hopper", config=Config(128, 6))
    assert not out[:56].any() and out[56:].isnan().all()
    out = attention_chunked(q, k, v, cu[:1], lengths[:0], table[:0], backend="cuda.hopper", config=Config(128, 6))
    assert not out.any()


def test_a_sequence_gives_the_same_bits_in_any_batch():
    drawn = inputs(**PLAIN | SMALL | {"device": str(card(attention_chunked))})
    q, k, v, cu, lengths, table, *_ = attention_chunked.complete((), drawn)
    how = {"backend": "cuda.hopper", "config": Config(128, 6, 4)}
    together = attention_chunked(q, k, v, cu, lengths, table, **how)
    for b, (start, end) in enumerate(((0, 40), (40, 40), (40, 45))):
        if end > start:
            cut = torch.tensor([0, end - start], dtype=torch.int32, device=q.device)
            alone = attention_chunked(q[start:end], k, v, cut, lengths[b : b + 1], table[b : b + 1], **how)
            assert torch.equal(alone, together[start:end])
