"""One row of any table: what a tool found for one op, kernel and case. Printed, written as JSON and as CSV alike."""

import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

import tilery
from tilery import languages
from tilery.hardware import device

SCHEMA = 1
BASE = "baseline:torch"
CONTROL = "control:torch"  # torch timed a second time: the distance of its ratio from 1 is the noise of the run
COPY = "control:copy"  # as many bytes, copied: what memory could do in this very run
_STORED_ONLY = ("samples", "against")
_ALWAYS = ("op", "kernel", "case", "status", "reason")


@dataclass
class Row:
    op: str
    kernel: str
    case: str
    status: str  # pass, fail, refused, compiled or skipped
    reason: str = ""
    device: str = ""  # where it ran
    error: float | None = None  # against float64, the worst output
    ms: float | None = None  # median
    ms_low: float | None = None  # its 95 % interval
    ms_high: float | None = None
    flops: int | None = None  # least arithmetic of the op
    bytes: int | None = None  # least traffic of the op
    dtype: str = ""  # whose matrix rate is its ceiling
    gbps: float | None = None  # least bytes over time
    tflops: float | None = None
    roof: float | None = None  # share of the measured ceilings
    ratio: float | None = None  # times faster than baseline:torch, round by round
    ratio_low: float | None = None
    ratio_high: float | None = None
    timed_by: str = ""  # graph, events or clock
    inputs: str = ""  # cold: from memory, as in a model; warm: from the caches
    clock: float | None = None  # MHz while it was timed
    power: float | None = None  # W
    temperature: float | None = None  # °C
    config: str = ""
    arch: str = ""  # what it was compiled for
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    code: str = ""  # key of what its compiler made, in the store
    stage: str = ""  # tune: a candidate of the tuner, which no benchmark may count; empty otherwise
    rank: int | None = None  # of a tune: 0 is the winner, then the best of every other kernel
    default: bool | None = None  # of a tune: its kernel's default config
    max_diff: float | None = None  # from float64, of any element
    source: str = ""  # hash of the source of a kernel of ours, as it was measured: measure/source_hash.py
    allowed: float | None = None  # what the error may be
    seed: int | None = None  # of the inputs it was checked on
    samples: tuple[float, ...] = ()  # ms a call, round by round; in the store and its exports only, as what follows
    against: tuple[float, ...] = ()  # the baseline's ms in the same rounds


COLUMNS = (*(f.name for f in fields(Row) if f.name not in _STORED_ONLY), "control")  # of CSV


def is_peer(kernel: str) -> bool:
    """What a user could run instead."""
    return kernel.startswith("baseline:")


def is_control(kernel: str) -> bool:
    """What measures the run itself."""
    return kernel.startswith("control:")


def is_ours(kernel: str) -> bool:
    """A kernel below a contract, but for a library's."""
    return not is_peer(kernel) and not is_control(kernel) and languages.is_ours(kernel)


def document(rows: Iterable[Row], **more: Any) -> dict[str, Any]:
    """What --json prints: fields without a value are left out."""
    plain = [{k: v for k, v in asdict(finite(row)).items() if _said(k, v)} for row in rows]
    return {"schema": SCHEMA, "machine": machine(), "rows": plain, **more}


def finite(row: Row) -> Row:
    """A row as JSON can hold it, which has no NaN and no infinity: such values are left out."""
    lost: dict[str, Any] = {k: None for k, v in vars(row).items() if isinstance(v, float) and not math.isfinite(v)}
    return replace(row, **lost) if lost else row


def _said(name: str, value: Any) -> bool:
    return name in _ALWAYS or (value not in (None, "") and name not in _STORED_ONLY)


def lines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line of CSV for each row."""
    noise = controls(rows)
    return [{name: getattr(row, name) for name in COLUMNS[:-1]} | {"control": noise.get(problem(row))} for row in rows]


def problem(row: Row) -> tuple[str, str, str]:
    """What the arms of one problem have in common."""
    return row.op, row.case, row.device


def controls(rows: Iterable[Row]) -> dict[tuple[str, str, str], float | None]:
    """The ratio of torch to itself, by problem; the rows are those of one run."""
    return {problem(row): row.ratio for row in rows if row.kernel == CONTROL}


def machine() -> dict[str, Any]:
    where = device.default()
    versions = {name: languages.version(lang) for name, lang in languages.LANGUAGES.items()}
    return {
        "tilery": tilery.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": device.name(torch.device("cpu")),
        "gpu": device.name(where) if where.type == "cuda" else None,
        "arch": device.arch(where),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "languages": {name: version for name, version in versions.items() if version},
    }
