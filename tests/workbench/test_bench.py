"""Rows of one case: what was checked, timed, wrong or impossible."""

import re
import weakref

import pytest
import torch

import plant
from tilery.base import settings
from tilery.base.spec import case
from tilery.core.op import REGISTRY
from tilery.measure import ceilings, timing
from tilery.measure.ceilings import Ceilings
from tilery.measure.timing import Depth
from tilery.workbench import bench
from tilery.workbench.bench import Unit

SMALL = case(m=64, n=256, dtype="fp32")
SLOW = Ceilings(read=1e15, copy=1e15, write=1e15, flops={"fp32": 1e18}, launch_us=1.0)  # nothing is faster


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch):
    monkeypatch.setattr(ceilings, "ceilings", lambda where: SLOW)
    monkeypatch.setattr(ceilings, "raised", lambda where: ceilings.ceilings(where))  # measured again, they are the same


def rows(op, kernels=("numba",), peers=("baseline:torch",), given=SMALL):
    unit = Unit(op, given, "cpu", tuple(kernels), tuple(peers), Depth(rounds=6, turn_ms=1.0, warm_s=0.0))
    return {row.kernel: row for row in bench.measure(unit)}


def test_what_runs_is_timed_beside_its_peers():
    found = rows("softmax")
    assert list(found) == ["baseline:torch", "numba", "control:torch", "control:copy"]
    for row in found.values():
        assert row.status == "pass" and row.ms_low <= row.ms <= row.ms_high and row.timed_by == "clock"
        assert row.gbps == pytest.approx(2 * 64 * 256 * 4 / row.ms / 1e6) and row.roof > 0 and row.inputs == "cold"
        assert row.bytes == 2 * 64 * 256 * 4 and row.dtype == "fp32"
    assert found["baseline:torch"].ratio == 1.0 and found["numba"].error < 1e-6
    assert found["baseline:torch"].error < 1e-6


def test_defaults_are_the_kernel_and_config_of_an_untuned_call(monkeypatch):
    op, depth = REGISTRY["softmax"], Depth(rounds=6, turn_ms=1.0, warm_s=0.0)
    asked = op, list(op.kernels), ["baseline:torch"], [SMALL], depth
    unit, all_of_them = bench.units(*asked, defaults=True)[0], bench.units(*asked)[0]
    if unit.device == "cpu":
        assert unit.kernels == ("numba",)
    assert len(unit.kernels) == 1 and not unit.tuned and all_of_them.tuned
    seen = []
    monkeypatch.setattr(bench, "_measured", lambda unit, progress: iter([seen.append(settings.get().tuned)]))
    for each in (unit, all_of_them):
        list(bench.measure(each))
    assert seen == [False, True]


def test_arithmetic_has_no_copy_beside_it(monkeypatch):
    monkeypatch.setattr(ceilings, "ceilings", lambda where: Ceilings(1e15, 1e15, 1e15, {"fp32": 1.0}, 1.0))
    assert "control:copy" not in rows("softmax")


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    plant.after(monkeypatch, REGISTRY["softmax"], "numba", torch.Tensor.zero_)
    row = rows("softmax")["numba"]
    assert row.status == "fail" and row.ms is None and "output 0 has error" in row.reason


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.zeros_like(x), "output 0 has error 1.00e[+]00"),
        (lambda x: torch.softmax(x, -1)[1:], r"output 0 must be \[64, 256\], is \[63, 256\]"),
        (lambda x: (x, x), "should give 1 outputs, gave 2"),
        (lambda x: x.softmax(-1).add_(x.zero_()), "wrote its input x"),
        (lambda x: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda x: torch.empty_like(x), "output 0 has error"),  # what it leaves unwritten is poisoned
    ],
)
def test_a_wrong_peer_is_not_timed(monkeypatch, function, reason):
    monkeypatch.setitem(REGISTRY["softmax"].baselines, "baseline:liger", function)
    found = rows("softmax", peers=("baseline:torch", "baseline:liger"))
    row = found["baseline:liger"]
    assert row.status == "fail" and row.ms is None and re.search(reason, row.reason), row.reason
    assert found["numba"].ms > 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_peer_that_is_off_by_a_tenth_is_not_timed(monkeypatch, dtype):
    """It may round more than we do, not compute something else."""
    op, given = REGISTRY["softmax"], case(m=64, n=256, dtype=dtype)
    monkeypatch.setitem(op.baselines, "baseline:liger", lambda x: torch.softmax(x, -1) * 1.1)
    found = rows("softmax", peers=("baseline:torch", "baseline:liger"), given=given)
    assert found["baseline:liger"].status == "fail" and found["baseline:torch"].status == "pass"


def test_a_peer_in_fp32_is_held_to_fp32(monkeypatch):
    monkeypatch.setitem(REGISTRY["softmax"].baselines, "baseline:liger", lambda x: torch.softmax(x, -1) * 1.001)
    assert rows("softmax", peers=("baseline:torch", "baseline:liger"))["baseline:liger"].status == "fail"


