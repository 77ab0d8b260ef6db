"""SGLang's and vLLM's files of tuned fp8 products: written from what was tuned here, read as candidates.

One file per N, K and GPU, keyed by M (docs/sglang.md). SGLang's TileLang wrapper and its Triton kernel read files of
the same name, of other fields and from other folders. vLLM's are those of Triton under another name.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tilery.base import settings
from tilery.base.errors import BadInput, BadTunedFile
from tilery.base.spec import Case
from tilery.core import tuned, tuned_files
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.core.tuned_files import MEND, Document, Entry
from tilery.models.steps import PRODUCT_ROWS
from tilery.tuning import kept

OP = "fp8_matmul"
USE = "sglang"  # what `tune --for` calls it
CASE = {"dtype": "e4m3", "dtype_b": "e4m3", "out": "bf16"}  # what their products are
SCALES = {"triton": "row", "tilelang": "column"}  # how each of SGLang's kernels is given the scales of tokens
VARIANTS = ("base", "swapAB", "splitK", "splitK_swapAB")
_FILE = "N={n},K={k},device_name={device},dtype=fp8_w8a8,block_shape=[128,{space}128].json"
_NAME = re.compile(r"N=(\d+),K=(\d+),device_name=([^,]+),dtype=fp8_w8a8,block_shape=\[128,( ?)128\]\.json")
_EXACT = re.compile(r"n=(\d+),k=(\d+),e4m3,e4m3,bf16,(row|column)")  # what SGLang's products are
_SAID = {"out_dtype": "bfloat16", "accum_dtype": "float32"}  # a file may say so, and nothing else

Rows = dict[int, dict[str, Any]]  # by M, the fields as SGLang has them


class Program(NamedTuple):
    """Who reads files: what it is called, the languages of its kernels, and how it writes a list."""

    name: str
    kernels: tuple[str, ...]
    space: str


PROGRAMS = {"sglang": Program("SGLang", ("tilelang", "triton"), " "), "vllm": Program("vLLM", ("triton",), "")}


@dataclass(frozen=True)
class Form:
    """The fields of a file and what the kernel's Config calls them."""

    needed: dict[str, str]  # the first is the one by which the form is known
    config: dict[str, Any]  # in the order of Config's fields, with what they are where a file says nothing
    may: tuple[str, ...] = ()  # fields besides, named as in Config
    besides: tuple[str, ...] = ()  # may be there, and are no part of the config


_FORMS = {  # by kernel, which is also the folder's name
    "tilelang": Form(
        {"kernel_type": "kernel_type", "block_M": "block_m", "block_N": "block_n", "block_K": "block_k",
         "num_stages": "num_stages", "threads": "threads"},
        {"kernel_type": None, "block_m": None, "block_n": None, "block_k": None, "num_stages": None, "threads": None,
         "split_k": 1, "c_scale_local": False, "a_scale_shm": False, "b_scale_shm": False},
        ("split_k", "c_scale_local", "a_scale_shm", "b_scale_shm"),
        ("latency_ms", "tflops", *_SAID),
    ),
    "triton": Form(
        {"BLOCK_SIZE_M": "block_m", "BLOCK_SIZE_N": "block_n", "BLOCK_SIZE_K": "block_k", "GROUP_SIZE_M": "group_m",
         "num_warps": "num_warps", "num_stages": "num_stages"},
        {"block_m": None, "block_n": None, "num_warps": None, "num_stages": None, "split_k": 1, "group_m": None,
         "block_k": None},
    ),
}  # fmt: skip


# Writing


class Written(NamedTuple):
    path: Path
    kernel: str
    rows: list[int]  # the M that were tuned here
    kept: list[int]  # those that the file had and that are not tuned here
    missing: list[int] = []  # noqa: RUF012  of the M that a whole file has
    command: str = ""  # what tunes those


class Exported(NamedTuple):
    written: list[Written]
    left_out: list[str]  # what the program cannot express
    partial: list[Written]  # files that were not written, as some M are missing


def refusal(kernel: str, config: dict[str, Any]) -> str | None:
    """Why SGLang's and vLLM's kernels cannot run a config that ours can."""
    parts = config.get("split_k", 1)
    if kernel == "triton" and parts > 1:
        return f"triton cuts K in {parts} parts, which that of SGLang and vLLM cannot"
    return None


