"""What a model's passes would take if every op ran at the roof, and which cases are worth tuning first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilery import models
from tilery.base.errors import require
from tilery.base.spec import Case, Cost
from tilery.models import roofs
from tilery.models.model import FP8, WEIGHTS, Model
from tilery.models.steps import DECODE, PREFILL, PRODUCT_ROWS, PRODUCTS, Pass, Step, steps

BATCHES = (1, 16, 64)
PROMPT = 512
CONTEXT = 4096


@dataclass(frozen=True)
class PassPlan:
    """A pass, its steps in the model's order, and the time of one call of each at the roof."""

    forward: Pass
    steps: list[Step]
    each_ms: list[float]

    @property
    def step_ms(self) -> list[float]:
        """All calls of a step together."""
        return [step.count * ms for step, ms in zip(self.steps, self.each_ms)]

    @property
    def ms(self) -> float:
        return sum(self.step_ms)

    @property
    def shares(self) -> list[float]:
        return [ms / self.ms for ms in self.step_ms]

    @property
    def cost(self) -> Cost:
        flops, reads, writes = (sum(step.count * step.cost[i] for step in self.steps) for i in range(3))
        return Cost(flops, reads, writes)

    @property
    def tokens_per_s(self) -> float:
        """Read in a prefill, written in a decode."""
        return 1e3 * self.forward.tokens / self.ms

    def document(self) -> dict[str, Any]:
        """Plain data: what --json prints."""
        listed = [
            {
                "step": step.name, "op": step.op, "case": str(step.case), "exists": step.exists, "count": step.count,
                **step.cost._asdict(), "ms": ms, "share": share,
            }
            for step, ms, share in zip(self.steps, self.each_ms, self.shares)
        ]  # fmt: skip
        total = self.cost._asdict() | {"ms": self.ms, "tokens_per_s": self.tokens_per_s}
        said = {"phase": self.forward.phase, "batch": self.forward.batch, "length": self.forward.length}
        return {**said, "steps": listed, "total": total}


def plan(model: Model, forward: Pass, roof: roofs.Roof) -> PassPlan:
    found = steps(model, forward)
    return PassPlan(forward, found, [roof.ceilings.roof_ms(step.cost, step.case.params["dtype"]) for step in found])


def plans(
    model: Model, roof: roofs.Roof, batches: Iterable[int] = BATCHES, prompt: int = PROMPT, context: int = CONTEXT
) -> list[PassPlan]:
    """A prefill and a decode for each number of sequences."""
    phases = ((PREFILL, prompt), (DECODE, context))
    return [plan(model, Pass(phase, batch, length), roof) for batch in batches for phase, length in phases]


class Worth(NamedTuple):
    """A case of an op, and how long it takes at the roof in all passes that were asked for."""

    op: str
    case: Case
    ms: float


def cases(
    model: str, tp: int = 1, batches: Iterable[int] = BATCHES, prompt: int = PROMPT, context: int = CONTEXT,
    device: str | None = None, weights: str | None = None,
) -> list[Worth]:  # fmt: skip
    """Cases of ops that exist, each once, the most valuable first: what a tuner should turn to."""
    return _worths(plans(models.load(model, tp, weights), roofs.find(device), batches, prompt, context))


def cases_of(op: str, model: str, tp: int = 1, rows: Sequence[int] | None = None) -> list[Worth]:
    """Cases of one op: in the model's own weights, or in those where the model has the op.

    An fp8 product is taken at all numbers of rows that one is tuned for; at `rows`, if given, as is one in bf16.
    """
    if op == PRODUCTS[FP8] or rows is not None:
        return _at_rows(op, model, tp, rows or PRODUCT_ROWS)
    for weights in (None, *WEIGHTS):
        if found := [worth for worth in cases(model, tp, weights=weights) if worth.op == op]:
            return found
    return []


def _at_rows(op: str, model: str, tp: int, rows: Sequence[int]) -> list[Worth]:
    """A layer may be in a prefill alone (kv_b), or there at one row (lm_head): so decode is asked too."""
    weights = next((weights for weights, product in PRODUCTS.items() if product == op), None)
    require(weights is not None, f"rows are those of {' and '.join(PRODUCTS.values())}, got them for {op}")
    chosen, roof = models.load(model, tp, weights), roofs.find()
    passes = [each for m in rows for each in (Pass(PREFILL, 1, m), Pass(DECODE, m, 1))]
    found = _worths(plan(chosen, each, roof) for each in passes)
    return [worth for worth in found if worth.op == op and worth.case.params["m"] in rows]


def _worths(made: Iterable[PassPlan]) -> list[Worth]:
    found: dict[tuple[str, str], Worth] = {}
    for each in made:
        for step, ms in zip(each.steps, each.step_ms):
            if step.exists:
                key = step.op, str(step.case)
                found[key] = Worth(step.op, step.case, ms + (found[key].ms if key in found else 0.0))
    return sorted(found.values(), key=lambda worth: -worth.ms)