@pytest.mark.parametrize("arithmetic", [True, False])
def test_where_power_is_the_limit_arms_are_timed_in_pairs(monkeypatch, arithmetic):
    """There each arm stands between two turns of torch; where memory is the limit all take turns."""
    limits = Ceilings(1e15, 1e15, 1e15, {"fp32": 1.0 if arithmetic else 1e18}, 1.0)
    monkeypatch.setattr(ceilings, "ceilings", lambda where: limits)
    time_arms, seen = timing.time_arms, []

    def spying(arms, sets, where, depth, base, paired, *rest):
        seen.append((base, paired, set(arms)))
        return time_arms(arms, sets, where, depth, base, paired, *rest)

    monkeypatch.setattr(timing, "time_arms", spying)
    rows("softmax")
    arms = {"baseline:torch", "control:torch", "numba"} | (set() if arithmetic else {"control:copy"})
    assert seen == [("baseline:torch", arithmetic, arms)]


def test_every_set_is_called_with_its_own_inputs():
    """And its output is held while the others' are made: memory that is freed would be used again, from the cache."""
    made = []

    def call(x):
        made.append(weakref.ref(found := x + 0))
        return found

    sets = [(torch.full((2,), float(i)),) for i in range(3)]
    arm = bench.rotating(call, sets)
    for i in (0, 1, 2):
        arm(i)
    assert [ref()[0].item() for ref in made] == [0.0, 1.0, 2.0]


def test_a_gpus_inputs_are_several_times_its_cache():
    """A small problem gets as many sets as fill it, a large one two; on a CPU the caches are overwritten instead."""
    op, gpu = REGISTRY["softmax"], torch.device("cuda", 0)

    def drawn(m):
        return lambda seed: (torch.full((m, 1024), float(seed)),)

    def count(m, where=gpu, cold=True):
        sets = bench.input_sets(op, drawn(m), where, cold)
        assert [s[0][0, 0].item() for s in sets] == list(range(len(sets)))
        return len(sets)

    assert count(1024) == 32  # 8 MiB read and written
    assert count(2**16) == 2 and count(1024, cold=False) == count(1024, torch.device("cpu")) == 1


def test_rates_are_of_the_least_an_op_needs():
    row = rows("softmax")["numba"]
    op = REGISTRY["softmax"]
    cost = op.cost(op.call(op.specs(bench.drawn(op, SMALL, torch.device("cpu"), 0))))
    assert row.tflops == pytest.approx(cost.flops / row.ms / 1e9)
    assert row.gbps == pytest.approx(cost.bytes / row.ms / 1e6)
    assert row.roof == pytest.approx(SLOW.roof_ms(cost, "fp32") / row.ms)


def test_a_time_below_the_roof_is_a_measurement_error(monkeypatch):
    real = Ceilings(read=1e3, copy=1e3, write=1e3, flops={"fp32": 1e18}, launch_us=1.0)  # a kilobyte a second
    monkeypatch.setattr(ceilings, "ceilings", lambda where: real)
    row = rows("softmax")["numba"]
    assert row.status == "fail" and row.ms is None and row.ratio is None and row.samples
    assert row.reason.startswith("a measurement error, not a speed")


def test_a_ceiling_that_was_too_low_is_measured_again(monkeypatch):
    slow = Ceilings(read=1e3, copy=1e3, write=1e3, flops={"fp32": 1e18}, launch_us=1.0)
    monkeypatch.setattr(ceilings, "ceilings", lambda where: slow)
    monkeypatch.setattr(ceilings, "raised", lambda where: SLOW)
    row = rows("softmax")["numba"]
    assert row.status == "pass" and row.roof < 1


def test_a_kernel_that_turns_wrong_while_it_is_timed_is_found(monkeypatch):
    calls = []

    def turns_wrong(y):
        calls.append(1)
        if len(calls) > 5:
            y.zero_()

    plant.after(monkeypatch, REGISTRY["softmax"], "numba", turns_wrong)
    row = rows("softmax")["numba"]
    assert row.status == "fail" and row.reason.startswith("right before it was timed, not after: softmax numba")


def test_the_control_is_the_baseline_timed_once_more(monkeypatch):
    op, calls = REGISTRY["softmax"], []

    def counted(x):
        calls.append(1)
        return torch.softmax(x, -1)

    monkeypatch.setitem(op.baselines, "baseline:torch", counted)
    found = rows("softmax")
    # Two arms, two calls a turn: warmed up in one, six rounds there and back; checked twice.
    assert len(calls) == 2 * 2 * (1 + 12) + 2
    base, control = found["baseline:torch"], found["control:torch"]
    assert len(base.samples) == len(control.samples) == 6 and base.samples != control.samples
    assert control.ratio_low <= control.ratio <= control.ratio_high


def test_without_torch_there_is_no_ratio():
    found = rows("softmax", peers=())
    assert list(found) == ["numba", "control:copy"] and found["numba"].ratio is None and found["numba"].ms > 0


def test_a_refusal_is_a_row_with_its_sentence(monkeypatch):
    plant.refusing(monkeypatch, REGISTRY["softmax"], "numba", "not on Sundays")
    row = rows("softmax")["numba"]
    assert (row.status, row.reason) == ("refused", "not on Sundays")


def test_what_fails_outside_the_arms_is_blamed_on_none():
    said = []
    unit = Unit("softmax", SMALL, "cpu", ("numba",), ("baseline:torch",), Depth(rounds=6, turn_ms=1.0, warm_s=0.0))
    list(bench.measure(unit, lambda arm, what: said.append((arm, what))))
    drawing = said.index(("", "drawing inputs"))
    assert all(what == "checking" for _, what in said[:drawing])
    assert said[drawing + 1] == ("baseline:torch", "first calls")
