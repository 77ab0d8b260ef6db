"""The store: nothing stored is lost, whoever is killed or writes beside."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from dataclasses import replace

import pytest

from processes import HANG_S
from tilery.base.errors import BadInput, BadStore, NotWritten
from tilery.measure.result import Row
from tilery.measure.store import Store, export, import_runs

ROW = Row(
    "softmax", "triton", "m=1,n=2", "pass", device="GPU", ms=2.0, ms_low=1.9, ms_high=2.1, samples=(1.9, 2.0, 2.1)
)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs.sqlite3")


def filled(store, *rows):
    run = store.start("tilery bench")
    for row in rows:
        store.add(run, row)
    store.finish(run)
    return store.find(run)


def test_what_goes_in_comes_out(store):
    run = filled(store, ROW, Row("softmax", "numba", "m=1,n=2", "refused", "no"))
    assert run.finished and run.command == "tilery bench" and run.machine["torch"]
    assert store.rows(run.id) == [ROW, Row("softmax", "numba", "m=1,n=2", "refused", "no")]


def test_an_export_is_json_that_every_reader_takes(store, tmp_path):
    run = filled(store, replace(ROW, error=float("inf"), max_diff=float("nan")))
    export(store, [run], tmp_path / "runs.json", "json")

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    (row,) = json.loads((tmp_path / "runs.json").read_text(), parse_constant=refuse)["runs"][0]["rows"]
    assert row["error"] is None and row["max_diff"] is None and row["ms"] == 2.0


def test_a_run_is_found_by_its_beginning_or_as_the_last(store):
    one, two = filled(store, ROW), filled(store)
    assert store.find("last") == two and store.find(one.id[:-1]) == one
    with pytest.raises(BadInput, match="got 'x': there are 2 runs, none so named"):
        store.find("x")
    with pytest.raises(BadInput, match="2 runs begin so"):
        store.find("20")


WRITER = """
    import sys
    from pathlib import Path
    from tilery.measure.result import Row
    from tilery.measure.store import Store
    store = Store(Path(sys.argv[1]))
    run = store.start("writer")
    print(run, flush=True)
    for i in range(int(sys.argv[2])):
        store.add(run, Row("op", "kernel", f"m={i}", "pass"))
        print(i, flush=True)
    store.finish(run)
