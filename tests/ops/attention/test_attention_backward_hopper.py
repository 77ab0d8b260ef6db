"""attention_backward by TMA and wgmma: what is refused, how its forms are built, and that each is right."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

from compilers import most_spills
from tilery import languages
from tilery.base.launch import Host
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for, specs_for
from tilery.hardware import device
from tilery.measure.check import check
from tilery.measure.place import place
from tilery.ops.attention.attention import attention_backward

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.hardware import toolkit
from tilery.languages import cuda_glue
from tilery.ops.attention.cuda import backward
from tilery.ops.attention.cuda.backward import Config

PLAIN = {"m": 300, "keys": 300, "heads": 4, "kv_heads": 2, "n": 128, "dtype": "bf16"}
kernel = attention_backward.kernel("cuda.hopper")


def call(**more):
    return attention_backward.call(specs_for(attention_backward, case(**PLAIN | more)))


def launches(problem, config):
    _, complete = policy.with_workspace(attention_backward, kernel, problem, config)
    return kernel.launches(complete, config)


def forms():
    """Every form of either pass, once: heads, a soft cap, whether it is that of dk and dv, its tile."""
    for n, softcap, of_keys in itertools.product((64, 128), (0.0, 3.0), (True, False)):
        for tile in backward.tiles(call(n=n, softcap=softcap), of_keys):
            name = f"{n}-{'dkdv' if of_keys else 'dq'}-{tile[0]}x{tile[1]}{'-softcap' * (softcap > 0)}"
            yield pytest.param(n, softcap, of_keys, tile, id=name)


PASSES = list(forms())
FORM = ("n", "softcap", "of_keys", "tile")


def config_with(problem, of_keys, tile):
    other = backward.tiles(problem, not of_keys)[0]
    return kernel.config(problem, *((tile, other) if of_keys else (other, tile)))


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
def test_wgmmas_of_every_form_stay_in_flight(n, softcap, of_keys, tile):
    """Three waits: for S, for dP and for the sums at the end. ptxas adds one to every wgmma where registers are few."""
    problem = call(n=n, softcap=softcap)
    config = config_with(problem, of_keys, tile)
    assert kernel.refusal(problem, config) is None and config in [*kernel.configs(problem), config]
    one = launches(problem, config)[1 if of_keys else 2]
    assert one.constants["OF_KEYS"] == of_keys and one.options["threads"] == tile[0] * 2 + 128
    made = cuda_glue.compile(one, "sm_90")
    assert made.spills <= most_spills("cuda") and made.registers == (168 if tile[0] == 128 else 128)
    assert made.shared <= device.gpu(torch.device("cuda", 0)).shared_per_block
    sass = toolkit.sass(made.cubin)
    assert f"HGMMA.64x{tile[1]}x16.F32" in sass and len(re.findall(r"WARPGROUP\.DEPBAR", sass)) == 3


@pytest.mark.usefixtures("hopper")
def test_tiles_that_meet_most_come_first_and_every_pair_has_its_own():
    delta, dkdv, dq = launches(call(m=1000, keys=500, batch=3), Config(128, 48, 4, 128, 112, 2))
    assert delta.grid == 3 * 4 * 1000 // 16 and dkdv.grid == 3 * 2 * 4 and dq.grid == 3 * 4 * 8
    assert (dkdv.args["heads"], dq.args["heads"], dkdv.args["heads_per_kv"]) == (2, 4, 2)
    packed = launches(call(m=0, order="thd", lengths="100+200+50"), Config(128, 48, 4, 128, 112, 2))
    # The fourth sequence is that of tokens of none.
    assert packed[1].grid == 4 * 2 * 2 and packed[2].grid == 4 * 4 * 2


@pytest.mark.usefixtures("hopper")
def test_without_keys_every_gradient_is_zero():
    made = launches(call(keys=0, causal=False), kernel.default(call()))
    assert all(isinstance(one, Host) for one in made) and len(made) == 1  # dk and dv have no elements


# Where it runs: on a Hopper GPU, or in the emulator.


def runs_here():
    where = place(attention_backward, "cuda.hopper").device
    if where is None or (where.type != "cpu" and device.arch(where) != "sm_90"):
        pytest.skip("needs a Hopper GPU or the emulator")
    return where


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


@pytest.mark.parametrize((*FORM, "what"), EACH)
def test_every_form_is_right(n, softcap, of_keys, tile, what):
    where = runs_here()
    one = case(**PLAIN | {"n": n, "softcap": softcap, "dtype": "fp16"} | PROBLEMS[what])
    config = config_with(call_for(attention_backward, one, str(where)), of_keys, tile)
    assert check(attention_backward, "cuda.hopper", one, where, config=config).refused is None


def test_keys_past_the_last_do_not_overflow():
    """Their scores are 0. Beside those of the others, of about -250, they would count for infinity."""
    args = attention_backward.inputs(m=5, keys=3, heads=1, kv_heads=1, n=64, dtype="fp16", device=str(runs_here()))
    q, k = args["q"].fill_(1), args["k"].copy_(-1 - 0.01 * args["k"])
    args |= {
        "scale": 4.0,
        "causal": False,
        "lse": torch.logsumexp(4 * torch.einsum("bshd,bthd->bhst", q, k).float(), -1),
    }
    wanted = attention_backward.reference(**{n: x.double() if torch.is_tensor(x) else x for n, x in args.items()})
    for made, right in zip(attention_backward(**args, backend="cuda.hopper"), wanted):
        assert (made - right).norm() <= 0.02 * right.norm()
