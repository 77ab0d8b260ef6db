"""grouped_matmul by TMA and wgmma: what is refused, how its forms are built, and that each is right."""

import re

import pytest
import torch

from compilers import most_spills
from tilery import languages
from tilery.base.launch import Persistent
from tilery.base.spec import case
from tilery.core.cases import specs_for
from tilery.hardware import device
from tilery.measure.check import check
from tilery.measure.place import place
from tilery.ops.matmul.grouped_matmul import WRONG, grouped_matmul

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.hardware import toolkit
from tilery.languages import cuda_glue
from tilery.ops.matmul.cuda.grouped import Config

PLAIN = {"m": 700, "n": 264, "k": 136, "experts": 5, "dtype": "fp16"}
kernel = grouped_matmul.kernel("cuda.hopper")


def call(**more):
    return grouped_matmul.call(specs_for(grouped_matmul, case(**PLAIN | more)))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"dtype": "fp32"}, "wgmma takes fp16 and bf16, and would round fp32 to tf32"),
        ({"k": 0}, "takes K of at least 1 and 1 to 4096 groups, got K 0 and 5 groups"),
        ({"experts": 4097}, "takes K of at least 1 and 1 to 4096 groups, got K 136 and 4097 groups"),
        ({"layout": "misaligned"}, "a must be contiguous along K or M, with lines that start at multiples of 16 bytes"),
        ({"k": 65}, "a must be contiguous along K or M"),
        ({"n": 33, "layout_b": "contiguous"}, "b must be contiguous along K or N"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("hopper")
def test_what_it_cannot_take_is_said(more, why):
    assert why in kernel.refusal(call(**more))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Config(96, 4), "block_n must be one of 64, 128, 192, 256, got 96"),
        (Config(128, 1), "stages must be 2 to 7 for shared memory to hold them, got 1"),
        (Config(256, 5), "stages must be 2 to 4 for shared memory to hold them, got 5"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("hopper")
def test_configs_that_do_not_fit_are_refused(config, why):
    assert kernel.refusal(call(), config) == why and kernel.refusal(call(), kernel.default(call())) is None


@pytest.mark.usefixtures("hopper")
def test_tiles_are_as_wide_as_fill_the_gpu():
    assert kernel.default(call(m=32768, n=1536, k=2048, experts=128)).block_n == 256
    assert kernel.default(call(m=512, n=768, k=2048, experts=8)).block_n == 64
    (launch,) = kernel.launches(call(), Config(128, 6))
    # 700 rows are at most 5 full tiles and one more in each of 5 groups and in the rows of none, of three columns.
    assert launch.grid == Persistent((700 + 6 * 127) // 128 * 3) and launch.pdl
    assert kernel.launches(call(m=0), Config(128, 6)) == []


@pytest.mark.parametrize("layout_b", ["transposed", "contiguous"])
@pytest.mark.parametrize("block_n", [64, 128, 192, 256])
@pytest.mark.usefixtures("hopper")
def test_every_form_is_built_with_its_wgmmas_in_flight(block_n, layout_b):
    """ptxas adds a wait to every wgmma where registers are few; a k-block has four."""
    problem = call(m=4096, n=1536, k=2048, layout_b=layout_b)
    (config,) = (one for one in kernel.configs(problem) if one.block_n == block_n)
    (launch,) = kernel.launches(problem, config)
    assert launch.constants["B_MN"] == (layout_b == "contiguous")
    made = cuda_glue.compile(launch, "sm_90")
    assert made.spills <= most_spills("cuda")
    assert made.shared <= device.gpu(torch.device("cuda", 0)).shared_per_block
    sass = toolkit.sass(made.cubin)
    assert f"HGMMA.64x{block_n}x16.F32" in sass
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) < len(re.findall("HGMMA", sass)) / 2


# Where it runs: on a Hopper GPU, or in the emulator.


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"m": 704, "layout_b": "contiguous", "layout": "transposed"},
        {"sizes": "128+256+0+1+300", "dtype": "bf16"},  # full tiles, and rows of no group
        {"sizes": "0+0+700+0+0", "n": 61},
        {"m": 130, "experts": 67},  # more groups than lanes, most of them empty
        {"wrong": "falls"},
        {"wrong": "past inside"},
    ],
    ids=str,
)
@pytest.mark.parametrize("block_n", [64, 256])
def test_every_form_is_right(more, block_n):
    where = place(grouped_matmul, "cuda.hopper").device
    if where is None or (where.type != "cpu" and device.arch(where) != "sm_90"):
        pytest.skip("needs a Hopper GPU or the emulator")
    assert more.get("wrong", "falls") in WRONG
    assert check(grouped_matmul, "cuda.hopper", case(**PLAIN | more), where, config=Config(block_n, 3)).refused is None
