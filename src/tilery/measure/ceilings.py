"""How fast this machine can be: measured on it once, kept, and asked wherever a roof is drawn."""

import functools
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tilery.base import files, settings
from tilery.base.spec import Cost
from tilery.hardware import device
from tilery.measure import timing

_MOST_PASSES, _SETTLED = 4, 0.03
_READ_OF_COPY = 0.9  # of the rate of a copy, what reading alone must reach
_MEASURED_AS = {"e4m3": "fp8", "e5m2": "fp8"}  # tensor cores take both formats alike


@dataclass(frozen=True)
class Ceilings:
    """The best this machine did when it was asked: nothing runs much faster."""

    read: float  # bytes/s of a large sum, or of a matrix times a vector
    copy: float  # bytes/s of a large copy, read and written
    write: float  # bytes/s of a large fill
    flops: dict[str, float]  # dtype name -> FLOP/s of a large matrix product
    launch_us: float  # from one tiny kernel to the next, in a CUDA graph; of a call, on a CPU

    def memory_ms(self, cost: Cost) -> float:
        """What is read and what is written go together at the copy's rate; the rest at its own."""
        rest = abs(cost.reads - cost.writes) / (self.read if cost.reads > cost.writes else self.write)
        return 1e3 * (2 * min(cost.reads, cost.writes) / self.copy + rest)

    def peak(self, dtype: str) -> float:
        """FLOP/s of products of a dtype; of one that was not measured, the greatest there is."""
        return self.flops.get(_MEASURED_AS.get(dtype, dtype), max(self.flops.values()))

    def arithmetic_ms(self, cost: Cost, dtype: str) -> float:
        return 1e3 * cost.flops / self.peak(dtype)

    def best(self, other: "Ceilings") -> "Ceilings":
        """Rate by rate the better of two."""
        flops = {name: max(rate, other.flops.get(name, 0.0)) for name, rate in self.flops.items()}
        rates = {name: max(getattr(self, name), getattr(other, name)) for name in ("read", "copy", "write")}
        return Ceilings(**rates, flops=flops, launch_us=min(self.launch_us, other.launch_us))

    def gain(self, before: "Ceilings") -> float:
        """By what share the rate grew that grew most."""
        rates = [(self.read, before.read), (self.copy, before.copy), (self.write, before.write)]
        rates += [(rate, before.flops[name]) for name, rate in self.flops.items()]
        return max(now / then for now, then in rates) - 1

    def contradiction(self) -> str | None:
        """What cannot be true of an idle machine: to copy is to read and to write."""
        if self.read >= _READ_OF_COPY * self.copy:
            return None
        rates = f"{self.read / 1e9:.1f} GB/s and copied {self.copy / 1e9:.1f} GB/s"
        return f"this machine read {rates}, so it was busy while it read"

    def roof_ms(self, cost: Cost, dtype: str) -> float:
        return max(self.memory_ms(cost), self.arithmetic_ms(cost, dtype))


Say = Callable[[str], None]  # told what is under way


def silent(what: str) -> None:
    pass


def ceilings(where: torch.device, measure: bool = False, say: Say = silent) -> Ceilings:
    """Measured once per device, kept in the data folder; `measure` measures again."""
    path = _path(where)
    if not measure:
        try:
            return Ceilings(**json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, TypeError) as error:
            warnings.warn(f"{path} cannot be read ({error}); measuring again", stacklevel=2)
    return keep(where, _settled(where, say))


@functools.cache
def raised(where: torch.device) -> Ceilings:
    """Measured again, once in a process: something was faster than they allow. Rate by rate the better is kept."""
    return keep(where, ceilings(where).best(_settled(where, silent)))


def _path(where: torch.device) -> Path:
    return settings.get().data_dir / "ceilings" / f"{device.slug(where)}.json"


def keep(where: torch.device, found: Ceilings) -> Ceilings:
    """For the next time that they are asked for."""
    path = _path(where)
    if where.type == "cuda":
        torch.cuda.empty_cache()  # gigabytes, that a kernel in another process may want
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, json.dumps(asdict(found)))
    except OSError as error:
        warnings.warn(f"{path} cannot keep what was measured: {error.strerror or error}", stacklevel=2)
    return found


def _settled(where: torch.device, say: Say) -> Ceilings:
    """The best of several passes, until one more adds little: in a single one the machine may have been busy."""
    found = _measured(where, lambda what: say(f"measuring this machine's ceilings: {what}"))
    for _ in range(1, _MOST_PASSES):
        before, found = found, found.best(_measured(where, lambda what: say(f"measuring them again: {what}")))
        if found.gain(before) < _SETTLED and not found.contradiction():
            return found
    if why := found.contradiction():
        warnings.warn(f"{why}; measure again when the machine is idle: `tilery doctor --measure`", stacklevel=3)
    return found


def _measured(where: torch.device, say: Say) -> Ceilings:
    # A CPU's caches take a small result without waiting for memory, so there the best of three sizes is the ceiling.
    sizes = (2**28,) if where.type == "cuda" else (2**20, 2**22, 2**24)
    tiny, vector = torch.empty(1, device=where), torch.randn(4096, device=where)
    rates = {"read": 0.0, "copy": 0.0, "write": 0.0}
    for elements in sizes:
        source = torch.randn(elements, device=where)
        target, table = torch.empty_like(source), source.view(-1, 4096)
        calls: tuple[tuple[str, int, Callable[[], object]], ...] = (
            ("read", 1, source.sum),
            ("read", 1, functools.partial(torch.mv, table, vector)),
            # Not copy_: in a CUDA graph that is a memcpy node, which ran at 2.8 TB/s on an H200; kernels reach 4.3.
            ("copy", 2, functools.partial(torch.mul, source, 1.5, out=target)),
            ("write", 1, functools.partial(target.fill_, 1.5)),
        )
        for name, tensors, call in calls:
            say(f"{name} {source.nbytes >> 20} MiB")
            rates[name] = max(rates[name], tensors * source.nbytes / timing.best_ms(call, where) * 1e3)
    flops = _matrix_rates(where, say)
    say("launch")
    return Ceilings(**rates, flops=flops, launch_us=1e3 * timing.best_ms(lambda: tiny.fill_(1.5), where))


def _matrix_rates(where: torch.device, say: Say) -> dict[str, float]:
    """The best of two sizes: the larger fills the machine, the smaller ends before power limits it."""
    gpu = where.type == "cuda"
    sizes = (4096, 8192) if gpu else (1024,)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if gpu:
        dtypes["fp16"] = torch.float16  # on a CPU torch multiplies fp16 so slowly that it is no ceiling
    found: dict[str, float] = {}
    for n in sizes:
        a, b = (torch.randn(n, n, device=where) for _ in range(2))
        products: dict[str, Callable[[], object]] = {
            name: functools.partial(torch.matmul, a.to(dtype), b.to(dtype)) for name, dtype in dtypes.items()
        }
        if gpu and device.arch(where) not in ("sm_80", "sm_86", "sm_87"):  # those have no fp8
            products["fp8"] = _fp8_product(a, b)
        for name, product in products.items():
            say(f"{name} {n}³")
            found[name] = max(found.get(name, 0.0), 2 * n**3 / timing.best_ms(product, where) * 1e3)
    return found


def _fp8_product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    one = torch.ones((), device=a.device)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
