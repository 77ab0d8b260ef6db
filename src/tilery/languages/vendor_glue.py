"""The vendor's kernels through torch: cuBLAS and cuBLASLt on a GPU, oneDNN and MKL on a CPU.

In a `Launch`, `kernel` is a function of tensors and numbers that writes into the tensor that it calls `out`;
`options["precision"]` is how it multiplies fp32, "ieee" or "tf32".
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tilery.base import settings
from tilery.base.launch import Argument, Launch, Values, argument_mismatch, assert_plain, resolver
from tilery.base.spec import Artifact

_below_autograd = torch._C._AutoDispatchBelowAutograd  # the op's own backward is above


def machine_refusal() -> str | None:
    """Why no kernel of a library may run in this process."""
    return None if settings.get().vendor else "TILERY_VENDOR=0 leaves it out"


def library(where: torch.device) -> str:
    """Whose code torch runs there."""
    return "cuBLAS through torch" if where.type == "cuda" else "oneDNN and MKL through torch"


def compile(launch: Launch, arch: str) -> Artifact:
    """Nothing is compiled: the library chooses among kernels that it brings."""
    return Artifact(arch, {})


def bind(launch: Launch, where: torch.device) -> Callable[[Values], None]:
    """What runs the launch for a call's values, on torch's current stream."""
    assert_plain(launch)
    function, names = launch.kernel, inspect.signature(launch.kernel).parameters
    assert not (wrong := argument_mismatch(function.__name__, names, launch.args)), wrong
    resolved = resolver(tuple(launch.args[name] for name in names), _of_tensor)
    switch = _switch(where.type, launch.args["out"].dtype, launch.options.get("precision", "ieee"))

    def run(values: Values) -> None:
        with _below_autograd():
            function(*resolved(values))

    if switch is None:
        return run

    def run_switched(values: Values) -> None:
        with switched(switch):
            run(values)

    return run_switched


def _of_tensor(x: Argument) -> Callable[[Values], Any]:
    return x.tensor


# Torch's settings of precision. They are the whole process's, so each is changed for the call alone, and only where it
# is not as it must be. Another thread's product that starts meanwhile is no less exact, but for precision="tf32".


class Switch(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    wanted: Callable[[Any], Any]  # of what is set now


@contextmanager
def switched(switch: Switch) -> Iterator[None]:
    """Inside, the setting is as wanted."""
    before = switch.get()
    wanted = switch.wanted(before)
    if wanted == before:
        yield
        return
    switch.set(wanted)
    try:
        yield
    finally:
        switch.set(before)


def _switch(kind: str, dtype: torch.dtype, precision: str) -> Switch | None:
    """The setting that decides how sums of this dtype are made on a kind of device; None where there is none."""
    if dtype == torch.float32:
        return _fp32("cuda", precision) if kind == "cuda" else _fp32("mkldnn", "ieee")
    if kind != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    return _reduction("bf16") if dtype == torch.bfloat16 else _both(_reduction("fp16"), _accumulation())


def _fp32(backend: str, precision: str) -> Switch:
    """By the newer of torch's two interfaces: the older raises an error where a program has used the newer."""
    get, set_ = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    exact = ("ieee", "none")  # none is set: the default, which is exact

    def wanted(now: str) -> str:
        return now if now == precision or (precision == "ieee" and now in exact) else precision

    now = functools.partial(get, backend, "matmul")

    def put(to: str) -> None:
        set_(backend, "matmul", "none")  # where this is what is set for all of torch, it stays so
        if now() != to:
            set_(backend, "matmul", to)

    return Switch(now, put, wanted)


def _reduction(name: str) -> Switch:
    """Parts of a sum over K are added in fp32, not in fp16 or bf16. Torch has a flag, or from 2.10 on two."""
    get = getattr(torch._C, f"_get_cublas_allow_{name}_reduced_precision_reduction")
    set_ = getattr(torch._C, f"_set_cublas_allow_{name}_reduced_precision_reduction")

    def put(to: Any) -> None:
        set_(*to) if isinstance(to, tuple) else set_(to)

    return Switch(get, put, lambda now: (False, *now[1:]) if isinstance(now, tuple) else False)


def _accumulation() -> Switch:
    """Sums of fp16 products are fp32."""
    get, put = torch._C._get_cublas_allow_fp16_accumulation, torch._C._set_cublas_allow_fp16_accumulation
    return Switch(get, put, lambda now: False)


def _both(one: Switch, other: Switch) -> Switch:
    def put(to: tuple[Any, Any]) -> None:
        one.set(to[0])
        other.set(to[1])

    return Switch(
        lambda: (one.get(), other.get()), put, lambda now: (one.wanted(now[0]), other.wanted(now[1]))
    )  # fmt: skip
