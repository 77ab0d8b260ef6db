"""Two runs compared: a kernel got slower only if the intervals of both say so."""

import pytest
from made_runs import put

from tilery.base.errors import BadInput
from tilery.measure.result import Row
from tilery.pages.compare import compare


def ratio_row(ratio, spread=0.01, **more):
    times = {"ms": 1.0, "ms_low": 0.9, "ms_high": 1.1}
    given = {"ratio": ratio, "ratio_low": ratio - spread, "ratio_high": ratio + spread}
    return Row("softmax", "triton", "m=1,n=2", "pass", **{"device": "GPU"} | times | given | more)


def filled(store, *rows):
    return put(store, rows, f"run-{len(store.runs())}")


@pytest.mark.parametrize(("before", "after", "worse"), [(1.0, 0.9, True), (1.0, 0.97, False), (1.0, 1.2, False)])
def test_a_regression_is_one_only_if_the_interval_says_so(store, before, after, worse):
    (change,) = compare(store, filled(store, ratio_row(before)), filled(store, ratio_row(after)))
    assert change.speed == pytest.approx(after / before) and change.regressed(0.03) is worse and change.by == "ratio"
    wide = compare(store, filled(store, ratio_row(before)), filled(store, ratio_row(after, spread=0.2)))[0]
    assert not wide.regressed(0.03)


def test_runs_of_different_devices_are_not_compared(store):
    with pytest.raises(BadInput, match="no kernel, case and device in common"):
        compare(store, filled(store, ratio_row(1.0)), filled(store, ratio_row(1.0, device="another")))


def test_what_a_tuner_tried_is_not_compared(store):
    tried = ratio_row(1.0, stage="tune")
    with pytest.raises(BadInput, match="nothing to compare"):
        compare(store, filled(store, tried), filled(store, tried))


def test_the_doubt_of_both_runs_counts(store):
    """A tenth slower at the middle, but the first run may as well have been a fifth slower than it says."""
    (change,) = compare(store, filled(store, ratio_row(1.0, spread=0.2)), filled(store, ratio_row(0.9)))
    assert change.low == pytest.approx(0.89 / 1.2) and change.high == pytest.approx(0.91 / 0.8)
    assert not change.regressed(0.03)


def test_what_kernels_are_held_against_is_not_compared(store):
    peer = Row("softmax", "baseline:torch", "m=1,n=2", "pass", device="GPU", ms=1.0, ms_low=0.9, ms_high=1.1)
    runs = [filled(store, ratio_row(1.0), peer) for _ in range(2)]
    assert [change.kernel for change in compare(store, *runs)] == ["triton"]
