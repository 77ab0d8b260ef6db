"""Contract of fp8_matmul."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.spec import DTYPES, Bucket, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Saved, baselines, load
from tilery.ops.fp8_matmul import contract
from tilery.ops.fp8_matmul.call import Fp8MatmulCall
from tilery.ops.quantize import formats
from tilery.ops.quantize.formats import GROUP, scale_of_each

MIXED = {"tilelang": "of one format", "cutile": "of one format"}


def check(call: Fp8MatmulCall) -> None:
    contract.check_operands(call, multiple=GROUP)
    (m, k), n = call.a.shape, call.n
    groups, blocks = formats.scale_shape(m, k, "group"), formats.scale_shape(n, k, "block")
    contract.check_scale("a_scale", call.a_scale, {"one per group of 128": groups}, call.a)
    contract.check_scale("b_scale", call.b_scale, {"one per block of 128 × 128": blocks}, call.b)


def bucket(call: Fp8MatmulCall) -> Bucket:
    layout = "row" if call.a_scale.stride(1) == 1 else "column"  # as quantize_fp8 names them
    return Bucket(exact=f"{contract.exact(call)},{layout}", scaled={"m": call.m})


def inputs(
    m: int, n: int, k: int, dtype: str = "e4m3", layout: str = "contiguous", special: str = "none",
    dtype_b: str = "e4m3", layout_b: str = "contiguous", out: str = "bf16",
    scales: str = "column", special_scale: str = "none", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`dtype`, `layout` and `special` are a's; `scales` is the layout of a_scale: peers want "column"."""
    g = draw.generator(seed, device)
    a, b = draw.matrix(m, k, dtype, g, layout, special), draw.matrix(n, k, dtype_b, g, layout_b)
    formats.check("group", scales, dtype)
    a_spec = formats.outputs(TensorSpec.of(a, aligned=True), "group", scales, dtype)["scales"]
    b_spec = formats.outputs(TensorSpec.of(b, aligned=True), "block", "row", dtype_b)["scales"]
    a_scale, b_scale = (contract.draw_scale(spec, g, special_scale) for spec in (a_spec, b_spec))
    return {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "out_dtype": out}


def _torch(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: str) -> Tensor:
    (m, k), n, dtype = a.shape, b.shape[0], contract.wide(a)
    a_wide = (a.float().view(m, k // GROUP, GROUP) * a_scale.unsqueeze(-1)).to(dtype).view(m, k)
    b_wide = (b.float() * scale_of_each(b_scale, n, k, "block")).to(dtype)
    return (a_wide @ b_wide.t()).to(DTYPES[out_dtype])


def _for_cublaslt(a: Tensor, a_scale: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """It wants rows of a and columns of b_scale in fours, and columns of both scales contiguous."""
    if more := -a.shape[0] % 4:
        a = F.pad(a.view(torch.uint8), (0, 0, 0, more)).view(a.dtype)
        a_scale = F.pad(a_scale, (0, 0, 0, more))
    if a_scale.stride() != (1, a.shape[0]):
        a_scale = a_scale.t().contiguous().t()
    if more := -b_scale.shape[1] % 4:
        b_scale = F.pad(b_scale, (0, more))
    return a, a_scale, b_scale.contiguous().t()


_ready_for_cublaslt = Saved(_for_cublaslt)  # whoever uses it would quantize to that form


def _cublaslt(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: str) -> Tensor:
    rows, rows_scale, columns_scale = _ready_for_cublaslt(a, a_scale, b_scale)
    kinds = "BlockWise1x128", "BlockWise128x128"
    return contract.scaled_mm(rows, b, rows_scale, columns_scale, kinds, out_dtype)[: a.shape[0]]


def _deepgemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: str) -> Tensor:
    """Its launches may overlap, as ours do."""
    c = torch.empty(a.shape[0], b.shape[0], dtype=DTYPES[out_dtype], device=a.device)
    deep_gemm = load("deep_gemm")
    deep_gemm.set_pdl(True)
    deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), c)
    return c


