"""Which kernels and configs are worth measuring for a problem: always the same, in the same order."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tilery.base.spec import TensorSpec, Work, dtype_name
from tilery.core import policy, tuned
from tilery.core.call import Call
from tilery.core.cases import specs_for
from tilery.core.op import REGISTRY, Op
from tilery.hardware import device
from tilery.measure import ceilings
from tilery.tuning import sglang
from tilery.tuning.data import Candidate, Measured, Problem

_HOPELESS = 2.0  # times the best modelled time
# What an SM reads above its share of the memory's rate: L2 holds what blocks share, and a few blocks have the
# memory to themselves. Chosen to fit a Triton matmul of 4096³ on an H200: tiles of 128 × 128 took 201 µs, modelled
# are 209; those of 128 × 256 took 263, modelled are 180. That is how far the model can be trusted.
_ABOVE_SHARE = 2.5


@dataclass(frozen=True)
class Machine:
    """What the cost model knows of a device."""

    units: int  # SMs, or the cores of a CPU
    flops: float  # FLOP/s of all of them
    bandwidth: float  # bytes/s
    least_ms: float  # of this problem, whatever the kernel


def collect(
    problem: Problem, kernels: Sequence[str], imported: Iterable[Candidate] = ()
) -> tuple[list[Candidate], list[Measured]]:
    """What to measure, and what is left out: "refused" or "pruned", with the reason.

    In the op's order of kernels; of each its default, its configs, then those imported. Imported ones have an origin
    and won elsewhere: the model has no say over them.
    """
    op, imported = REGISTRY[problem.op], list(imported)
    call = op.call(specs_of(problem))
    chosen: list[Candidate] = []
    left_out: list[Measured] = []
    asked = [kernel for kernel in op.kernels if kernel in kernels]
    for kernel in asked:
        brought = [candidate for candidate in imported if candidate.kernel == kernel]
        if why := _kernel_refusal(op, kernel, call):
            left_out += [Measured(candidate, "refused", why) for candidate in (Candidate(kernel, {}), *brought)]
            continue
        for candidate, why in _of_kernel(op, kernel, call, brought):
            if why is None and problem.use:
                why = sglang.refusal(candidate.kernel, candidate.config)
            if why is not None:
                left_out.append(Measured(candidate, "refused", why))
            else:
                chosen.append(candidate)
    for candidate in imported:
        if candidate.kernel not in asked:
            why = f"{candidate.kernel} is not among {op.name}'s kernels to tune: {', '.join(asked)}"
            left_out.append(Measured(candidate, "refused", why))
    kept, pruned = _without_hopeless(op, call, chosen)
    return kept, left_out + pruned


def specs_of(problem: Problem) -> tuple[Any, ...]:
    """What the op's functions see of the problem's arguments. Nothing is drawn, nothing put on the device."""
    op, where = REGISTRY[problem.op], torch.device(problem.device)
    if problem.case is not None:
        return specs_for(op, problem.case, problem.device)
    args = torch.load(str(problem.saved), map_location="cpu", mmap=True, weights_only=True)
    return tuple(s._replace(device=where) if isinstance(s, TensorSpec) else s for s in op.specs(args))


def dtype_of(specs: tuple[Any, ...]) -> str:
    """By which a peak is chosen: that of the first tensor of floats, or tf32 where that is asked for."""
    if "tf32" in specs:
        return "tf32"
    floats = (s.dtype for s in specs if isinstance(s, TensorSpec) and s.dtype.is_floating_point)
    return next(map(dtype_name, floats), "fp32")


def _kernel_refusal(op: Op, kernel: str, call: Call) -> str | None:
    where = op.device(call)
    if why := policy.environment_refusal(op, kernel, where, call):
        return why
    if where.type == "cpu" and "cpu" not in op.kernel(kernel).archs:
        return "is interpreted on a CPU, which tells nothing of its speed"
    return policy.problem_refusal(op, kernel, call)


def _of_kernel(op: Op, kernel: str, call: Call, brought: list[Candidate]) -> Iterator[tuple[Candidate, str | None]]:
    """Every candidate and why it is refused."""
    made, known = op.kernel(kernel), list[dict[str, Any]]()
    for config in (made.default(call), *made.configs(call)):
        if asdict(config) not in known:
            known.append(asdict(config))
            yield Candidate(kernel, known[-1]), policy.problem_refusal(op, kernel, call, config)
    for candidate in brought:
        try:
            config = made.Config(**tuned.present_fields(made.Config, candidate.config))
            why = policy.problem_refusal(op, kernel, call, config)
        except Exception as error:  # of another version or written by hand: it may break the kernel's code anywhere
            yield candidate, f"{kernel} takes no config {candidate.config}: {type(error).__name__}: {error}"
            continue
        if asdict(config) not in known:
            known.append(asdict(config))
            yield Candidate(kernel, known[-1], candidate.origin), why


# The cost model


def modelled_ms(work: Work, machine: Machine) -> float:
    """Waves of blocks, each as long as its arithmetic or its bytes take one SM; no less than the roof."""
    waves = -(-work.blocks // machine.units)
    arithmetic = work.flops * machine.units / machine.flops
    memory = work.bytes * machine.units / (machine.bandwidth * _ABOVE_SHARE)
    return max(1e3 * waves * max(arithmetic, memory), machine.least_ms)


def _without_hopeless(op: Op, call: Call, candidates: list[Candidate]) -> tuple[list[Candidate], list[Measured]]:
    """Without those modelled far slower than the best; a kernel's default and what cannot be modelled stay."""
    machine: Machine | None = None
    modelled: dict[int, float] = {}
    for i, candidate in enumerate(candidates):
        kernel = op.kernel(candidate.kernel)
        if (work := kernel.estimate(call, kernel.Config(**candidate.config))) is not None:
            machine = machine or _machine(op, call)
            modelled[i] = modelled_ms(work, machine)
    best = min(modelled.values(), default=0.0)
    kept: list[Candidate] = []
    pruned: list[Measured] = []
    for i, candidate in enumerate(candidates):
        default = all(candidate.kernel != before.kernel for before in candidates[:i])
        if default or candidate.origin or modelled.get(i, 0.0) <= _HOPELESS * best:
            kept.append(candidate)
        else:
            why = f"modelled at {modelled[i]:.4g} ms, more than {_HOPELESS:g} times the best's {best:.4g} ms"
            pruned.append(Measured(candidate, "pruned", why))
    return kept, pruned


def _machine(op: Op, call: Call) -> Machine:
    where, cost = op.device(call), op.cost(call)
    roof, dtype = ceilings.ceilings(where), dtype_of(op.specs_in(call))
    cuda = where.type == "cuda"
    units = device.gpu(where).sms if cuda else device.cores()
    return Machine(units, roof.peak(dtype), roof.read, roof.roof_ms(cost, dtype))
