"""What Numba's kernels stand on: fp8 as torch rounds it, but for saturation; code that is kept on disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")
from numba import prange

from tilery.languages import numba_elements, numba_glue
from tilery.languages.numba_elements import f32, load, store

FORMATS = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])


@numba_glue.jit
def _copy(source, target, n, source_type, target_type):
    for i in range(n):
        store(target, i, load(source, i, source_type), target_type)


def copied(source, dtype):
    target = torch.empty(source.shape, dtype=dtype)
    tags = numba_elements.STORAGE[source.dtype], numba_elements.STORAGE[dtype]
    _copy(source.data_ptr(), target.data_ptr(), source.numel(), *tags)
    return target


@FORMATS
def test_every_fp8_value_is_read_as_torch_reads_it(dtype):
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert torch.equal(copied(values, torch.float32).nan_to_num(1.5), values.float().nan_to_num(1.5))


@FORMATS
def test_fp8_is_rounded_as_torch_rounds_it_and_saturates(dtype):
    known = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    known = known[known.isfinite()].sort().values
    halves = (known[1:] + known[:-1]) / 2  # ties
    near = torch.cat([halves.nextafter(known[1:]), halves.nextafter(known[:-1])])
    values = torch.cat([known, halves, near, torch.randn(4096) * 100, torch.randn(4096) * 1e-3, torch.tensor([1e-30])])
    assert torch.equal(copied(values, dtype).view(torch.uint8), values.to(dtype).view(torch.uint8))
    largest = torch.finfo(dtype).max
    beyond = torch.tensor([1e6, -1e6, float("inf"), -float("inf"), largest * 1.2])
    assert copied(beyond, dtype).float().tolist() == [largest, -largest, largest, -largest, largest]
    assert copied(torch.tensor([float("nan"), -float("nan")]), dtype).float().isnan().all()


@numba_glue.kernel
def _fill(threads, target, n, dtype):
    for i in prange(n):
        store(target, i, numba_elements.f32(2), dtype)


def test_code_on_disk_is_looked_at_without_compiling_it_again():
    tensors = (torch.empty(3),)
    made = numba_glue.compile(_fill, tensors, 3)
    assert "define" in made.code["ir"] and "ret" in made.code["asm"]
    anew = numba_glue.kernel(_fill.py_func)  # as another process would have it
    assert numba_glue.compile(anew, tensors, 3).code["asm"] == made.code["asm"]
    assert list(anew.stats.cache_hits.values()) == [1] and not anew.stats.cache_misses


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:-9] + bytes(9), lambda b: b""])
def test_damaged_code_on_disk_is_built_anew(suffix, damage):
    """Truncated, garbled or empty: the call must not see a pickle's or LLVM's error, then or ever after."""
    tensors = (torch.empty(3),)
    numba_glue.launch(_fill, False, tensors, 3)
    kept = sorted(Path(_fill.stats.cache_path).glob(f"test_numba_glue._fill-*.{suffix}"))
    assert kept
    for path in kept:
        path.write_bytes(damage(path.read_bytes()))
    again, after = (numba_glue.kernel(_fill.py_func) for _ in range(2))  # as two other processes would have it
    numba_glue.launch(again, False, tensors, 3)
    assert tensors[0].tolist() == [2.0] * 3 and sum(again.stats.cache_misses.values()) == 1
    numba_glue.launch(after, False, tensors, 3)
    assert sum(after.stats.cache_hits.values()) == 1, "what was damaged was not replaced"
    assert all(numba_glue._read(str(path)) for path in kept)  # raises for a damaged one


def test_a_full_disk_costs_the_cache_and_not_the_call(monkeypatch):
    def full(self, path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba_glue._HashedFiles, "_write", full)
    one, tensors = (
        numba_glue.kernel(lambda threads, target, n, dtype: store(target, 0, f32(n), dtype)),
        (torch.zeros(1),),
    )
    with pytest.warns(UserWarning, match="cannot keep compiled kernels, each process builds them: .*No space left"):
        numba_glue.launch(one, False, tensors, 5)
    assert tensors[0].item() == 5


def test_numba_without_its_compiler_is_a_refusal():
    code = (
        "import torch, tilery\n"
        "try: tilery.rms_norm(torch.randn(3, 8), torch.randn(8), backend='numba')\n"
        "except tilery.base.errors.NoBackend as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "NUMBA_DISABLE_JIT is set: unset it before Python starts" in run.stdout
