"""Contract of fp8_matmul_rowwise."""

from typing import Any

from torch import Tensor

from tilery.base.spec import DTYPES, Bucket, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Saved, baselines
from tilery.ops.fp8_matmul import contract
from tilery.ops.fp8_matmul.call import Fp8MatmulCall
from tilery.ops.matmul.contract import FAR
from tilery.ops.quantize import formats

MULTIPLE = 16  # of K
# What cases declare of torch's product: fp8 of one format, columns in sixteens, rows scaled to bf16 alone.
E4M3, SIXTEEN, BF16 = ({"vendor": words} for words in ("must be e4m3", "multiple", "to bf16 alone"))


def check(call: Fp8MatmulCall) -> None:
    contract.check_operands(call, multiple=MULTIPLE)
    for name, scale, x in (("a_scale", call.a_scale, call.a), ("b_scale", call.b_scale, call.b)):
        contract.check_scale(name, scale, {"one per row": (x.shape[0], 1), "one for all": (1,)}, x)


def bucket(call: Fp8MatmulCall) -> Bucket:
    per = f"{_per(call.a_scale)},{_per(call.b_scale)}"
    return Bucket(exact=f"{contract.exact(call)},{per}", scaled={"m": call.m})


def _per(scale: Any) -> str:
    """What a scale is for, as quantize_fp8 names it; of a tensor or a spec."""
    return "token" if len(scale.shape) == 2 else "tensor"


