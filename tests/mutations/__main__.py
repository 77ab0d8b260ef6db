"""Plants every bug of the catalogue and says which the tests notice: `PYTHONPATH=tests python -m mutations`."""

import argparse
import os
import sys
from collections.abc import Sequence

from mutations.catalogue import MUTATIONS
from mutations.run import INVALID, NOTICED, Project, Verdict, run_all

_WIDTH = 80


def main() -> int:
    options = _options()
    chosen = [m for m in MUTATIONS if all(word in f"{m.layer}/{m.name}" for word in options.k)]
    if not chosen:
        print(f"-k must be part of the name or the layer of a mutation, got {' '.join(options.k)}", file=sys.stderr)
        return 2
    if options.list:
        for mutation in chosen:
            print(f"{mutation.layer}/{mutation.name}: {', '.join(mutation.tests)}")
        return 0
    print(f"{len(chosen)} mutations in {options.jobs} children at a time; first their tests without a mutation")
    verdicts = run_all(chosen, Project(), options.jobs, options.limit, _tell)
    print(table(verdicts))
    return int(any(verdict.status != NOTICED for verdict in verdicts))


def _tell(verdict: Verdict) -> None:
    what = f"{verdict.status:<9} {verdict.mutation.layer}/{verdict.mutation.name} ({verdict.seconds:.0f} s)"
    print(what if verdict.status == NOTICED and "signal" not in verdict.detail else f"{what}\n    {verdict.detail}")
    sys.stdout.flush()


def table(verdicts: Sequence[Verdict]) -> str:
    """Planted and noticed by layer, then what was not noticed."""
    lines = ["", f"{'layer':<20}{'planted':>10}{'noticed':>10}"]
    for layer in dict.fromkeys(verdict.mutation.layer for verdict in verdicts):
        of_layer = [verdict for verdict in verdicts if verdict.mutation.layer == layer]
        lines.append(_line(layer, of_layer))
    lines.append(_line("all", verdicts))
    for status in sorted({verdict.status for verdict in verdicts} - {NOTICED}):
        lines += ["", "does not say anything of the tests:" if status == INVALID else "not noticed:"]
        lines += [f"  {v.mutation.layer}/{v.mutation.name}"[:_WIDTH] for v in verdicts if v.status == status]
    return "\n".join(lines)


def _line(name: str, verdicts: Sequence[Verdict]) -> str:
    return f"{name:<20}{len(verdicts):>10}{sum(verdict.status == NOTICED for verdict in verdicts):>10}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("mutations", description=__doc__)
    parser.add_argument("-k", action="append", default=[], help="part of layer/name; of several, all must be in it")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="children at a time; else one for each core"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a child is ended")
    parser.add_argument("--list", action="store_true", help="print the mutations and their tests, and run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
