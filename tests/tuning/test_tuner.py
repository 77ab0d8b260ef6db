"""A whole tune, by workers that are told their timings: kept, resumed, shared out, stopped and overlapped."""

import dataclasses
import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import FakePool, FakeWorker

import plant
import tilery
from plant import TILES
from processes import HANG_S
from tilery.base import settings
from tilery.base.errors import BadInput, NotWritten
from tilery.base.spec import case
from tilery.core import tuned
from tilery.core.cases import specs_for
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.measure import ceilings
from tilery.measure.store import Store
from tilery.tuning import journal, request, tuner
from tilery.tuning.candidates import collect, specs_of
from tilery.tuning.data import Built
from tilery.tuning.pool import LocalPool
from tilery.tuning.tuner import Tuner, TuneResult

SOFTMAX = REGISTRY["softmax"]


def sizes(*widths):
    """Problems of buckets of their own."""
    return [case(m=64, n=n, dtype="fp32") for n in widths]


LARGE, OTHER = sizes(256, 512)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder for what is tuned, a kernel to tune, and a machine whose speed is known."""
    rates = ceilings.Ceilings(1e12, 1e12, 1e12, {"fp32": 1e15}, 1.0)
    monkeypatch.setattr(ceilings, "ceilings", lambda where, **_: rates)
    plant.add(monkeypatch, SOFTMAX, TILES, plant.Tiles())
    with settings.override(config_dir=tmp_path / "tuned"):
        yield tmp_path
    tuned.reload()


def asked(*cases, budget="1h", **how):
    return request.request([(SOFTMAX, cases or [LARGE], [])], [TILES], budget, **how)


def ms(candidate):
    """The smaller the tile, the faster; the other kind is a little slower."""
    return 10 + candidate.config["tile"] + (0.5 if candidate.config["kind"] == "other" else 0.0)


def run(place, wanted, pool=None, **how):
    pool = pool or FakePool([FakeWorker(ms, 0.002)])
    return Tuner(wanted, pool, store=Store(place / "runs.sqlite3"), **how).run(), pool


def jobs(pool):
    return [job for worker in pool.workers for job in worker.jobs]


def field():
    return collect(asked().problems[0], (TILES,))[0]


def call_of(problem):
    return SOFTMAX.call(specs_of(problem))


def test_what_won_is_kept_and_used(place):
    result, _ = run(place, asked())
    (done,) = result.tuned
    best = min(field(), key=ms)
    assert done.outcome.ranked[0].candidate == best != field()[0]
    (entry,) = json.loads(done.path.read_text())["entries"]
    assert (entry["kernel"], entry["config"], entry["rank"], entry["case"]) == (TILES, best.config, 0, LARGE.params)
    assert entry["interval"][0] <= entry["ms"] <= entry["interval"][1] and entry["versions"]["tilery"]
    assert entry["roof"] == pytest.approx(SOFTMAX.cost(call_of(done.problem)).bytes / 1e9 / entry["ms"])
    plan = SOFTMAX.plan(specs_of(done.problem))
    assert plan.source == "tuned" and dataclasses.asdict(plan.config) == best.config


def test_every_candidate_is_in_the_store(place):
    bad = {str(field()[2]): ("wrong", "error 1e-1")}
    result, _ = run(place, asked(), FakePool([FakeWorker(ms, 0.002, bad=bad)]))
    rows = Store(place / "runs.sqlite3").rows(result.run)
    assert len(rows) == len(field()) and {row.stage for row in rows} == {"tune"}
    assert [row.rank for row in rows].count(0) == 1 and [row.default for row in rows].count(True) == 1
    assert (rows[2].status, rows[2].reason, rows[2].ms) == ("fail", "wrong: error 1e-1", None)
    assert rows[0].config.startswith("Config(tile=") and rows[0].ms and len(rows[0].samples) == len(rows[0].against)


def broken_after(count):
    def before(job):
        if len(worker.jobs) > count:
            raise RuntimeError("the machine went away")

    worker = FakeWorker(ms, 0.002)
    worker.before = before
    return FakePool([worker])


@pytest.mark.parametrize("count", [2, 4], ids=["in a problem", "between two"])
def test_a_tune_that_broke_goes_on_and_measures_nothing_twice(place, count):
    whole, undisturbed = run(place, asked(LARGE, OTHER))
    with settings.override(config_dir=place / "again"):
        broken = broken_after(count)
        with pytest.raises(RuntimeError, match="went away"):
            run(place, asked(LARGE, OTHER), broken)
        assert broken.closed.is_set()
        result, pool = run(place, asked(LARGE, OTHER))
        measured = jobs(broken)[:count]
        assert not [job for job in jobs(pool) if job in measured]
        assert len(measured) + len(jobs(pool)) == len(jobs(undisturbed))
    choices = [[done.outcome.ranked[0].candidate for done in each.tuned] for each in (whole, result)]
    assert choices[0] == choices[1] and len(choices[0]) == 2


def test_a_tune_that_ended_starts_anew_and_other_questions_are_other_sessions(place):
    _, first = run(place, asked())
    _, second = run(place, asked())
    assert len(jobs(second)) == len(jobs(first))
    with pytest.raises(RuntimeError):
        run(place, asked(), broken_after(2))
    _, exhaustive = run(place, asked(how="exhaustive"))
    assert {c for job in jobs(exhaustive) for c in map(str, job.candidates)} == set(map(str, field()))
    _, third = run(place, asked())
    assert len(jobs(third)) < len(jobs(first))


@pytest.fixture
def clock(monkeypatch):
    """Passes time for the tuner, on a clock of the test's own."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(tuner, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def test_a_budget_that_ends_leaves_the_rest_for_the_next_time(place, clock):
    cases, slow = sizes(32, 64, 128, 256), FakeWorker(ms, 0.002)

    def takes_a_second(job):
        clock.s += 1

    slow.before = takes_a_second
    result, _ = run(place, asked(*cases, budget=3.5), FakePool([slow]))
    assert 1 <= len(result.tuned) < 4 and len(result.not_reached) == 4 - len(result.tuned)
    assert result.tuned[0].outcome.cut_short and result.tuned[0].entries
    rest, pool = run(place, asked(*cases))
    assert len(rest.tuned) == 4 and not rest.not_reached
    reached = {str(done.problem) for done in result.tuned}
    assert not [job for job in jobs(pool) if str(job.problem) in reached]


