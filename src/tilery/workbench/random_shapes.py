"""Random cases of any op, as models have them. Defaults are judged by them, so nothing is tuned on them.

The op's `model_sizes` gives the sizes of a random published model on one of 1, 2, 4 or 8 ranks. Rows, dtype and layouts
are drawn too; other parameters are those of a random case of the op's bench.

A seed gives the same cases on every machine: only `Random.random` is called, whose numbers are the same in every Python
version, and they are only compared, multiplied and cut to integers.
"""

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tilery.base.errors import BadInput, require
from tilery.base.spec import Case, TensorSpec
from tilery.core.cases import specs_for
from tilery.core.op import Op
from tilery.models.published import published

NAME = "random"
WRITTEN = f"{NAME}[:COUNT[:SEED]]"
NOT_TUNED = (
    f"--shapes {NAME} is what defaults are judged by, so nothing is tuned on it: "
    "a config that had seen these shapes would say nothing of others; name a set, a model or a case"
)
MOST_BYTES = 4 * 2**30  # of a case's inputs and outputs
_MOST_SCORES = 2**31  # of heads that share a key: attention's reference holds them in float64, several times
_COUNT = 20
_SEEDS = 10**6  # fresh ones are short enough to type
_RANKS = (1, 2, 4, 8)
_ROWS = 13  # rows are 1 to 2**13
_CONTEXTS = (4, 15)  # and contexts 2**4 to 2**15 - 1
_WIDE = 512  # smaller sizes are of heads, or numbers of them, or of experts
_UNEVEN, _PADDED, _FP32 = 0.1, 0.1, 0.15  # how often
_FP8 = ("e4m3", "e5m2")
_LAYOUTS = ("contiguous", "transposed", "padded")
_CONTEXT = ("keys", "context")  # parameters that say how many keys are in a cache
_NOT_THE_MODELS = ("parts", *_CONTEXT)  # what model_sizes names, for want of a better, though no model decides it
_TRIES = 2000

T = TypeVar("T")


@dataclass(frozen=True)
class RandomSet:
    count: int
    seed: int

    def __str__(self) -> str:
        return f"{NAME}:{self.count}:{self.seed}"


def asked(names: str) -> bool:
    """Whether one of the sets, behind commas, is a random one."""
    return any(name.partition(":")[0] == NAME for name in names.split(","))


def parsed(name: str) -> RandomSet:
    """random, random:100 or random:100:12345; without a seed it is a fresh one."""
    parts = name.split(":")[1:]
    good = len(parts) <= 2 and all(part.isdecimal() and part.isascii() for part in parts)
    require(good, f"--shapes {WRITTEN} takes whole numbers, got {name!r}")
    count = int(parts[0]) if parts else _COUNT
    require(count >= 1, f"--shapes {WRITTEN} takes a count from 1 on, got {name!r}")
    return RandomSet(count, int(parts[1]) if len(parts) == 2 else random.SystemRandom().randrange(_SEEDS))


def cases(op: Op, chosen: RandomSet) -> list[Case]:
    """So many different cases. A longer set with the same seed begins with the cases of a shorter one."""
    draw, found = _Draw(op, chosen.seed), dict[str, Case]()
    while len(found) < chosen.count:
        case = draw.case()
        found.setdefault(str(case), case)
    return list(found.values())