def export(to: Path | None, slug: str | None = None, program: str = "sglang", partial: bool = False) -> Exported:
    """Writes a file per kernel, N, K and GPU; of one device, or of all.

    A program takes the row of the nearest M, so that a file with a few of them is worse than none: unless `partial`,
    only files that have all of `PRODUCT_ROWS` are written. In a file that is there the M that are tuned here are
    replaced. If one cannot be read, nothing is written.
    """
    reader = PROGRAMS[program]
    found, left_out = _collect(slug, reader)
    if not found:
        where, why = f" on {slug}" if slug else "", f": {'; '.join(left_out)}" if left_out else ""
        kernels = " or ".join(reader.kernels)
        raise BadInput(f"nothing that {reader.name} reads is tuned{where}: {OP} by {kernels}, to bf16{why}")
    texts: list[tuple[Written, str]] = []
    for (kernel, file), rows in found.items():
        path = _folder_of(kernel, to, program) / file
        before = {m: fields for m, (fields, _) in _read(path, kernel).items()} if path.exists() else {}
        merged = {str(m): fields for m, fields in sorted((before | rows).items())}
        missing = [m for m in PRODUCT_ROWS if str(m) not in merged]
        command = _command(file, kernel, missing) if missing else ""
        written = Written(path, kernel, sorted(rows), sorted(set(before) - set(rows)), missing, command)
        texts.append((written, json.dumps(merged, indent=4) + "\n"))
    chosen = [(written, text) for written, text in texts if partial or not written.missing]
    for written, text in chosen:
        tuned_files.write_text(written.path, text)
    skipped = [] if partial else [written for written, _ in texts if written.missing]
    return Exported([written for written, _ in chosen], left_out, skipped)


def _command(file: str, kernel: str, missing: list[int]) -> str:
    match = _NAME.fullmatch(file)
    assert match is not None, "it is a file of ours"
    rows = "" if len(missing) == len(PRODUCT_ROWS) else f" --M {','.join(map(str, missing))}"
    return f"tilery tune {OP} --for {USE} --backend {kernel} --N {match[1]} --K {match[2]}{rows}"


def _folder_of(kernel: str, to: Path | None, program: str) -> Path:
    """In `to` a folder each for SGLang's kernels; if that is not given, TileLang's where SGLang is told to look."""
    told = settings.get().sglang_dir
    if to is None and kernel == "tilelang" and told is not None:
        return told
    base = to or Path(program)
    return base / kernel if len(PROGRAMS[program].kernels) > 1 else base


def _collect(slug: str | None, reader: Program) -> tuple[dict[tuple[str, str], Rows], list[str]]:
    """By kernel and file name what to write for every M; and in words what cannot be written.

    What was tuned for SGLang goes first, then what dispatch uses; of either, scales in the layout that it has.
    """
    op = REGISTRY[OP]
    slugs = sorted({file.device for file in kept.files([op]) if file.owner != kept.CANDIDATES} | _slugs())
    chosen = [name for name in slugs if slug in (None, name)]
    own = [entry for name in chosen for entry in entries(name)]
    others = [entry for name in chosen for _, entry in kept.used(op, name)]
    found: dict[tuple[str, str], Rows] = {}
    refused: dict[tuple[str, str, int], str] = {}
    for entry in (*sorted(own, key=_preferred), *sorted(others, key=_preferred)):
        match = _EXACT.fullmatch(entry.exact)
        if entry.kernel not in reader.kernels or match is None or not entry.scaled["m"]:
            continue
        n, k, m = int(match[1]), int(match[2]), entry.scaled["m"]
        name = _FILE.format(n=n, k=k, device=entry.device.replace(" ", "_"), space=reader.space)
        file = entry.kernel, name
        if why := refusal(entry.kernel, entry.config):
            refused.setdefault((*file, m), f"M={m}, N={n}, K={k}: {why}")
        else:
            found.setdefault(file, {}).setdefault(m, _fields(entry, 2 * m * n * k))
    taken = {(*file, m) for file, rows in found.items() for m in rows}
    return found, [why for key, why in refused.items() if key not in taken]


