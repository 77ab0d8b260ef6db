"""Times two versions of Tilery against each other, in turns in one process.

    python benchmarks/before_after.py OLD/src/tilery results/matmul-h200.csv [--rounds 10] [--turn-ms 10]
    python benchmarks/before_after.py OLD/src/tilery 'softmax:m=4096,n=16384,dtype=bf16' …

`OLD/src/tilery` is the package in another checkout (`git worktree add OLD COMMIT`). It is imported under the name
`tilery_before`, so that both versions run on the same inputs in the same rounds. Rows are the distinct cases of a
results file, or `op:case`. Each version runs what its own dispatch chooses. Both are checked against float64 first.

`before` and `after` are ratios to torch. `after / before` is how many times faster this version is, with its 95 %
interval; a row whose whole interval is below 0.98 is marked with `<`. `torch/torch` times torch against itself: its
distance from 1 is the noise of the run.
"""

import argparse
import csv
import importlib
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import torch

import tilery.ops  # noqa: F401  fills the registry
from tilery.base.errors import TileryError
from tilery.cli.common import parsed_case
from tilery.core import plan as plan_module
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.measure import timing
from tilery.measure.check import Limits, judge_call
from tilery.workbench import bench

OTHER = "tilery_before"


def import_before(package: Path, folder: Path) -> dict:
    """Import another version's package as `tilery_before`; its registry of ops."""
    copy = folder / OTHER
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in copy.rglob("*"):
        if path.suffix in (".py", ".cu", ".cuh"):
            path.write_text(re.sub(r"\btilery\b", OTHER, path.read_text(encoding="utf-8")), encoding="utf-8")
    for header in list(copy.rglob("tilery.cuh")):
        header.rename(header.with_name(f"{OTHER}.cuh"))
    sys.path.insert(0, str(folder))
    importlib.import_module(f"{OTHER}.ops")
    for module in (f"{OTHER}.op", f"{OTHER}.core.op"):
        try:
            return importlib.import_module(module).REGISTRY
        except ModuleNotFoundError:
            continue
    raise SystemExit(f"{package} has no registry of ops")


def rows_of(words: list[str]) -> list[tuple[str, str]]:
    """(op, case) pairs, each once, in order."""
    found: dict[tuple[str, str], None] = {}
    for word in words:
        if word.endswith(".csv"):
            with open(word, encoding="utf-8") as file:
                found |= {(row["op"], row["case"]): None for row in csv.DictReader(file) if row["case"]}
        else:
            op, _, case = word.partition(":")
            found[op, case] = None
    return list(found)


def measured(name: str, text: str, before: dict, depth: timing.Depth) -> dict:
    """One row: times and ratios of both versions on one case."""
    op, where, case = REGISTRY[name], device.default(), parsed_case(REGISTRY[name], text)
    for version, called in (("before", before[name]), ("after", op)):
        args = bench.drawn(op, case, where, seed=random.randrange(2**31))
        limits = Limits.of(op, op.call(op.specs(args)))
        judge_call(op, f"{version}: {name} {text}", args, lambda a, f=called: _outputs(op, f(*a)), limits)
    sets = bench.input_sets(op, lambda seed: bench.drawn(op, case, where, seed), where)
    arms = {bench.BASE: bench.rotating(op.baselines[bench.BASE], sets)}
    arms[bench.CONTROL] = bench.rotating(op.baselines[bench.BASE], sets)
    arms["before"] = bench.rotating(before[name], sets)
    arms["after"] = bench.rotating(op, sets)
    times = timing.time_arms(arms, len(sets), where, depth, bench.BASE, paired=where.type == "cuda")
    rounds = [b / a for a, b in zip(times["after"].samples, times["before"].samples)]
    held = [a / b for a, b in zip((_ratios(times["after"])), _ratios(times["before"]))]
    ratio = statistics.median(held), *timing.median_interval(held)
    found = {"op": name, "case": text, "ms": {n: t.median for n, t in times.items()}}
    found["ratio"] = {n: times[n].ratio for n in (bench.CONTROL, "before", "after")}
    found["after_before"] = ratio
    found["raw"] = (statistics.median(rounds), *timing.median_interval(rounds))
    return found


def _outputs(op, made) -> tuple:
    return () if op.mutates or made is None else plan_module.packed(made)


def _ratios(found: timing.Timing) -> list[float]:
    return [b / t for t, b in zip(found.samples, found.against)]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the package folder of the other version")
    parser.add_argument("rows", nargs="+", help="results/….csv, or op:case")
    parser.add_argument("--rounds", type=int, default=timing.FULL.rounds)
    parser.add_argument("--turn-ms", type=float, default=timing.FULL.turn_ms)
    parser.add_argument("--warm-s", type=float, default=0.3)
    parser.add_argument("--json", type=Path, help="write every row here as well, as it is measured")
    return parser


def main() -> None:
    args = parser().parse_args()
    depth = timing.Depth(args.rounds, args.turn_ms, args.warm_s)
    with tempfile.TemporaryDirectory() as folder:
        before = import_before(args.before, Path(folder))
        print(f"{'op and case':<72} {'µs':>8} {'before':>7} {'after':>7} {'after / before':>22} {'torch/torch':>11}")
        for name, text in rows_of(args.rows):
            if name not in before or name not in REGISTRY:
                print(f"{name} {text}: not an op of both versions")
                continue
            try:
                found = measured(name, text, before, depth)
            except (TileryError, NotImplementedError, RuntimeError) as error:  # it costs its own row
                print(f"{name} {text}: {str(error).splitlines()[0][:160]}", flush=True)
                continue
            ratio, low, high = found["after_before"]
            mark = "<" if high < 0.98 else " "
            print(
                f"{name + ' ' + text:<72} {found['ms']['after'] * 1e3:>8.1f} {found['ratio']['before'][0]:>7.3f} "
                f"{found['ratio']['after'][0]:>7.3f} {ratio:>7.3f} ({low:.3f}-{high:.3f}) {mark} "
                f"{found['ratio'][bench.CONTROL][0]:>9.3f}",
                flush=True,
            )
            if args.json:
                with args.json.open("a", encoding="utf-8") as file:
                    print(json.dumps(found), file=file)
            torch.cuda.empty_cache() if torch.cuda.is_available() else None


if __name__ == "__main__":
    main()