class _Draw:
    """Draws cases of one op, one after another."""

    def __init__(self, op: Op, seed: int) -> None:
        self._op, self._random = op, random.Random(seed)
        self._parameters = inspect.signature(op.inputs).parameters
        self._layouts = {name: _layouts(op, name) for name in self._parameters if name.startswith("layout")}
        self._in_models = any(op.model_sizes(model) for model in published())

    def case(self) -> Case:
        """Rows are drawn once, the rest until the op takes it and it fits: what fits does not decide on rows."""
        m = self._rows()
        for _ in range(_TRIES):
            params = self._params(m)
            if params is not None and _scores(params) <= _MOST_SCORES and _fits(self._op, params):
                return Case(params)
        raise AssertionError(f"{self._op.name}: no random case of {m} rows in {_TRIES} tries")

    def _params(self, m: int) -> dict[str, Any] | None:
        """Parameters of a case that the op may refuse; None where the model is not shared so or is without the op."""
        like, sizes = self._one_of(self._op.cases["bench"]).params, self._sizes()
        if sizes is None:
            return None
        dtype = like.get("dtype", self._parameters["dtype"].default)
        params = {"m": m, **sizes, "dtype": self._dtype(dtype, sizes)}
        params |= {name: value for name, value in like.items() if name not in params}
        params |= {name: self._context(m) for name in _CONTEXT if name in params}
        for name, taken in self._layouts.items():
            params[name] = self._layout(taken)
            if params[name] == self._parameters[name].default:
                del params[name]
        return params if params["dtype"] != params.get("to") else None  # a cast to what it is

    def _sizes(self) -> dict[str, int] | None:
        """Sizes of a random model, a tenth of them replaced; for an op that no model has, rows of the hidden size."""
        model = replace(self._one_of(published()), tp=self._one_of(_RANKS))
        try:
            model.linears()
            given = self._op.model_sizes(model) if self._in_models else [{"n": model.hidden_size}]
        except BadInput:  # so many ranks cannot share it
            return None
        if not given:
            return None
        sizes = {name: size for name, size in self._one_of(given).items() if name not in _NOT_THE_MODELS}
        return {name: self._uneven(size) if size >= _WIDE else size for name, size in sizes.items()}

    def _uneven(self, size: int) -> int:
        """The size; or, a tenth of the time, one that is odd or an odd multiple of 1000."""
        if not self._chance(_UNEVEN):
            return size
        return self._number(9, 14) | 1 if self._chance(0.5) else 1000 * (self._number(0, 4) | 1)

    def _rows(self) -> int:
        """Half of them powers of 2, as batches and chunks often are."""
        return 2 ** int(self._random.random() * (_ROWS + 1)) if self._chance(0.5) else self._number(0, _ROWS)

    def _context(self, m: int) -> int:
        """Keys in a cache: of each of m sequences, or of the one that m tokens are the last of."""
        keys = self._number(*_CONTEXTS)
        return keys if "queries" in self._parameters else max(keys, m)

    def _dtype(self, like: str, sizes: dict[str, int]) -> str:
        """bf16 or fp16; fp32 at times for ops on rows, half the time where the bench has it; fp8 where it has that."""
        if like in _FP8 or like == "int32":
            return like
        fp32 = 0.5 if like == "fp32" else 0.0 if {"k", "heads"} & sizes.keys() else _FP32
        return "fp32" if self._chance(fp32) else self._one_of(("bf16", "fp16"))

    def _layout(self, taken: Sequence[str]) -> str:
        """Rows and columns alike where the op takes both; padded at times."""
        if "padded" in taken and self._chance(_PADDED):
            return "padded"
        return self._one_of([layout for layout in taken if layout != "padded"])

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _one_of(self, items: Sequence[T]) -> T:
        return items[int(self._random.random() * len(items))]

    def _number(self, low: int, high: int) -> int:
        """From 2**low up to 2**high, each octave as likely: without a logarithm, which machines round differently."""
        octave = low + int(self._random.random() * (high - low))
        return int((1 + self._random.random()) * 2**octave)


def _layouts(op: Op, name: str) -> list[str]:
    """Layouts that the op takes for this parameter; of several rows, since a single one lies alike in all of them."""
    like = op.cases["bench"][0].params | {"m": 3}
    return [layout for layout in _LAYOUTS if _specs(op, like | {name: layout}) is not None]


def _specs(op: Op, params: dict[str, Any]) -> tuple[Any, ...] | None:
    """Specs of the case's inputs and outputs; None where the op does not take it."""
    try:
        specs = specs_for(op, Case(params))
        return *specs, *op.output_specs(op.call(specs))
    except BadInput:
        return None


def _fits(op: Op, params: dict[str, Any]) -> bool:
    specs = _specs(op, params)
    return specs is not None and sum(s.nbytes for s in specs if isinstance(s, TensorSpec)) <= MOST_BYTES


def _scores(params: dict[str, Any]) -> int:
    if "kv_heads" not in params:
        return 0
    return params["heads"] // params["kv_heads"] * params["m"] * max(params.get("keys", 0), params["m"])
