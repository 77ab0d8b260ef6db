"""CUDA kernels of rows that blocks, clusters or pipelines take: what they refuse, what they choose, that all build."""

import pytest
import torch

from compilers import most_spills
from tilery import languages
from tilery.base.spec import TensorSpec
from tilery.core import policy
from tilery.core.op import REGISTRY
from tilery.hardware import gpu

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.ops.rows.cuda_rows import Config

ROWWISE = ("softmax", "rms_norm", "add_rms_norm")


def x(m, n, dtype=torch.bfloat16, aligned=True):
    return TensorSpec.contiguous((m, n), dtype, "cuda:0")._replace(aligned=aligned)


def problem(name, row, weight_aligned=True):
    """The kernel, and the call of it with such rows."""
    weight = TensorSpec.contiguous(row.shape[-1:], row.dtype, "cuda:0")._replace(aligned=weight_aligned)
    specs = {"softmax": (row,), "rms_norm": (row, weight), "add_rms_norm": (row, row, weight)}[name]
    return REGISTRY[name].kernel("cuda"), REGISTRY[name].call(specs)


@pytest.fixture(autouse=True)
def hopper():
    with gpu.pretend("sm_90"):
        yield


@pytest.mark.parametrize(
    ("config", "spec", "said"),
    [
        (Config(256, cluster=3), x(4, 4096), "cluster must be one of 1, 2, 4, 8, got 3"),
        (Config(100), x(4, 4096), "threads must be one of"),
        (Config(128, in_registers=True), x(4, 65536), "row of 65536 does not fit the registers of 1 × 128 threads"),
        (Config(512, in_registers=True, stages=4), x(4, 4096), "in registers or in stages, not in both"),
        (Config(512, stages=4), x(4, 4096, aligned=False), "multiples of 16 bytes"),
        (Config(512, stages=4), x(4, 4097), "multiples of 16 bytes"),
        (Config(512, stages=15), x(4, 4096), "takes 245760 bytes of shared memory, 231424 are there"),
        (Config(512, stages=4), x(4, 65536), "a row and one chunk of the next take 9 stages, the pipeline has 4"),
    ],
)
def test_says_why_it_refuses(config, spec, said):
    kernel, call = problem("softmax", spec)
    assert said in kernel.refusal(call, config)


@pytest.mark.parametrize("config", [Config(256, cluster=2), Config(256, stages=4)])
def test_older_cards_have_neither_clusters_nor_pipelines(config):
    with gpu.pretend("sm_89"):
        kernel, call = problem("softmax", x(4, 4096))
        assert "sm_90 or later" in kernel.refusal(call, config)
        _, long = problem("softmax", x(4, 65536))
        assert all(c.cluster == 1 and not c.stages for c in kernel.configs(long))
        _, longest = problem("softmax", x(4, 262144))
        assert kernel.refusal(longest, kernel.default(longest)) is None


@pytest.mark.parametrize("m", [1, 16, 512, 8192])
@pytest.mark.parametrize("n", [1, 1000, 4096, 16384, 65536, 131072, 1_000_003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_default_is_a_config_it_takes(m, n, dtype):
    for name in ROWWISE:
        kernel, call = problem(name, x(m, n, dtype))
        assert kernel.refusal(call, kernel.default(call)) is None


def test_few_long_rows_are_spread_and_many_are_pipelined():
    def default(m, n):
        kernel, call = problem("softmax", x(m, n))
        return kernel.default(call)

    assert default(1, 131072).cluster == 8
    assert default(4096, 65536).stages > 0
    assert default(8192, 4096) == Config(128, in_registers=True)


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize(
    "config", [Config(256, 8, in_registers=True), Config(256, 8), Config(512, 2, stages=7)], ids=str
)
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_every_form_builds(name, config, arch):
    with gpu.pretend(arch):
        _, call = problem(name, x(512, 16384))
        made = policy.compiled(REGISTRY[name], "cuda", call, config, arch)
    # NVRTC 13.0 spills 8 bytes of rms_norm in a pipeline for sm_100.
    assert made.spills <= most_spills("cuda", 8 if (name, arch) == ("rms_norm", "sm_100") and config.stages else 0)
    assert ("barrier.cluster" in made.code["ptx"]) == (config.cluster > 1)
    assert ("cp.async.bulk" in made.code["ptx"]) == (config.stages > 0)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_a_pipeline_is_not_for_a_weight_off_16_bytes(name):
    """Its loads are 16 bytes wide whatever the weight's address; found by random calls on an H200."""
    kernel, call = problem(name, x(4096, 32768))
    _, off = problem(name, x(4096, 32768), weight_aligned=False)
    assert kernel.default(call).stages and not kernel.default(off).stages
    assert not any(config.stages for config in kernel.configs(off))
    assert "multiple of 16 bytes" in kernel.refusal(off, kernel.default(call))
