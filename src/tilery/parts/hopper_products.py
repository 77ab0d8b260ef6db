"""Products by TMA and wgmma for sm_90: tiles of many rows, or few rows whose blocks share K in a cluster.

An ending works on the sums while they are in registers. `kernel` makes an op's module; the device side is matmul's
hopper.cu, and parts/hopper_tiles.py cuts the work.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilery.base.spec import Artifact, TensorSpec, Work, dtype_name
from tilery.languages import cuda_glue, tensor_maps
from tilery.parts import hopper_tiles
from tilery.parts.kernels import Functions, functions
from tilery.parts.products import Product
from tilery.parts.tiles import tiled_product

archs = ("sm_90",)

_SOURCE = Path(__file__).parents[1] / "ops" / "matmul" / "hopper.cu"
_MANY = 1024  # rows, from which on tiles share b
_WIDTHS = (*hopper_tiles.NARROW, 128, 160, 192, 224, 256)
_SHARED = (2, 3, 4)  # blocks that may share K in the wide form


@dataclass(frozen=True)
class Config(hopper_tiles.Config):
    share: int = 1  # blocks of a cluster that fetch b for each other; of the wide form

    @property
    def depth(self) -> int:  # type: ignore[override]
        return 2 if self.form == "few" else 1


@dataclass(frozen=True)
class GatedConfig(Config):
    halves = 2


def _forms(kind: type[Config]) -> hopper_tiles.Forms:
    """Gate and up of a column are in one block: its K is not shared."""
    alone = kind.halves > 1
    few = {"block_m": hopper_tiles.FEW_ROWS, "block_n": hopper_tiles.few_columns(kind)}
    return {
        "wide": {"block_m": (128,), "block_n": _WIDTHS, "splits": (1,) if alone else (1, *_SHARED), "share": (1, 2)},
        "few": few | {"splits": (1,) if alone else hopper_tiles.SPLITS, "share": (1,)},
    }


_FORMS = {kind: _forms(kind) for kind in (Config, GatedConfig)}


class Ending(NamedTuple):
    """What becomes of sums before they are stored: a kernel of its own."""

    act: str
    bias: bool
    addend: bool
    scaled: bool

    def __str__(self) -> str:
        return f"{self.act}, " + ", ".join(str(flag).lower() for flag in self[1:])


PLAIN = Ending("none", False, False, False)


def _kind(p: Product) -> type[Config]:
    return Config if p.halves == 1 else GatedConfig


def _ending(p: Product) -> Ending:
    """PLAIN itself where there is none; silu of a gate is in its kernel."""
    if p.halves == 2 or (p.act == "none" and p.bias is p.addend is p.alpha is None):
        assert p.halves == 1 or p.act == "silu"
        return PLAIN
    return Ending(p.act, p.bias is not None, p.addend is not None, p.alpha is not None)


def _refusal(p: Product, names: tuple[str, str, str], config: Config | None) -> str | None:
    if p.a.dtype not in (torch.float16, torch.bfloat16):
        return f"wgmma takes fp16 and bf16, and would round {dtype_name(p.a.dtype)} to tf32"
    a = p.a._replace(shape=(p.m, p.k), strides=(p.a_row, p.a_column))
    b = p.b._replace(shape=(p.halves * p.n, p.k), strides=(p.b_column, p.b_row))
    for name, x, given in zip(names, (a, b), (p.a, p.b)):
        if x.strides[1] != 1 and p.k > 1 and x.shape[0]:
            return f"{name} must have K contiguous, got strides {list(given.strides)}"
    fetched = tensor_maps.refusal(names[0], a) or tensor_maps.refusal(names[1], b)
    if why := fetched or _ending_refusal(p, names[2]):
        return why
    if config is None:
        return None
    if why := hopper_tiles.refusal(config, _FORMS[_kind(p)], p.n, p.a.dtype.itemsize, p.a.device):
        return why
    if config.form == "wide" and config.splits > 1 and p.k < 128 * config.splits:
        return f"K must be at least {128 * config.splits} for {config.splits} blocks to share it, got {p.k}"
    return None


def _ending_refusal(p: Product, name: str) -> str | None:
    """`name` is the addend's."""
    if (p.bias is not None or p.addend is not None) and p.k == 0:
        return "K must be at least 1: without products there is no kernel to add anything to them"
    if p.bias is not None and (p.n % 2 or not p.bias.aligned):
        return f"bias must start at a multiple of 16 bytes and have an even size, to be read in pairs, got {p.n}"
    if p.addend is None or p.n == 0:
        return None
    even = p.addend.aligned and p.n % 8 == 0 and (p.addend_row % 8 == 0 or p.m <= 1)
    if not even or (p.addend_column != 1 and p.n > 1):
        came = f"{list(p.addend.shape)} with strides {list(p.addend.strides)}"
        return f"rows of {name} must be contiguous, start at multiples of 16 bytes and be of 8 values each, got {came}"
    return None


