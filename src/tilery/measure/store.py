"""Every run, kept: SQLite in the data folder. A row is on disk before the next one is measured."""

import base64
import csv
import hashlib
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilery.base import files, settings
from tilery.base.errors import BadInput, BadStore, ToolMissing
from tilery.measure.result import Row, controls, finite, machine, problem

SCHEMA = 1
FORMATS = ("json", "csv", "parquet")
_WAIT_S = 60  # for another writer's turn, which takes milliseconds
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_NOT_WRITTEN = (
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR,
)  # fmt: skip
_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    id TEXT PRIMARY KEY, started TEXT, finished TEXT, command TEXT, machine TEXT, git TEXT);
CREATE TABLE IF NOT EXISTS rows (run TEXT REFERENCES runs(id), n INTEGER, data TEXT, PRIMARY KEY (run, n));
CREATE TABLE IF NOT EXISTS code (key TEXT PRIMARY KEY, data BLOB);
"""


@dataclass(frozen=True)
class Run:
    id: str  # when it started, and a few random letters: sorts by time, never clashes
    started: str
    finished: str | None  # None where it was stopped in the middle; what it had measured is here all the same
    command: str
    machine: dict[str, Any]
    git: dict[str, Any] | None


class Store:
    def __init__(self, path: Path | None = None) -> None:
        self.path = path or settings.get().data_dir / "runs.sqlite3"

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or nothing, also when the process is killed inside."""
        with files.writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644))  # says why not, which sqlite does not
        with self._named(writes=True), closing(sqlite3.connect(self.path, timeout=_WAIT_S)) as connection:
            _use_wal(connection)
            self._version(connection)
            with connection:
                connection.executescript(f"{_TABLES} PRAGMA user_version = {SCHEMA};")
            with connection:
                yield connection

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Changes nothing: a store that is not there is an empty one, and one that cannot be written can be read."""
        with self._named(writes=False), closing(self._reader()) as connection:
            if self._version(connection) == 0:
                with closing(sqlite3.connect(":memory:")) as empty:
                    empty.executescript(_TABLES)
                    yield empty
            else:
                yield connection

    def _reader(self) -> sqlite3.Connection:
        if not self.path.exists():
            return sqlite3.connect(":memory:")
        connection = sqlite3.connect(self.path, timeout=_WAIT_S)
        try:
            connection.execute("PRAGMA user_version")
        except sqlite3.OperationalError as error:
            connection.close()
            beside = self.path.with_name(f"{self.path.name}-wal")  # newer rows, that are not in the file itself
            if _code(error) not in _NOT_WRITTEN or (beside.exists() and beside.stat().st_size):
                raise
            return sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        return connection

    @contextmanager
    def _named(self, writes: bool) -> Iterator[None]:
        """Inside the block, what sqlite cannot do is raised with the name of this file and what to do."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if _code(error) in _BUSY:
                why = f"another process has been writing it for {_WAIT_S} s"
                raise files.not_written(self.path, why, hint="end that process, or wait for it") from None
            if _code(error) in _NOT_WRITTEN and writes:
                free = shutil.disk_usage(self.path.parent).free // 1024  # sqlite may call a full disk an I/O error
                raise files.not_written(self.path, f"{error} ({free} KiB are free there)") from None
            if _code(error) in _NOT_WRITTEN:
                raise BadStore(f"{self.path} cannot be read: {error}; it was left as it is; {files.HINT}") from None
            raise BadStore(
                f"{self.path} cannot be read: {error}; it was left as it is: move it away, and bring back what was "
                "exported with `tilery runs import`"
            ) from None
        except OSError as error:
            raise BadStore(f"{self.path} cannot be read: {error.strerror or error}; make it readable") from None

    def _version(self, connection: sqlite3.Connection) -> int:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, SCHEMA):
            what = f"{self.path} has schema {version}, this tilery knows {SCHEMA}"
            raise BadStore(f"{what}; it was left as it is: update tilery, or move it away")
        return version

    def start(self, command: str, more: dict[str, Any] | None = None) -> str:
        """A new run on this machine; `more` is kept with what is said of the machine."""
        now = datetime.now(UTC)
        run = f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"
        self.put(
            Run(run, now.isoformat(timespec="milliseconds"), None, command, machine() | (more or {}), git_state()), []
        )
        return run

    def put(self, run: Run, rows: Iterable[Row]) -> None:
        with self._open() as db:
            values = (run.id, run.started, run.finished, run.command, json.dumps(run.machine), json.dumps(run.git))
            db.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?)", values)
            db.executemany(
                "INSERT INTO rows VALUES (?, ?, ?)",
                [(run.id, n, json.dumps(asdict(row))) for n, row in enumerate(rows)],
            )

    def add(self, run: str, *rows: Row) -> None:
        """All of them or none."""
        with self._open() as db:
            for row in rows:
                db.execute(
                    "INSERT INTO rows SELECT ?, count(*), ? FROM rows WHERE run = ?",
                    (run, json.dumps(asdict(row)), run),
                )

    def replace(self, run: str, n: int, row: Row) -> None:
        """The run's n-th row, of which more is known now."""
        with self._open() as db:
            db.execute("UPDATE rows SET data = ? WHERE run = ? AND n = ?", (json.dumps(asdict(row)), run, n))

    def add_code(self, stages: dict[str, str]) -> str:
        """Keeps what a compiler made (stage -> text), once however many rows have it; says under which key."""
        data = zlib.compress(json.dumps(stages, sort_keys=True).encode(), 9)
        key = hashlib.sha256(data).hexdigest()[:16]
        self._put_code(key, data)
        return key

    def _put_code(self, key: str, data: bytes) -> None:
        with self._open() as db:
            db.execute("INSERT OR IGNORE INTO code VALUES (?, ?)", (key, data))

    def code(self, key: str) -> dict[str, str]:
        return dict(json.loads(zlib.decompress(self._code(key))))

    def _code(self, key: str) -> bytes:
        with self._reading() as db:
            found = db.execute("SELECT data FROM code WHERE key = ?", (key,)).fetchone()
        if found is None:
            raise BadStore(f"{self.path} has no code {key}, which a row names")
        return bytes(found[0])

    def finish(self, run: str) -> None:
        with self._open() as db:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            db.execute("UPDATE runs SET finished = ? WHERE id = ?", (now, run))

    def runs(self) -> list[Run]:
        """Latest last."""
        with self._reading() as db:
            found = db.execute("SELECT id, started, finished, command, machine, git FROM runs ORDER BY started, rowid")
            return [
                Run(run, started, finished, command, json.loads(where), json.loads(git))
                for run, started, finished, command, where, git in found
            ]

    def find(self, name: str) -> Run:
        """By its id, by how the id begins, or `last`."""
        runs = self.runs()
        found = runs[-1:] if name == "last" else [run for run in runs if run.id.startswith(name)]
        if len(found) != 1:
            what = f"{len(found)} runs begin so" if found else f"there are {len(runs)} runs, none so named"
            raise BadInput(f"RUN must be an id, the beginning of one, or last, got {name!r}: {what} (`tilery runs`)")
        return found[0]

    def rows(self, run: str) -> list[Row]:
        with self._reading() as db:
            found = db.execute("SELECT data FROM rows WHERE run = ? ORDER BY n", (run,)).fetchall()
        try:
            return [_row(json.loads(data)) for (data,) in found]
        except (ValueError, TypeError) as error:
            raise BadStore(f"{self.path}: a row of run {run} cannot be read: {error}; it was left as it is") from None


