"""Split-K: several blocks share a tile of c, each with a part of K, and a second launch adds the parts up."""

import torch

from tilery.base.spec import TensorSpec, Work
from tilery.ops.fp8_matmul.call import Fp8MatmulCall
from tilery.ops.matmul.call import gemm_work


def split_k_work(call: Fp8MatmulCall, rows: int, columns: int, parts: int) -> Work:
    """Work of a block that has one part of a tile."""
    work = gemm_work(call.m, call.n, call.k, call.a.dtype.itemsize, rows, columns, parts)
    part = min(rows, call.m) * min(columns, call.n) * 4
    return work if parts == 1 else work._replace(bytes=work.bytes + 2 * part)  # written, and read again


def split_k_workspace(call: Fp8MatmulCall, parts: int) -> dict[str, TensorSpec]:
    """The parts of c, in fp32."""
    if parts == 1:
        return {}
    return {"parts": TensorSpec.contiguous((parts, call.m, call.n), torch.float32, call.a.device)}
