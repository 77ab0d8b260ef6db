"""Fits the cost model of products on Hopper (src/tilery/ops/matmul/cuda/hopper_costs.py) to measurements on a GPU.

    python benchmarks/fit_products.py measure CSV [--kind 16-bit|fp8] [--seconds 90] [--seed 1]
    python benchmarks/fit_products.py fit CSV… [--kind …]    writes hopper_costs.json, and says how far off the model is

`measure` times some of the configs of products of published models' sizes, in turns with torch, on operands in memory:
six rounds of 1 ms turns. They choose defaults and claim nothing. Shapes come from a list of their own, not from
`--shapes random`, by which defaults are judged.
"""

import argparse
import csv
import dataclasses
import itertools
import json
import math
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tilery.base.spec import case
from tilery.core.cases import call_for
from tilery.hardware.gpu import pretend
from tilery.ops.matmul.cuda import hopper_costs

KINDS = {"16-bit": ("matmul", "cuda.hopper"), "fp8": ("fp8_matmul", "cuda")}
SIZES = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1280, 8192), (8192, 1024), (7168, 2048), (576, 7168),
    (2560, 9728), (5120, 5120), (24576, 1536), (3072, 3072), (11008, 4096), (18432, 7168), (2048, 2048), (151936, 2560),
)  # fmt: skip
ROWS = (1, 4, 16, 33, 64, 80, 100, 128, 160, 192, 256, 300, 384, 500, 640, 768, 1000, 1024, 1536, 2048, 4096)
LAYOUTS = ({}, {}, {"layout_b": "contiguous"}, {"layout": "transposed"})  # of 16-bit products
BEST, OTHERS = 5, 8  # configs of a shape: the best by the model, and random ones that it takes for up to twice as slow


# Where the fit begins.
FIRST = hopper_costs.Costs(
    launch=2400, line=0.5, shared_line=1.2, read=0.6, mma=1.3, step=1, stage=5, tile=800, store=25, memory=4200,
    reduce=100, exchange=190, multicast=10, warpgroup=0.02,
)  # fmt: skip


def shapes(kind: str, seed: int) -> list[dict]:
    """All sizes in random order, those of 64 to 1024 rows three times as likely to come early."""
    rng = random.Random(seed)
    both = [(m, n, k) for m, (n, k) in itertools.product(ROWS, SIZES) if m * n * k < 2**39]
    both.sort(key=lambda s: rng.random() ** (1 / 3 if 64 < s[0] <= 1024 else 1), reverse=True)
    dtype = {"16-bit": "bf16", "fp8": "e4m3"}[kind]
    more = [rng.choice(LAYOUTS) if kind == "16-bit" else {} for _ in both]
    return [dict(m=m, n=n, k=k, dtype=dtype, **layout) for (m, n, k), layout in zip(both, more)]


def chosen(kind: str, params: dict, seed: int) -> list:
    """The configs to time for a shape."""
    import tilery.ops  # noqa: F401  fills the registry
    from tilery.core.op import REGISTRY

    op, kernel = KINDS[kind]
    call = call_for(REGISTRY[op], case(**params))
    problem = REGISTRY[op].kernel(kernel).problem(call)
    ranked = problem.ranked()
    limit = 2 * problem.expected_us(ranked[0])
    rest = [c for c in ranked[BEST:] if problem.expected_us(c) < limit]
    random.Random(f"{seed} {params}").shuffle(rest)
    return ranked[:BEST] + rest[:OTHERS]


def built(job: tuple) -> str | None:
    """Compile a config into the cache; why it does not build."""
    import tilery.ops  # noqa: F401
    from tilery.core import policy
    from tilery.core.op import REGISTRY

    kind, params, config = job
    op, kernel = KINDS[kind]
    with pretend("h200"):
        try:
            policy.compiled(REGISTRY[op], kernel, call_for(REGISTRY[op], case(**params)), config, "sm_90")
        except Exception as error:
            return f"{config}: {error}"
    return None


