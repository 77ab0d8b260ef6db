"""How fast this machine can be: measured on it once, kept, and asked wherever a roof is drawn."""

import functools
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from tilery.base import files, settings
from tilery.base.spec import Cost
from tilery.hardware import device
from tilery.measure import timing

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

    def roof_ms(self, cost: Cost, dtype: str) -> float:
        return max(self.memory_ms(cost), self.arithmetic_ms(cost, dtype))


def ceilings(where: torch.device, measure: bool = False) -> Ceilings:
    """Measured once per device, kept in the data folder; `measure` measures again."""
    path = settings.get().data_dir / "ceilings" / f"{device.slug(where)}.json"
    if not measure:
        try:
            return Ceilings(**json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, TypeError) as error:
            warnings.warn(f"{path} cannot be read ({error}); measuring again", stacklevel=2)
    found = _measured(where)
    if where.type == "cuda":
        torch.cuda.empty_cache()  # gigabytes, that a kernel in another process may want
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, json.dumps(asdict(found)))
    except OSError as error:
        warnings.warn(f"{path} cannot keep what was measured: {error.strerror or error}", stacklevel=2)
    return found


def _measured(where: torch.device) -> Ceilings:
    elements = 2**28 if where.type == "cuda" else 2**24
    source = torch.randn(elements, device=where)
    target = torch.empty_like(source)
    tiny, table, vector = torch.empty(1, device=where), source.view(-1, 4096), torch.randn(4096, device=where)

    def rate(call: Callable[[], object], tensors: int) -> float:
        return tensors * source.nbytes / timing.best_ms(call, where) * 1e3

    return Ceilings(
        read=max(rate(source.sum, 1), rate(lambda: table @ vector, 1)),
        # Not copy_: in a CUDA graph that is a memcpy node, which ran at 2.8 TB/s on an H200 where kernels reach 4.3.
        copy=rate(lambda: torch.mul(source, 1.5, out=target), 2),
        write=rate(lambda: target.fill_(1.5), 1),
        flops=_matrix_rates(where),
        launch_us=1e3 * timing.best_ms(lambda: tiny.fill_(1.5), where),
    )


def _matrix_rates(where: torch.device) -> dict[str, float]:
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
            found[name] = max(found.get(name, 0.0), 2 * n**3 / timing.best_ms(product, where) * 1e3)
    return found


def _fp8_product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    one = torch.ones((), device=a.device)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
