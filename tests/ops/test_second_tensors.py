"""A tensor beside the first must have its dtype: a kernel reads both as the first one is stored."""

import pytest
import torch

import tilery
from tilery.base.errors import BadInput

X, HALF, W = torch.randn(4, 8), torch.randn(4, 8).half(), torch.randn(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tilery.silu_mul(X, HALF), "up must be fp32 as gate is, got fp16"),
        (lambda: tilery.add_rms_norm(X, HALF, W), "residual must be fp32 as x is, got fp16"),
        (lambda: tilery.softmax_backward(HALF, X), "must be fp16 as .* is, got fp32|must be fp32 as .* is, got fp16"),
        (lambda: tilery.layer_norm(X, W, W.half()), "bias must be fp32 as x is, got fp16"),
        (lambda: tilery.rms_norm_fp8(X, W.half()), "weight must be fp32 as x is, got fp16"),
        (lambda: tilery.moe_route(X, W.half(), 2), r"bias must be fp32\[8\], .* got fp16\[8\]"),
    ],
)
def test_a_second_tensor_of_another_dtype_is_named(call, message):
    with pytest.raises(BadInput, match=message):
        call()
