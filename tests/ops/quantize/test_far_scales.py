"""Scales whose columns lie so far apart that 32 bits do not count the elements in between."""

from dataclasses import replace

import pytest
import torch

import tilery
from tilery import languages
from tilery.base.spec import TensorSpec
from tilery.core.op import REGISTRY
from tilery.hardware.gpu import pretend
from tilery.measure.place import place

FAR = 2**30  # elements: the third column is past 2**31


def far_scales(rows, where):
    """[rows, 3] in memory of which little is touched."""
    scales = torch.empty(2 * FAR + rows, device=where).as_strided((rows, 3), (1, FAR))
    return scales.copy_(torch.arange(1.0, 1 + 3 * rows).view(rows, 3))


@pytest.mark.parametrize("kernel", ["numba", "triton"])
def test_dequantize_reads_far_columns(kernel):
    where = place(REGISTRY["dequantize_fp8"], kernel).device
    if where is None:
        pytest.skip(languages.missing(kernel) or "runs on a GPU alone")
    values, scales = torch.ones(2, 384, device=where).to(torch.float8_e4m3fn), far_scales(2, where)
    found = tilery.dequantize_fp8(values, scales, "group", "fp32", backend=kernel)
    assert torch.equal(found, scales.repeat_interleave(128, 1))


def test_fp8_matmul_counts_far_scales_in_64_bits():
    op = REGISTRY["fp8_matmul"]
    a, b = (TensorSpec.contiguous((128, 256), torch.float8_e4m3fn, "cuda:0") for _ in range(2))
    near, b_scale = (TensorSpec.contiguous(shape, torch.float32, "cuda:0") for shape in ((128, 2), (1, 2)))
    for strides, wide in (((2, 1), False), ((2**25, 1), True), ((1, 2**30), True)):
        with pretend("sm_90"):
            kernel, call = op.kernel("triton"), op.call((a, near._replace(strides=strides), b, b_scale, "bf16"))
            config = replace(kernel.default(call), split_k=1)
            (launch,) = kernel.launches(call, config)
            assert launch.constants["INT64"] is wide, strides