@op(
    check=check, outputs=contract.outputs, cost=contract.cost, bucket=bucket, inputs=inputs, allowed=contract.ALLOWED,
    call_type=Fp8MatmulCall,
    kernels={
        "numba": "numba_kernels:fp8_gemm", "cuda": "cuda_kernels:fp8_matmul", "triton": "triton_kernels:fp8_gemm",
        "tilelang": "tilelang_kernels:fp8_matmul", "cutile": "cutile_kernels:fp8_matmul",
    },
    baselines=baselines(torch=_torch, cublaslt=_cublaslt, deepgemm=_deepgemm),
    model_sizes=lambda model: [{"n": layer.n, "k": layer.k} for layer in model.linears() if layer.k % GROUP == 0],
    cases={
        "test": [
            case(m=128, n=256, k=256, dtype="e4m3", out="fp16"),
            case(m=128, n=256, k=256, dtype="e4m3", out="bf16"),
            case(m=64, n=128, k=256, dtype="e4m3", out="fp32", scales="row"),
            case(m=64, n=128, k=128, dtype="e5m2", out="fp32", refused_by=MIXED),
            case(m=33, n=130, k=256, dtype="e5m2", dtype_b="e5m2", out="fp16", scales="row"),
            case(m=65, n=129, k=384, dtype="e4m3", out="fp32"),  # odd rows, a block of one column
            case(m=65, n=129, k=384, dtype="e4m3", dtype_b="e5m2", out="fp32", refused_by=MIXED),
            case(m=1, n=200, k=256, dtype="e4m3", out="bf16"),  # one row
            case(m=1, n=129, k=384, dtype="e4m3", out="fp16"),  # one that does not end on 16 bytes
            case({"cuda": "16 bytes"}, m=1, n=1, k=384, layout_b="misaligned"),  # nor start there
            case(m=1, n=1, k=128, dtype="e4m3", out="fp32", scales="row"),
            case(m=0, n=64, k=128, dtype="e4m3", out="bf16"),  # nothing to launch
            case(m=64, n=0, k=128, dtype="e4m3", out="fp16"),
            case(m=40, n=24, k=0, dtype="e4m3", out="fp32"),  # a sum of nothing is zero
            case(m=33, n=64, k=128, dtype="e4m3", out="fp16", layout="padded", layout_b="padded"),
            case({"cuda": "16 bytes"}, m=17, n=40, k=128, out="fp32", layout="misaligned", layout_b="misaligned"),
            case(m=3, n=32, k=128, dtype="e4m3", out="fp16", layout="far"),  # more than 2**31 bytes from first to last
            case(m=16, n=3, k=128, dtype="e4m3", out="fp32", layout_b="far"),
            case(m=32, n=64, k=128, dtype="e4m3", out="fp32", special="nan"),
            case(m=32, n=64, k=128, dtype="e5m2", dtype_b="e5m2", out="fp16", special="inf"),
            case(m=32, n=130, k=256, dtype="e4m3", out="fp16", special_scale="nan"),
            case(m=32, n=130, k=256, dtype="e4m3", out="fp32", special_scale="zero"),
        ],
        "bench": [
            case(m=m, n=n, k=k, dtype="e4m3") for m, n, k in ((16, 4096, 8192), (4096, 4096, 7168), (64, 7168, 2048))
        ],
        "bench_cpu": [case(m=512, n=1024, k=1024, dtype="e4m3", out="fp32"), case(m=16, n=4096, k=1024, dtype="e4m3")],
    },
)  # fmt: skip
def fp8_matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: str = "bf16") -> Tensor:
    """c [M, N] = (a · a_scale) (b · b_scale)ᵀ; fp8 a [M, K], b [N, K]; a_scale [M, K/128], b_scale [⌈N/128⌉, K/128]."""
    (m, k), n = a.shape, b.shape[0]
    kind = a_scale.dtype
    return (a.to(kind) * scale_of_each(a_scale, m, k, "group")) @ (
        b.to(kind) * scale_of_each(b_scale, n, k, "block")
    ).t()
