"""No token is written past the end of a cache, which may be a part of a larger tensor."""

import pytest
import torch

import tilery
from cases import home


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_the_slot_past_the_last_is_not_written(backend):
    where = home(backend)
    k_all, v_all = (torch.full((3, 16, 2, 16), 7.0, device=where) for _ in range(2))
    k_cache, v_cache = k_all[:2], v_all[:2]
    q, k, v = (torch.randn(2, 2, 16, device=where) for _ in range(3))
    cos, sin = torch.ones(4, 8, device=where), torch.zeros(4, 8, device=where)
    positions, slots = torch.zeros(2, dtype=torch.int64, device=where), torch.tensor([32, 31], device=where)
    tilery.rope_cache_write_(q, k, v, k_cache, v_cache, cos, sin, positions, slots, backend=backend)
    assert (k_all[2] == 7).all() and (v_all[2] == 7).all()
    assert torch.equal(k_all[1, 15], k[1]) and torch.equal(v_all[1, 15], v[1])
