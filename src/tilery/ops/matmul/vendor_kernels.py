"""matmul, matmul_add, linear and bmm by cuBLAS through torch, into the output that is given.

Not here, as torch has no form of them that writes into an output and keeps the contract: grouped_matmul (torch's
grouped_mm makes its output, and follows offsets that lead outside) and linear_silu_mul (gate and up would be rounded
before they are multiplied).
"""

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

_LARGEST = 2**31 - 1  # cuBLAS takes the distance between rows as 32 bits


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


def strides_refusal(**given: TensorSpec | None) -> str | None:
    """Why these tensors, by the names that users know, are too far apart in memory."""
    for name, x in given.items():
        if x is not None and any(step > _LARGEST for step, size in zip(x.strides, x.shape) if size > 1):
            return f"{name} must have strides below 2**31, got {list(x.strides)}"
    return None


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)


class Matmul(Vendor):
    def refusal(self, call: MatmulCall, config: Config | None = None) -> str | None:
        return strides_refusal(a=call.a, b=call.b)

    def launches(self, call: MatmulCall, config: Config) -> list[Launch]:
        args = {"a": call.a, "b": call.b, "out": call.out}
        return [Launch(_mm, 1, args, options={"precision": call.precision})]


def _addmm(a: Tensor, b: Tensor, addend: Tensor, alpha: float, beta: float, out: Tensor) -> None:
    if alpha == 0:  # BLAS would leave the product out, and with it NaN and infinity
        a, alpha = a * alpha, 1.0
    torch.addmm(addend, a, b, alpha=alpha, beta=beta, out=out)


class MatmulAdd(Vendor):
    def refusal(self, call: MatmulAddCall, config: Config | None = None) -> str | None:
        return strides_refusal(a=call.a, b=call.b, c=call.addend)

    def launches(self, call: MatmulAddCall, config: Config) -> list[Launch]:
        args = {"a": call.a, "b": call.b, "addend": call.addend, "alpha": call.alpha, "beta": call.beta}
        return [Launch(_addmm, 1, args | {"out": call.out}, options={"precision": call.precision})]


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, act: str, out: Tensor
) -> None:  # fmt: skip
    """The first that is added is added by the product itself; what is left is fp32, or relu, which rounds nothing."""
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
        if why := strides_refusal(x=call.a, weight=call.b, residual=call.addend):
            return why
        steps = [call.act] if call.act not in ("none", "relu") else []
        steps += ["residual"] if call.addend is not None and (call.bias is not None or call.act != "none") else []
        if call.a.dtype != torch.float32 and steps:
            return f"rounds to {dtype_name(call.a.dtype)} before {' and '.join(steps)}, which the contract does once"
        return None

    def launches(self, call: LinearCall, config: Config) -> list[Launch]:
        residual = None if call.addend is None else matrix(call.addend)
        args = {"x": matrix(call.a), "weight": call.b, "bias": call.bias, "residual": residual, "act": call.act}
        args["out"] = matrix(call.out)
        return [Launch(_linear, 1, args, options={"precision": call.precision})]


def _bmm(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.bmm(a, b, out=out)


class Bmm(Vendor):
    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        return strides_refusal(a=call.a, b=call.b)

    def launches(self, call: Call, config: Config) -> list[Launch]:
        return [Launch(_bmm, 1, {"a": call.a, "b": call.b, "out": call.c})]


matmul, matmul_add, linear, bmm = Matmul(), MatmulAdd(), Linear(), Bmm()
