"""attention_backward by TMA and wgmma: what is refused, how its forms are built, and that each is right."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from hopper_checks import runs_here

from compilers import most_spills
from tilery import languages
from tilery.base.launch import Host
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for, specs_for
from tilery.hardware import device
from tilery.measure.check import check
from tilery.ops.attention.attention import attention_backward

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.hardware import toolkit
from tilery.languages import cuda_glue
from tilery.ops.attention.cuda import backward
from tilery.ops.attention.cuda.backward import Config

PLAIN = {"m": 300, "keys": 300, "heads": 4, "kv_heads": 2, "n": 128, "dtype": "bf16"}
NO_DQ = {"dq_block_m": 0, "dq_block_n": 0, "dq_stages": 0}
kernel = attention_backward.kernel("cuda.hopper")


def call(**more):
    return attention_backward.call(specs_for(attention_backward, case(**PLAIN | more)))


def launches(problem, config):
    _, complete = policy.with_workspace(attention_backward, kernel, problem, config)
    return kernel.launches(complete, config)


def forms():
    """Every form of each pass, once: heads, a soft cap, what the pass makes, its tile."""
    for n, softcap, what in itertools.product((64, 128), (0.0, 3.0), ("dkdv", "dq", "one_pass")):
        for tile in backward.tiles(call(n=n, softcap=softcap), what):
            name = f"{n}-{what}-{tile[0]}x{tile[1]}{'-softcap' * (softcap > 0)}"
            yield pytest.param(n, softcap, what, tile, id=name)


PASSES = list(forms())
FORM = ("n", "softcap", "made", "tile")


def config_with(problem, made, tile):
    if made == "one_pass":
        return kernel.one_pass(problem, tile)
    default = {what: backward.tiles(problem, what)[0] for what in ("dkdv", "dq")}
    return kernel.config(problem, **default | {made: tile})


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"dtype": "fp32"}, "multiplies fp16 and bf16 alone, got fp32"),
        ({"n": 192}, "must be of one size, multiples of 16 up to 128, got 192 and 192"),
        ({"n": 128, "value": 64}, "must be of one size, multiples of 16 up to 128, got 128 and 64"),
        ({"layout": "misaligned"}, "q must start at a multiple of 16 bytes"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("hopper")
def test_what_it_cannot_take_is_said(more, why):
    assert why in kernel.refusal(call(**more))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dkdv_block_m": 64}, "tiles for dk and dv of heads of 128 must be 128 × 48, 128 × 32, got 128 × 64"),
        (
            {"dq_block_m": 64},
            "tiles for dq of heads of 128 must be 128 × 112, 128 × 80, 192 × 48, 128 × 96, got 64 × 112",
        ),
        ({"dkdv_stages": 0}, "stages for dk and dv must be 1 to 4 for shared memory to hold them, got 0"),
        ({"dq_stages": 3}, "stages for dq must be 1 to 2 for shared memory to hold them, got 3"),
        (
            {"one_pass": True},
            "dq has no tiles of its own in one pass: dq_block_m, dq_block_n, dq_stages must be 0, got (128, 112, 2)",
        ),
        (
            {"one_pass": True, "dkdv_block_m": 96, **NO_DQ},
            "tiles for one pass of heads of 128 must be 128 × 64, 128 × 80, 128 × 48, got 128 × 96",
        ),
        (
            {"one_pass": True, "dkdv_block_m": 80, "dkdv_stages": 3, **NO_DQ},
            "stages for one pass must be 1 to 2 for shared memory to hold them, got 3",
        ),
        (NO_DQ, "tiles for dq of heads of 128 must be 128 × 112, 128 × 80, 192 × 48, 128 × 96, got 0 × 0"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("hopper")
def test_configs_that_do_not_fit_are_refused(change, why):
    problem = call()
    default = kernel.default(problem)
    assert kernel.refusal(problem, default) is None and why == kernel.refusal(problem, replace(default, **change))


@pytest.mark.parametrize(FORM, PASSES)
@pytest.mark.usefixtures("hopper")
def test_wgmmas_of_every_form_stay_in_flight(n, softcap, made, tile):
    """Waits for S, for dP and for the sums at the end; in one pass for dq, and where registers are few for dk, too.

    ptxas adds one to every wgmma where it has too few registers.
    """
    problem = call(n=n, softcap=softcap)
    config = config_with(problem, made, tile)
    assert kernel.refusal(problem, config) is None and config in [*kernel.configs(problem), config]
    one = launches(problem, config)[2 if made == "dq" else 1]
    assert one.constants.get("OF_KEYS", made) == {"dkdv": True, "dq": False}.get(made, made)
    assert one.options["threads"] == tile[0] * 2 + 128
    built = cuda_glue.compile(one, "sm_90")
    assert built.spills <= most_spills("cuda") and built.registers == (168 if tile[0] == 128 else 128)
    card = device.gpu(torch.device("cuda", 0))  # its driver's own bytes are not of those that a block may ask for
    assert built.shared - card.reserved_shared == one.options["shared"] <= card.shared_per_block
    sass = toolkit.sass(built.cubin)
    waits = len(re.findall(r"WARPGROUP\.DEPBAR", sass))
    assert f"HGMMA.64x{tile[1]}x16.F32" in sass and waits in ((4, 5) if made == "one_pass" else (3,))
    if made == "one_pass":  # added up in memory by a copy
        assert "UBLKRED.G.S.ADD.F32" in sass


@pytest.mark.usefixtures("hopper")
def test_tiles_that_meet_most_come_first_and_every_pair_has_its_own():
    delta, dkdv, dq = launches(call(m=1000, keys=500, batch=3), Config(128, 48, 4, 128, 112, 2))
    assert delta.grid == 3 * 4 * 1000 // 16 and dkdv.grid == 3 * 2 * 4 and dq.grid == 3 * 4 * 8
    assert (dkdv.args["heads"], dq.args["heads"], dkdv.args["heads_per_kv"]) == (2, 4, 2)
    packed = launches(call(m=0, order="thd", lengths="100+200+50"), Config(128, 48, 4, 128, 112, 2))
    # The fourth sequence is that of tokens of none.
    assert packed[1].grid == 4 * 2 * 2 and packed[2].grid == 4 * 4 * 2


@pytest.mark.usefixtures("hopper")
def test_one_pass_has_sums_and_counters_for_every_block_of_queries():
    one = Config(128, 64, 2, one_pass=True)
    problem = call(m=1000, keys=500, batch=3)
    delta, keys, rounding = launches(problem, one)
    assert kernel.workspace(problem, one)["dq_sums"].shape == (3 * 4 * 16, 64 * 128)
    assert kernel.workspace(problem, one)["dq_turns"].shape == (delta.args["counter_count"],) == (3 * 4 * 16,)
    assert keys.grid == 3 * 2 * 4 and rounding.grid == 3 * 4 * 16 and rounding.args["out"] is not keys.args["out"]
    assert (keys.args["heads"], rounding.args["heads"], rounding.args["query_heads"]) == (2, 4, 4)
    # Packed sequences may begin inside of a block, so each has one more.
    packed = call(m=0, order="thd", lengths="100+200+50")
    assert kernel.workspace(packed, one)["dq_turns"].shape == (4 * (353 // 64 + 3 + 1),)


@pytest.mark.usefixtures("hopper")
def test_as_many_heads_run_together_as_the_l2_holds_or_as_make_four_tiles_of_each():
    """Of 200 queries and keys: a pair of heads that share keys takes 200 · 128 · (2 · 8 + 4) bytes, of 32 MiB."""
    one = Config(128, 64, 2, one_pass=True)
    assert launches(call(m=200, keys=200, batch=50), one)[1].args["pairs_per_group"] == 65
    assert launches(call(m=9000, keys=9000, batch=50), one)[1].args["pairs_per_group"] == 132 // 4
    assert launches(call(m=9000, keys=9000, batch=2), one)[1].args["pairs_per_group"] == 4  # all that there are
    assert launches(call(m=9000, keys=9000, batch=50), kernel.default(call()))[1].args["pairs_per_group"] == 100


@pytest.mark.usefixtures("hopper")
def test_without_keys_every_gradient_is_zero():
    made = launches(call(keys=0, causal=False), kernel.default(call()))
    assert all(isinstance(one, Host) for one in made) and len(made) == 1  # dk and dv have no elements


# Where it runs: on a Hopper GPU, or in the emulator.


PROBLEMS = {
    "causal": {"m": 333, "kv_heads": 1, "heads": 2},
    "window": {"m": 280, "window": 70},
    "both sides": {"m": 280, "window": 90, "causal": False, "heads": 2},
    "packed": {"m": 0, "order": "thd", "lengths": "130:70+40:200", "causal": False},
}
EACH = [
    pytest.param(*form.values, what, id=f"{what}-{form.id}")
    for form in PASSES
    for what in PROBLEMS
    if what == "causal" or not form.values[1]  # a soft cap changes no mask
]


@pytest.mark.parametrize("together", [1, 2])
def test_groups_of_heads_follow_each_other(monkeypatch, together):
    """Three heads of keys, so that the last group of two is not full."""
    monkeypatch.setattr(backward, "_heads_together", lambda call: together)
    where, one = (
        runs_here(attention_backward),
        case(**PLAIN | {"m": 290 + together, "heads": 6, "kv_heads": 3, "n": 64, "dtype": "fp16"}),
    )
    config = Config(128, 64, 2, one_pass=True)
    assert check(attention_backward, "cuda.hopper", one, where, config=config).refused is None


@pytest.mark.parametrize((*FORM, "what"), EACH)
def test_every_form_is_right(n, softcap, made, tile, what):
    where = runs_here(attention_backward)
    one = case(**PLAIN | {"n": n, "softcap": softcap, "dtype": "fp16"} | PROBLEMS[what])
    config = config_with(call_for(attention_backward, one, str(where)), made, tile)
    assert check(attention_backward, "cuda.hopper", one, where, config=config).refused is None


@pytest.mark.parametrize("one_pass", [False, True])
def test_keys_past_the_last_do_not_overflow(one_pass):
    """Their scores are 0. Beside those of the others, of about -250, they would count for infinity."""
    args = attention_backward.inputs(
        m=5, keys=3, heads=1, kv_heads=1, n=64, dtype="fp16", device=str(runs_here(attention_backward))
    )
    q, k = args["q"].fill_(1), args["k"].copy_(-1 - 0.01 * args["k"])
    args |= {
        "scale": 4.0,
        "causal": False,
        "lse": torch.logsumexp(4 * torch.einsum("bshd,bthd->bhst", q, k).float(), -1),
    }
    wanted = attention_backward.reference(**{n: x.double() if torch.is_tensor(x) else x for n, x in args.items()})
    config = Config(128, 64, 2, one_pass=True) if one_pass else None
    for made, right in zip(attention_backward(**args, backend="cuda.hopper", config=config), wanted):
        assert (made - right).norm() <= 0.02 * right.norm()


ORDERED = {
    "every key": {"causal": False, "heads": 2},
    "causal": {"heads": 4},
    "window": {"window": 150},
    "packed": {"m": 0, "order": "thd", "lengths": "300:400+70+0:9", "causal": False, "heads": 2},
}


@pytest.mark.parametrize("what", ORDERED)
def test_every_run_of_one_pass_gives_the_same_bits(what):
    """Up to five tiles of keys add to each block of queries, in an order of their own in each run but for their turns.

    The first and the third cancel out and are 2¹⁵ times as large as the others, so another order gives another dq.
    """
    one = PLAIN | {"m": 500, "keys": 600, "n": 64, "kv_heads": 1, "dtype": "fp16"} | ORDERED[what]
    args = attention_backward.inputs(**one, device=str(runs_here(attention_backward)))
    keys, values = (x if one.get("order") else x[0] for x in (args["k"], args["v"]))
    args["q"].zero_(), keys.mul_(2**-4)
    keys[:128] *= 2**15
    keys[256:384], values[256:384] = -keys[:128], values[:128]
    config = Config(128, 64, 2, one_pass=True)
    first = attention_backward(**args, backend="cuda.hopper", config=config)
    assert all(x.isfinite().all() for x in first)
    for _ in range(5):
        again = attention_backward(**args, backend="cuda.hopper", config=config)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("wrong", ["k3:36", "q1:-5", "q3:1073741824"])
def test_one_pass_follows_no_wrong_offsets(wrong):
    """Sequences that end past the tokens or decrease; no tile waits for one that does not come."""
    one = case(m=0, heads=2, kv_heads=1, n=16, dtype="fp16", order="thd", lengths="9+4+20", wrong=wrong)
    config = Config(128, 64, 2, one_pass=True)
    assert check(attention_backward, "cuda.hopper", one, runs_here(attention_backward), config=config).refused is None


@pytest.mark.parametrize(
    ("wrong", "queries", "keys"), [("q2:3", range(3, 9), range(0)), ("k1:30+q1:9", range(0), range(13, 30))]
)
def test_one_pass_of_sequences_that_overlap_is_right_elsewhere(wrong, queries, keys):
    """Rows of two sequences, one of which is too long and so all NaN, are either's."""
    given = {"m": 0, "heads": 2, "kv_heads": 1, "n": 16, "dtype": "fp16", "order": "thd", "lengths": "9+4+20"}
    args = attention_backward.inputs(**given, wrong=wrong, device=str(runs_here(attention_backward)))
    wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in args.items()}
    made = attention_backward(**args, backend="cuda.hopper", config=Config(128, 64, 2, one_pass=True))
    for found, right, twice in zip(made, attention_backward.reference(**wide), (queries, keys, keys)):
        once = [row for row in range(len(right)) if row not in twice]
        torch.testing.assert_close(found[once].double(), right[once], rtol=0.01, atol=0.01, equal_nan=True)


@pytest.mark.parametrize("tile", [(128, 64), (128, 80)])
def test_nothing_of_another_sequence_gets_into_one_pass(tile):
    """Tiles of the first sequence also load rows of the second, whose NaN times a probability of 0 would be NaN."""
    given = {"m": 0, "n": 128, "heads": 2, "kv_heads": 1, "dtype": "fp16", "order": "thd", "lengths": "70:90+60:50"}
    args = attention_backward.inputs(**given, causal=False, device=str(runs_here(attention_backward)))
    problem = attention_backward.call(attention_backward.specs(tuple(args.values())))
    config = kernel.one_pass(problem, tile)
    clean = attention_backward(**args, backend="cuda.hopper", config=config)
    for name in ("q", "k", "v", "dout", "result"):
        args[name][90 if name in ("k", "v") else 70 :] = torch.nan
    args["lse"][:, 70:] = torch.nan
    for kept, soiled, own in zip(clean, attention_backward(**args, backend="cuda.hopper", config=config), (70, 90, 90)):
        assert torch.equal(kept[:own], soiled[:own])
