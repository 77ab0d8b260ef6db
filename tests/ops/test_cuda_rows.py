"""CUDA kernels that give a row to a block, a cluster or a ring: what they refuse, what they choose, that all build."""

import pytest
import torch

from compilers import most_spills
from tilery import languages
from tilery.base.spec import TensorSpec
from tilery.core.op import REGISTRY
from tilery.hardware import device

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.parts import cuda_rows
from tilery.parts.cuda_rows import Config

ROWWISE = ("softmax", "rms_norm", "add_rms_norm")


def x(m, n, dtype=torch.bfloat16, aligned=True):
    return TensorSpec.contiguous((m, n), dtype, "cuda:0")._replace(aligned=aligned)


@pytest.fixture(autouse=True)
def hopper():
    with device.pretend("sm_90"):
        yield


@pytest.mark.parametrize(
    ("config", "spec", "said"),
    [
        (Config(256, cluster=3), x(4, 4096), "cluster must be one of 1, 2, 4, 8, got 3"),
        (Config(100), x(4, 4096), "threads must be one of"),
        (Config(128, held=True), x(4, 65536), "row of 65536 does not fit the registers of 1 × 128 threads"),
        (Config(512, held=True, slots=4), x(4, 4096), "in registers or in slots, not in both"),
        (Config(512, slots=4), x(4, 4096, aligned=False), "multiples of 16 bytes"),
        (Config(512, slots=4), x(4, 4097), "multiples of 16 bytes"),
        (Config(512, slots=15), x(4, 4096), "takes 245760 bytes of shared memory, 232448 are there"),
        (Config(512, slots=4), x(4, 65536), "a row and one chunk of the next take 9 slots, the ring has 4"),
    ],
)
def test_says_why_it_refuses(config, spec, said):
    assert said in cuda_rows.refusal(config, spec)


@pytest.mark.parametrize("config", [Config(256, cluster=2), Config(256, slots=4)])
def test_older_cards_have_neither_clusters_nor_rings(config):
    with device.pretend("sm_89"):
        assert "sm_90 or later" in cuda_rows.refusal(config, x(4, 4096))
        assert all(c.cluster == 1 and not c.slots for c in cuda_rows.configs(x(4, 65536)))
        assert cuda_rows.refusal(cuda_rows.default(x(4, 262144)), x(4, 262144)) is None


@pytest.mark.parametrize("m", [1, 16, 512, 8192])
@pytest.mark.parametrize("n", [1, 1000, 4096, 16384, 65536, 131072, 1_000_003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_default_is_a_config_it_takes(m, n, dtype):
    for inputs in ((x(m, n, dtype),), (x(m, n, dtype),) * 2):
        assert cuda_rows.refusal(cuda_rows.default(*inputs), *inputs) is None


def test_few_long_rows_are_spread_and_many_pass_through_a_ring():
    assert cuda_rows.default(x(1, 131072)).cluster == 8
    assert cuda_rows.default(x(4096, 65536)).slots > 0
    assert cuda_rows.default(x(8192, 4096)) == Config(128, held=True)


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("config", [Config(256, 8, held=True), Config(256, 8), Config(512, 2, slots=7)], ids=str)
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_every_form_builds(name, config, arch):
    op, row = REGISTRY[name], x(512, 16384)
    weight = TensorSpec.contiguous((16384,), torch.bfloat16, "cuda:0")
    specs = {"softmax": (row,), "rms_norm": (row, weight), "add_rms_norm": (row, row, weight)}[name]
    with device.pretend(arch):
        made = op.kernel("cuda").compile(specs, config, arch)
    # NVRTC 13.0 spills 8 bytes of rms_norm in a ring for sm_100.
    assert made.spills <= most_spills("cuda", 8 if (name, arch) == ("rms_norm", "sm_100") and config.slots else 0)
    assert ("barrier.cluster" in made.code["ptx"]) == (config.cluster > 1)
    assert ("cp.async.bulk" in made.code["ptx"]) == (config.slots > 0)


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_a_ring_is_not_for_a_weight_off_16_bytes(op):
    """Its loads are 16 bytes wide whatever the weight's address; found by random calls on an H200."""
    weight = TensorSpec.contiguous((32768,), torch.bfloat16, "cuda:0")
    specs = (x(4096, 32768),) * (2 if op == "add_rms_norm" else 1) + (weight,)
    kernel, off = REGISTRY[op].kernel("cuda"), weight._replace(aligned=False)
    assert kernel.default(*specs).slots and not kernel.default(*specs[:-1], off).slots
    assert not any(config.slots for config in kernel.configs(*specs[:-1], off))
    assert "multiple of 16 bytes" in kernel.refusal(*specs[:-1], off, config=kernel.default(*specs))
