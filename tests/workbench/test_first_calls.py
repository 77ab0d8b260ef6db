"""First calls in several processes: all are made, and one that fails costs nothing but itself."""

import pytest

from processes import package
from tilery.base.spec import case
from tilery.measure.timing import Depth
from tilery.workbench import first_calls
from tilery.workbench.bench import Unit

QUICK = Depth(rounds=6, turn_ms=1.0, warm_s=0.0)
PLUGIN = """
import os, pathlib
from tilery.core.op import REGISTRY

def noted(x):
    pathlib.Path(os.environ["NOTED"], f"{os.getpid()}-{x.shape[0]}").touch()
    return x.softmax(-1)

def ends_badly(x):
    os._exit(3)

def refuses(x):
    raise RuntimeError("not today")

REGISTRY["softmax"].baselines |= {
    "baseline:liger": noted, "baseline:quack": ends_badly, "baseline:tilegym": refuses,
}
"""


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """Where an arm of the plug-in notes its calls: a file for each process and number of rows."""
    path = package(tmp_path, "[tilery.ops]\nplanted = planted.peers\n", planted={"peers": PLUGIN})
    monkeypatch.setenv("PYTHONPATH", path)
    folder = tmp_path / "noted"
    folder.mkdir()
    monkeypatch.setenv("NOTED", str(folder))
    return folder


def unit(m, *peers, device="cpu"):
    return Unit("softmax", case(m=m, n=64, dtype="fp32"), device, (), peers, QUICK)


def test_every_arm_is_called_whatever_the_others_do(noted):
    arms = ["baseline:liger"] * 3 + ["baseline:quack", "baseline:tilegym"] + ["baseline:liger"] * 3
    jobs, said = [(unit(m, arm), arm) for m, arm in enumerate(arms, 1)], []
    assert first_calls.call_all(jobs, said.append, processes=2) == len(said) == 8
    calls = [path.name.split("-") for path in noted.iterdir()]
    assert sorted(rows for _, rows in calls) == ["1", "2", "3", "6", "7", "8"]
    assert len({process for process, _ in calls}) >= 2


def test_few_arms_are_left_to_the_process_that_times(noted):
    assert first_calls.call_all([(unit(1), "baseline:liger")] * 5, lambda text: None, processes=8) == 0
    assert not list(noted.iterdir())


def test_arms_of_a_cpu_are_left_out(monkeypatch):
    seen = []
    monkeypatch.setattr(first_calls, "call_all", lambda jobs, say, processes: seen.extend(jobs))
    first_calls.make([unit(1, "baseline:torch"), on_gpu := unit(2, "baseline:torch", device="cuda:0")], print)
    assert seen == [(on_gpu, "baseline:torch")]