def _code(error: sqlite3.Error) -> int:
    """The primary code of what sqlite says; 0 of what Python's module says itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _use_wal(connection: sqlite3.Connection) -> None:
    """A new file's first two users may meet here, where sqlite does not wait by itself."""
    for left in reversed(range(100)):
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if _code(error) not in _BUSY or not left:
                raise
            time.sleep(0.05)


def _row(data: dict[str, Any]) -> Row:
    """Fields that this version does not know are left out, so that older and newer runs can be read."""
    known: dict[str, Any] = {f.name: data[f.name] for f in fields(Row) if f.name in data}
    return Row(**known | {name: tuple(known.get(name, ())) for name in ("samples", "against")})


def git_state() -> dict[str, Any] | None:
    """The commit of the checkout that tilery runs from, and whether it has changes; None where it is installed."""
    here = Path(__file__).parents[3]
    if not (here / ".git").exists():
        return None
    try:
        commit, status = (
            subprocess.run(["git", "-C", str(here), *words], capture_output=True, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None  # a checkout without git, or without a commit
    return {"commit": commit.decode("ascii"), "changed": bool(status)}


def export(store: Store, runs: list[Run], path: Path, form: str) -> int:
    """Writes runs to a file and says how many rows; json holds all there is, csv and parquet one line a row."""
    rows = [(run, row) for run in runs for row in store.rows(run.id)]
    if form == "json":
        document = [{**asdict(run), "rows": [asdict(finite(row)) for row in store.rows(run.id)]} for run in runs]
        keys = sorted({row.code for _, row in rows if row.code})
        code = {key: base64.b64encode(store._code(key)).decode() for key in keys}
        files.write(path, json.dumps({"schema": SCHEMA, "runs": document, "code": code}))
        return len(rows)
    noise = {run.id: controls(row for of, row in rows if of is run) for run in runs}
    flat = [
        {"run": run.id, "started": run.started, **asdict(row), "control": noise[run.id].get(problem(row))}
        for run, row in rows
    ]
    if form == "csv":
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, ["run", "started", *(f.name for f in fields(Row)), "control"])
        writer.writeheader()
        writer.writerows(flat)
        files.write(path, text.getvalue())
    else:
        files.write(path, _parquet(flat))
    return len(rows)


def _parquet(flat: list[dict[str, Any]]) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ToolMissing("pyarrow is not installed: pip install 'tilery[parquet]'") from None
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat), file)
    return file.getvalue()


def import_runs(store: Store, path: Path) -> tuple[int, int]:
    """(new, already there) of the runs in a json export."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        runs = [(Run(**{f.name: r[f.name] for f in fields(Run)}), list(map(_row, r["rows"]))) for r in document["runs"]]
        code = {key: base64.b64decode(data) for key, data in document.get("code", {}).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is not a json export of runs: {type(error).__name__}: {error}") from None
    there = {run.id for run in store.runs()}
    for key, data in code.items():
        store._put_code(key, data)
    for run, rows in runs:
        if run.id not in there:
            store.put(run, rows)
    known = sum(run.id in there for run, _ in runs)
    return len(runs) - known, known


def command_line() -> str:
    return " ".join(["tilery", *sys.argv[1:]])