def _preferred(entry: Entry) -> tuple[bool, int]:
    return not entry.exact.endswith(f",{SCALES.get(entry.kernel, '')}"), entry.rank


def without_layout(exact: str) -> str:
    """A bucket's exact part but for the layout of scales."""
    return exact.rpartition(",")[0]


# What was tuned for SGLang: dispatch never looks there, as our own kernels may have a faster config


def folder() -> Path:
    return settings.get().config_dir / USE


def entries(slug: str) -> list[Entry]:
    """What was tuned for SGLang on a device: the user's buckets, then shipped ones."""
    op, found = REGISTRY[OP], list[Entry]()
    for path in (folder() / OP / f"{slug}.json", _shipped() / f"{slug}.json"):
        read = tuned_files.read(path, OP, slug)
        for entry in read:
            tuned.require_kernel(op, entry, path)
        taken = {entry.bucket for entry in found}
        found += [entry for entry in read if entry.bucket not in taken]
    return found


def _shipped() -> Path:
    return REGISTRY[OP].folder / "tuned" / USE


def _slugs() -> set[str]:
    return {path.stem for place in (folder() / OP, _shipped()) for path in place.glob("*.json")}


def _fields(entry: Entry, flops: int) -> dict[str, Any]:
    form = _FORMS[entry.kernel]
    config = form.config | entry.config
    made = {theirs: config[ours] for theirs, ours in form.needed.items()}
    if entry.kernel == "triton":
        return made
    foreign = _of_other_variants(made["kernel_type"])
    made |= {name: config[name] for name in form.may if name not in foreign}
    return made | {"latency_ms": entry.ms, "tflops": flops / entry.ms / 1e9}


def _of_other_variants(kernel_type: str) -> dict[str, Any]:
    """Fields that this variant does not have, with the value that says as much."""
    splits = {} if kernel_type.startswith("splitK") else {"split_k": 1}
    return splits | {"a_scale_shm" if kernel_type.endswith("swapAB") else "b_scale_shm": False}


# Reading


def files(given: Path | None) -> list[Path]:
    """The file, or all of SGLang's in a folder and those below it; of none, where SGLang is told to look."""
    path = given or settings.get().sglang_dir
    if path is None:
        what = "or SGLANG_TILELANG_GEMM_CONFIG_DIR must say where SGLang's are"
        raise BadInput(f"FILE must name a file or a folder of configs, {what}, got neither")
    if not path.is_dir():
        return [path]
    found = sorted([*path.glob("N=*.json"), *path.glob("*/N=*.json")])
    if not found:
        raise BadInput(f"{path} must hold files of SGLang, N=….json, got a folder without any")
    return found


def is_one(path: Path) -> bool:
    """By its name, or by what it holds: then the name is wrong, and is said to be."""
    if _NAME.fullmatch(path.name):
        return True
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # whoever reads it next says so
    marks = {next(iter(form.needed)) for form in _FORMS.values()}
    return isinstance(found, dict) and any(isinstance(v, dict) and marks & set(v) for v in found.values())