def inputs(
    m: int, n: int, k: int, dtype: str = "e4m3", layout: str = "contiguous", special: str = "none",
    dtype_b: str = "e4m3", layout_b: str = "contiguous", out: str = "bf16",
    scales: str = "token", scales_b: str = "token", special_scale: str = "none",
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`dtype`, `layout` and `special` are a's; `scales` and `scales_b` are "token" (a row) or "tensor"."""
    g = draw.generator(seed, device)
    a, b = draw.matrix(m, k, dtype, g, layout, special), draw.matrix(n, k, dtype_b, g, layout_b)
    made = []
    for x, per, kind in ((a, scales, dtype), (b, scales_b, dtype_b)):
        formats.check(per, "row", kind, among=("token", "tensor"))
        spec = formats.outputs(TensorSpec.of(x, aligned=True), per, "row", kind)["scales"]
        made.append(contract.draw_scale(spec, g, special_scale))
    return {"a": a, "a_scale": made[0], "b": b, "b_scale": made[1], "out_dtype": out}


def _torch(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: str) -> Tensor:
    """The products first, the scales after them: less to read and write."""
    c = a.to(contract.wide(a)) @ b.to(contract.wide(b)).t()
    return (c.float() * a_scale.view(-1, 1) * b_scale.view(1, -1)).to(DTYPES[out_dtype])


def _cublaslt(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: str) -> Tensor:
    """It scales both by row or both as a whole."""
    if _per(a_scale) == _per(b_scale) == "tensor":
        return contract.scaled_mm(a, b, a_scale, b_scale, ("TensorWise", "TensorWise"), out_dtype)
    a_rows, b_rows = (_of_each_row(s, x.shape[0]) for s, x in ((a_scale, a), (b_scale, b)))
    return contract.scaled_mm(a, b, a_rows, b_rows.t(), ("RowWise", "RowWise"), out_dtype)


_of_each_row = Saved(lambda scale, rows: scale.view(-1, 1).expand(rows, 1).contiguous())


@op(
    check=check, outputs=contract.outputs, cost=contract.cost, bucket=bucket, inputs=inputs, allowed=contract.ALLOWED,
    call_type=Fp8MatmulCall,
    kernels={
        "numba": "numba_kernels:fp8_gemm", "triton": "triton_kernels:fp8_gemm",
        "vendor": "vendor_kernels:fp8_matmul_rowwise",
    },
    baselines=baselines(torch=_torch, cublaslt=_cublaslt),
    model_sizes=lambda model: [{"n": layer.n, "k": layer.k} for layer in model.linears() if layer.k % MULTIPLE == 0],
    cases={
        "test": [
            case(BF16, m=128, n=256, k=192, dtype="e4m3", out="fp16"),
            case(m=128, n=256, k=192, dtype="e4m3", out="bf16"),
            case(m=64, n=128, k=256, dtype="e4m3", out="fp32", scales="tensor", scales_b="tensor"),
            case(E4M3, m=64, n=128, k=128, dtype="e5m2", out="fp32", scales_b="tensor"),
            case(E4M3, m=33, n=130, k=272, dtype="e5m2", dtype_b="e5m2", out="fp16", scales="tensor"),
            case(E4M3, m=65, n=129, k=16, dtype="e4m3", dtype_b="e5m2", out="fp32"),  # odd rows, less than a block of K
            case(SIXTEEN, m=1, n=200, k=144, dtype="e4m3", out="bf16"),  # one row
            case(SIXTEEN, m=1, n=1, k=16, dtype="e4m3", out="fp32"),
            case(m=0, n=64, k=128, dtype="e4m3", out="bf16"),  # nothing to launch
            case(BF16, m=64, n=0, k=128, dtype="e4m3", out="fp16"),
            case(SIXTEEN, m=40, n=24, k=0, dtype="e4m3", out="fp32"),  # a sum of nothing is zero
            case(SIXTEEN, m=40, n=24, k=0, dtype="e4m3", out="fp16", special_scale="nan"),
            case(BF16, m=33, n=64, k=80, dtype="e4m3", out="fp16", layout="padded", layout_b="padded"),
            case(SIXTEEN, m=17, n=40, k=144, dtype="e4m3", out="fp32", layout="misaligned", layout_b="misaligned"),
            case(BF16, m=3, n=32, k=64, dtype="e4m3", out="fp16", layout="far"),  # more than 2**31 bytes apart
            case(SIXTEEN, m=16, n=3, k=64, dtype="e4m3", out="fp32", layout_b="far"),
            case(BF16, m=32, n=64, k=128, dtype="e4m3", out="fp32", special="nan"),
            case(E4M3, m=32, n=64, k=128, dtype="e5m2", out="fp16", special="inf"),
            case(BF16, m=32, n=64, k=256, dtype="e4m3", out="fp16", special_scale="nan"),
            case(BF16, m=32, n=64, k=256, dtype="e4m3", out="fp32", special_scale="zero"),
            # What torch's product takes too.
            case(m=48, n=144, k=80, dtype="e4m3", out="fp16", scales="tensor", scales_b="tensor"),
            case(m=1, n=208, k=144, dtype="e4m3", out="bf16"),
            case(m=40, n=32, k=0, dtype="e4m3", out="bf16"),
            case(m=33, n=64, k=80, dtype="e4m3", out="bf16", layout="padded", layout_b="padded"),
            case(FAR, m=3, n=32, k=64, dtype="e4m3", out="bf16", layout="far"),
            case(m=32, n=64, k=128, dtype="e4m3", out="bf16", special="nan"),
            case(m=32, n=64, k=256, dtype="e4m3", out="bf16", special_scale="nan"),
            case(m=32, n=64, k=256, dtype="e4m3", out="bf16", special_scale="zero"),
        ],
        "bench": [case(m=m, n=4096, k=4096, dtype="e4m3") for m in (16, 4096)],
        "bench_cpu": [case(m=512, n=1024, k=1024, dtype="e4m3", out="fp32"), case(m=16, n=4096, k=1024, dtype="e4m3")],
    },
)  # fmt: skip
def fp8_matmul_rowwise(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: str = "bf16") -> Tensor:
    """c [M, N] = (a · a_scale) (b · b_scale)ᵀ; fp8 a [M, K], b [N, K]; a_scale [M, 1] or [1], b_scale [N, 1] or [1]."""
    kind = a_scale.dtype
    return (a.to(kind) * a_scale) @ (b.to(kind) * b_scale).t()
