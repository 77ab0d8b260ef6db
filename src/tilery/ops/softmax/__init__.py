import torch
from torch import Tensor

from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines, load
from tilery.ops.softmax_backward import softmax_backward
from tilery.parts import rows

ALLOWED = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def check(x: TensorSpec) -> None:
    rows.check_rows("x", x, ALLOWED)


def outputs(x: TensorSpec) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(x.shape, x.dtype, x.device),)


def cost(x: TensorSpec) -> Cost:
    return rows.cost_rows(x, flops=5)  # max, subtract, exp, sum, divide


def bucket(x: TensorSpec) -> Bucket:
    return rows.bucket_rows(x)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    return {"x": rows.draw(m, n, dtype, draw.generator(seed, device), layout, special, batch)}


def bench_cases() -> dict[str, list[Case]]:
    """Also a vocabulary: few rows of it as a decoder has, and many."""
    known = rows.bench_cases()
    return known | {"bench": [*known["bench"], *(case(m=m, n=128256, dtype="bf16") for m in (16, 1024))]}


def _torch(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    kernels=("numba", "triton", "cutile", "cuda"), first=rows.cuda_first(65536, many=65536),
    baselines=baselines(
        torch=_torch, compile=Compiled(_torch),
        liger=lambda x: load("liger_kernel.ops").LigerSoftmaxFunction.apply(x),
        tilegym=lambda x: load("tilegym.ops").softmax(x),
        quack=lambda x: load("quack").softmax(x),
    ),
    model_sizes=lambda model: [{"n": model.vocab_size}],  # what a sampler sees
    backward=lambda args, outs, grads: softmax_backward(grads[0], outs[0]),
    cases={"test": rows.cases(), **bench_cases()},
)  # fmt: skip
def softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis: y = exp(x - max(x)) / sum(exp(x - max(x))); x, y [..., N]."""
    return torch.softmax(x, -1)
