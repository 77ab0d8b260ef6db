"""Which of an op's test cases compute-sanitizer is shown: few that cover what all of them have, small ones first."""

import functools
from collections.abc import Sequence

from tilery.base.spec import Case, TensorSpec
from tilery.core.cases import specs_for
from tilery.core.op import Op

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ALL = "all"
_GIB = 2**30
# Several children share the GPU, and initcheck keeps a shadow of all memory.
_MOST_BYTES = {"memcheck": 8 * _GIB, "racecheck": _GIB // 4, "initcheck": _GIB // 4, "synccheck": _GIB // 4}
_SIZES = ("m", "n", "k")
_VALUES = ("special", "special_scale", "special_c", "strength")  # of the data: no address depends on them


def chosen_cases(op: Op, kernel: str, tool: str, asked: int | str | None) -> list[Case]:
    """Those the kernel takes and something is launched for, smallest first; racecheck is given one per dtype."""
    taken = [(size, case) for size, case in _sized(op) if size and kernel not in case.refused_by]
    if asked == ALL:
        return [case for _, case in taken]
    small = [case for size, case in taken if size <= _MOST_BYTES[tool]]
    if tool == "racecheck" and asked is None:  # 10 to 100 times slower than a plain run
        return list({case.params.get("dtype"): case for case in reversed(small)}.values())[::-1]
    return covering(small)[: asked if isinstance(asked, int) else None]


def covering(cases: Sequence[Case]) -> list[Case]:
    """Few cases with every dtype, layout, switch and kind of size that any of them has; of equals the first."""
    left = set().union(*map(_traits, cases))
    chosen: list[Case] = []
    while left:
        best = max(cases, key=lambda case: len(_traits(case) & left))
        chosen.append(best)
        left -= _traits(best)
    return chosen


def _traits(case: Case) -> set[str]:
    found = set()
    for name, value in case.params.items():
        if name in _VALUES:
            continue
        if isinstance(value, str):
            found.add(f"{name} listed" if value[:1].isdigit() else f"{name}={value}")  # lengths: "3+17+0"
        elif isinstance(value, bool):
            found.add(f"{name}={value}")
        elif isinstance(value, int) and name in _SIZES:
            found.add(f"{name} {'is one' if value == 1 else 'has a tail' if value % 16 else 'is even'}")
        else:
            found.add(name)  # a number that is not the op's default
    return found


@functools.cache
def _sized(op: Op) -> list[tuple[int, Case]]:
    """Each test case with the bytes that it spans, in their order."""
    return sorted(((_bytes(op, case), case) for case in op.cases["test"]), key=lambda pair: pair[0])


def _bytes(op: Op, case: Case) -> int:
    """Memory that the inputs span; 0 if an output is empty: there may be nothing to launch."""
    specs = specs_for(op, case)
    if any(0 in out.shape for out in op.output_specs(op.call(specs))):
        return 0
    tensors = [s for s in specs if isinstance(s, TensorSpec) and 0 not in s.shape]
    return sum(s.dtype.itemsize * (1 + sum((n - 1) * d for n, d in zip(s.shape, s.strides))) for s in tensors)
