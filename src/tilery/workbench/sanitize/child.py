"""The program that compute-sanitizer watches: makes the launches it is given and says how each went.

It is given two files: a request (a list of op, kernel and case, the case as a dictionary of its parameters), and where
to write one line of JSON before and after each launch. What it prints otherwise is only shown if it fails.
"""

import json
import sys
from pathlib import Path
from typing import Any


def launched(op_name: str, kernel: str, params: dict[str, Any]) -> str | None:
    """Launch the kernel once on the GPU and wait for it; why it was not launched, or None."""
    import torch

    import tilery.ops  # noqa: F401  fills the registry
    from tilery.core import policy
    from tilery.core.op import REGISTRY
    from tilery.hardware import device

    op = REGISTRY[op_name]
    args = op.complete((), op.inputs(**params, device=device.default(), seed=0))
    call = op.call(op.specs(args))
    if why := policy.refusal(op, kernel, call):
        return why
    plan = policy.decide(op, call, kernel, None)
    if plan.outs and not any(spec.nbytes for spec in plan.outs):
        return "the outputs are empty, so nothing is launched"
    torch.cuda.synchronize()
    plan(args)
    torch.cuda.synchronize()
    return None


def main(request: Path, results: Path) -> None:
    asked = json.loads(request.read_text(encoding="utf-8"))
    with results.open("w", buffering=1, encoding="utf-8") as file:  # line by line: the next run may end this process
        for index, run in enumerate(asked):
            print(json.dumps({"run": index, "status": "started"}), file=file)
            try:
                why = launched(run["op"], run["kernel"], run["case"])
                found = {"status": "ran"} if why is None else {"status": "refused", "reason": why}
            except Exception as error:  # a kernel may raise anything; the next run has a process of its own then
                found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
            print(json.dumps({"run": index, **found}), file=file)
            if found["status"] == "failed":
                sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
