"""`tilery compare` as a gate: its exit code says whether a kernel got slower."""

import pytest
from typer.testing import CliRunner

from tilery.base import settings
from tilery.cli import app
from tilery.measure.result import Row
from tilery.measure.store import Store


def kept(ratio):
    row = Row("softmax", "triton", "m=1,n=2", "pass", device="GPU", ms=1.0, ms_low=0.9, ms_high=1.1)
    row.ratio, row.ratio_low, row.ratio_high = ratio, ratio - 0.01, ratio + 0.01
    store = Store()
    run = store.start("tilery bench")
    store.add(run, row)
    store.finish(run)
    return run


@pytest.mark.parametrize(("after", "code"), [(0.8, 1), (0.99, 0), (1.3, 0)])
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_a_slower_run_exits_1(tmp_path, form, after, code):
    with settings.override(data_dir=tmp_path):
        done = CliRunner().invoke(app, ["compare", kept(1.0), kept(after), *form])
    assert done.exit_code == code, done.output