def test_a_full_disk_loses_nothing(place, monkeypatch):
    def full(*_):
        raise NotWritten("x.json cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tuned, "write", full)
        with pytest.raises(NotWritten, match=r"No space left on device\. What was measured is kept: the same command"):
            run(place, asked())
    result, pool = run(place, asked())
    assert jobs(pool) == [] and result.tuned[0].entries and result.overlap is None


def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(place, monkeypatch):
    pool, mkdir = FakePool([FakeWorker(ms)]), Path.mkdir

    def refusing(path, *how, **more):
        if place / "tuned" in path.parents:
            raise PermissionError(13, "Permission denied")
        mkdir(path, *how, **more)

    monkeypatch.setattr(Path, "mkdir", refusing)
    with pytest.raises(NotWritten, match=r"\.jsonl cannot be written: Permission denied; .* name another --config-dir"):
        run(place, asked(), pool)
    assert jobs(pool) == []
    (place / "file").write_text("")
    with pytest.raises(BadInput, match="config_dir must be a folder, got the file"):
        tilery.tune("softmax", backend="numba", config_dir=place / "file")


def test_two_tuners_on_one_file(place):
    both = [threading.Thread(target=run, args=(place, asked(each))) for each in (LARGE, OTHER)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    path = place / "tuned" / "softmax" / f"{device.slug(torch.device('cpu'))}.json"
    assert {entry["exact"] for entry in json.loads(path.read_text())["entries"]} == {
        SOFTMAX.bucket(call_of(problem)).exact for problem in asked(LARGE, OTHER).problems
    }


@pytest.mark.parametrize("thread", [signal.SIG_UNBLOCK, signal.SIG_BLOCK], ids=["told", "not told"])
def test_ctrl_c_leaves_what_was_measured(place, thread):
    """Not told: the system hands the signal to another thread than the main one, as it may."""
    worker = FakeWorker(ms, 0.002)

    def interrupted(job):
        if len(worker.jobs) == 3:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            os.kill(os.getpid(), signal.SIGINT)
            assert pool.closed.wait(HANG_S)

    worker.before = interrupted
    pool = FakePool([worker])
    before = signal.pthread_sigmask(thread, [signal.SIGINT])
    try:
        with pytest.raises(KeyboardInterrupt):
            run(place, asked(), pool)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert pool.closed.is_set()
    _, rest = run(place, asked())
    assert jobs(rest) and not [job for job in jobs(rest) if job in jobs(pool)[:2]]


def test_compiling_and_measuring_overlap(place):
    """The first job does not wait for all to be built, and all else is built while it is measured."""
    cases, worker = sizes(32, 64, 128), FakeWorker(ms, 0.002)
    wanted = len(cases) * len(field())
    pool, measuring, built, group = FakePool([worker]), threading.Event(), threading.Event(), 8

    def compiling(config):
        with pool.lock:
            count = len(pool.compiled)
        if count >= group:
            assert measuring.wait(HANG_S / 4), "measuring has not begun"
        if count == wanted - 1:
            built.set()

    def measured(job):
        if not measuring.is_set():
            measuring.set()
            assert built.wait(HANG_S / 4), "compilers wait for the measuring"

    pool.compilers, pool.before, worker.before = 1, compiling, measured
    result, _ = run(place, asked(*cases), pool, ahead=True)
    assert len(result.tuned) == 3 and len(pool.compiled) == wanted
    assert result.compile_s > 0 and result.measure_s > 0


def test_overlap_is_wall_time_over_the_longer_of_the_two():
    assert TuneResult([], [], "", wall_s=6.0, compile_s=2.0, measure_s=5.0).overlap == pytest.approx(1.2)
    assert TuneResult([], [], "", wall_s=6.0).overlap is None


def test_time_counts_once_for_all_who_are_at_work(clock):
    both = tuner._Clock()
    for at, step in ((0, "in"), (1, "in"), (2, "out"), (5, "out"), (7, "in"), (8, "out")):
        clock.s = at
        both.__enter__() if step == "in" else both.__exit__()
    assert both.total == 6


def test_what_does_not_build_is_recorded(place):
    bad = str(min(field(), key=ms))
    result, pool = run(place, asked(), FakePool([FakeWorker(ms)], built={bad: Built(failure="no")}), ahead=True)
    assert [str(m.candidate) for m in result.tuned[0].outcome.measured if m.status == "does not build"] == [bad]
    assert not [job for job in jobs(pool) if bad in map(str, job.candidates)]
    assert result.tuned[0].entries[0].registers == 32


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_number_of_workers_does_not_decide(place, count):
    workers, gate = [FakeWorker(ms, 0.002, seed) for seed in range(count)], threading.Barrier(count)

    def together(worker):
        """No first job is measured before every worker has one."""
        return lambda job: gate.wait(HANG_S) if len(worker.jobs) == 1 else None

    for worker in workers:
        worker.before = together(worker)
    result, _ = run(place, asked(*sizes(32, 64, 128, 256)), FakePool(workers))
    assert [done.outcome.ranked[0].candidate for done in result.tuned] == [min(field(), key=ms)] * 4
    shares = [{str(job.problem) for job in worker.jobs} for worker in workers]
    assert all(shares) and sum(map(len, shares)) == len(set.union(*shares)) == 4, "a problem stays with one"


def test_one_worker_that_fails_stops_the_others(place):
    good, bad, begun = FakeWorker(ms), FakeWorker(ms), threading.Event()
    pool = FakePool([good, bad])

    def works(job):
        begun.set()
        assert pool.closed.wait(HANG_S)

    def fails(job):
        assert begun.wait(HANG_S)
        raise BadInput("such a case there is not")

    good.before, bad.before = works, fails
    with pytest.raises(BadInput, match="such a case"):
        run(place, asked(*sizes(32, 64, 128)), pool)
    assert len(good.jobs) == 1


def test_what_is_tuned_now_is_known_under_the_names_of_now(place, monkeypatch):
    """It stays among equals, though an older tilery wrote its file."""
    first, _ = run(place, asked(), FakePool([FakeWorker(lambda c: 1.0, 0.002)]))
    (entry,) = first.tuned[0].entries
    assert entry.config == {"tile": 8, "kind": "plain"}
    old = dataclasses.replace(entry, config={"block": 3, "kind": "simple"})
    tuned.write(SOFTMAX, device.slug(torch.device("cpu")), [old])
    again, _ = run(place, asked(), FakePool([FakeWorker(lambda c: 1.0, 0.002)]))
    assert again.tuned[0].entries[0].config == {"tile": 3, "kind": "plain"}


def test_a_tune_of_one_backend_keeps_what_is_known_of_others(place):
    first, _ = run(place, asked())
    (entry,) = first.tuned[0].entries
    others = [dataclasses.replace(entry, kernel=k, config={}, ms=t) for k, t in (("triton", 1e-3), ("cuda", 1e3))]
    tuned.write(SOFTMAX, device.slug(torch.device("cpu")), [entry, *others])
    again, _ = run(place, asked())
    assert [(e.kernel, e.rank) for e in again.tuned[0].entries] == [("triton", 0), (TILES, 1), ("cuda", 2)]


def test_progress_says_how_far_it_is(place):
    said = []
    run(place, asked(LARGE, OTHER), progress=said.append)
    assert {status.problems for status in said} == {2} and {status.candidates for status in said} == {len(field())}
    assert [s.done for s in said if "n=256" in s.problem] == sorted(s.done for s in said if "n=256" in s.problem)
    assert said[-1].problems_done == 2 and said[-1].done == len(field()) and said[-1].best.startswith(f"{TILES} ")
    assert all(0 < status.left_s <= 3600 for status in said)


def test_a_pool_of_this_machine_compiles_and_says_what_does_not_build():
    op = REGISTRY["softmax"]
    specs = specs_for(op, case(m=8, n=256, dtype="fp32"))
    with device.pretend("sm_90"):
        config = op.kernel("triton").default(op.call(specs))
    pool = LocalPool(["cpu"])
    try:
        built = pool.compile("softmax", "triton", specs, "sm_90", config)
        assert built.registers and built.spills == 0 and not built.failure
        assert "does not build for sm_90" in pool.compile("softmax", "triton", specs[:0], "sm_90", config).failure
    finally:
        pool.close()


def test_keys_do_not_depend_on_the_process():
    assert (
        journal.key_of("a", {"b": 1, "a": 2}) == journal.key_of("a", {"a": 2, "b": 1}) != journal.key_of("a", {"b": 1})
    )
