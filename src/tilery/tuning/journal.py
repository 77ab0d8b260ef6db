"""What was measured, on disk before the next job starts: a tuner that is killed loses at most one job.

A file of JSON lines per op and device: {"session", "job", "measured"} for a job, {"session", "problem", "outcome"} for
a problem that is finished, {"session", "done"} at the end. A session is what was asked for: asked again before its end
it goes on, after it it starts anew. A last line that was torn by a crash is dropped.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from tilery.base import files
from tilery.base.errors import NotWritten
from tilery.tuning.data import Built, Candidate, Job, Measured
from tilery.tuning.search import Gain, Outcome

FOLDER = ".journal"
_WAIT_S = 60  # for another tuner's turn, which takes milliseconds
_GO_ON = "make room or make it writable (or name another --config-dir), then the same command goes on"


def key_of(*parts: Any) -> str:
    """A key that is the same for the same data, in every process."""
    plain = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(plain.encode()).hexdigest()[:24]


def job_key(problem: str, versions: Mapping[str, str], job: Job, before: int = 0) -> str:
    """`problem` names op, device and arguments; where these lie, or on which of two equal GPUs, is no part of it.

    `before`: how often a search had asked for the same job. It asks again because it wants other samples.
    """
    candidates = [dataclasses.astuple(c) for c in job.candidates]
    return key_of(problem, dict(versions), candidates, dataclasses.astuple(job.depth), before)


class Journal:
    """One session's part of a file. `jobs` and `outcomes` hold what an earlier run of the session had done."""

    def __init__(self, folder: Path, op: str, slug: str, session: str) -> None:
        self.path = folder / FOLDER / f"{op}-{slug}.jsonl"
        self.session = session
        self.jobs: dict[str, list[Measured]] = {}
        self.outcomes: dict[str, Outcome] = {}
        with self._alone():
            records = self._records()
            if not _unfinished(records):
                self._replace(b"")  # nobody will come back for what is in it
            for record in records:
                if record["session"] == session:
                    with contextlib.suppress(KeyError, TypeError):  # of another tilery's form: it is measured again
                        self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        if record.get("done"):
            self.jobs.clear()
            self.outcomes.clear()
        elif "job" in record:
            self.jobs[record["job"]] = [_measured(m) for m in record["measured"]]
        else:
            self.outcomes[record["problem"]] = _outcome(record["outcome"])

    def add_job(self, key: str, measured: list[Measured]) -> None:
        self._append({"job": key, "measured": [dataclasses.asdict(m) for m in measured]})
        self.jobs[key] = measured

    def add_outcome(self, problem: str, outcome: Outcome) -> None:
        self._append({"problem": problem, "outcome": dataclasses.asdict(outcome)})
        self.outcomes[problem] = outcome

    def done(self) -> None:
        self._append({"done": True})

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps({"session": self.session, **record}).encode() + b"\n"
        with self._alone(), self.path.open("a+b") as file:
            before = file.seek(0, os.SEEK_END)
            file.seek(max(before - 1, 0))
            torn = file.read(1) not in (b"", b"\n")
            try:
                file.write(b"\n" + line if torn else line)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(self.path, before)  # a full disk leaves half a line
                raise

    def _records(self) -> list[dict[str, Any]]:
        found = []
        for line in self.path.read_bytes().splitlines() if self.path.exists() else []:
            with contextlib.suppress(ValueError):  # torn by a crash; the line before it is whole
                record = json.loads(line)
                if isinstance(record, dict) and "session" in record:
                    found.append(record)
        return found

    def _replace(self, data: bytes) -> None:
        partial = self.path.with_suffix(".tmp")
        partial.write_bytes(data)
        partial.replace(self.path)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with files.writing(self.path, "what was measured before is kept", _GO_ON):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with filelock.FileLock(self.path.with_suffix(".lock"), timeout=_WAIT_S):
                    yield
            except filelock.Timeout:
                raise NotWritten(f"{self.path} is held by another tuner for more than {_WAIT_S} s; end it") from None


def _unfinished(records: list[dict[str, Any]]) -> set[str]:
    left: set[str] = set()
    for record in records:
        (left.discard if record.get("done") else left.add)(record["session"])
    return left


# From plain data


def _measured(found: dict[str, Any]) -> Measured:
    made = {**found, "candidate": Candidate(**found["candidate"]), "built": Built(**found["built"])}
    return Measured(**made | {name: tuple(found[name]) for name in ("samples", "against")})


def _outcome(found: dict[str, Any]) -> Outcome:
    measured, ranked = (tuple(map(_measured, found[name])) for name in ("measured", "ranked"))
    return Outcome(measured, ranked, Gain(**found["gain"]) if found["gain"] else None, found["cut_short"])
