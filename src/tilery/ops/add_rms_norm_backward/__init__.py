from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec, case
from tilery.core import inputs as draw
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.rms_norm_backward import rms_norm_backward, torch_backward
from tilery.parts import norms, rows


def check(dy: TensorSpec, dresidual: TensorSpec | None, residual_out: TensorSpec, weight: TensorSpec) -> None:
    rows.check_rows("residual_out", residual_out, norms.ALLOWED)
    for name, spec in (("dy", dy), ("dresidual", dresidual)):
        if spec is not None:
            rows.check_rows(name, spec, norms.ALLOWED)
            rows.check_like(name, spec, "residual_out", residual_out)
    norms.check_vector("weight", weight, residual_out)


def outputs(
    dy: TensorSpec, dresidual: TensorSpec | None, residual_out: TensorSpec, weight: TensorSpec
) -> tuple[TensorSpec, ...]:
    return norms.contiguous(residual_out), norms.contiguous(weight)


def cost(dy: TensorSpec, dresidual: TensorSpec | None, residual_out: TensorSpec, weight: TensorSpec) -> Cost:
    read = 2 if dresidual is None else 3
    least = rows.cost_rows(residual_out, flops=12, reads=read, extra=weight.nbytes)
    return least._replace(writes=least.writes + weight.nbytes)


def bucket(dy: TensorSpec, dresidual: TensorSpec | None, residual_out: TensorSpec, weight: TensorSpec) -> Bucket:
    return rows.bucket_rows(residual_out)


def inputs(
    m: int, n: int, dtype: str = "bf16", layout: str = "contiguous", special: str = "none", batch: int = 0,
    passed: bool = True, eps: float = 1e-6, offset: float = 0.0, device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor | float | None]:  # fmt: skip
    """`passed`: the residual has a gradient of its own."""
    g = draw.generator(seed, device)
    dy = rows.draw(m, n, dtype, g, "contiguous", "none", batch)
    dresidual = rows.draw(m, n, dtype, g, "contiguous", "none", batch) if passed else None
    total = rows.draw(m, n, dtype, g, layout, special, batch)
    weight = draw.vector(n, dtype, g)
    return {
        "dy": dy, "dresidual": dresidual, "residual_out": total, "weight": weight, "eps": eps, "offset": offset
    }  # fmt: skip


def _torch(
    dy: Tensor, dresidual: Tensor | None, residual_out: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    dx, dweight = torch_backward(dy, residual_out, weight, eps, offset)
    return (dx if dresidual is None else dx.add_(dresidual)), dweight


def _formula(
    dy: Tensor, dresidual: Tensor | None, residual_out: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    dx, dweight = _gradients(
        dy.float(), dresidual if dresidual is None else dresidual.float(), residual_out.float(), weight.float(),
        eps, offset,
    )  # fmt: skip
    return dx.to(residual_out.dtype), dweight.to(weight.dtype)


def _gradients(
    dy: Tensor, dresidual: Tensor | None, residual_out: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    dx, dweight = rms_norm_backward.reference(dy, residual_out, weight, eps, offset)
    return (dx if dresidual is None else dx + dresidual), dweight


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=norms.ALLOWED,
    runtime=("eps", "offset"), check_runtime=norms.check_eps, kernels=("numba", "triton"),
    baselines=baselines(torch=_torch, compile=Compiled(_formula)),
    model_sizes=lambda model: [{"n": model.hidden_size}],
    cases={
        "test": [*norms.backward_cases(), case(m=3, n=96, dtype="fp32", passed=False, offset=1.0)],
        **rows.bench_cases(),
    },
)  # fmt: skip
def add_rms_norm_backward(
    dy: Tensor, dresidual: Tensor | None, residual_out: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of add_rms_norm: (dx, dweight), dx = dresidual + the gradient of the norm of residual_out; dx is that
    of x and of the residual alike; dy, dresidual, residual_out, dx [..., N], weight, dweight [N]."""
    return _gradients(dy, dresidual, residual_out, weight, eps, offset)
