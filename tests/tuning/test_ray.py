"""Many GPUs: Ray's real cluster on this machine, whose GPUs are numbers only; kernels run on the CPU."""

import contextlib
import json
import os
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray", reason="pip install 'tilery[ray]'")

from processes import HANG_S, wait_for  # noqa: E402
from tilery.base import settings  # noqa: E402
from tilery.base.errors import BadInput, ToolMissing  # noqa: E402
from tilery.base.spec import case  # noqa: E402
from tilery.core.cases import specs_for  # noqa: E402
from tilery.core.op import REGISTRY  # noqa: E402
from tilery.measure import timing  # noqa: E402
from tilery.measure.store import Store  # noqa: E402
from tilery.tuning import candidates  # noqa: E402
from tilery.tuning.data import GOOD, Built, Candidate, Job, Measured, Problem  # noqa: E402
from tilery.tuning.ray_pool import RayPool  # noqa: E402
from tilery.tuning.tuner import Request, Tuner  # noqa: E402

QUICK = timing.Depth(rounds=6, turn_ms=1.0, warm_s=0.0)
ROWS = case(m=64, n=256, dtype="fp32")


class Timed:
    """A worker whose times are made: as the config says, else of the problem and the candidate, always the same."""

    def __init__(self, device, silence_s):
        self.ended = threading.Event()

    def measure(self, job, progress):
        found = []
        for candidate in job.candidates:
            progress(candidate, "timing")
            self.time(candidate)
            ms, first = self.ms(job.problem, candidate), self.ms(job.problem, job.candidates[0])
            wobble = [1 + 0.001 * i for i in range(job.depth.rounds)]
            found.append(Measured(candidate, GOOD, "", tuple(ms * w for w in wobble), tuple(first * w for w in wobble)))
        return found

    def ms(self, problem, candidate):
        return candidate.config.get("ms") or 1 + zlib.crc32(f"{problem.case} {candidate}".encode()) % 50

    def time(self, candidate):
        """`dies`: a file that counts how often its process has yet to die; `waits`: one by which it waits only once.

        Before it dies it waits until the tuner has heard of it, which leaves a file beside the other.
        """
        counter = candidate.config.get("dies")
        if counter and (left := int(Path(counter).read_text())):
            Path(counter).write_text(str(left - 1))
            wait_for(Path(f"{counter}-heard-{left}").exists)
            os._exit(1)
        if (mark := candidate.config.get("waits")) and not Path(mark).exists():
            Path(mark).touch()
            self.ended.wait(HANG_S)
        if candidate.config.get("raises"):
            raise BadInput("m must be positive, got -1")

    def close(self):
        self.ended.set()


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    """Its processes have this folder on their path, where the workers of these tests are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        here = Path(__file__).parent
        patch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]))
        ray.init("local", num_cpus=2, num_gpus=5, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def pool(_cluster):
    made = RayPool(2, "cpu", HANG_S, Timed)
    yield made
    made.close()


def job(*configs):
    return Job(Problem("softmax", "cpu", ROWS), tuple(Candidate("numba", config) for config in configs), QUICK)


def dying(folder, times):
    file = folder / f"dies-{times}"
    file.write_text(str(times))
    return {"ms": 3, "dies": str(file)}


def test_the_number_of_workers_does_not_decide_who_wins(pool, tmp_path):
    """The whole tuner, on one and on both of the actors; and what it keeps."""
    problems = tuple(Problem("matmul", "cpu", case(m=2048 + 64 * i, n=512, k=512, dtype="fp32")) for i in range(6))
    kept = {}
    for count in (1, 2):
        some = SimpleNamespace(workers=pool.workers[:count], compilers=2, compile=pool.compile, close=lambda: None)
        with settings.override(config_dir=tmp_path / str(count)):
            tuner = Tuner(Request(problems, {"matmul": ("numba",)}, HANG_S), some, store=Store(tmp_path / "runs"))
            result = tuner.run()
        assert len(result.tuned) == 6 and not result.not_reached
        for one in result.tuned:
            assert one.outcome.ranked[0].ms == min(found.ms for found in one.outcome.measured)
        entries = json.loads(result.tuned[0].path.read_text())["entries"]
        kept[count] = [{name: value for name, value in entry.items() if name != "when"} for entry in entries]
    assert kept[1] == kept[2]
    assert len({str(entry["config"]) for entry in kept[1]}) > 1  # not one for all


def test_an_actor_that_is_killed_is_replaced_and_its_job_done_anew(pool, tmp_path):
    worker = pool.workers[0]
    killed, said = [], []

    def kill_once(candidate, what):
        said.append(what)
        if candidate is not None and not killed:
            killed.append(worker._actor)
            ray.kill(worker._actor)

    found = worker.measure(job({"ms": 2, "waits": str(tmp_path / "waited")}, {"ms": 1}), kill_once)
    assert [one.status for one in found] == [GOOD, GOOD] and [one.ms for one in found] == pytest.approx([2.005, 1.0025])
    assert killed and worker._actor is not killed[0]
    assert any("a new one takes its place" in what for what in said)


@pytest.mark.slow
def test_a_candidate_that_ends_its_actor_twice_is_crashed_and_the_others_go_on(pool, tmp_path):
    def heard(candidate, what):
        if candidate is not None and (counter := candidate.config.get("dies")):
            Path(f"{counter}-heard-9").touch()
            Path(f"{counter}-heard-8").touch()

    found = pool.workers[1].measure(job({"ms": 2}, dying(tmp_path, 9), {"ms": 1}), heard)
    assert [one.status for one in found] == [GOOD, "crashed", GOOD]
    assert "its Ray actor died twice" in found[1].reason and found[2].slower == pytest.approx(0.5)
    assert (tmp_path / "dies-9").read_text() == "7"  # it was tried twice, not more


def test_what_is_wrong_with_a_problem_is_raised_as_it_is(pool):
    worker = pool.workers[1]
    with pytest.raises(BadInput, match=r"^m must be positive, got -1$"):
        worker.measure(job({"ms": 1, "raises": True}))
    assert worker.measure(job({"ms": 1}))[0].status == GOOD  # the actor is still there


def test_closing_ends_what_is_under_way_and_replaces_nothing(pool, tmp_path):
    worker = pool.workers[1]
    actor = worker._actor
    started = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(
            worker.measure, job({"ms": 1, "waits": str(tmp_path / "waited")}), lambda *_: started.set()
        )
        assert started.wait(HANG_S)
        pool.close()
        with contextlib.suppress(ray.exceptions.RayActorError):  # or it came to its end first
            future.result(timeout=HANG_S)
    assert worker._actor is actor and ray.is_initialized()  # the cluster is not the pool's own
    with pytest.raises(ray.exceptions.RayActorError):
        worker.measure(job({"ms": 1}))
    pool.close()


@pytest.mark.slow
def test_real_kernels_are_compiled_measured_and_checked_by_an_actor():
    problem = Problem("softmax", "cpu", ROWS)
    chosen = candidates.collect(problem, ["numba"])[0][:2]
    said = []
    used = RayPool(1, "cpu")
    try:
        found = used.workers[0].measure(Job(problem, tuple(chosen), QUICK), lambda candidate, what: said.append(what))
        broken = used.compile("softmax", "no_such", specs_for(REGISTRY["softmax"], ROWS, "cpu"), "cpu", None)
        built = used.compile("softmax", "numba", specs_for(REGISTRY["softmax"], ROWS, "cpu"), "cpu", None)
    finally:
        used.close()
    assert [one.candidate for one in found] == chosen and {one.status for one in found} == {GOOD} and said
    assert all(len(one.samples) == 6 and one.ms > 0 and one.error < 1e-6 and one.digest for one in found)
    assert "softmax no_such does not build for cpu" in broken.failure and built == Built()


@pytest.mark.parametrize("asked", [0, -1, 6])
def test_more_gpus_than_there_are_is_bad_input(asked):
    with pytest.raises(BadInput, match=f"num_gpus must be between 1 and the 5 of the cluster, got {asked}"):
        RayPool(asked, "cpu")


def test_without_ray_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ToolMissing, match=r"pip install 'tilery\[ray\]'"):
        RayPool(1)
