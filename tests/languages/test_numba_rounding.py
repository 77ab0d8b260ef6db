"""bf16 as Numba's kernels round it: to nearest even, as torch does, and NaN stays NaN whatever its bits."""

import pytest
import torch

pytest.importorskip("numba")

from tilery.languages import numba_elements, numba_glue
from tilery.languages.numba_elements import load, store


@numba_glue.jit
def _copy(source, target, n, source_type, target_type):
    for i in range(n):
        store(target, i, load(source, i, source_type), target_type)


def rounded(source):
    target = torch.empty(source.shape, dtype=torch.bfloat16)
    tags = numba_elements.STORAGE[torch.float32], numba_elements.STORAGE[torch.bfloat16]
    _copy(source.data_ptr(), target.data_ptr(), source.numel(), *tags)
    return target


def test_bf16_is_rounded_to_nearest_even():
    """Every tie between neighbours, and what lies right beside it."""
    high = torch.arange(0, 0x7F80, 7, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (high[:, None] | low).flatten().view(torch.float32)
    values = torch.cat([values, -values])
    assert torch.equal(rounded(values).view(torch.int16), values.to(torch.bfloat16).view(torch.int16))


def test_every_nan_stays_one_in_bf16():
    """Those whose low bits alone tell them from infinity, and those that would overflow if they were rounded."""
    bits = [0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFFFFFF, 0xFF800001 - 2**32, 0xFFFFFFFF - 2**32]
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert values.isnan().all() and rounded(values).isnan().all()
