import torch
import torch.nn.functional as F
from torch import Tensor

from tilery import inputs as draw
from tilery.op import op
from tilery.ops import rows
from tilery.peers import Compiled, baselines, load
from tilery.spec import Bucket, Cost, TensorSpec, case

ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def check(gate: TensorSpec, up: TensorSpec) -> None:
    rows.check_rows("gate", gate, ALLOWED)
    rows.check_rows("up", up, ALLOWED)
    rows.check_like("up", up, "gate", gate)


def outputs(gate: TensorSpec, up: TensorSpec) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(gate.shape, gate.dtype, gate.device),)


def cost(gate: TensorSpec, up: TensorSpec) -> Cost:
    return rows.cost_rows(gate, flops=5, reads=2)  # negate, exp, add, divide, multiply


def bucket(gate: TensorSpec, up: TensorSpec) -> Bucket:
    return rows.bucket_rows(gate)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    g = draw.generator(seed, device)
    return {
        "gate": rows.draw(m, n, dtype, g, layout, special, batch),
        "up": rows.draw(m, n, dtype, g, "contiguous", "none", batch),  # the two differ in row stride where layout says
    }


def _torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    kernels=("numba", "triton", "cutile", "cuda"),
    baselines=baselines(
        torch=_torch, compile=Compiled(_torch),
        liger=lambda gate, up: load("liger_kernel.ops").LigerSiLUMulFunction.apply(gate, up),
        tilegym=lambda gate, up: load("tilegym.ops").get_swiglu()(gate, up),
    ),
    model_sizes=lambda model: [{"n": model.mlp_size}],
    cases={
        "test": rows.cases(),
        **rows.bench_cases(),
        "bench": [case(m=m, n=14336, dtype="bf16") for m in (16, 8192)],
    },
)  # fmt: skip
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's product: y = gate · sigmoid(gate) · up; gate, up, y [..., N]."""
    return gate * torch.sigmoid(gate) * up
