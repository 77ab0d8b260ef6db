import torch
from torch import Tensor

from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.log_softmax_backward import log_softmax_backward
from tilery.ops.softmax import ALLOWED, bench_cases, bucket, check, cost, inputs, outputs
from tilery.parts import rows


def _torch(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    kernels=("numba", "triton"),
    baselines=baselines(torch=_torch, compile=Compiled(_torch)),
    model_sizes=lambda model: [{"n": model.vocab_size}],
    backward=lambda args, outs, grads: log_softmax_backward(grads[0], outs[0]),
    cases={"test": rows.cases(), **bench_cases()},
)  # fmt: skip
def log_softmax(x: Tensor) -> Tensor:
    """Logarithm of softmax over the last axis: y = x - max(x) - log(sum(exp(x - max(x)))); x, y [..., N]."""
    return torch.log_softmax(x, -1)
