"""Makes a call that fails smaller while it still fails.

Not Hypothesis: a call is plain data, drawn by the op's contract and run in a process that may die, so all there is to
do is to try simpler values one after another.
"""

import dataclasses
from collections.abc import Callable, Iterator

from fuzz import families
from fuzz.call import Call
from tilery.core.op import REGISTRY


def shrunk(call: Call, fails: Callable[[Call], bool], most: int) -> Call:
    """The smallest that was found in so many tries at most."""
    tries, smaller = 0, True
    while smaller:
        smaller = False
        for simpler in _simpler(call):
            tries += 1
            if tries > most:
                return call
            if fails(simpler):
                call, smaller = simpler, True
                break
    return call


def _simpler(call: Call) -> Iterator[Call]:
    """Without one of its mutations, with a parameter left to its default, with a size nearer to 1."""
    for part in ("config", "layouts", "plants", "indices", "scalars"):
        value = getattr(call, part)
        if value is not None and value not in ({}, []):
            yield dataclasses.replace(call, **{part: None if part == "config" else type(value)()})
    for part in ("plants", "indices"):
        held = getattr(call, part)
        for i in range(len(held)) if len(held) > 1 else ():
            yield dataclasses.replace(call, **{part: held[:i] + held[i + 1 :]})
    for part in ("layouts", "scalars"):
        held = getattr(call, part)
        for name in held if len(held) > 1 else ():
            yield dataclasses.replace(call, **{part: {k: v for k, v in held.items() if k != name}})
    needed = {name for case in REGISTRY[call.op].cases["test"][:1] for name in case.params}
    for name in call.params:
        if name not in needed and name not in ("chunks", "lengths", "key_lengths", "sizes", "order"):
            yield _with(call, {k: v for k, v in call.params.items() if k != name})
    for name, size in call.params.items():
        if type(size) is int and size > 1 and (call.op, name) not in families.FIXED:
            for less in sorted({1, size // 2, size - 1}):
                yield _with(call, call.params | {name: less})


def _with(call: Call, params: dict) -> Call:
    return dataclasses.replace(call, params=params)
