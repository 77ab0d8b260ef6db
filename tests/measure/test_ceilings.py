"""What the machine can do: measured once, kept, and a roof over every cost."""

import json

import pytest
import torch

from tilery.base import settings
from tilery.base.spec import Cost
from tilery.measure import ceilings, timing
from tilery.measure.ceilings import Ceilings

CPU = torch.device("cpu")
KNOWN = Ceilings(read=4e9, copy=2e9, write=1e9, flops={"fp32": 1e12}, launch_us=1.0)


def test_they_are_measured_once_and_kept(tmp_path, monkeypatch):
    measured = []

    def measure(where, say):
        measured.append(where)
        return Ceilings(1e9 * len(measured), 1e9, 1e9, {"fp32": 1e12}, 1.0)

    monkeypatch.setattr(ceilings, "_settled", measure)
    with settings.override(data_dir=tmp_path):
        assert ceilings.ceilings(CPU) == ceilings.ceilings(CPU) == Ceilings(1e9, 1e9, 1e9, {"fp32": 1e12}, 1.0)
        assert ceilings.ceilings(CPU, measure=True).read == 2e9
        assert ceilings.ceilings(CPU).read == 2e9
    (kept,) = (tmp_path / "ceilings").iterdir()
    assert json.loads(kept.read_text())["read"] == 2e9


@pytest.mark.parametrize("text", ["nonsense", '{"bandwidth": 1e9, "flops": {}}'])  # the second is of an older tilery
def test_what_cannot_be_read_is_measured_again_and_said(tmp_path, monkeypatch, text):
    monkeypatch.setattr(ceilings, "_measured", lambda where, say: KNOWN)
    with settings.override(data_dir=tmp_path):
        ceilings.ceilings(CPU)
        (kept,) = (tmp_path / "ceilings").iterdir()
        kept.write_text(text)
        with pytest.warns(UserWarning, match="cannot be read .* measuring again"):
            assert ceilings.ceilings(CPU) == KNOWN
        assert ceilings.ceilings(CPU) == KNOWN


def test_what_cannot_be_kept_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(ceilings, "_measured", lambda where, say: KNOWN)
    (tmp_path / "file").write_text("")
    with settings.override(data_dir=tmp_path / "file"), pytest.warns(UserWarning, match="cannot keep"):
        assert ceilings.ceilings(CPU) == KNOWN


def test_rates_are_what_was_moved_and_multiplied_over_the_time_it_took(tmp_path, monkeypatch):
    """Every measurement takes a millisecond here."""
    called = []

    def best_ms(call, where):
        called.append(call())
        return 1.0

    monkeypatch.setattr(timing, "best_ms", best_ms)
    with settings.override(data_dir=tmp_path):
        found = ceilings.ceilings(CPU)
    moved = 4 * 2**24  # bytes of the tensor
    assert (found.read, found.write, found.copy) == pytest.approx((1e3 * moved, 1e3 * moved, 2e3 * moved))
    assert found.flops == pytest.approx(dict.fromkeys(("fp32", "bf16"), 1e3 * 2 * 1024**3))
    assert found.launch_us == pytest.approx(1e3) and all(isinstance(result, torch.Tensor) for result in called)


def passes(monkeypatch, tmp_path, *reads):
    """What is found where one pass after another reads so fast, and what was said meanwhile."""
    left, said = [1e9 * read for read in reads], []

    def measured(where, say):
        say("read")
        return Ceilings(left.pop(0), 1e9, 1e9, {"fp32": 1e12}, 1.0)

    monkeypatch.setattr(ceilings, "_measured", measured)
    with settings.override(data_dir=tmp_path):
        return ceilings.ceilings(CPU, say=said.append).read / 1e9, len(reads) - len(left), said


def test_they_are_the_best_of_passes_until_one_more_adds_little(tmp_path, monkeypatch):
    assert passes(monkeypatch, tmp_path / "idle", 2.0, 2.02, 9.0)[:2] == (2.02, 2)
    assert passes(monkeypatch, tmp_path / "busy at first", 1.0, 2.0, 2.0, 9.0)[:2] == (2.0, 3)
    best, count, said = passes(monkeypatch, tmp_path / "never settles", 1.0, 2.0, 3.0, 4.0, 5.0)
    assert (best, count) == (4.0, 4) and said[0] == "measuring this machine's ceilings: read" and len(said) == 4


def test_a_machine_that_reads_below_its_copies_is_measured_again_and_then_said_to_be_busy(tmp_path, monkeypatch):
    assert passes(monkeypatch, tmp_path / "once", 0.5, 0.5, 1.5, 1.5)[:2] == (1.5, 4)
    with pytest.warns(UserWarning, match="read 0.5 GB/s and copied 1.0 GB/s, so it was busy"):
        passes(monkeypatch, tmp_path / "always", 0.5, 0.5, 0.5, 0.5)


def test_what_was_too_low_is_raised_and_never_lowered(tmp_path, monkeypatch):
    found = [KNOWN, Ceilings(5e9, 1e9, 1e9, {"fp32": 2e12}, 2.0)]
    monkeypatch.setattr(ceilings, "_settled", lambda where, say: found.pop(0))
    ceilings.raised.cache_clear()
    with settings.override(data_dir=tmp_path):
        ceilings.ceilings(CPU)
        assert ceilings.raised(CPU) == ceilings.ceilings(CPU) == Ceilings(5e9, 2e9, 1e9, {"fp32": 2e12}, 1.0)
    ceilings.raised.cache_clear()


@pytest.mark.parametrize(
    ("cost", "ms"),
    [
        (Cost(0, 4 * 10**6, 0), 1.0),  # read alone
        (Cost(0, 0, 10**6), 1.0),  # written alone
        (Cost(0, 10**6, 10**6), 1.0),  # a copy
        (Cost(0, 5 * 10**6, 10**6), 2.0),  # a copy of a million, and four million more to read
        (Cost(10**10, 10**6, 10**6), 10.0),  # arithmetic is the slower
    ],
)
def test_the_roof_is_the_slower_of_memory_and_arithmetic(cost, ms):
    assert KNOWN.roof_ms(cost, "fp32") == pytest.approx(ms)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_both_formats_of_fp8_are_held_to_its_products(format):
    known = Ceilings(4e9, 2e9, 1e9, flops={"fp32": 1e12, "bf16": 5e12, "fp8": 2e12}, launch_us=1.0)
    assert known.peak(format) == 2e12 and known.arithmetic_ms(Cost(2 * 10**12, 0, 0), format) == pytest.approx(1e3)
    assert KNOWN.peak(format) == 1e12  # where there is no fp8, the best there is
