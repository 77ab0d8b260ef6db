"""attention by TMA and wgmma: what it refuses and chooses, what it hands to the driver, that every form builds."""

import re
from dataclasses import replace

import pytest
import torch
from hopper_checks import card, on_card, weights_are_made_while_it_multiplies
from tilery.parts.attention_cases import draw

from compilers import most_spills
from tilery import languages
from tilery.base.spec import case
from tilery.core.cases import specs_for
from tilery.hardware import device
from tilery.ops import attention, attention_lse

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.parts.hopper_attention import Config

from tilery.languages import toolkit
from tilery.ops.attention import cuda_hopper_kernel as kernel
from tilery.parts import hopper_attention

PLAIN = {"m": 300, "heads": 4, "kv_heads": 2, "n": 128, "dtype": "bf16"}
SIZES = (16, 32, 64, 80, 96, 128, 192, 256)


def specs(**more):
    return specs_for(attention, case(**PLAIN | more), "cuda:0")


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
def test_takes_what_tma_can_fetch_and_nothing_added_to_scores(more, said):
    why = kernel.refusal(*specs(**more))
    assert why is None if said is None else said in why


@pytest.mark.usefixtures("hopper")
def test_heads_that_share_memory_are_not_fetched():
    """As `expand` makes them."""
    q, k, v, *rest = specs()
    shared = k._replace(strides=(k.stride(0), k.stride(1), 0, 1))
    assert "k must not overlap for TMA to fetch them, got stride 0" in kernel.refusal(q, shared, v, *rest)


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        (Config(128, 144, 4), {}, "tiles of heads of 128 must be 128 × 128, 128 × 176, got 128 × 144"),
        (Config(128, 176, 5), {}, "stages must be 2 to 4 for shared memory to hold them, got 5"),
        (
            Config(128, 128, 6, share=3),
            {},
            "tiles of 128 queries, 2, got 3",
        ),
        (Config(128, 128, 6, share=2), {"order": "thd"}, "of sequences that are not packed"),
        (Config(192, 112, 8, share=2), {"n": 64}, "tiles of 128 queries, 2, got 2"),
        (Config(128, 128, 6, share=2), {}, None),
        (Config(192, 112, 8), {"n": 64}, None),
        (Config(192, 112, 8), {"n": 128}, "tiles of heads of 128 must be"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_says_why_it_refuses_a_config(config, more, said):
    why = kernel.refusal(*specs(**more), config=config)
    assert why is None if said is None else said in why


@pytest.mark.parametrize("order", ["bshd", "thd"])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("m", [1, 200, 4096])
@pytest.mark.usefixtures("hopper")
def test_the_default_and_all_configs_are_taken(m, n, order):
    for causal in (False, True):
        problem = specs(m=m, n=n, order=order, causal=causal)
        found = kernel.configs(*problem)
        assert kernel.default(*problem) in found and 2 <= len(found) == len(set(found)) <= 10
        assert all(kernel.refusal(*problem, config=c) is None for c in found)
        assert all(kernel.estimate(*problem, config=c).blocks > 0 for c in found)


@pytest.mark.usefixtures("hopper")
def test_packed_tiles_go_to_who_is_free():
    def chosen(**more):
        c = kernel.default(*specs(m=4096, **more))
        return c.block_m, c.block_n, c.share, c.persistent

    assert chosen() == chosen(causal=False) == (128, 128, 1, True)
    assert chosen(causal=False, order="thd") == (128, 128, 1, False)
    assert chosen(n=64) == (192, 112, 1, True) and chosen(n=256) == (128, 80, 1, True)


def test_is_asked_before_triton():
    for op in (attention, attention_lse):
        assert op.kernels.index("cuda.hopper") < op.kernels.index("triton")


FORMS = [
    (Config(128, 176, 4, share=2), 128, "bf16"),
    (Config(128, 128, 6), 128, "fp16"),
    (Config(192, 112, 8), 64, "bf16"),
    (Config(128, 192, 8), 64, "bf16"),
    (Config(128, 128, 6), 80, "bf16"),
    (Config(128, 112, 4), 192, "bf16"),
    (Config(128, 80, 4), 256, "bf16"),
]


@pytest.mark.parametrize(("config", "n", "dtype"), FORMS, ids=lambda v: str(v))
@pytest.mark.usefixtures("hopper")
def test_every_form_builds_and_makes_weights_while_it_multiplies(config, n, dtype):
    problem = specs(n=n, dtype=dtype)
    assert kernel.refusal(*problem, config=config) is None
    made = kernel.compile(problem, config, "sm_90")
    width = -(-n // 64) * 64
    assert made.spills <= most_spills("cuda", 8 if config.block_m == 192 else 0)  # by NVRTC 13.0
    assert made.shared == config.shared(width) + 1024 <= device.shared_limit("sm_90")
    assert made.registers == (168 if config.block_m == 128 else 128)  # as many as all threads may start with
    sass = toolkit.sass(made.cubin)
    assert f"HGMMA.64x{config.block_n}x16.F32" in sass and "UTMALDG.4D" in sass
    assert ("MULTICAST" in sass) == (config.share > 1)
    assert re.search(rf"HGMMA\.64x{width}x16\.F32\S* R\d+, R\d+, gdesc\[UR\d+\]\.tnspB", sass)  # weights from registers
    assert weights_are_made_while_it_multiplies(sass, config.block_n)


# What is handed to the driver, without one.


def launched(op, launches, config, **more):
    (args, outs) = given(op, **more)
    op.kernel("cuda.hopper").run(outs, args, config)
    ((one, (grid, *values)),) = launches[0]
    return one, grid, values, launches[1], args, outs


def given(op, **more):
    args = op.complete((), draw(**PLAIN | {"device": "cpu"} | more))
    return args, tuple(spec.empty() for spec in op.outputs(*op.specs(args)))


def test_launches_as_planned(launches):
    config = Config(128, 176, 4, share=2)
    one, grid, values, maps, (q, k, v, *_), (out,) = launched(attention, launches, config, batch=3, causal=False)
    assert (one.threads, one.shared, one.cluster, one.early) == (384, config.shared(128), 2, True)
    assert grid == 3 * 4 * 2 * 2  # sequences, heads, and tiles of 256, for two blocks each
    assert "128, 176, 2, 4, 2>" in one.name
    addresses, sizes, steps, boxes, _ = zip(*maps)
    assert addresses == (q.data_ptr(), k.data_ptr(), v.data_ptr()) and boxes == ((128,), (88,), (88,))
    assert sizes == ((128, 300, 4, 3), (128, 300, 2, 3), (128, 300, 2, 3))
    assert steps == ((512, 128, 153600), (256, 128, 76800), (256, 128, 76800))
    assert values[:12] == [1, 2, 3, out.data_ptr(), 0, 0, 0, 153600, 512, 128, 0, 0]
    far = 2**29
    assert values[12:] == [3, 4, 2, 300, 300, 300, 300, 2, 12, far, far, pytest.approx(128**-0.5)]


def test_launches_packed_sequences_with_their_lse(launches):
    more = {"order": "thd", "lengths": "20+0+300", "spare": 7, "window": 40, "scale": -0.5}
    config = Config(128, 128, 6, persistent=False)
    one, grid, values, maps, args, (out, lse) = launched(attention_lse, launches, config, **more)
    assert grid == 4 * 4 * 3 and one.cluster == 1  # the tokens that are left are a sequence more
    assert maps[0][1:3] == ((128, 327, 4, 1), (512, 128, 128))
    ends = args[3].data_ptr(), args[4].data_ptr()
    assert values[3:12] == [out.data_ptr(), lse.data_ptr(), *ends, 0, 512, 128, 0, 327]
    assert values[12:] == [3, 4, 2, 327, 327, 300, 300, 3, 16, 39, 0, -0.5]  # tokens, then the most that are declared


def packed(launches, q_tokens, k_tokens, most, window=0):
    """What a launch is given of two packed sequences."""
    q, k = (torch.zeros(tokens, 4, 128, dtype=torch.bfloat16) for tokens in (q_tokens, k_tokens))
    ends = torch.zeros(3, dtype=torch.int32)
    how = {"layout": "thd", "max_seqlen_q": most, "max_seqlen_k": most, "window": window}
    args = attention.complete((), {"q": q, "k": k, "v": k, "cu_seqlens_q": ends, "cu_seqlens_k": ends} | how)
    kernel.run((torch.empty_like(q),), args, Config(128, 128, 6, persistent=False))
    ((_, (grid, *values)),), maps = launches
    return grid, values[12:], maps


@pytest.mark.parametrize("most", [501, 2**31, 2**62])
def test_declared_lengths_and_windows_of_any_size_are_numbers_that_int32_holds(launches, most):
    """No sequence has more tokens than there are, and none sees more than all."""
    grid, values, _ = packed(launches, 300, 200, most, window=most)
    assert grid == 3 * 4 * 3
    assert values[3:7] == [300, 200, 300, 200] and values[9] >= 500 and max(values[:11]) < 2**31


def test_packed_sequences_are_launched_even_where_there_are_no_keys(launches):
    """Their numbers may say otherwise, and their rows are NaN then. What is mapped as keys is never read."""
    grid, values, maps = packed(launches, 300, 0, 300)
    assert grid == 3 * 4 * 3 and values[3:7] == [300, 0, 300, 0]
    assert len(maps) == 3 and {how[:3] for how in maps} == {maps[0][:3]}


def test_persistent_blocks_are_as_many_as_run_at_once(launches):
    assert launched(attention, launches, Config(128, 128, 6), heads=80, batch=1)[1] == 132


def test_where_there_are_no_keys_nothing_is_launched(launches):
    args, (out, lse) = given(attention_lse, keys=0)
    out.fill_(torch.nan), lse.fill_(torch.nan)
    attention_lse.kernel("cuda.hopper").run((out, lse), args, Config(128, 128, 6))
    assert not launches[0] and not out.any() and (lse == -torch.inf).all()


# On a card.


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("more", [{}, {"causal": False}, {"order": "bhsd", "keys": 700}, {"order": "thd", "spare": 40}])
def test_every_size_is_right(n, more):
    on_card(attention_lse, case(**PLAIN | {"n": n, "batch": 2, "m": 600} | more))


@pytest.mark.parametrize("tile", [(m, n, size) for size, tiles in hopper_attention._TILES.items() for m, n in tiles])
@pytest.mark.parametrize("form", [{}, {"share": 2}, {"persistent": False}, {"stages": 2}], ids=str)
def test_every_form_is_right(tile, form):
    m, n, size = tile
    if m > 128 and "share" in form:
        pytest.skip("refused")
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
