"""Runs one call: in guarded memory, against its float64 reference, twice."""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuzz.call import Call, arguments, is_float
from fuzz.guards import Guarded
from fuzz.rounding import explained
from tilery.base.errors import BadInput, CompileFailed, NoBackend, NoBackward, Wrong
from tilery.base.spec import TensorSpec
from tilery.core import plan as plan_module
from tilery.core import policy
from tilery.core.op import REGISTRY, Op
from tilery.measure.check import check_call, reference
from tilery.measure.place import place

NOT_DRAWN, BAD_INPUT = "not drawn:", "bad input:"  # refusals by which a strategy is poor

_MOST_BYTES = 9 * 2**30  # of a call's arguments on a GPU: one matrix in fp32 with its rows far apart


class Outcome(NamedTuple):
    kind: str  # passed, refused or failed
    detail: str = ""


def run(call: Call) -> Outcome:
    """What the call does. It may end this process: a child runs it."""
    op = REGISTRY[call.op]
    where = place(op, call.kernel)
    if where.device is None:
        return Outcome("refused", where.reason)
    try:
        args = arguments(call, where.device)
    except Exception as error:  # the contract draws what it can; that is no call of a user
        return Outcome("refused", f"{NOT_DRAWN} {type(error).__name__}: {error}")
    if where.device.type == "cuda" and _held(args) > _MOST_BYTES:
        return Outcome("refused", f"{NOT_DRAWN} {_held(args) / 2**30:.0f} GiB, three times over")
    try:
        op.call(op.specs(args))  # which checks them
        return _gradients(op, args) if call.gradient else _run(op, call, args)
    except BadInput as error:
        return Outcome("refused", f"{BAD_INPUT} {error}")
    except (NoBackend, NoBackward) as error:
        return Outcome("refused", str(error))
    except Wrong as error:
        return Outcome("failed", str(error))
    except torch.OutOfMemoryError as error:  # several fuzzers may share the GPU
        return Outcome("refused", f"{NOT_DRAWN} {error}")
    except Exception as error:  # a kernel may raise anything: that is what is looked for
        if isinstance(error, CompileFailed) and "TRITON_PTXAS_PATH" in str(error):  # wrong code, which was noticed
            return Outcome("refused", str(error))
        return Outcome("failed", f"raised {type(error).__name__}: {error}")


def _held(args: tuple[Any, ...]) -> int:
    return sum(a.untyped_storage().nbytes() for a in args if isinstance(a, Tensor))


class _Attempt:
    """One launch of a call, in memory of its own; what is to be written holds the poison, or `fill`."""

    def __init__(self, op: Op, call: Call, args: tuple[Any, ...], fill: float | None = None) -> None:
        self.op, self.kernel, self.fill = op, call.kernel, fill
        self.guards = Guarded()
        self._made: list[Tensor] = []  # outputs, then workspace
        self.args = tuple(
            self.guards.copy(name, a, call.layouts.get(name, "same")) if isinstance(a, Tensor) else a
            for name, a in zip(op.names, args)
        )
        self.call = op.call(op.specs(self.args))

    def allocate(self, spec: TensorSpec) -> Tensor:
        self._made.append(self.guards.poisoned(spec))
        return self._made[-1] if self.fill is None else self._made[-1].fill_(self.fill)

    def launch(self, config: Any) -> None:
        plan = policy.decide(self.op, self.call, self.kernel, config)
        outs, workspace = (tuple(map(self.allocate, specs)) for specs in (plan.outs, plan.workspace))
        plan.launch(outs, self.args, workspace)
        if plan.device.type == "cuda":
            torch.cuda.synchronize()

    def check(self, config: Any, args: tuple[Any, ...]) -> None:
        """Launches and compares with the reference of `args`, which are as this one's were before."""
        right = reference(self.op, args)
        try:
            checked = check_call(self.op, self.kernel, self.args, "", config, right, self.allocate)
        except Wrong as error:
            why = str(error).partition(": ")[2]  # what stands before is in the call
            if not why.startswith("output") or not explained(self.op, args, self.written, right):
                raise Wrong(why) from None
            return
        if checked.refused is not None:
            raise NoBackend(checked.refused)

    @property
    def written(self) -> tuple[Tensor, ...]:
        count = len(self.op.output_specs(self.call))
        return (*self._made[:count], *(self.args[i] for i in self.op.mutated))


