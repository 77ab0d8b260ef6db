"""Host time that a direct call costs over the kernel's own launch.

    python benchmarks/host_time.py

Least of many batches, so that another process's work does not count. `launch` is the kernel's `run`, into outputs and
workspace that are there already; `call` is `tilery.op(...)`: arguments, plan, outputs, device guard and that launch.
"""

import time

import torch

import tilery.ops  # noqa: F401  fills the registry
from tilery.op import REGISTRY

BATCH, BATCHES = 100, 200


def least_us(*functions):
    """The least time of each, taking turns: what slows the machine for a while slows them all."""
    best = [float("inf")] * len(functions)
    for _ in range(BATCHES):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            for _ in range(BATCH):
                function()
            best[i] = min(best[i], (time.perf_counter() - start) / BATCH * 1e6)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # an empty queue: a full one makes launches wait
    return best


def host_times(op, backend=None):
    """(call, launch) in µs on a problem so small that the kernel's own work is next to nothing."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = {"m": 1, "n": 16, "dtype": "fp32"} | ({"k": 16} if op.name == "matmul" else {})
    args = op.complete((), op.inputs(**small, device=device, seed=0))
    plan = op.plan(op.specs(args), backend)
    outs, scratch = (tuple(spec.empty() for spec in specs) for specs in (plan.outs, plan.workspace))

    def launch():
        plan.run(outs, args, plan.config, *scratch)

    op(*args)
    launch()
    return *least_us(lambda: op(*args), launch), plan.kernel


if __name__ == "__main__":
    print(f"{'op':<10} {'kernel':<8} {'call':>8} {'launch':>8} {'over':>8}   µs")
    for op in REGISTRY.values():
        call, launch, kernel = host_times(op)
        print(f"{op.name:<10} {kernel:<8} {call:8.2f} {launch:8.2f} {call - launch:8.2f}")
