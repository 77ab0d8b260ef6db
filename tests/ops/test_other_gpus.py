"""Defaults on GPUs that are not here: each is legal there, and fits."""

import pytest
import torch

from tilery import languages
from tilery.base.launch import Launch
from tilery.core import policy
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.hardware import gpu

GPUS = ("h100-pcie", "h200", "l40s", "rtx4090", "b200", "a100", "rtx5090")
KERNELS = [
    pytest.param(op, kernel, name, id=f"{op.name}-{kernel}-{name}")
    for op in REGISTRY.values()
    for kernel in op.kernels
    if languages.missing(kernel) is None
    for name in GPUS
    if any(languages.serves(arch, gpu.KNOWN[name].arch) for arch in op.kernel(kernel).archs)
]


@pytest.mark.parametrize(("op", "kernel", "name"), KERNELS)
def test_the_default_is_legal(op, kernel, name):
    found, card, taken = op.kernel(kernel), gpu.KNOWN[name], 0
    with gpu.pretend(name):
        for case in [*op.cases["bench"], *op.cases["test"]]:
            call = call_for(op, case)
            if found.refusal(call) is not None or any(0 in out.shape for out in op.output_specs(call)):
                continue
            taken += 1
            config = found.default(call)
            assert found.refusal(call, config) is None, f"{case}: {config}"
            _, complete = policy.with_workspace(op, found, call, config)
            for launch in found.launches(complete, config):
                if isinstance(launch, Launch):
                    fits(launch, card)
    assert taken, "no case is taken on this GPU"


def fits(launch, card):
    sizes = launch.grid if isinstance(launch.grid, tuple) else (getattr(launch.grid, "most", launch.grid),)
    assert all(size > 0 for size in sizes) and all(size < 65536 for size in sizes[1:]), launch.grid
    assert launch.cluster <= card.largest_cluster
    assert launch.options.get("shared", 0) <= card.shared_per_block
    assert launch.options.get("threads", 32) <= 1024 and launch.options.get("num_warps", 1) <= 32


def test_a_gpu_is_pretended_by_name_and_by_architecture():
    where = torch.device("cuda", 0)
    with gpu.pretend("h100-pcie"):
        assert gpu.gpu(where).sms == 114 and gpu.gpu(where).arch == "sm_90"
        with gpu.pretend("sm_89"):
            assert gpu.gpu(where).arch == "sm_89" and gpu.gpu(where).largest_cluster == 1
        assert gpu.gpu(where).sms == 114
