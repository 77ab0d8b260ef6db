"""Elements as Numba's kernels read and write them: fp8 and bf16 rounded as torch rounds, but for fp8's saturation."""

import pytest
import torch

pytest.importorskip("numba")

from tilery.languages import numba_glue
from tilery.languages.numba_elements import STORAGE, load, store

FORMATS = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])


@numba_glue.jit
def _copy(source, target, n, source_type, target_type):
    for i in range(n):
        store(target, i, load(source, i, source_type), target_type)


def copied(source, dtype):
    target = torch.empty(source.shape, dtype=dtype)
    _copy(source.data_ptr(), target.data_ptr(), source.numel(), STORAGE[source.dtype], STORAGE[dtype])
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


def test_bf16_is_rounded_to_nearest_even():
    """Every tie between neighbours, and what lies right beside it."""
    high = torch.arange(0, 0x7F80, 7, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (high[:, None] | low).flatten().view(torch.float32)
    values = torch.cat([values, -values])
    found = copied(values, torch.bfloat16)
    assert torch.equal(found.view(torch.int16), values.to(torch.bfloat16).view(torch.int16))


def test_every_nan_stays_one_in_bf16():
    """Those whose low bits alone tell them from infinity, and those that would overflow if they were rounded."""
    bits = [0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFFFFFF, 0xFF800001 - 2**32, 0xFFFFFFFF - 2**32]
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert values.isnan().all() and copied(values, torch.bfloat16).isnan().all()