"""


def writer(store, count):
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(store.path), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_writer_loses_nothing_it_had_stored(store):
    child = writer(store, 100_000)
    run = child.stdout.readline().strip()
    stored = [int(child.stdout.readline()) for _ in range(20)]
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    rows = store.rows(run)
    assert len(rows) >= len(stored) and [r.case for r in rows] == [f"m={i}" for i in range(len(rows))]
    assert store.find(run).finished is None
    assert filled(store, ROW).finished  # and the store goes on


def test_two_writers_at_once_both_keep_their_runs(store):
    children = [writer(store, 50) for _ in range(2)]
    names = [child.communicate(timeout=HANG_S)[0].split()[0] for child in children]
    assert [len(store.rows(name)) for name in names] == [50, 50] and all(store.find(n).finished for n in names)


def test_a_truncated_database_is_an_error_and_stays(store):
    filled(store, *[ROW] * 50)
    for beside in store.path.parent.glob("*-wal"):
        beside.unlink()
    data = store.path.read_bytes()
    broken = data[: len(data) // 2][:100] + b"x" * 5000
    store.path.write_bytes(broken)
    with pytest.raises(BadStore, match=r"cannot be read: .* it was left as it is"):
        store.runs()
    assert store.path.read_bytes() == broken


def test_json_takes_runs_elsewhere(store, tmp_path):
    run = filled(store, ROW)
    file = tmp_path / "runs.json"
    assert export(store, [run], file, "json") == 1
    other = Store(tmp_path / "other.sqlite3")
    assert import_runs(other, file) == (1, 0) and import_runs(other, file) == (0, 1)
    assert other.runs() == [run] and other.rows(run.id) == [ROW]


def test_csv_and_parquet_have_a_line_a_row(store, tmp_path):
    run = filled(store, ROW, ROW)
    export(store, [run], tmp_path / "x.csv", "csv")
    lines = (tmp_path / "x.csv").read_text().splitlines()
    assert len(lines) == 3 and lines[0].endswith(",control")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'tilery[parquet]'")
    export(store, [run], tmp_path / "x.parquet", "parquet")
    table = parquet.read_table(tmp_path / "x.parquet")
    assert table.num_rows == 2 and table["samples"][0].as_py() == [1.9, 2.0, 2.1]


def test_a_run_without_the_hash_of_its_source_is_read(store, tmp_path):
    export(store, [filled(store, replace(ROW, source="0123456789ab"))], tmp_path / "runs.json", "json")
    document = json.loads((tmp_path / "runs.json").read_text())
    assert document["runs"][0]["rows"][0].pop("source") == "0123456789ab"
    (tmp_path / "runs.json").write_text(json.dumps(document))
    other = Store(tmp_path / "other.sqlite3")
    import_runs(other, tmp_path / "runs.json")
    assert other.rows(other.runs()[0].id) == [ROW]


@pytest.mark.parametrize("text", ["nonsense", "[]", json.dumps({"runs": [{"id": 1}]})])
def test_what_is_no_export_is_named(store, tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(BadInput, match="is not a json export of runs"):
        import_runs(store, tmp_path / "x.json")


def test_the_latest_run_comes_last(store):
    made = [filled(store).id for _ in range(5)]
    assert [run.id for run in store.runs()] == made and store.find("last").id == made[-1]


def test_rows_are_added_all_or_none(store):
    """The second cannot be written: the first is not there either, nor is anything in the way of what comes next."""
    run = store.start("tilery bench")
    with pytest.raises(TypeError):
        store.add(run, ROW, Row("softmax", "triton", "m=1,n=2", "pass", config=object()))
    assert store.rows(run) == []
    store.add(run, ROW, ROW)
    assert store.rows(run) == [ROW, ROW]


def test_a_change_of_one_run_leaves_the_others_alone(store):
    first, second = store.start("one"), store.start("two")
    other = Row("softmax", "numba", "m=1,n=2", "pass")
    for row in (ROW, ROW):
        store.add(first, row)
        store.add(second, row)
    store.replace(second, 1, other)
    assert store.rows(first) == [ROW, ROW] and store.rows(second) == [ROW, other]
    store.finish(second)
    assert store.find(first).finished is None and store.find(second).finished


def test_a_store_of_a_newer_tilery_is_left_alone(store):
    filled(store, ROW)
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    for use in (store.runs, lambda: store.start("tilery bench")):
        with pytest.raises(BadStore, match=r"has schema 99, .* it was left as it is"):
            use()


# Disks


def test_a_full_disk_is_called_one_and_the_store_stays_whole(store, monkeypatch):
    run, real = filled(store, ROW), sqlite3.connect

    def small(*args, **options):
        connection = real(*args, **options)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    monkeypatch.setattr(sqlite3, "connect", small)
    with pytest.raises(NotWritten) as error:
        store.add(run.id, *[ROW] * 500)
    said = str(error.value)
    assert said.startswith(f"{store.path} cannot be written: database or disk is full (") and "as it was" in said
    assert "cannot be read" not in said
    assert store.rows(run.id) == [ROW]


def test_a_store_that_cannot_be_written_can_be_read(store, monkeypatch):
    run, real = filled(store, ROW), sqlite3.connect

    class ReadOnly(sqlite3.Connection):
        """A connection to a folder in which no file can be made."""

        def execute(self, *_):
            return real("file:/proc/nothing?mode=ro", uri=True)  # what a file that cannot be opened raises

    def connect(path, *args, uri=False, **options):
        return real(path, *args, uri=uri, **options) if uri else real(path, *args, factory=ReadOnly, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    assert store.runs() == [run] and store.rows(run.id) == [ROW]
    with pytest.raises(NotWritten, match="cannot be written: unable to open database file"):
        store.finish(run.id)


def test_a_reader_makes_nothing(tmp_path):
    assert Store(tmp_path / "data" / "runs.sqlite3").runs() == []
    (tmp_path / "empty.sqlite3").touch()
    assert Store(tmp_path / "empty.sqlite3").runs() == []
    assert [path.name for path in tmp_path.iterdir()] == ["empty.sqlite3"]


def test_a_store_that_another_process_holds_is_said(store, monkeypatch):
    filled(store, ROW)
    monkeypatch.setattr("tilery.measure.store._WAIT_S", 0.05)
    other = sqlite3.connect(store.path)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(NotWritten, match="another process has been writing it"):
        store.start("second")
    other.close()
