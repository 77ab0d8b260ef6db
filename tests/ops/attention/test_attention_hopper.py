"""attention by TMA and wgmma: what it refuses and chooses, what it hands to the driver, that every form builds."""

import re
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
from tilery.ops.attention.attention import attention, attention_lse
from tilery.ops.attention.cases import inputs

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.hardware import toolkit
from tilery.ops.attention.cuda import forward
from tilery.ops.attention.cuda.forward import Config

kernel = attention.kernel("cuda.hopper")
PLAIN = {"m": 300, "heads": 4, "kv_heads": 2, "n": 128, "dtype": "bf16"}
SIZES = (16, 32, 64, 80, 96, 128, 192, 256)


def call(**more):
    return call_for(attention, case(**PLAIN | more))


def shared_bytes(config, width):
    return forward.shared_bytes(config.block_m, config.block_n, config.stages, width)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dtype": "fp32"}, "multiplies fp16 and bf16 alone, got fp32"),
        ({"dtype": "e4m3"}, "multiplies fp16 and bf16 alone, got e4m3"),
        ({"bias": "bf16", "sinks": True}, "takes no more than packed sequences, causal and window, got bias, sinks"),
        ({"slopes": True, "softcap": 3.0}, "got slopes, softcap"),
        ({"padding": True}, "got key_mask"),
        ({"n": 192, "value": 128}, "heads of keys and values must be of one size, got 192 and 128"),
        ({"layout": "misaligned"}, "q must start at a multiple of 16 bytes"),
        ({"layout": "padded"}, None),
        ({"order": "thd", "lengths": "3+300", "window": 40}, None),
        ({"order": "bhsd", "causal": False, "keys": 77}, None),
        ({"keys": 0}, None),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_takes_what_tma_can_load_and_nothing_added_to_scores(more, said):
    why = kernel.refusal(call(**more))
    assert why is None if said is None else said in why


