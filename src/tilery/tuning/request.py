"""What a user asks of the tuner, read and checked before anything runs."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tilery import languages
from tilery.base.errors import BadInput, require
from tilery.base.spec import Case
from tilery.core.op import REGISTRY, Op
from tilery.hardware import device
from tilery.measure.place import chosen_kernels, require_known
from tilery.tuning import search, sglang
from tilery.tuning.data import Problem
from tilery.tuning.pool import SILENCE_S, LocalPool, Pool
from tilery.tuning.tuner import Request

Work = tuple[Op, Sequence[Case] | None, Sequence[float]]  # an op, its cases (None: its own), what each is worth
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
_BUDGET = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


def seconds(budget: str | float) -> float:
    """90, 90s, 10m, 1h30m."""
    wanted = f"budget must be a time above zero such as 90s, 10m or 1h30m, got {budget!r}"
    if isinstance(budget, bool) or not isinstance(budget, str | int | float):
        raise BadInput(wanted)
    match = _BUDGET.fullmatch(str(budget).strip())
    parts = match.groups() if match else ()
    total = sum(float(part) * unit for part, unit in zip(parts, _UNITS.values()) if part)
    require(total > 0, wanted)
    return total


def folder(given: str | Path) -> Path:
    path = Path(given).expanduser().absolute()
    require(not path.exists() or path.is_dir(), f"config_dir must be a folder, got the file {path}")
    return path


def device_for(op: Op, kernels: Sequence[str]) -> torch.device:
    """The GPU; the CPU where there is none, or where only its kernels were asked for."""
    where = device.default()
    if where.type == "cuda" and any(op.kernel(k).archs != ("cpu",) for k in kernels if languages.missing(k) is None):
        return where
    return torch.device("cpu")


def work(
    op: str | Op | Sequence[str | Op] | None,
    cases: Sequence[Case] | None,
    shapes: str | None,
    model: str | None,
    tp: int,
    rows: Sequence[int] | None = None,
) -> list[Work]:
    """Ops with their cases: those given, those of a set, those of a model, or an op's own."""
    import tilery.ops  # noqa: F401  fills the registry
    from tilery.workbench import random_shapes
    from tilery.workbench.shapes import cases as cases_of

    given = [op] if isinstance(op, str | Op) else list(op or ())
    ops = [_op(each) for each in given]
    sources = sum(source is not None for source in (cases, shapes, model))
    require(sources <= 1, "cases, shapes and model exclude each other, got more than one of them")
    if model is not None:
        return _of_model(model, tp, ops, rows)
    require(rows is None, "rows are those of a model's products, got them without a model")
    require(bool(ops), "an op or a model must be named, got neither")
    require(cases is None or len(ops) == 1, f"cases are those of one op, got {len(ops)} ops")
    if shapes is not None:
        require(not random_shapes.asked(shapes), random_shapes.NOT_TUNED)
        return [(each, cases_of(each, shapes), []) for each in ops]
    return [(each, cases, []) for each in ops]


def _op(op: str | Op) -> Op:
    if isinstance(op, Op):
        return op
    require(op in REGISTRY, f"op must be one of {', '.join(sorted(REGISTRY))}, got {op!r}")
    return REGISTRY[op]


def request(
    work: Sequence[Work],
    backend: Sequence[str] | None,
    budget: str | float,
    how: str = "halving",
    bits: str = "any",
    use: str | None = None,
) -> Request:
    """`use`: what the configs are for, if not for dispatch: sglang."""
    budget_s = seconds(budget)
    require(how in search.SEARCHES, f"search must be one of {', '.join(search.SEARCHES)}, got {how!r}")
    require(bits in search.BITS, f"bits must be one of {', '.join(search.BITS)}, got {bits!r}")
    problems: list[Problem] = []
    kernels: dict[str, tuple[str, ...]] = {}
    require_known([op for op, _, _ in work], backend)
    for op, cases, worth in work:
        kernels[op.name] = chosen_kernels(op, backend)
        if not kernels[op.name]:
            continue
        where = device_for(op, kernels[op.name])
        own = op.cases["bench" if where.type == "cuda" else "bench_cpu"]
        given = own if cases is None else cases
        weights = [*worth, *[1.0] * (len(given) - len(worth))]
        problems += [Problem(op.name, str(where), case, weight=w) for case, w in zip(given, weights)]
    require(bool(problems), "there must be a case to tune, got none: name one with --case or --shapes")
    if use is not None:
        require(use == sglang.USE, f"use must be {sglang.USE}, for SGLang's files and vLLM's, got {use!r}")
        problems = _for_sglang(problems, kernels)
    ordered = sorted(problems, key=lambda problem: -problem.weight)
    return Request(tuple(ordered), kernels, budget_s, how, bits)


