"""Which results Numba moves past the caches: whole lines alone, or the store that does it would fault."""

import pytest
import torch

from tilery import languages

if why := languages.missing("numba"):
    pytest.skip(why, allow_module_level=True)

from tilery.languages.numba_elements import STORAGE
from tilery.languages.numba_stream import LINE, too_large

FP32 = STORAGE[torch.float32]


@pytest.mark.parametrize("shift", [4, 16, 32])
def test_a_result_that_does_not_begin_on_a_line_is_not_moved(shift):
    """Only the address is looked at: nothing lies there."""
    assert too_large(64 * LINE, 2**20, 256, 0, FP32)
    assert not too_large(64 * LINE + shift, 2**20, 256, 0, FP32)
