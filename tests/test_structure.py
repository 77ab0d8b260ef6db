"""What docs/structure.md promises a reader: few files for a kernel, one place that launches, public names that stay."""

import ast
import re
import statistics
from functools import cache
from pathlib import Path

import pytest
import torch

import tilery
import tilery.ops
from tilery.core.op import REGISTRY, Op

PACKAGE = Path(tilery.__file__).parent


@cache
def path_of(module):
    """The file of a module of the package; None of what is no module."""
    base = PACKAGE.parent.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def imported(path):
    """Files in ops and languages that a file imports, but for those that are empty."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if path_of(name) else node.module for name in full}
    files = {path_of(name) for name in names if name.startswith(("tilery.ops.", "tilery.languages"))}
    return {file for file in files if file and file.stat().st_size > 200}


def closure(path):
    """The file and all that it imports, directly or not."""
    seen, waiting = {path}, [path]
    while waiting:
        found = imported(waiting.pop()) - seen
        seen |= found
        waiting += found
    return seen


def kernel_files():
    for op in REGISTRY.values():
        if op.package.startswith("tilery."):
            for where in op.kernels.values():
                module = where.partition(":")[0]
                yield path_of(module if "." in module else f"{op.package}.{module}")


def test_a_kernel_is_read_in_a_few_files():
    sizes = [len(closure(path)) for path in kernel_files()]
    assert len(sizes) > 140 and statistics.median(sizes) <= 5 and max(sizes) <= 9


def test_kernels_import_calls_and_not_contracts():
    """A contract is what a kernel is held to: references, cases and peers are none of its business."""
    contracts = {path_of(op.reference.__module__) for op in REGISTRY.values()}
    contracts |= set((PACKAGE / "ops").rglob("contract.py"))
    wrong = {path.name: found for path in set(kernel_files()) if (found := closure(path) & contracts)}
    assert not wrong


LAUNCHES = {  # what starts a kernel, and the one file that may
    r"\.__getitem__\(|\b_?kernel\[": "triton_glue.py",
    r"cuLaunchKernel": "cuda_glue.py",
    r"\bct\.launch\(": "cutile_glue.py",
    r"\bcore_launch\(": "numba_cuda_glue.py",
    r"get_exportable_executable": "tilelang_glue.py",
    r"cupy\.cuda\.Module|RawKernel\(": "cupy_glue.py",
}


@pytest.mark.parametrize(("pattern", "file"), LAUNCHES.items(), ids=LAUNCHES.values())
def test_one_file_a_language_launches(pattern, file):
    found = {path.name for path in PACKAGE.rglob("*.py") if re.search(pattern, path.read_text(encoding="utf-8"))}
    assert found == {file}


def test_public_names_and_schemas_stay():
    """Those of a release; whoever adds an op adds its line."""
    wanted = Path(__file__).with_name("public_names.txt").read_text().splitlines()
    values = {name: getattr(tilery, name) for name in dir(tilery) if name != "__version__"}
    found = [
        f"{name} {getattr(torch.ops.tilery, name).default._schema}" if isinstance(value, Op) else name
        for name, value in values.items()
    ]
    more, gone = sorted(set(found) - set(wanted)), sorted(set(wanted) - set(found))
    assert not gone, "gone or changed:\n" + "\n".join(gone)
    assert not more, "add to tests/public_names.txt:\n" + "\n".join(more)
