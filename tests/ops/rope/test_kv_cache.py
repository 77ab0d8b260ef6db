"""Writing the paged KV cache, bit for bit: slots, skipped tokens, fp8 with its saturation, what is refused."""

import pytest
import torch

import tilery
from tilery.base.errors import BadInput
from tilery.ops.quantize import formats
from tilery.ops.rope import kv_cache

BACKENDS = ["numba", "triton"]


TIES = [
    1.0625, 1.1875, -1.3125, 17, 19, 2**-10, 3 * 2**-10, -5 * 2**-10,  # of e4m3
    1.125, 1.375, -2.25, 2.75, 2**-17, 3 * 2**-17, -5 * 2**-17, 7 * 2**-17,  # of e5m2
]  # fmt: skip


def drawn(**more):
    where = torch.get_default_device()
    return tilery.rope_cache_write_.inputs(
        **{"m": 6, "heads": 2, "kv_heads": 2, "dtype": "fp32", "device": where, "seed": 5} | more
    )


def no_rotation():
    """So that keys are stored as they are."""
    return {"cos": torch.ones(20, 8), "sin": torch.zeros(20, 8)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_goes_to_its_slot_and_nowhere_else(backend):
    given = drawn() | no_rotation()
    slots = torch.tensor([17, -1, 0, 31, 1000, -7])  # the last two lie outside
    before = given["k_cache"].clone()
    tilery.rope_cache_write_(**given | {"slots": slots}, backend=backend)
    for token, slot in ((0, 17), (2, 0), (3, 31)):
        for name in ("k", "v"):
            assert torch.equal(given[f"{name}_cache"][slot // 16, slot % 16], given[name][token])
            before[slot // 16, slot % 16] = given["k"][token]
    assert torch.equal(given["k_cache"], before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per", ["tensor", "head"])
@pytest.mark.parametrize("format", formats.LARGEST)
def test_fp8_is_rounded_to_nearest_even_and_saturates(format, per, backend):
    given = drawn(format=format, per=per, skip=False) | no_rotation()
    for name in ("k", "v"):
        scale = given[f"{name}_scale"].log2_().round_().exp2_()  # divided by a power of two, ties stay ties
        given[name][2] = torch.tensor(TIES)[: given[name].shape[-1]] * scale[:, None]
        given[name][0, 0] = torch.tensor([1e9, -1e9, float("inf"), float("nan"), 0.0, 1e-9, 3e-3, -2.5e-3] * 2)
        given[name][1] *= 1e-3  # small values have fewer bits
    tilery.rope_cache_write_(**given, backend=backend)
    where = given["slots"] // 16, given["slots"] % 16
    for name, first in (("k", 1), ("v", 0)):  # a rotation by no angle makes NaN of 0 · infinity
        cache, scale, largest = given[f"{name}_cache"], given[f"{name}_scale"], formats.LARGEST[format]
        expected = (given[name] / scale[:, None]).clamp(-largest, largest).to(cache.dtype)
        found = cache.float()[where][first:].nan_to_num(7)
        assert torch.equal(found, expected[first:].float().nan_to_num(7))


def test_a_prefill_written_at_once_and_token_by_token_are_the_same():
    given = drawn(m=6, skip=False, format="e4m3")
    whole = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in given.items()}
    tilery.rope_cache_write_(**whole)
    for i in range(6):
        one = {name: given[name][i : i + 1] for name in ("q", "k", "v", "positions", "slots")}
        tilery.rope_cache_write_(**given | one)
    for name in ("q", "k_cache", "v_cache"):
        assert torch.equal(given[name].float(), whole[name].float())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots": torch.zeros(5, dtype=torch.int64)}, r"slots must be \[6\], one per token"),
        ({"k_cache": torch.zeros(3, 24, 2, 16)}, "block_size of 16, 32, 64, 128, 256, got 24"),
        ({"k_cache": torch.zeros(3, 16, 4, 16)}, r"k_cache must be \[blocks, block_size, 2, 16\]"),
        ({"v_cache": torch.zeros(2, 32, 2, 16)}, "v_cache must be as k_cache in shape"),
        ({"v": torch.zeros(6, 1, 16)}, r"v must be \[6, 2, 16\] as k is"),
        ({"k_scale": torch.ones(1)}, "k_scale is for an fp8 cache; one of fp32 takes None"),
    ],
)
def test_refuses_in_a_sentence(change, says):
    with pytest.raises(BadInput, match=says):
        tilery.rope_cache_write_(**drawn() | change)


def test_an_fp8_cache_must_have_scales():
    given = drawn(format="e4m3")
    with pytest.raises(BadInput, match="v_scale must be given for a cache of e4m3"):
        tilery.rope_cache_write_(**given | {"v_scale": None})
    with pytest.raises(BadInput, match=r"k_scale must be \[1\] or \[2\]"):
        tilery.rope_cache_write_(**given | {"k_scale": torch.ones(3)})


def test_the_document_states_what_the_code_checks():
    from pathlib import Path

    text = (Path(__file__).parents[3] / "docs" / "kv_cache.md").read_text(encoding="utf-8")
    *most, last = map(str, kv_cache.BLOCK_SIZES)
    assert f"`block_size` is {', '.join(most)} or {last}" in text
    assert all(f"±{largest:.0f} ({name})" in text for name, largest in formats.LARGEST.items())
