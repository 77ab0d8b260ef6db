"""Sets of cases by name: a model's shapes at the numbers of tokens that matter, a sweep of rows, random ones."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from tilery import models
from tilery.base.errors import BadInput
from tilery.base.spec import Case
from tilery.core.op import Op
from tilery.models.steps import PRODUCT_ROWS
from tilery.workbench import random_shapes


@dataclass(frozen=True)
class ShapeSet:
    model: str
    tokens: tuple[int, ...]
    tp: int = 1
    most: int | None = None  # of an op's cases per number of tokens


_FEW_TO_MANY = (1, 16, 64, 512, 4096)
SETS = {
    "llama-8b": ShapeSet("llama-8b", _FEW_TO_MANY),
    "llama-70b-tp8": ShapeSet("llama-70b", _FEW_TO_MANY, tp=8),
    "qwen3-8b": ShapeSet("qwen3-8b", _FEW_TO_MANY),
    "deepseek-v3": ShapeSet("deepseek-v3", _FEW_TO_MANY),
    "odd": ShapeSet("llama-8b", (17, 100, 4097), most=2),
    "quick": ShapeSet("llama-8b", (16, 4096), most=2),
}


SWEEP = "sweep"  # rows of every length by numbers of rows, otherwise as the op's first case of a bench
_SWEPT_ROWS = (1, 16, 512, 8192, 32768)
_SWEPT_LENGTHS = (1024, 4096, 8192, 16384, 65536, 131072)
_MOST_ELEMENTS = 2**28  # larger problems are no different, and take the memory of all their input sets


def settled(names: str | None) -> str | None:
    """The names with all that decides their cases: a random set has a seed from here on."""
    if names is None:
        return None
    return ",".join(str(random_shapes.parsed(name)) if random_shapes.asked(name) else name for name in names.split(","))


def cases(op: Op, names: str) -> list[Case]:
    """The op's cases for a set, fewest tokens first, or for several, behind commas; random ones as they were drawn."""
    return list({str(case): case for name in names.split(",") for case in _cases(op, name)}.values())


def _cases(op: Op, name: str) -> list[Case]:
    if random_shapes.asked(name):
        return random_shapes.cases(op, random_shapes.parsed(name))
    if name == SWEEP:
        return _swept(op)
    if name not in SETS:
        known = ", ".join((*SETS, SWEEP, random_shapes.WRITTEN))
        raise BadInput(f"--shapes must be one of {known}, got {name!r}")
    chosen = SETS[name]
    sizes = op.model_sizes(models.load(chosen.model, chosen.tp))
    distinct = [dict(pairs) for pairs in dict.fromkeys(tuple(size.items()) for size in sizes)]
    dtype = inspect.signature(op.inputs).parameters["dtype"].default  # bf16, or fp8 where that is the op's business
    return [Case({"m": m, **size, "dtype": dtype}) for m in chosen.tokens for size in distinct[: chosen.most]]


def products(op: Op, n: int, k: int, rows: Sequence[int] = PRODUCT_ROWS) -> list[Case]:
    """[m, k] times [k, n] for every m of rows."""
    require_product(op, "--N and --K are")
    dtype = inspect.signature(op.inputs).parameters["dtype"].default
    return [Case({"m": m, "n": n, "k": k, "dtype": dtype}) for m in rows]


def require_product(op: Op, what: str) -> None:
    parameters = inspect.signature(op.inputs).parameters
    needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if needed != ["m", "n", "k"]:
        raise BadInput(f"{what} for ops whose cases are m, n and k, {op.name} needs {', '.join(needed)}")


def _swept(op: Op) -> list[Case]:
    first = op.cases["bench"][0].params
    if "heads" in first:  # their size and number are the model's: tokens alone vary
        return [Case(first | {"m": m}) for m in _SWEPT_ROWS]
    needed = {n for n, p in inspect.signature(op.inputs).parameters.items() if p.default is inspect.Parameter.empty}
    if not {"m", "n"} <= needed | set(first) or not needed <= {"m", "n", "how"}:
        raise BadInput(f"--shapes {SWEEP} is for ops whose cases are rows m of length n, {op.name} needs {needed}")
    return [Case(first | {"m": m, "n": n}) for n in _SWEPT_LENGTHS for m in _SWEPT_ROWS if m * n <= _MOST_ELEMENTS]
