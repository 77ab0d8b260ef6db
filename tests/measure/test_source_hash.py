"""The hash of a kernel's source changes with the kernel, and with nothing else."""

import shutil

import pytest

import tilery.ops  # noqa: F401  fills the registry
from tilery.core.op import REGISTRY
from tilery.measure import source_hash
from tilery.measure.source_hash import hash_of

PYTHON = '''"""A kernel."""

import triton
from pathlib import Path

BLOCK = 128
SOURCE = Path(__file__).with_name("kernel.cu")


def kernel(x):
    """Return x in blocks."""
    return x[:BLOCK]  # the first
'''
CUDA = """// A kernel.
#include "helper.cuh"
#include <cstdint>
#define STAGES 3

__global__ void kernel(float* x) {
  /* twice */
  x[threadIdx.x] = 2 * load(x + STAGES);  // a * b
  asm volatile("mov.u32 r0, 1; // no comment");
}
"""
SOURCES = {"python": PYTHON, "cuda": CUDA}
HELPER = "#pragma once\n__device__ float load(float* x) { return *x; }\n"


@pytest.fixture(autouse=True)
def read_again():
    yield
    clear()


def clear():
    for kept in (source_hash._used_by_python, source_hash._used_by_cuda, source_hash.normalised):
        kept.cache_clear()


def hashed(folder, python=PYTHON, cuda=CUDA, helper=HELPER, name="kernel"):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / f"{name}.py").write_text(python.replace("kernel.cu", f"{name}.cu"))
    (folder / f"{name}.cu").write_text(cuda)
    (folder / "helper.cuh").write_text(helper)
    clear()
    return hash_of([folder / f"{name}.py"])


@pytest.mark.parametrize(
    ("language", "before", "after"),
    [
        ("python", "  # the first", ""),
        ("python", '"""A kernel."""', '"""Another\n\nway to say it."""'),
        ("python", '    """Return x in blocks."""\n', ""),
        ("python", "import triton", "import triton\nimport triton.language as tl\nfrom typing import TYPE_CHECKING"),
        ("python", "BLOCK = 128", "if TYPE_CHECKING:\n    from tilery.base.spec import Case\nBLOCK = 128"),
        ("python", "x[:BLOCK]", "x[ : BLOCK ]"),
        ("python", "return x[:BLOCK]", "return (\n        x[:BLOCK]\n    )"),
        ("cuda", "// A kernel.\n", ""),
        ("cuda", "/* twice */", "/* two\n times */"),
        ("cuda", "  // a * b", ""),
        ("cuda", "2 * load(x + STAGES)", "2*load( x+STAGES )"),
        ("cuda", " {\n", "\n{\n"),
        ("cuda", "#define STAGES 3", "#define   STAGES 3 // of them"),
        ("cuda", "#include <cstdint>\n", ""),
    ],
)
def test_comments_docstrings_imports_and_format_are_no_change(tmp_path, language, before, after):
    assert before in SOURCES[language]
    changed = {language: SOURCES[language].replace(before, after)}
    assert hashed(tmp_path / "a", **changed) == hashed(tmp_path / "b")


@pytest.mark.parametrize(
    ("language", "before", "after"),
    [
        ("python", "BLOCK = 128", "BLOCK = 256"),
        ("python", "[:BLOCK]", "[BLOCK:]"),
        ("python", "return x", "return -x"),
        ("python", "BLOCK = 128", "BLOCK = 128.0"),
        ("cuda", "2 * load", "3 * load"),
        ("cuda", "STAGES 3", "STAGES 4"),
        ("cuda", "x + STAGES", "x - STAGES"),
        ("cuda", "r0, 1; // no", "r0, 1; // now"),
    ],
)
def test_a_changed_constant_or_operation_is_a_change(tmp_path, language, before, after):
    assert before in SOURCES[language]
    changed = {language: SOURCES[language].replace(before, after)}
    assert hashed(tmp_path / "a", **changed) != hashed(tmp_path / "b")


def test_an_included_file_counts(tmp_path):
    assert hashed(tmp_path / "a", helper=HELPER.replace("*x;", "2 * *x;")) != hashed(tmp_path / "b")
    assert hashed(tmp_path / "a", helper="// loads\n" + HELPER) == hashed(tmp_path / "b")


def test_a_move_is_no_change(tmp_path):
    assert hashed(tmp_path / "a", name="elsewhere") == hashed(tmp_path / "b")


def test_every_kernel_has_one_and_kernels_of_other_files_have_another():
    found = {(op.name, k): source_hash.source_hash(op, k) for op in REGISTRY.values() for k in op.kernels}
    assert all(len(value) == 12 and int(value, 16) >= 0 for value in found.values())
    assert len({found["matmul", k] for k in REGISTRY["matmul"].kernels}) == len(REGISTRY["matmul"].kernels)


def test_the_files_of_a_cuda_kernel_are_its_own_its_cu_file_and_what_that_includes():
    names = {path.name for path in source_hash.closure(source_hash.kernel_file(REGISTRY["matmul"], "cuda.hopper"))}
    assert {"hopper.py", "hopper.cu", "hopper_tiles.py", "wgmma.cuh", "common.cuh", "tensor_maps.py"} <= names
    assert not {"matmul.cu", "attention.cu", "contract.py"} & names
