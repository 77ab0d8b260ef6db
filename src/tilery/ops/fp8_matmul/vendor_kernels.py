"""fp8_matmul_rowwise by cuBLASLt through torch, into the output that is given.

Not fp8_matmul: torch takes its scales without a copy only where M and K / 128 are multiples of 4.
"""

import torch
from torch import Tensor

from tilery.base.launch import Launch
from tilery.base.spec import DTYPES, dtype_name
from tilery.ops.fp8_matmul.call import Fp8MatmulCall
from tilery.ops.matmul.vendor_kernels import Config, Vendor, span_refusal

_EACH = 16  # what N and the bytes from row to row must be a multiple of


def _scaled_mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype, out: Tensor) -> None:
    torch._scaled_mm(a, b.t(), a_scale, b_scale.t() if b_scale.dim() == 2 else b_scale, out_dtype=out_dtype, out=out)


class Rowwise(Vendor):
    archs = ("cpu", "sm_89", "sm_90", "sm_100", "sm_120")

    def refusal(self, call: Fp8MatmulCall, config: Config | None = None) -> str | None:
        for name, x in (("a", call.a), ("b", call.b)):
            if x.dtype != torch.float8_e4m3fn:
                return f"{name} must be e4m3, got {dtype_name(x.dtype)}"
            if not x.aligned or (min(x.shape) > 1 and x.stride(0) % _EACH):
                return f"{name} must have its rows at multiples of {_EACH} bytes, got stride {x.stride(0)}"
        if call.n % _EACH:
            return f"N must be a multiple of {_EACH}, got {call.n}"
        per_row = [len(scale.shape) == 2 for scale in (call.a_scale, call.b_scale)]
        if per_row[0] != per_row[1]:
            return "scales a and b both by row or both as a whole, got one of each"
        if per_row[0] and call.out_dtype != "bf16":
            return f"scales by row to bf16 alone, got out_dtype {call.out_dtype}"
        if not all(s.shape[0] <= 1 or s.stride(0) == 1 for s in (call.a_scale, call.b_scale)):
            return "scales must be contiguous"
        return span_refusal(a=call.a, b=call.b)

    def launches(self, call: Fp8MatmulCall, config: Config) -> list[Launch]:
        args = {"a": call.a, "a_scale": call.a_scale, "b": call.b, "b_scale": call.b_scale}
        return [Launch(_scaled_mm, 1, args | {"out_dtype": DTYPES[call.out_dtype], "out": call.c})]


fp8_matmul_rowwise = Rowwise()
