"""What Numba's kernels stand on: fp8 as torch rounds it, but for saturation; code that is kept on disk."""

import pytest
import torch

pytest.importorskip("numba")
from numba import prange

from tilery.backends import numba_glue
from tilery.backends.numba_glue import load, store

FORMATS = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])


@numba_glue.jit
def _copy(source, target, n, source_type, target_type):
    for i in range(n):
        store(target, i, load(source, i, source_type), target_type)


def copied(source, dtype):
    target = torch.empty(source.shape, dtype=dtype)
    tags = numba_glue.STORAGE[source.dtype], numba_glue.STORAGE[dtype]
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
        store(target, i, numba_glue.f32(2), dtype)


def test_code_on_disk_is_looked_at_without_compiling_it_again():
    tensors = (torch.empty(3),)
    made = numba_glue.compile(_fill, tensors, 3)
    assert "define" in made.code["ir"] and "ret" in made.code["asm"]
    anew = numba_glue.kernel(_fill.py_func)  # as another process would have it
    assert numba_glue.compile(anew, tensors, 3).code["asm"] == made.code["asm"]
    assert list(anew.stats.cache_hits.values()) == [1] and not anew.stats.cache_misses
