"""Host time that a direct call costs over the kernel's own launch.

    python benchmarks/host_time.py [OP…] [--csv FILE]

`call` is `tilery.op(...)`; `launch` is the plan's `run` into outputs and workspace that exist already; `over` is the
call with that launch left out: arguments, plan, outputs, device guard. It is timed apart, since a launch varies by more
from one batch to the next than `over` is long. The least of many batches, so that other processes do not count.
"""

import argparse
import time
from math import prod
from pathlib import Path

import torch

import tilery.ops  # noqa: F401  fills the registry
from tilery.base.spec import TensorSpec
from tilery.core.cases import specs_for
from tilery.core.op import REGISTRY
from tilery.hardware import device

ODD = ("layout", "special", "wrong", "outside")
BATCH, BATCHES, ROUNDS = 100, 50, 5


def least_us(function):
    best = float("inf")
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(BATCH):
            function()
        best = min(best, (time.perf_counter() - start) / BATCH * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # an empty queue: a full one makes launches wait
    return best


def smallest(op):
    """The smallest of the op's fp32 cases that launches anything and lies in memory as most do."""
    found = []
    for case in op.cases["test"]:
        usual = set(case.params).isdisjoint(ODD) and case.params.get("out", case.params.get("dtype", "fp32")) == "fp32"
        given = specs_for(op, case)
        if usual and elements(op.output_specs(op.call(given)) or given):  # an op in place has no outputs of its own
            found.append((elements(given), case))
    return min(found, key=lambda each: each[0])[1]


def elements(specs):
    return sum(prod(spec.shape) for spec in specs if isinstance(spec, TensorSpec))


def host_times(op):
    """kernel, call, launch, over in µs, on a problem so small that the kernel's own work is next to nothing."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    args = op.complete((), op.inputs(**smallest(op).params, device=where, seed=0))
    op.plans.clear()
    op(*args)
    (plan,) = op.plans.recent
    outs, scratch = (tuple(spec.empty() for spec in specs) for specs in (plan.outs, plan.workspace))
    run, values = plan.run, (*args, *outs, *scratch)
    call, launch = least_us(lambda: op(*args)), least_us(lambda: run(values))
    plan.run = lambda values: None
    over = least_us(lambda: op(*args))
    op.plans.clear()
    return plan.kernel, call, launch, over


def parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", choices=[[], *REGISTRY], metavar="OP", help="all of them if none is named")
    parser.add_argument("--csv", type=Path, help="write the rows to this file too")
    return parser


def main():
    args = parser().parse_args()
    print(f"{'op':<36} {'kernel':<8} {'call':>8} {'launch':>8} {'over':>8}   µs")
    names = args.ops or list(REGISTRY)
    rounds = [[host_times(REGISTRY[name]) for name in names] for _ in range(ROUNDS)]
    lines = [("op", "call_us", "launch_us", "over_us", "device")]
    for op, *found in zip(names, *rounds):
        least = [min(column) for column in zip(*(times for _, *times in found))]
        lines.append((op, *(f"{t:.4f}" for t in least), device.name(device.default())))
        print(f"{op:<36} {found[0][0]:<8} " + " ".join(f"{t:8.2f}" for t in least))
    if args.csv:
        args.csv.write_text("".join(",".join(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