def document(path: Path) -> Document:
    """What a file holds, as entries without evidence: what it does not say is 0 or empty."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        wanted = _FILE.format(n=4096, k=8192, device="NVIDIA_H200", space=" ")
        raise BadTunedFile(f"{path}:1: SGLang's file must be named as {wanted}, got {path.name}; rename it")
    n, k, name = int(match[1]), int(match[2]), match[3].replace("_", " ")
    program = next(each.name for each in PROGRAMS.values() if each.space == match[4])
    kernel = _kernel_of(path)
    op, made = REGISTRY[OP], []
    for m, (fields, line) in _read(path, kernel).items():
        case = Case({"m": m, "n": n, "k": k, "dtype": "e4m3"})
        try:
            call = call_for(op, case)
        except BadInput as error:
            raise BadTunedFile(f"{path}:{line}: {error}; {MEND}") from None
        bucket, ms = op.bucket(call), float(fields.get("latency_ms", 0.0))
        made.append(Entry(
            kernel=kernel, exact=bucket.exact, scaled=bucket.scaled, config=_config(kernel, fields), ms=ms,
            interval=[ms, ms], error=0.0, bit_identical=False, registers=None, spills=None, roof=0.0, versions={},
            device=f"{name} ({program}, {kernel})", when="", case=case.params, line=line,
        ))  # fmt: skip
    return Document(OP, re.sub(r"[^a-z0-9]+", "_", name.lower()), tuple(made))


def _kernel_of(path: Path) -> str:
    """The kernel whose fields the first row has."""
    rows = _parsed(path)
    for kernel, form in _FORMS.items():
        if next(iter(form.needed)) in next(iter(rows.values()))[0]:
            return kernel
    known = " or ".join(f"{', '.join(form.needed)} ({kernel})" for kernel, form in _FORMS.items())
    raise BadTunedFile(f"{path}:1: expected rows with {known}, got {next(iter(rows.values()))[0]}; {MEND}")


def _config(kernel: str, fields: dict[str, Any]) -> dict[str, Any]:
    form = _FORMS[kernel]
    named = {ours: fields[theirs] for theirs, ours in form.needed.items()}
    named |= {name: fields[name] for name in form.may if name in fields}
    return form.config | named


def _read(path: Path, kernel: str) -> dict[int, tuple[dict[str, Any], int]]:
    """By M the fields and their line, each checked to be of this kernel's form."""
    found = _parsed(path)
    for m, (fields, line) in found.items():
        if why := _fault(_FORMS[kernel], fields):
            raise BadTunedFile(f"{path}:{line}: M={m} for {kernel}: {why}; {MEND}")
    return found


def _parsed(path: Path) -> dict[int, tuple[dict[str, Any], int]]:
    """By M what stands there and on which line it begins; nothing else is known of it."""
    try:
        text, found = tuned_files.load(path)
    except FileNotFoundError:
        raise BadInput(f"FILE must be a file of configs, got {path}, which is not there") from None
    if not isinstance(found, dict) or not found:
        raise BadTunedFile(f'{path}:1: expected {{"1": {{…}}, "16": {{…}}, …}} by M, got {_short(found)}; {MEND}')
    rows = {}
    for key, fields in found.items():
        match = re.search(rf'"{re.escape(key)}"\s*:', text)
        line = text.count("\n", 0, match.start()) + 1 if match else 1
        if not re.fullmatch(r"[1-9][0-9]*", key):
            raise BadTunedFile(f"{path}:{line}: a key must be M, a whole number from 1 on, got {key!r}; {MEND}")
        if not isinstance(fields, dict):
            raise BadTunedFile(f"{path}:{line}: M={key} must be an object of fields, got {_short(fields)}; {MEND}")
        rows[int(key)] = fields, line
    return rows


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _fault(form: Form, fields: dict[str, Any]) -> str | None:
    """What is wrong with the fields of one M; None if nothing is."""
    lacks, unknown = set(form.needed) - set(fields), set(fields) - {*form.needed, *form.may, *form.besides}
    if lacks or unknown:
        return f"lacks {sorted(lacks)}, has unknown {sorted(unknown)}"
    for name, value in fields.items():
        if why := _bad_value(name, value):
            return why
    if "kernel_type" not in fields:
        return None
    variant = fields["kernel_type"]
    for name, neutral in _of_other_variants(variant).items():
        if fields.get(name, neutral) != neutral:
            return f"{name} of {fields[name]} is of another variant, kernel_type is {variant!r}"
    return f"{variant} needs split_k" if variant.startswith("splitK") and "split_k" not in fields else None


def _bad_value(name: str, value: Any) -> str | None:
    if name == "kernel_type":
        good, said = value in VARIANTS, f"one of {', '.join(VARIANTS)}"
    elif name in _SAID:
        good, said = value == _SAID[name], repr(_SAID[name])
    elif name in ("latency_ms", "tflops"):
        good, said = type(value) in (int, float) and 0 < value < float("inf"), "a number above 0"
    elif name.endswith(("_local", "_shm")):
        good, said = isinstance(value, bool), "true or false"
    else:
        good, said = type(value) is int and value >= 1, "a whole number from 1 on"
    return None if good else f"{name} must be {said}, got {value!r}"
