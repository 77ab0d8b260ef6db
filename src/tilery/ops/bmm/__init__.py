import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.models.model import Model
from tilery.parts import batches
from tilery.parts.products import ALLOWED


def check(a: TensorSpec, b: TensorSpec) -> None:
    batches.check_operand("a", a, "[B, M, K]")
    batches.check_operand("b", b, "[B, K, N]")
    batches.check_same_dtype(a, b)
    require(
        a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1],
        f"a [B, M, K] and b [B, K, N] must agree in B and K, got {list(a.shape)} and {list(b.shape)}",
    )


def outputs(a: TensorSpec, b: TensorSpec) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous((a.shape[0], a.shape[1], b.shape[2]), a.dtype, a.device),)


def cost(a: TensorSpec, b: TensorSpec) -> Cost:
    (count, m, k), n = a.shape, b.shape[2]
    return Cost(flops=2 * count * m * n * k, reads=a.nbytes + b.nbytes, writes=count * m * n * a.dtype.itemsize)


def bucket(a: TensorSpec, b: TensorSpec) -> Bucket:
    (count, m, k), n = a.shape, b.shape[2]
    layouts = batches.layout(a) + batches.layout(b)
    return Bucket(exact=f"n={n},k={k},{dtype_name(a.dtype)},{layouts}", scaled={"m": m, "batch": count})


def inputs(
    batch: int, m: int, n: int, k: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none",
    layout_b: str = "contiguous", device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """`layout` is a's, `layout_b` that of b."""
    g = draw.generator(seed, device)
    return {
        "a": batches.draw(batch, m, k, dtype, g, layout, special),
        "b": batches.draw(batch, k, n, dtype, g, layout_b),
    }


def model_sizes(model: Model) -> list[dict[str, int]]:
    """Multi-head latent attention takes its queries into the latent, head by head, and its values out of it."""
    if not model.kv_lora_rank:
        return []
    latent, nope, _, value = model.mla_sizes()
    heads = model.query_heads
    return [{"batch": heads, "n": latent, "k": nope}, {"batch": heads, "n": value, "k": latent}]


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    kernels=("numba", "triton", "cutile"),
    baselines=baselines(torch=torch.bmm, compile=Compiled(torch.bmm)), model_sizes=model_sizes,
    cases={
        "test": [
            case(batch=3, m=65, n=33, k=97, dtype="fp32"),  # odd tails on every side
            case(batch=2, m=128, n=136, k=72, dtype="fp16"),
            case(batch=2, m=128, n=136, k=72, dtype="bf16"),
            case(batch=2, m=65, n=33, k=97, dtype="bf16", layout_b="transposed"),
            case(batch=5, m=1, n=40, k=64, dtype="bf16", layout_b="transposed"),  # one row each
            case(batch=1, m=20, n=24, k=64, dtype="fp16"),
            case(batch=2, m=1, n=1, k=1, dtype="fp32"),
            case(batch=0, m=16, n=16, k=16, dtype="fp16"),  # nothing to launch
            case(batch=2, m=0, n=16, k=16, dtype="fp32"),
            case(batch=2, m=16, n=0, k=16, dtype="fp16"),
            case(batch=2, m=20, n=24, k=0, dtype="fp32"),  # a sum of nothing is zero
            case(batch=2, m=40, n=48, k=64, dtype="fp16", layout="transposed", layout_b="transposed"),
            case(batch=2, m=33, n=48, k=64, dtype="fp16", layout="padded", layout_b="padded"),
            case(batch=2, m=33, n=40, k=65, dtype="bf16", layout="misaligned", layout_b="misaligned"),
            case(batch=2, m=3, n=32, k=64, dtype="fp16", layout="far"),  # more than 2**31 elements from first to last
            case(batch=3, m=20, n=32, k=34, dtype="fp16", layout_b="far"),
            case(batch=2, m=32, n=40, k=64, dtype="fp32", special="nan"),
            case(batch=2, m=32, n=40, k=64, dtype="fp16", special="inf"),
        ],
        "bench": [
            *(case(batch=128, m=m, n=512, k=128, dtype="bf16") for m in (16, 256)),  # DeepSeek-V3's queries
            case(batch=16, m=2048, n=2048, k=128, dtype="bf16", layout_b="transposed"),
            case(batch=8, m=2048, n=2048, k=2048, dtype="bf16"),
        ],
        "bench_cpu": [
            case(batch=8, m=256, n=256, k=256, dtype="fp32"),
            case(batch=32, m=4, n=512, k=128, dtype="bf16"),
        ],
    },
)  # fmt: skip
def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Matrix products: c[i] = a[i] · b[i]; a [B, M, K], b [B, K, N], c [B, M, N]; layouts as matmul's, B anywhere."""
    return torch.bmm(a, b)
