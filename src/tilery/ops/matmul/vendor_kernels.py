"""matmul, matmul_add, linear and bmm by cuBLAS through torch, into the output that is given.

Not here, as torch has no form of them that writes into an output and keeps the contract: grouped_matmul (torch's
grouped_mm makes its output, and follows offsets that lead outside) and linear_silu_mul (gate and up would be rounded
before they are multiplied).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.launch import Launch
from tilery.base.rows import matrix
from tilery.base.spec import TensorSpec, dtype_name
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.device import ARCHS
from tilery.languages import vendor_glue
from tilery.ops.matmul.call import LinearCall, MatmulAddCall, MatmulCall

_MOST = 2**31  # values that a matrix may span: cuBLAS numbers those of some with gaps in 32 bits


@dataclass(frozen=True)
class Config:
    """Nothing to choose: the library chooses by itself."""


class Vendor(Kernel):
    """A kernel of a library that torch calls."""

    archs: tuple[str, ...] = ("cpu", *ARCHS)
    Config = Config

    def default(self, call: Call) -> Config:
        return Config()

    def library(self, where: torch.device) -> str:
        return vendor_glue.library(where)


def span_refusal(**given: TensorSpec | None) -> str | None:
    """Why these tensors, by the names that users know, are too far apart in memory."""
    for name, x in given.items():
        if x is None or not all(x.shape):
            continue
        matrix_span = 1 + sum((size - 1) * step for size, step in zip(x.shape[-2:], x.strides[-2:]))
        if matrix_span > max(_MOST, math.prod(x.shape[-2:])):
            return f"{name} must not span 2**31 values with gaps between its rows, got strides {list(x.strides)}"
    return None


def adds_refusal(dtype: torch.dtype, what: str) -> str | None:
    """Why cuBLAS does not add as the contract does: some of its kernels round the product to 16 bits before."""
    if dtype == torch.float32:
        return None
    return f"rounds to {dtype_name(dtype)} before {what}, which the contract does once"


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)


class Matmul(Vendor):
    def refusal(self, call: MatmulCall, config: Config | None = None) -> str | None:
        return span_refusal(a=call.a, b=call.b)

    def launches(self, call: MatmulCall, config: Config) -> list[Launch]:
        args = {"a": call.a, "b": call.b, "out": call.out}
        return [Launch(_mm, 1, args, options={"precision": call.precision})]


def _addmm(a: Tensor, b: Tensor, addend: Tensor, alpha: float, beta: float, out: Tensor) -> None:
    if alpha == 0:  # BLAS would leave the product out, and with it NaN and infinity
        a, alpha = a * alpha, 1.0
    torch.addmm(addend, a, b, alpha=alpha, beta=beta, out=out)


class MatmulAdd(Vendor):
    def refusal(self, call: MatmulAddCall, config: Config | None = None) -> str | None:
        return adds_refusal(call.a.dtype, "c") or span_refusal(a=call.a, b=call.b, c=call.addend)

    def launches(self, call: MatmulAddCall, config: Config) -> list[Launch]:
        args = {"a": call.a, "b": call.b, "addend": call.addend, "alpha": call.alpha, "beta": call.beta}
        return [Launch(_addmm, 1, args | {"out": call.out}, options={"precision": call.precision})]


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, act: str, out: Tensor
) -> None:  # fmt: skip
    """The product adds the first itself. What is left is done to fp32, or is relu, which rounds nothing."""
    first, rest = (bias, residual) if bias is not None or act != "none" else (residual, None)
    if first is not None:
        torch.addmm(first, x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out=out)
    if act != "none":
        _ACTIVATIONS[act](out)
    if rest is not None:
        out.add_(rest)


_ACTIVATIONS: dict[str, Any] = {
    "relu": torch.relu_,
    "gelu": lambda x: torch.ops.aten.gelu_(x),
    "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "silu": lambda x: F.silu(x, inplace=True),
}


class Linear(Vendor):
    def refusal(self, call: LinearCall, config: Config | None = None) -> str | None:
        steps = [call.act] if call.act not in ("none", "relu") else []
        steps += ["residual"] if call.addend is not None else []
        why = adds_refusal(call.a.dtype, " and ".join(steps)) if steps else None
        return why or span_refusal(x=call.a, weight=call.b, residual=call.addend)

    def launches(self, call: LinearCall, config: Config) -> list[Launch]:
        residual = None if call.addend is None else matrix(call.addend)
        args = {"x": matrix(call.a), "weight": call.b, "bias": call.bias, "residual": residual, "act": call.act}
        args["out"] = matrix(call.out)
        return [Launch(_linear, 1, args, options={"precision": call.precision})]


def _bmm(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.bmm(a, b, out=out)


class Bmm(Vendor):
    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        return span_refusal(a=call.a, b=call.b)

    def launches(self, call: Call, config: Config) -> list[Launch]:
        return [Launch(_bmm, 1, {"a": call.a, "b": call.b, "out": call.c})]


matmul, matmul_add, linear, bmm = Matmul(), MatmulAdd(), Linear(), Bmm()
