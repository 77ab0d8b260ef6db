"""The tuner may choose a library's kernel, where the settings do not leave it out."""

import pytest
from fakes import FakePool, FakeWorker

from tilery.base import settings
from tilery.base.spec import case
from tilery.core.cases import specs_for
from tilery.measure import ceilings
from tilery.measure.store import Store
from tilery.ops import matmul
from tilery.tuning import request
from tilery.tuning.tuner import Tuner

CASE = case(m=24, n=40, k=32, dtype="fp32")
SPECS = specs_for(matmul, CASE, "cpu")


@pytest.mark.parametrize("wanted", [True, False], ids=["with it", "without it"])
def test_the_tuner_may_choose_it(ship, tmp_path, monkeypatch, without_a_gpu, wanted):
    rates = ceilings.Ceilings(1e12, 1e12, 1e12, {"fp32": 1e15}, 1.0)
    monkeypatch.setattr(ceilings, "ceilings", lambda where, **_: rates)
    worker = FakeWorker(lambda candidate: 1.0 if candidate.kernel == "vendor" else 2.0, 0.002)
    with settings.override(vendor=wanted):
        asked = request.request([(matmul, [CASE], [])], None, "1h")
        (done,) = Tuner(asked, FakePool([worker]), store=Store(tmp_path / "runs.sqlite3")).run().tuned
        assert [e.kernel for e in done.entries] == (["vendor", "numba"] if wanted else ["numba"])
        assert matmul.plan(SPECS).kernel == done.entries[0].kernel
    if not wanted:
        (left_out,) = [m for m in done.left_out if m.candidate.kernel == "vendor"]
        assert (left_out.status, left_out.reason) == ("refused", "TILERY_VENDOR=0 leaves it out")