def _run(op: Op, call: Call, args: tuple[Any, ...]) -> Outcome:
    first, again = _Attempt(op, call, args), _Attempt(op, call, args, fill=77)
    if why := policy.refusal(op, call.kernel, first.call):
        return Outcome("refused", f"{call.kernel}: {why}")
    configs = op.kernel(call.kernel).configs(first.call) if call.config is not None else []
    config = configs[call.config % len(configs)] if configs else None
    specified = not _overlapping(op, args) and not _cancels(op, args)
    if specified:
        first.check(config, args)
    else:
        first.launch(config)
    _require_guards(first)
    again.launch(config)
    _require_guards(again)
    if not _overlapping(op, args) and any(_differ(a, b) for a, b in zip(first.written, again.written)):
        raise Wrong("the same call twice gives different bits")
    return Outcome("passed")


def _require_guards(attempt: _Attempt) -> None:
    if why := attempt.guards.broken():
        raise Wrong(why)


def _differ(a: Tensor, b: Tensor) -> bool:
    return not torch.equal(*(x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8) for x in (a, b)))


def _cancels(op: Op, args: tuple[Any, ...]) -> bool:
    """Whether nothing but rounding is left: a norm of one value is 1 whatever it is, a layer norm of two is ±1."""
    least = {"rms_norm_backward": 1, "add_rms_norm_backward": 1, "layer_norm_backward": 2}
    return op.name in least and args[0].shape[-1] <= least[op.name]


def _overlapping(op: Op, args: tuple[Any, ...]) -> bool:
    """Whether packed sequences overlap, by wrong cu_seqlens: which of two writers wins is not said."""
    named = dict(zip(op.names, args))
    for name, of in (("cu_seqlens_q", "q"), ("cu_seqlens_k", "k")):
        if named.get(name) is None or of not in named:
            continue
        total, reached = named[of].shape[0], 0
        ends = [0, *(min(max(end, 0), total) for end in named[name].tolist()[1:])]
        for start, end in itertools.pairwise(ends):
            if start < reached:
                return True
            reached = max(start, end)
        if ends[-1] < reached:
            return True
    return False


# Gradients


def _gradients(op: Op, args: tuple[Any, ...]) -> Outcome:
    """Through the kernels by autograd, beside those of the float64 reference."""
    found, expected = _graded(op, args, torch.float32), _graded(op.reference, args, torch.float64)
    for name, ours, theirs in zip(op.names, found, expected):
        if ours is None and theirs is not None:
            raise Wrong(f"the gradient of {name} is missing")
        if ours is None:
            continue
        theirs = torch.zeros_like(ours) if theirs is None else theirs  # of what no output depends on
        if not torch.equal(ours.isnan(), theirs.isnan()):
            raise Wrong(
                f"the gradient of {name} is NaN in {int(ours.isnan().sum())} places, not {int(theirs.isnan().sum())}"
            )
        ours, theirs = ours.nan_to_num(0.0, 0.0, 0.0), theirs.nan_to_num(0.0, 0.0, 0.0)
        off, most = (ours - theirs).norm().item(), 1e-5 * theirs.norm().item() + 1e-5 * theirs.numel() ** 0.5
        if not off <= most:
            raise Wrong(f"the gradient of {name} is off by {off:.2e}, allowed {most:.0e}")
    return Outcome("passed")


def _graded(call: Any, args: tuple[Any, ...], dtype: torch.dtype) -> list[Tensor | None]:
    given = [a.detach().to(dtype).requires_grad_() if is_float(a) else a for a in args]
    outs = [out for out in plan_module.packed(call(*given)) if out.requires_grad]
    g = torch.Generator().manual_seed(5)
    weights = [torch.randn(out.shape, generator=g).to(out.device, dtype) for out in outs]
    kept = [torch.where(out.isfinite(), out, 0.0) for out in outs]
    if outs:
        sum((out * weight).sum() for out, weight in zip(kept, weights)).backward()
    return [a.grad if isinstance(a, Tensor) else None for a in given]
