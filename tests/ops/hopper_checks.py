"""What tests of attention's kernels by TMA and wgmma share."""

import re

import pytest

from tilery.hardware import device
from tilery.measure.check import check
from tilery.measure.place import place


def softmax_overlaps_products(sass, keys):
    """Between the wait for scores and the one for sums are all exponentials of a block of keys."""
    waits = [m.start() for m in re.finditer(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x[01]", sass)]
    for_scores = next(at for at in waits if sass[at:].startswith("WARPGROUP.DEPBAR.LE gsb0, 0x1"))
    between = sass[for_scores : waits[waits.index(for_scores) + 1]]
    return between.count("MUFU.EX2") >= keys // 2 and between.count("HGMMA") == 0


def flat(given):
    """Arguments of a launch, with those of a params struct in its place."""
    for value in given:
        made = getattr(value, "_made", None)
        yield from (value,) if made is None else (getattr(made, name) or 0 for name, _ in made._fields_)


def card(op):
    where = place(op, "cuda.hopper").device
    if where is None or device.arch(where) != "sm_90":
        pytest.skip("needs a Hopper GPU")
    return where


def runs_here(op):
    """Where the kernel runs: on a card, or in the emulator."""
    where = place(op, "cuda.hopper").device
    if where is None or (where.type != "cpu" and device.arch(where) != "sm_90"):
        pytest.skip("needs a Hopper GPU or the emulator")
    return where


def on_card(op, one, config=None):
    assert check(op, "cuda.hopper", one, card(op), config=config).refused is None
