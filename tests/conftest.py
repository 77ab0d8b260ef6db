"""Set-up for every test: Triton interprets where there is no GPU, and state lives in a folder of this run's own."""

import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # before torch: two workers' spinning threads would starve each other
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported
    os.environ.setdefault("TILERY_EMULATE", "1")
_OWNS_STATE = "TILERY_TEST_STATE" not in os.environ  # the workers of xdist inherit it
_STATE = Path(os.environ["TILERY_TEST_STATE"] if not _OWNS_STATE else tempfile.mkdtemp(prefix="tilery-tests-"))
os.environ["TILERY_TEST_STATE"] = str(_STATE)
os.environ["TILERY_DATA_DIR"] = str(_STATE / "data")
os.environ["TILERY_CACHE_DIR"] = str(_STATE / "cache")
if "PYTHONPATH" in os.environ:  # tests start processes in other folders
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["COLUMNS"] = "120"  # as wide as what is piped, whatever terminal the tests are started in
os.environ.pop("TILERY_CONFIG_DIR", None)
os.environ.pop("TILERY_EXPLAIN", None)

import tilery.ops  # noqa: E402, F401  fills the registry, whichever test runs alone
from gpu_context import pytest_runtest_logfinish  # noqa: E402, F401  pytest looks for it here
from tilery.base import settings  # noqa: E402
from tilery.core import tuned  # noqa: E402
from tilery.core.op import Op  # noqa: E402
from tilery.measure import ceilings  # noqa: E402
from tilery.measure.compile import Compiler  # noqa: E402
from tilery.measure.store import git_state  # noqa: E402

# Of this machine's CPU they are not measured, which takes long and says less while the tests run: nothing is faster.
ceilings.keep(torch.device("cpu"), ceilings.Ceilings(1e13, 1e13, 1e13, {"fp32": 1e18, "bf16": 1e18}, 1.0))
TRITON_36 = Path(sys.prefix) / "triton-3.6.0"


def pytest_addoption(parser):
    parser.addoption("--fuzz-calls", type=int, default=10, help="random calls of each kernel (tests/fuzz)")
    commit = (git_state() or {"commit": "none"})["commit"]  # other calls for every commit, the same for each run of it
    parser.addoption("--fuzz-seed", default=commit[:8], help="what they are drawn from; else the commit")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_unconfigure():
    if _OWNS_STATE:
        shutil.rmtree(_STATE, ignore_errors=True)


@pytest.fixture(autouse=True)
def _give_memory_back():
    """Free what a test with rows far apart has left in torch's cache: the workers share one GPU."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture
def without_a_gpu(monkeypatch):
    """A machine without one, whatever this one has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """Folders of tuned configs of this test's own, the user's and the shipped; ships entries of an op for a device."""

    def write(op, slug, *entries):
        made, path = tuned.write(op, slug, entries, tmp_path / "made"), op.folder / "tuned" / slug / f"{op.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        made.rename(path)
        tuned.reload()
        return path

    with settings.override(config_dir=tmp_path / "tuned"), monkeypatch.context() as patch:
        patch.setattr(Op, "folder", property(lambda op: tmp_path / "ops" / op.name))
        tuned.reload()
        yield write
    tuned.reload()


@pytest.fixture(scope="session")
def compiler():
    with Compiler() as child:
        yield child


@pytest.fixture(scope="session")
def compiler_36():
    """A compiler with Triton 3.6.0, which users of torch 2.11 have; installed beside this environment on first use."""
    if importlib.metadata.version("triton") == "3.6.0":
        with Compiler() as child:
            yield child
        return
    if not TRITON_36.exists():
        partial = Path(tempfile.mkdtemp(dir=TRITON_36.parent))
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(partial), "triton==3.6.0"]
        subprocess.run(command, check=True)
        try:
            partial.rename(TRITON_36)
        except OSError:  # another worker was first
            shutil.rmtree(partial)
    with Compiler(pythonpath=TRITON_36) as child:
        yield child


def pytest_terminal_summary(terminalreporter):
    """What the compilers made: the record that a change of registers or spills is seen against."""
    made = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in getattr(report, "user_properties", []):
            if name == "resources":
                made[value[0]] = value[1]
    if made:
        terminalreporter.section("compiled: registers, spilled bytes, shared bytes")
        for what in sorted(made):
            terminalreporter.write_line(f"{what:<48} {made[what]}")
