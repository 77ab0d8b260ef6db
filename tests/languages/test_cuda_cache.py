"""The disk cache of CUDA C++ kernels: built once, keyed by all that decides the code, never trusted when damaged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import HANG_S
from tilery.base import settings
from tilery.base.errors import CompileFailed

pytest.importorskip("cuda.bindings", reason="CUDA C++ is not installed: pip install 'tilery[cuda]'")

from tilery.hardware import toolkit
from tilery.languages import cuda_compiler

SOURCE = """#include <cuda_fp16.h>
template <typename T, int N>
__global__ void scale(T* x) { x[threadIdx.x] = T(float(x[threadIdx.x]) * N); }
"""
NAME = "scale<__half, 3>"


@pytest.fixture
def folder(tmp_path):
    with settings.override(cache_dir=tmp_path):
        yield tmp_path / "cuda"


@pytest.fixture
def builds(monkeypatch):
    """The files that went through the compiler."""
    built = []
    build = cuda_compiler._build
    monkeypatch.setattr(cuda_compiler, "_build", lambda *args: built.append(args[-2:]) or build(*args))
    return built


def compiled(source=SOURCE, names=(NAME,), arch="sm_90", **more):
    return cuda_compiler.compile_source(source, names, arch, **more)


def test_built_once_then_read(folder, builds):
    first, second = compiled(), compiled()
    assert first == second
    assert builds == [("source.cu", "sm_90")]
    assert len(list(folder.iterdir())) == 1
    assert toolkit.resources(first.cubin).registers > 0
    assert first.symbols[NAME].encode() in first.cubin
    assert first.symbols[NAME] in first.ptx


@pytest.mark.parametrize(
    "change",
    [
        {"source": SOURCE.replace("* N", "+ N")},
        {"names": ("scale<__half, 4>",)},
        {"arch": "sm_80"},
        {"options": ("--use_fast_math",)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_decides_the_code_is_in_the_key(folder, builds, change):
    compiled()
    compiled(**change)
    assert len(builds) == len(list(folder.iterdir())) == 2


def test_headers_and_compiler_are_in_the_key(folder, builds, monkeypatch):
    compiled()
    name, text = next(iter(cuda_compiler.HEADERS.items()))
    monkeypatch.setitem(cuda_compiler.HEADERS, name, f"{text}\n// changed\n")
    compiled()
    monkeypatch.setattr(cuda_compiler, "_compiler", lambda: [99, 0])
    compiled()
    assert len(builds) == len(list(folder.iterdir())) == 3


def test_a_source_may_include_a_header_of_ours(folder, monkeypatch):
    monkeypatch.setitem(cuda_compiler.HEADERS, "planted.cuh", "constexpr int planted = 5;")
    found = compiled('#include "planted.cuh"\n' + SOURCE.replace("* N", "* planted"))
    assert found.symbols[NAME] in found.ptx


def _truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flip(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


@pytest.mark.parametrize("damage", [_truncate, _flip, lambda data: b"", lambda data: data[:10]])
def test_damaged_entry_is_built_anew(folder, builds, damage):
    first = compiled()
    (entry,) = folder.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    assert compiled() == first
    assert len(builds) == 2
    assert compiled() == first
    assert len(builds) == 2, "the mended entry must serve"


def test_folder_that_cannot_be_written(tmp_path, builds):
    tmp_path.joinpath("cuda").write_text("a file where the folder should be")
    with settings.override(cache_dir=tmp_path), pytest.warns(UserWarning, match="cannot keep compiled kernels"):
        assert compiled().cubin


def test_two_processes_at_once(tmp_path):
    code = f"""
import hashlib
from tilery.languages import cuda_compiler
print(hashlib.sha256(cuda_compiler.compile_source({SOURCE!r}, ({NAME!r},), "sm_90").cubin).hexdigest())
"""
    paths = [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "TILERY_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    answers = [process.communicate(timeout=HANG_S)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    with settings.override(cache_dir=tmp_path / "apart"):
        alone = compiled()
    assert len(set(answers)) == 1 and len(answers[0]) == 64
    with settings.override(cache_dir=tmp_path):
        assert compiled() == alone
    assert [path.suffix for path in tmp_path.joinpath("cuda").iterdir()] == [""], "no half-written file stays"


def test_broken_source_names_file_and_message(folder):
    with pytest.raises(CompileFailed, match=r"norm\.cu for sm_90 does not build[\s\S]*norm\.cu\(3\).*undefined_name"):
        compiled(SOURCE.replace("* N", "* undefined_name"), file="norm.cu")
    assert not folder.exists() or not list(folder.iterdir())


def test_name_that_is_not_there(folder):
    with pytest.raises(CompileFailed, match="scale<int, missing>"):
        compiled(names=("scale<int, missing>",))
