"""How a call is drawn: a test case of the op, some of its parameters changed, its arguments then spoilt a little."""

import dataclasses
import functools
import inspect
import random
from typing import Any

from fuzz import families
from fuzz.call import Call
from tilery.core.op import Op

SIZES = (0, 1, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129, 191, 256, 257)
_LONG = (*SIZES, 511, 512, 513, 1000, 1023, 1025, 2049, 4095, 4097, 8191)
_COUNTED = {"m": _LONG, "n": _LONG, "k": SIZES, "keys": SIZES, "context": SIZES, "v": SIZES[1:]}  # sizes by parameter
_FEW = {"batch": (0, 1, 2, 3, 5), "experts": (0, 1, 2, 3, 7), "parts": (0, 1, 2, 3, 5, 8, 17), "queries": (1, 2, 3, 16)}
_KINDS = ("dtype", "dtype_b", "to", "out", "format", "angles", "ids")  # of tensors
_WORK, _SMALL_WORK = 400_000, 10_000  # elements, or products of them; the smaller where a kernel is interpreted
_TOKENS = 300  # of a sequence that attends to itself, interpreted: the time is their square, and 8191 took 74 s
_SCALARS: dict[str, tuple[Any, ...]] = {
    "eps": (1e-8, 1e-6, 1e-5, 1e-3, 0.1),
    "offset": (0.0, 1.0, 0.5, -0.25),
    "label_smoothing": (0.0, 0.1, 0.5, 0.9, 1.0),
    "z_loss": (0.0, 1e-4, 1e-2, 1.0),
    "ignore_index": (-100, -1, 0, 2),
    "p": (0.0, 1e-3, 0.1, 0.5, 0.9, 1.0),
    "temperature": (0.0, -1.0, 0.05, 0.7, 1.0, 3.0, 100.0),
    "top_k": (0, 1, 2, 7, 50, 10**6),
    "top_p": (0.0, 1e-3, 0.3, 0.9, 0.999, 1.0),
    "min_p": (0.0, 1e-3, 0.1, 0.9, 1.0),
    "alpha": (0.0, 1.0, -1.0, 0.5, 3.0),
    "beta": (0.0, 1.0, -1.0, 0.5, 3.0),
    "scaling": (0.0, 1.0, 2.5, 16.0, -0.3),
    "limit": (0.0, 0.3, 1.0, 7.0),
    "up_offset": (0.0, 1.0, -0.3),
    "softcap": (0.0, 0.5, 5.0, 30.0),
    "window": (0, 1, 2, 7, 33, 10**6, 2**63 - 1),
    "max_seqlen_q": (1, 2, 30, 70, 300),  # sequences that are longer are NaN
    "max_seqlen_k": (1, 2, 30, 80, 300),
    "scale": (0.05, 0.125, 1.0, -0.3, 1e-50),
    "seed": (0, 1, 2**31, 2**32 - 1, 2**40 + 5, 2**63 - 1),
}
_SMOOTH = {"p": 1.0, "temperature": 2.0, "top_p": 1.0, "min_p": 1.0, "label_smoothing": 1.0}  # any value up to these


def draw(op: Op, kernel: str, seed: str, interpreted: bool = False, wide: bool = False) -> Call:
    """The call that this seed stands for. `interpreted`: small, and without bf16; `wide`: any combination of dtypes."""
    r = random.Random(f"{seed} {op.name} {kernel}")
    params = _params(op, r, interpreted, wide)
    made = Call(op.name, kernel, params, r.randrange(2**31), scalars=_scalars(op, params, r))
    if op.backward is not None and kernel == "numba" and r.random() < 0.15:
        return families.graded(made)
    return dataclasses.replace(
        made,
        config=r.randrange(1000) if r.random() < 0.3 else None,
        layouts=families.layouts(op, params, r),
        plants=families.plants(op, params, r),
        indices=families.indices(op, params, r),
    )


@functools.cache
def _domains(op: Op) -> dict[str, tuple[Any, ...]]:
    """The values of every parameter in the op's own test cases, and its default."""
    found: dict[str, dict[Any, None]] = {}
    for case in op.cases["test"]:
        for name, value in case.params.items():
            found.setdefault(name, {})[value] = None
    for name, parameter in inspect.signature(op.inputs).parameters.items():
        if parameter.default is not inspect.Parameter.empty and name in found:
            found[name][parameter.default] = None
    return {name: tuple(values) for name, values in found.items()}


def _params(op: Op, r: random.Random, interpreted: bool, wide: bool) -> dict[str, Any]:
    params = dict(r.choice(op.cases["test"]).params)
    if not wide:  # kinds of another case, as they are there: those are compiled for other tests too
        other = r.choice(op.cases["test"]).params
        params = {k: v for k, v in params.items() if k not in _KINDS} | {k: other[k] for k in _KINDS if k in other}
    for name, known in _domains(op).items():
        if r.random() < 0.35 and (wide or name not in _KINDS):
            params[name] = _value(op, name, known, r)
    params = families.mended(op, params, r)
    if interpreted:
        params = {name: "fp16" if value == "bf16" else value for name, value in params.items()}
        params |= {"m": min(params["m"], _TOKENS)} if op.name in families.ATTENTION else {}
    return _bounded(op, params, _SMALL_WORK if interpreted else _WORK, r)


def _value(op: Op, name: str, known: tuple[Any, ...], r: random.Random) -> Any:
    counts = _COUNTED | _FEW
    if name not in counts or (op.name, name) in families.FIXED or r.random() < 0.3:
        return r.choice(known)
    return r.choice(counts[name])


def _bounded(op: Op, params: dict[str, Any], most: int, r: random.Random) -> dict[str, Any]:
    """With the largest of its sizes halved until there is not too much to compute."""
    while True:
        sizes = {name: params[name] for name in (*_COUNTED, *_FEW) if name in params}
        work = params.get("heads") or 1
        for size in sizes.values():
            work *= max(size, 1)
        free = {name: size for name, size in sizes.items() if (op.name, name) not in families.FIXED and size > 1}
        if work <= most or not free:
            return params
        largest = max(free, key=lambda name: free[name])
        params = families.mended(op, params | {largest: (params[largest] + r.randrange(2)) // 2}, r)


def _scalars(op: Op, params: dict[str, Any], r: random.Random) -> dict[str, Any]:
    """Some of the arguments that are numbers; those that inputs are drawn by keep what the contract makes of them."""
    made = {}
    for name in op.names:
        if name in _SCALARS and r.random() < 0.3 and families.free_scalar(op, name, params):
            smooth = name in _SMOOTH and r.random() < 0.5
            made[name] = round(r.random() * _SMOOTH[name], 4) if smooth else r.choice(_SCALARS[name])
    return made
