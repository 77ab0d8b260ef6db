"""Fuzzes ops by hand: `PYTHONPATH=tests python -m fuzz softmax matmul --calls 1000`, or all of them."""

import argparse
import os
import secrets
import sys

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported
import tilery.ops  # noqa: F401  fills the registry
from fuzz.call import parsed
from fuzz.child import Child
from fuzz.fuzz import fuzz
from tilery.core.op import REGISTRY


def main() -> int:
    options = _options()
    with Child(options.plant) as child:
        if options.call:
            outcome = child.run(parsed(options.call))
            print(f"{outcome.kind}: {outcome.detail}")
            return int(outcome.kind == "failed")
        wrong = 0
        for name in options.ops or REGISTRY:
            for kernel in REGISTRY[name].kernels:
                if options.kernel in (None, kernel):
                    wrong += _report(name, kernel, options, child)
        print(f"seed {options.seed}: {wrong} failures")
        return int(wrong > 0)


def _report(name: str, kernel: str, options: argparse.Namespace, child: Child) -> int:
    show = (lambda call: print(call, file=sys.stderr)) if options.verbose else (lambda call: None)
    report = fuzz(REGISTRY[name], kernel, options.seed, options.calls, child, show)
    if report.kinds:
        print(f"{name} {kernel}: " + ", ".join(f"{count} {kind}" for kind, count in report.kinds.items()), flush=True)
    if report.failures:
        print(report.told, flush=True)
    if options.verbose:
        for why, count in report.reasons.most_common(5):
            print(f"  {count} × {why[:160]}")
    return len(report.failures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("fuzz", description=__doc__)
    parser.add_argument("ops", nargs="*", help="ops, all if none is named")
    parser.add_argument("--kernel", help="one kernel, such as numba; else all that run here")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="what calls are drawn from; else a new one")
    parser.add_argument("--calls", type=int, default=100, help="of each kernel; a fifteenth where Triton interprets")
    parser.add_argument("--call", help="one call, as a failure prints it")
    parser.add_argument(
        "--verbose", action="store_true", help="print each call before it runs, and why some are refused"
    )
    parser.add_argument("--plant", default="", help="a bug of planted.py to put into a kernel first")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