def _for_sglang(problems: Sequence[Problem], kernels: dict[str, tuple[str, ...]]) -> list[Problem]:
    """A problem for each of SGLang's kernels, its scales as that kernel is given them; the most valuable file first."""
    require(
        {p.op for p in problems} == {sglang.OP}, f"for {sglang.USE} only {sglang.OP} is tuned, got {', '.join(kernels)}"
    )
    asked = [kernel for kernel in sglang.SCALES if kernel in kernels[sglang.OP]]
    require(
        bool(asked), f"{sglang.USE} has kernels in {' and '.join(sglang.SCALES)}, got {', '.join(kernels[sglang.OP])}"
    )
    found: dict[tuple[int, int], list[Problem]] = {}
    for problem in problems:
        assert problem.case is not None, "what is asked for by name has a case"
        params = problem.case.params
        strange = {name: value for name, value in params.items() if sglang.CASE.get(name, value) != value}
        require(not strange, f"{sglang.USE} multiplies e4m3 by e4m3 to bf16, got {problem.case}")
        found.setdefault((params["n"], params["k"]), []).append(problem)
    made = []
    for group in found.values():
        worth = sum(problem.weight for problem in group)
        for kernel in asked:
            for problem in sorted(group, key=lambda p: p.case.params["m"] if p.case else 0):
                case = Case((problem.case.params if problem.case else {}) | {"scales": sglang.SCALES[kernel]})
                made.append(replace(problem, case=case, weight=worth, kernels=(kernel,), use=sglang.USE))
    return made


def _of_model(model: str, tp: int, ops: Sequence[Op], rows: Sequence[int] | None) -> list[Work]:
    """The cases of a model's prefill and decode, each worth the time it takes at the roof."""
    from tilery.models.plan import cases, cases_of

    names = sorted({op.name for op in ops})
    require(rows is None or bool(names), "rows are those of products that are named, got no op")
    worths = [worth for name in names for worth in cases_of(name, model, tp, rows)] if names else cases(model, tp)
    found: dict[str, tuple[Op, list[Case], list[float]]] = {}
    for worth in worths:
        _, given, weights = found.setdefault(worth.op, (REGISTRY[worth.op], [], []))
        given.append(worth.case)
        weights.append(worth.ms)
    require(bool(found), f"{model} must have the ops that were asked for, got {', '.join(names)}")
    return list(found.values())


def pool_for(
    asked: Request, gpus: Sequence[int] | None = None, num_gpus: int | None = None, silence_s: float = SILENCE_S
) -> Pool:
    """`gpus`: those of this machine, by number. `num_gpus`: so many as Ray gives."""
    require(gpus is None or num_gpus is None, "gpus and num_gpus exclude each other, got both")
    on_gpu = {p.device for p in asked.problems} - {"cpu"}
    mixed = len({p.device for p in asked.problems}) > 1
    require(not mixed, "one tune is for one device, got kernels for the CPU and for the GPU; choose with --backend")
    if gpus is None and num_gpus in (None, 1):
        return LocalPool(sorted({p.device for p in asked.problems}), silence_s)
    require(bool(on_gpu), "gpus must be given for kernels that run on one, got kernels that run on the CPU here")
    if gpus is not None:
        there = torch.cuda.device_count()
        good = bool(gpus) and len(set(gpus)) == len(gpus) and all(0 <= i < there for i in gpus)
        require(good, f"gpus must be different numbers from 0 to {there - 1}, got {list(gpus)}")
        names = {device.name(torch.device("cuda", i)) for i in gpus}
        require(len(names) == 1, f"gpus must be of one kind, got {', '.join(sorted(names))}")
        return LocalPool([f"cuda:{i}" for i in gpus], silence_s)
    from tilery.tuning.ray_pool import RayPool

    return RayPool(num_gpus, silence_s=silence_s)
