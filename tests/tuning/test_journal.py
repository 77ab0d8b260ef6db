"""Finished jobs survive crashes, full disks and other tuners."""

import json
import multiprocessing
import os

import pytest

from tilery.base.errors import NotWritten
from tilery.base.spec import case
from tilery.measure.timing import Depth
from tilery.tuning import journal
from tilery.tuning.data import Built, Candidate, Job, Measured, Problem
from tilery.tuning.journal import Journal
from tilery.tuning.search import Gain, Outcome

GOOD = Measured(
    Candidate("numba", {"tile": 3}, "H100"), samples=(1.0, 2.0), against=(2.0, 2.0), error=1e-7, digest="ab",
    built=Built(32, 0, 1024),
)  # fmt: skip
BAD = Measured(Candidate("triton", {}), "wrong", "error 1e-1")


def opened(folder, session="s"):
    return Journal(folder, "softmax", "cpu", session)


def test_what_was_added_is_there_for_the_same_session_alone(tmp_path):
    first = opened(tmp_path)
    first.add_job("k", [GOOD, BAD])
    first.add_outcome("p", Outcome((GOOD, BAD), (GOOD,), Gain(1.5, 1.4, 1.6), True))
    again = opened(tmp_path)
    assert again.jobs == {"k": [GOOD, BAD]} == first.jobs
    assert again.outcomes == {"p": Outcome((GOOD, BAD), (GOOD,), Gain(1.5, 1.4, 1.6), True)}
    assert opened(tmp_path, "another").jobs == {}


def test_a_session_that_is_done_starts_anew(tmp_path):
    first, other = opened(tmp_path), opened(tmp_path, "other")
    first.add_job("k", [GOOD])
    other.add_job("k", [BAD])
    first.done()
    assert opened(tmp_path).jobs == {} and opened(tmp_path, "other").jobs == {"k": [BAD]}
    other.done()
    assert opened(tmp_path).path.read_bytes() == b""  # nobody comes back for it


@pytest.mark.parametrize("torn", [b'{"session": "s", "job": "x", "meas', b"\xff\x00", b"[1]"])
def test_a_torn_last_line_is_ignored_and_the_next_is_whole(tmp_path, torn):
    first = opened(tmp_path)
    first.add_job("k", [GOOD])
    with first.path.open("ab") as file:
        file.write(torn)
    again = opened(tmp_path)
    assert again.jobs == {"k": [GOOD]}
    again.add_job("l", [BAD])
    assert opened(tmp_path).jobs == {"k": [GOOD], "l": [BAD]}


def test_a_full_disk_is_said_and_what_was_there_stays(tmp_path, monkeypatch):
    first = opened(tmp_path)
    first.add_job("k", [GOOD])
    before = first.path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotWritten, match=r"softmax-cpu\.jsonl cannot be written: No space left.*the same command"):
        first.add_job("l", [BAD])
    assert first.path.read_bytes() == before and opened(tmp_path).jobs == {"k": [GOOD]}


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritten, match=r"file/\.journal/softmax-cpu\.jsonl cannot be written: Not a directory"):
        opened(tmp_path / "file")


def add_many(folder, session):
    mine = opened(folder, session)
    for i in range(20):
        mine.add_job(f"{session}{i}", [GOOD])


def test_two_tuners_write_one_file(tmp_path):
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=add_many, args=(tmp_path, name)) for name in ("a", "b")]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [len(opened(tmp_path, name).jobs) for name in ("a", "b")] == [20, 20]
    assert all(json.loads(line) for line in opened(tmp_path).path.read_text().splitlines())


def test_a_job_is_known_by_what_decides_its_result():
    def key(problem="softmax m=3 on H200", versions=None, depth=6, tile=3, where="cuda:0"):
        job = Job(Problem("softmax", where, case(m=3)), (Candidate("numba", {"tile": tile}),), Depth(depth, 1.0, 0.0))
        return journal.job_key(problem, versions or {"torch": "2.13"}, job)

    assert key() == key(where="cuda:1")
    assert len({key(), key(problem="other"), key(versions={"torch": "3"}), key(depth=12), key(tile=4)}) == 5


def test_a_journal_of_another_form_is_measured_again(tmp_path):
    first = opened(tmp_path)
    first.path.write_text('{"session": "s", "job": "k", "measured": [{"nothing": 1}]}\n')
    assert opened(tmp_path).jobs == {}