def _default(p: Product) -> Config:
    wide = {"staged": p.n % 8 == 0} | ({"share": 2, "group": 4} if p.m > _MANY else {})
    measured = _shared(p)[:1]  # more than two blocks are for a tuner to try
    return hopper_tiles.default(_kind(p), *_sizes(p), _WIDTHS, 0, wide, measured)


def _configs(p: Product, names: tuple[str, str, str]) -> list[Config]:
    wide: list[dict[str, Any]] = [
        {"staged": staged, "share": s} for s in ((1, 2) if p.m > 128 else (1,)) for staged in (True, False)
    ]
    found = [_default(p), *hopper_tiles.candidates(_kind(p), *_sizes(p), _WIDTHS, wide, _shared(p))]
    return [c for c in dict.fromkeys(found) if _refusal(p, names, c) is None]


def _sizes(p: Product) -> tuple[int, int, int]:
    """Rows of a, columns of b, slots of K."""
    return p.m, p.halves * p.n, p.k // 128


def _shared(p: Product) -> tuple[int, ...]:
    """How many blocks of the wide form may share K."""
    return _SHARED if p.m <= _MANY and p.halves == 1 else ()


def _estimate(p: Product, config: Config) -> Work:
    """The addend counts as much as c: what a tile of it costs is next to nothing."""
    kind, where = p.a.dtype, p.a.device
    a, b = TensorSpec.contiguous((p.m, p.k), kind, where), TensorSpec.contiguous((p.k, p.halves * p.n), kind, where)
    return tiled_product(a, b, config.block_m, config.block_n, config.splits)


@functools.cache
def _kernel(dtype: torch.dtype, config: Config, ending: Ending) -> cuda_glue.Kernel:
    c, of = config, cuda_glue.TYPES[dtype]
    if c.form == "wide":
        sizes = f"{c.block_n}, {c.stages}, {c.group}, {c.share}, {c.splits}, {str(c.staged).lower()}"
        form, parameters = "", "TTTPiii"
    else:
        sizes = f"{c.block_m}, {c.warpgroups}, {c.width}, {c.stages}, {c.splits}"
        form, parameters = "_small_m", "TTPiii"
    if ending is PLAIN:
        name = f"hopper_{'matmul' if c.halves == 1 else 'silu_mul'}{form}<{of}, {sizes}>"
    else:
        name, parameters = f"hopper_linear{form}<{of}, {sizes}, {ending}>", parameters + "PPqff"
    return cuda_glue.Kernel(_SOURCE, name, parameters, c.threads, c.shared, c.cluster, early=True)


def _run(p: Product, config: Config) -> None:
    if p.k == 0:
        p.c.zero_()  # there is no map of nothing, and every activation of 0 is 0
        return
    ending, size, columns = _ending(p), p.a.dtype.itemsize, p.halves * p.n
    kernel = _kernel(p.a.dtype, config, ending)
    box = config.block_n // max(config.share, config.halves)
    maps = [
        tensor_maps.at(p.a.data_ptr(), p.m, p.k, p.a_row, config.block_m, size),
        tensor_maps.at(p.b.data_ptr(), columns, p.k, p.b_column, box, size),
    ]
    if config.form == "wide":
        rows = hopper_tiles.STORED_ROWS
        maps.append(tensor_maps.at(p.c.data_ptr(), p.m, p.n, p.n, rows, size) if config.staged else maps[0])
    more = () if ending is PLAIN else _arguments(p)
    kernel.launch(config.launched(p.m, columns, kernel.resident()), *maps, p.c.data_ptr(), p.m, p.n, p.k, *more)


def _arguments(p: Product) -> tuple[Any, ...]:
    """Of a kernel's ending."""
    pointers = (0 if x is None else x.data_ptr() for x in (p.bias, p.addend))
    return *pointers, p.addend_row, *(1.0 if factor is None else factor for factor in (p.alpha, p.beta))


def _compile(p: Product, config: Config, arch: str) -> Artifact:
    return _kernel(p.a.dtype, config, _ending(p)).compile(arch)


def kernel(product: Callable[..., Product], outputs: Callable[..., Any], names: tuple[str, str, str]) -> Functions:
    """An op's module; `product(outs, *args)` is what it multiplies, `names` are what users call a, b and the addend."""
    return functions(
        lambda specs: product(outputs(*specs), *specs), lambda outs, args: product(outs, *args),
        lambda p, config: _refusal(p, names, config), _default, lambda p: _configs(p, names),
        _estimate, _compile, _run,
    )  # fmt: skip