@pytest.mark.usefixtures("hopper")
def test_heads_that_share_memory_are_not_loaded():
    """As `expand` makes them."""
    q, k, v, *rest = specs_for(attention, case(**PLAIN))
    shared = k._replace(strides=(k.stride(0), k.stride(1), 0, 1))
    expanded = attention.call_type(attention.signature.references((q, shared, v, *rest)))
    assert "k must not overlap for TMA to load them, got stride 0" in kernel.refusal(expanded)


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        (Config(128, 144, 4), {}, "tiles of heads of 128 must be 128 × 128, 128 × 176, got 128 × 144"),
        (Config(128, 176, 5), {}, "stages must be 2 to 4 for shared memory to hold them, got 5"),
        (
            Config(128, 128, 6, multicast=3),
            {},
            "tiles of 128 queries, 2, got 3",
        ),
        (Config(128, 128, 6, multicast=2), {"order": "thd"}, "of sequences that are not packed"),
        (Config(192, 112, 8, multicast=2), {"n": 64}, "tiles of 128 queries, 2, got 2"),
        (Config(128, 128, 6, multicast=2), {}, None),
        (Config(192, 112, 8), {"n": 64}, None),
        (Config(192, 112, 8), {"n": 128}, "tiles of heads of 128 must be"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_says_why_it_refuses_a_config(config, more, said):
    why = kernel.refusal(call(**more), config)
    assert why is None if said is None else said in why


@pytest.mark.parametrize("order", ["bshd", "thd"])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("m", [1, 200, 4096])
@pytest.mark.usefixtures("hopper")
def test_the_default_and_all_configs_are_taken(m, n, order):
    for causal in (False, True):
        problem = call(m=m, n=n, order=order, causal=causal)
        found = kernel.configs(problem)
        assert kernel.default(problem) in found and 2 <= len(found) == len(set(found)) <= 10
        assert all(kernel.refusal(problem, c) is None for c in found)
        assert all(kernel.estimate(problem, c).blocks > 0 for c in found)


@pytest.mark.usefixtures("hopper")
def test_packed_tiles_go_to_who_is_free():
    def chosen(**more):
        c = kernel.default(call(m=4096, **more))
        return c.block_m, c.block_n, c.multicast, c.persistent

    assert chosen() == chosen(causal=False) == (128, 128, 1, True)
    assert chosen(causal=False, order="thd") == (128, 128, 1, False)
    assert chosen(n=64) == (192, 112, 1, True) and chosen(n=256) == (128, 80, 1, True)


def test_is_asked_before_triton():
    for op in (attention, attention_lse):
        assert list(op.kernels).index("cuda.hopper") < list(op.kernels).index("triton")


FORMS = [
    (Config(128, 176, 4, multicast=2), 128, "bf16"),
    (Config(128, 128, 6), 128, "fp16"),
    (Config(192, 112, 8), 64, "bf16"),
    (Config(128, 192, 8), 64, "bf16"),
    (Config(128, 128, 6), 80, "bf16"),
    (Config(128, 112, 4), 192, "bf16"),
    (Config(128, 80, 4), 256, "bf16"),
]


@pytest.mark.parametrize(("config", "n", "dtype"), FORMS, ids=lambda v: str(v))
@pytest.mark.usefixtures("hopper")
def test_every_form_builds_and_computes_p_while_it_multiplies(config, n, dtype):
    problem = call(n=n, dtype=dtype)
    assert kernel.refusal(problem, config) is None
    made = policy.compiled(attention, "cuda.hopper", problem, config, "sm_90")
    width = -(-n // 64) * 64
    assert made.spills <= most_spills("cuda", 8 if config.block_m == 192 else 0)  # by NVRTC 13.0
    assert made.shared == shared_bytes(config, width) + 1024 <= device.gpu(torch.device("cuda", 0)).shared_per_block
    assert made.registers == (168 if config.block_m == 128 else 128)  # as many as all threads may start with
    sass = toolkit.sass(made.cubin)
    assert f"HGMMA.64x{config.block_n}x16.F32" in sass and "UTMALDG.4D" in sass
    assert ("MULTICAST" in sass) == (config.multicast > 1)
    assert re.search(rf"HGMMA\.64x{width}x16\.F32\S* R\d+, R\d+, gdesc\[UR\d+\]\.tnspB", sass)  # P from registers
    assert softmax_overlaps_products(sass, config.block_n)


# What is handed to the driver, without one.


def given(op, **more):
    return op.complete((), inputs(**PLAIN | {"device": "cpu"} | more))


STRIDES = ("out_batch_stride", "out_row_stride", "out_head_stride", "lse_batch_stride", "lse_head_stride")
SHAPES = (
    "sequences", "heads", "heads_per_kv", "seqlen_q", "seqlen_k", "max_seqlen_q", "max_seqlen_k", "tiles_per_head",
    "heads_per_group", "window_left", "window_right",
)  # fmt: skip


def some(args, names):
    return [args[name] for name in names]


def test_launches_as_planned(launches):
    config = Config(128, 176, 4, multicast=2)
    q, k, v, *rest = given(attention, batch=3, causal=False)
    ((one, grid, args),), (out,), _ = run(attention, config, (q, k, v, *rest), launches)
    assert (one.threads, one.shared, one.cluster, one.pdl) == (384, shared_bytes(config, 128), 2, True)
    assert grid == 3 * 4 * 2 * 2  # sequences, heads, and tiles of 256, for two blocks each
    assert "128, 176, 2, 4, 2>" in one.name
    addresses, sizes, steps, boxes, _ = zip(*launches[1])
    assert addresses == (q.data_ptr(), k.data_ptr(), v.data_ptr()) and boxes == ((128,), (88,), (88,))
    assert sizes == ((128, 300, 4, 3), (128, 300, 2, 3), (128, 300, 2, 3))
    assert steps == ((512, 128, 153600), (256, 128, 76800), (256, 128, 76800))
    assert some(args, ("q_map", "k_map", "v_map", "out")) == [1, 2, 3, out.data_ptr()]
    assert not any(some(args, ("lse", "cu_seqlens_q", "cu_seqlens_k")))
    assert some(args, STRIDES) == [153600, 512, 128, 0, 0]
    assert some(args, SHAPES) == [3, 4, 2, 300, 300, 300, 300, 2, 12, 2**29, 2**29]
    assert args["softmax_scale"] == pytest.approx(128**-0.5)


def test_launches_packed_sequences_with_their_lse(launches):
    more = {"order": "thd", "lengths": "20+0+300", "spare": 7, "window": 40, "scale": -0.5}
    config = Config(128, 128, 6, persistent=False)
    q, k, v, cu_q, cu_k, *rest = given(attention_lse, **more)
    ((one, grid, args),), (out, lse), _ = run(attention_lse, config, (q, k, v, cu_q, cu_k, *rest), launches)
    assert grid == 4 * 4 * 3 and one.cluster == 1  # the tokens of no sequence are a sequence more
    assert launches[1][0][1:3] == ((128, 327, 4, 1), (512, 128, 128))
    pointers = [x.data_ptr() for x in (out, lse, cu_q, cu_k)]
    assert some(args, ("out", "lse", "cu_seqlens_q", "cu_seqlens_k")) == pointers
    assert some(args, STRIDES) == [0, 512, 128, 0, 327]
    assert some(args, SHAPES) == [3, 4, 2, 327, 327, 300, 300, 3, 16, 39, 0]  # tokens, then the most that are declared
    assert args["softmax_scale"] == -0.5


def packed(launches, q_tokens, k_tokens, most, window=0):
    """What a launch is given of two packed sequences."""
    q, k = (torch.zeros(tokens, 4, 128, dtype=torch.bfloat16) for tokens in (q_tokens, k_tokens))
    ends = torch.zeros(3, dtype=torch.int32)
    how = {"layout": "thd", "max_seqlen_q": most, "max_seqlen_k": most, "window": window}
    args = attention.complete((), {"q": q, "k": k, "v": k, "cu_seqlens_q": ends, "cu_seqlens_k": ends} | how)
    ((_, grid, found),), _, _ = run(attention, Config(128, 128, 6, persistent=False), args, launches)
    return grid, found, launches[1]


@pytest.mark.parametrize("most", [501, 2**31, 2**62])
def test_declared_lengths_and_windows_of_any_size_are_numbers_that_int32_holds(launches, most):
    """No sequence has more tokens than there are, and none sees more than all."""
    grid, args, _ = packed(launches, 300, 200, most, window=most)
    assert grid == 3 * 4 * 3
    assert some(args, SHAPES[3:7]) == [300, 200, 300, 200]
    assert args["window_left"] >= 500 and max(some(args, SHAPES)) < 2**31


def test_packed_sequences_are_launched_even_where_there_are_no_keys(launches):
    """Their numbers may say otherwise, and their rows are NaN then. What is mapped as keys is never read."""
    grid, args, maps = packed(launches, 300, 0, 300)
    assert grid == 3 * 4 * 3 and some(args, SHAPES[3:7]) == [300, 0, 300, 0]
    assert len(maps) == 3 and {how[:3] for how in maps} == {maps[0][:3]}


def test_persistent_blocks_are_as_many_as_run_at_once(launches):
    ((_, grid, _),), _, _ = run(attention, Config(128, 128, 6), given(attention, heads=80, batch=1), launches)
    assert grid == 132


def test_where_there_are_no_keys_nothing_is_launched(launches):
    _, (out, lse), _ = run(attention_lse, Config(128, 128, 6), given(attention_lse, keys=0), launches)
    assert not launches[0] and not out.any() and (lse == -torch.inf).all()


# On a card.


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("more", [{}, {"causal": False}, {"order": "bhsd", "keys": 700}, {"order": "thd", "spare": 40}])
def test_every_size_is_right(n, more):
    on_card(attention_lse, case(**PLAIN | {"n": n, "batch": 2, "m": 600} | more))


TILES = [(m, n, size) for size, tiles in forward._TILES.items() for m, n in tiles]
ALONE = [{}, {"persistent": False}, {"stages": 2}]  # tiles of more rows than 128 take no multicast


@pytest.mark.parametrize(
    ("tile", "form"),
    [(tile, form) for tile in TILES for form in (ALONE if tile[0] > 128 else [*ALONE, {"multicast": 2}])],
    ids=str,
)
def test_every_form_is_right(tile, form):
    m, n, size = tile
    config = replace(Config(m, n, 4 if size > 128 else 3), **form)
    on_card(attention, case(**PLAIN | {"n": size, "m": 1000, "keys": 1100, "batch": 2, "heads": 36}), config)


@pytest.mark.parametrize("more", [{"window": 100}, {"window": 100, "causal": False}, {"scale": -0.1}, {"keys": 90}])
def test_windows_negative_scales_and_queries_that_see_nothing_are_right(more):
    on_card(attention_lse, case(**PLAIN | more))


@pytest.mark.parametrize(
    "wrong",
    [
        "q0:1",
        "q0:-1+q3:1073741824",
        "q2:200",  # more queries than tiles were launched for
        "k0:7+k2:-2147483648",
        "k3:2147483647",
        "q3:780",  # tokens that no sequence has
    ],
)
@pytest.mark.parametrize("more", [{}, {"causal": False}, {"window": 40}], ids=str)
@pytest.mark.parametrize("n", [64, 128])
def test_wrong_ends_give_nan_to_their_sequences_alone(wrong, more, n):
    packed = {"order": "thd", "lengths": "100+200+500", "m": 500, "n": n, "wrong": wrong}
    on_card(attention_lse, case(**PLAIN | packed | more))


def test_without_keys_sequences_that_say_otherwise_are_nan():
    where = card(attention_lse)
    q, none = (torch.zeros(tokens, 4, 128, dtype=torch.bfloat16, device=where) for tokens in (300, 0))
    ends = torch.tensor([[0, 100, 290], [0, 0, 5]], dtype=torch.int32, device=where)
    how = {"layout": "thd", "max_seqlen_q": 200, "max_seqlen_k": 9, "backend": "cuda.hopper"}
    out, lse = attention_lse(q, none, none, *ends, **how)
    assert out[100:290].isnan().all() and not out[:100].any() and not out[290:].any()
    assert lse[:, 100:290].isnan().all() and (lse[:, :100] == -torch.inf).all() and (lse[:, 290:] == -torch.inf).all()
