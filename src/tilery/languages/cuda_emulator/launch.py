"""Launches of emulated kernels: arguments as the driver would take them, in host memory."""

import ctypes
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tilery.base.launch import Launch, Persistent, Values, resolver
from tilery.languages.cuda_emulator import build
from tilery.languages.cuda_signature import TENSOR_MAP, Signature, Struct
from tilery.languages.tensor_maps import TensorMapOf

RESIDENT = 3  # clusters that run side by side; of a persistent kernel, all that there are
_one_at_a_time = threading.Lock()  # the emulator has one GPU
_seeds = itertools.count(1)  # each launch has an order of its own; the same in every run of a program


def bind(launch: Launch, signature: Signature, instance: str, arguments: tuple[Any, ...]) -> Callable[[Values], None]:
    """What runs the launch for a call's values, and waits until it has ended."""
    library = build.kernel(launch.kernel.path, instance)
    body = ctypes.cast(library.kernel, ctypes.c_void_p)
    own_maps = tuple(replace(x, emulated=True) if isinstance(x, TensorMapOf) else x for x in arguments)
    resolved = resolver(own_maps, lambda x: x.address)
    types = tuple(p.type for p in signature.parameters)
    cluster = launch.cluster
    blocks = min(launch.grid.most, RESIDENT * cluster) if isinstance(launch.grid, Persistent) else launch.grid
    run = build.runtime().emulator_launch
    run.restype = ctypes.c_char_p
    pointer, number = ctypes.c_void_p, ctypes.c_int
    run.argtypes = [pointer, pointer, number, number, ctypes.c_long, number, number, ctypes.c_uint]
    size = launch.options["threads"], launch.options.get("shared", 0)

    def launched(values: Values) -> None:
        given = [_held(kind, value) for kind, value in zip(types, resolved(values))]
        addresses = (ctypes.c_void_p * max(len(given), 1))(*(address for _, address in given))
        with _one_at_a_time:
            error = run(body, addresses, blocks, *size, cluster, RESIDENT, next(_seeds))
        if error:
            raise RuntimeError(f"emulating {instance} with {blocks} blocks of {size[0]} threads: {error.decode()}")

    return launched


def _held(kind: Any, value: Any) -> tuple[Any, int]:
    """The memory of an argument, which must outlive the launch, and its address."""
    if isinstance(kind, Struct) or kind == TENSOR_MAP:
        return value, value.getPtr()
    held = kind(value)
    return held, ctypes.addressof(held)
