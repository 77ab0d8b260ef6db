"""What docs/structure.md promises a reader: few files for a kernel, one place that launches, public names that stay."""

import re
import statistics
from pathlib import Path

import pytest
import torch

import tilery
import tilery.ops
from tilery.core.op import REGISTRY, Op
from tilery.measure import source_hash

PACKAGE = Path(tilery.__file__).parent


def kernel_files():
    for op in REGISTRY.values():
        if op.package.startswith("tilery."):
            yield from (source_hash.kernel_file(op, kernel) for kernel in op.kernels)


def python_closure(path):
    """Python files to read for a kernel: those that hold more than a docstring."""
    return {file for file in source_hash.closure(path) if file.suffix == ".py" and file.stat().st_size > 200}


COMPOSED = "attention_cascade"  # of the kernels of three other ops, each of which is read on its own


def test_a_kernel_is_read_in_a_few_files():
    composed = {source_hash.kernel_file(REGISTRY[COMPOSED], kernel) for kernel in REGISTRY[COMPOSED].kernels}
    sizes = {path: len(python_closure(path)) for path in kernel_files()}
    each = [sizes[path] for path in kernel_files()]
    assert len(each) > 140 and statistics.median(each) <= 5
    assert max(sizes[path] for path in composed) <= 11
    assert max(size for path, size in sizes.items() if path not in composed) <= 9


def test_kernels_import_calls_and_not_contracts():
    """A contract is what a kernel is held to: references, cases and peers are none of its business."""
    contracts = {source_hash.module_file(op.reference.__module__) for op in REGISTRY.values()}
    contracts |= set((PACKAGE / "ops").rglob("contract.py"))
    wrong = {path.name: found for path in set(kernel_files()) if (found := source_hash.closure(path) & contracts)}
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