def measure(args: argparse.Namespace) -> None:
    start = time.monotonic()
    with pretend("h200"):
        todo = [(params, chosen(args.kind, params, args.seed)) for params in shapes(args.kind, args.seed)]
    pool = ProcessPoolExecutor(args.jobs, get_context("spawn"))
    jobs = [[pool.submit(built, (args.kind, params, config)) for config in configs] for params, configs in todo]
    fields = ["op", "m", "n", "k", "layout", "layout_b", "config", "us", "torch_us", "wrong"]
    with open(args.csv, "w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, fields)
        out.writeheader()
        for (params, configs), waiting in zip(todo, jobs):
            if time.monotonic() - start > args.seconds:
                break
            for why in (job.result() for job in waiting):
                if why:
                    print(why[:300], flush=True)
            rows = timed(args.kind, params, configs)
            for row in rows:
                out.writerow({"op": KINDS[args.kind][0], **{f: params.get(f, "") for f in fields[1:6]}} | row)
            file.flush()
            best = min(rows, key=lambda r: r["us"])
            print(f"{params} torch {rows[0]['torch_us']:.1f} first {rows[0]['us']:.1f} best {best['us']:.1f} "
                  f"{rows[0]['torch_us'] / best['us']:.2f} {best['config']}", flush=True)  # fmt: skip
    pool.shutdown(wait=False, cancel_futures=True)


def timed(kind: str, params: dict, configs: list) -> list[dict]:
    import torch

    import tilery.ops  # noqa: F401
    from tilery.core.op import REGISTRY
    from tilery.hardware import device
    from tilery.measure import timing
    from tilery.workbench import bench

    op, kernel = KINDS[kind]
    op, where = REGISTRY[op], device.default()
    sets = bench.input_sets(op, lambda seed: bench.drawn(op, case(**params), where, seed), where)
    base = op.baselines[bench.BASE]
    right = base(*sets[0]).float()
    arms, wrong = {bench.BASE: bench.rotating(base, sets)}, {}
    for i, config in enumerate(configs):
        plan = op.plan(op.specs(sets[0]), kernel, config)
        off = (plan(sets[0]).float() - right).norm() / right.norm()
        wrong[i] = not float(off) < (0.02 if kind == "16-bit" else 0.06)
        arms[str(i)] = bench.rotating(lambda *a, plan=plan: plan(a), sets)
    at = [""]
    try:
        depth = timing.Depth(6, 1.0, 0.02)
        found = timing.time_arms(arms, len(sets), where, depth, None, False, True, lambda arm, _: at.append(arm))
    except RuntimeError:
        print(f"failed at {params} {configs[int(at[-1])] if at[-1].isdigit() else at[-1]}", flush=True)
        raise
    torch_us = found[bench.BASE].median * 1e3
    del arms, sets, right
    torch.cuda.empty_cache()
    return [
        {"config": json.dumps(dataclasses.asdict(c)), "us": round(found[str(i)].median * 1e3, 3),
         "torch_us": round(torch_us, 3), "wrong": wrong[i]}
        for i, c in enumerate(configs)
    ]  # fmt: skip


def fit(args: argparse.Namespace) -> None:
    rows = []
    for path in args.csv:
        with open(path, encoding="utf-8") as file:
            rows += [row for row in csv.DictReader(file) if row.get("wrong") != "True"]
    fitted = json.loads(hopper_costs.FITTED.read_text(encoding="utf-8"))
    for kind, (op, _) in KINDS.items():
        if args.kind not in (None, kind) or not (of_kind := [row for row in rows if row["op"] == op]):
            continue
        costs = least_squares(kind, of_kind, FIRST)
        fitted["costs"][kind] = {name: float(f"{getattr(costs, name):.4g}") for name in hopper_costs.names()}
        print(kind, fitted["costs"][kind])
        say_how_far(kind, of_kind, costs)
    words = [*map(str, args.csv), *(["--kind", args.kind] if args.kind else [])]
    fitted["made_by"] = "python benchmarks/fit_products.py fit " + " ".join(words)
    hopper_costs.FITTED.write_text(json.dumps(fitted, indent=1) + "\n", encoding="utf-8")


def cases_of(kind: str, rows: list[dict]) -> list[tuple]:
    """(problem, config, µs) of each row."""
    import tilery.ops  # noqa: F401
    from tilery.core import tuned
    from tilery.core.op import REGISTRY

    op, name = KINDS[kind]
    kernel, found = REGISTRY[op].kernel(name), []
    with pretend("h200"):
        for row in rows:
            params = {f: int(row[f]) for f in "mnk"} | {f: row[f] for f in ("layout", "layout_b") if row[f]}
            params["dtype"] = {"16-bit": "bf16", "fp8": "e4m3"}[kind]
            problem = kernel.problem(call_for(REGISTRY[op], case(**params)))
            found.append(
                (
                    problem,
                    kernel.Config(**tuned.present_fields(kernel.Config, json.loads(row["config"]))),
                    float(row["us"]),
                )
            )
    return found


def least_squares(kind: str, rows: list[dict], first: hopper_costs.Costs) -> hopper_costs.Costs:
    """Coordinate descent on the logarithms of the coefficients; fast configs of a shape count most."""
    cases = cases_of(kind, rows)
    best = {}
    for problem, _, us in cases:
        key = problem.m, problem.n, problem.k_blocks
        best[key] = min(best.get(key, us), us)
    weights = [(best[p.m, p.n, p.k_blocks] / us) ** 2 for p, _, us in cases]

    def loss(costs: hopper_costs.Costs) -> float:
        off = (math.log(dataclasses.replace(p, costs=costs).expected_us(c) / us) for p, c, us in cases)
        return sum(w * min(abs(o), 0.5) ** 1.5 for w, o in zip(weights, off)) / sum(weights)

    costs, least, factor = first, loss(first), 1.5
    while factor > 1.01:
        before = least
        for name in hopper_costs.names():
            for scale in (factor, 1 / factor):
                value = getattr(costs, name) * scale
                tried = dataclasses.replace(costs, **{name: value})
                if (now := loss(tried)) < least:
                    costs, least = tried, now
        if before - least < 1e-4 * before:
            factor **= 0.6
    return costs


def say_how_far(kind: str, rows: list[dict], costs: hopper_costs.Costs) -> None:
    """How far expected times are off, and how much slower the model's choice is than the best that was timed."""
    by_shape: dict[tuple, list] = {}
    off = []
    for (problem, config, us), row in zip(cases_of(kind, rows), rows):
        expected = dataclasses.replace(problem, costs=costs).expected_us(config)
        off.append(math.log(expected / us))
        key = row["m"], row["n"], row["k"], row["layout"], row["layout_b"]
        by_shape.setdefault(key, []).append((expected, us, float(row["torch_us"] or "nan")))
    lost = [min(found)[1] / min(us for _, us, _ in found) for found in by_shape.values()]
    ratio = [
        found[0][2] / min(found)[1] for found in by_shape.values() if found[0][2] > 0
    ]  # what a tuner kept has none
    mean = math.exp(statistics.fmean(map(math.log, lost)))
    print(f"{len(off)} times of {len(by_shape)} shapes: off by {statistics.pstdev(off):.1%} (one sigma), "
          f"choice {mean:.3f} × the best timed, {max(lost):.2f} at worst; "
          f"× torch {math.exp(statistics.fmean(map(math.log, ratio))):.3f}, least {min(ratio):.2f}")  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("measure")
    one.add_argument("csv", type=Path)
    one.add_argument("--kind", choices=KINDS, default="16-bit")
    one.add_argument("--seconds", type=float, default=90.0)
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--jobs", type=int, default=14)
    one.set_defaults(run=measure)
    other = verbs.add_parser("fit")
    other.add_argument("csv", type=Path, nargs="+")
    other.add_argument("--kind", choices=KINDS, help="the one to fit; both if not given")
    other.set_defaults(run=fit)
    return parser


def main() -> None:
    args = parser().parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
