"""What a command says where its surroundings are odd: in a sentence, with an exit code, never with a traceback."""

import errno
import json
import os
import pwd
import select
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tilery.base import files, settings
from tilery.base.errors import BadSetting, BadStore, NotWritten
from tilery.cli import main, surroundings
from tilery.measure.result import Row
from tilery.measure.store import SCHEMA, Store, export
from tilery.tuning.journal import Journal

ROW = Row("softmax", "numba", "m=1", "pass")


def ended(monkeypatch, capsys, *words):
    """(exit code, stdout, stderr) of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["tilery", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code or 0, *capsys.readouterr()


def command(*words, script="from tilery.cli import main; main()", **options):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", **options,
    )  # fmt: skip


# Folders and disks


@pytest.fixture
def below_a_file(tmp_path):
    (tmp_path / "file").touch()
    return tmp_path / "file" / "data"


@pytest.mark.parametrize("variable", ["TILERY_DATA_DIR", "TILERY_CACHE_DIR", "TILERY_CONFIG_DIR"])
def test_a_folder_below_a_file_is_named(monkeypatch, below_a_file, variable):
    monkeypatch.setenv(variable, str(below_a_file))
    with pytest.raises(BadSetting, match=rf"{variable} must name a folder, got the file {below_a_file.parent}, below"):
        settings.from_environment()


def test_a_folder_that_may_not_be_looked_into_is_no_error_yet(monkeypatch, tmp_path):
    def forbidden(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setenv("TILERY_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(os, "stat", forbidden)
    monkeypatch.setattr(os, "lstat", forbidden)
    assert settings.from_environment().data_dir == tmp_path / "data"


def test_without_a_home_the_variable_to_set_is_named(monkeypatch):
    def unknown(*_):
        raise KeyError("uid not found")

    for variable in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    settings.from_environment()  # both folders are named: nobody asks for a home
    for variable in ("TILERY_DATA_DIR", "TILERY_CACHE_DIR"):
        with monkeypatch.context() as patch:
            patch.delenv(variable)
            with pytest.raises(BadSetting, match=f"{variable} must name a folder by its whole path, got nothing"):
                settings.from_environment()


def test_every_verb_that_writes_says_what_it_cannot_write(monkeypatch, capsys, tmp_path, below_a_file):
    (tmp_path / "runs.json").write_text(json.dumps({"schema": SCHEMA, "runs": []}))
    with settings.override(data_dir=below_a_file, config_dir=below_a_file / "tuned"):
        for words in (
            ("bench", "softmax", "--case", "m=1,n=8,dtype=fp32", "-b", "numba", "--peers", "none", "--screen"),
            ("tune", "softmax", "--case", "m=1,n=8,dtype=fp32", "-b", "numba"),
        ):
            code, _, said = ended(monkeypatch, capsys, *words)
            assert code == 2 and "Traceback" not in said, said
            assert f"tilery: {below_a_file}" in said and "cannot be written: Not a directory" in said, said
        for words in (("runs",), ("runs", "import", tmp_path / "runs.json")):  # there is nothing to write
            assert ended(monkeypatch, capsys, *words)[0] == 0
        code, _, said = ended(monkeypatch, capsys, "report")
        assert code == 2 and "there must be a run to show" in said


def test_a_file_to_write_is_named(monkeypatch, capsys, tmp_path):
    store = Store(tmp_path / "runs.sqlite3")
    store.add(store.start("x"), ROW)
    for form in ("json", "csv"):
        with pytest.raises(NotWritten, match=f"{tmp_path} cannot be written: Is a directory"):
            export(store, store.runs(), tmp_path, form)
    with settings.override(data_dir=tmp_path):
        code, _, said = ended(monkeypatch, capsys, "runs", "export", "--format", "csv", "-o", tmp_path)
    assert code == 2 and "cannot be written: Is a directory" in said


def test_a_device_and_the_target_of_a_link_are_written_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text("old")
    files.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"
    (tmp_path / "null").symlink_to("/dev/null")
    files.write(tmp_path / "null", "new")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(NotWritten, match="/dev/full cannot be written: No space left on device"):
        files.write(Path("/dev/full"), "new")


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "runs.sqlite3")
    made.add(made.start("first"), ROW)
    return made


def test_a_full_disk_is_called_one_and_the_store_stays_whole(store, monkeypatch):
    (run,), real = store.runs(), sqlite3.connect

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
    (run,), real = store.runs(), sqlite3.connect

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
    monkeypatch.setattr("tilery.measure.store._WAIT_S", 0.05)
    other = sqlite3.connect(store.path)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(NotWritten, match="another process has been writing it"):
        store.start("second")
    other.close()


def test_a_store_of_a_newer_tilery_is_left(store):
    with sqlite3.connect(store.path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    for use in (store.runs, lambda: store.start("second")):
        with pytest.raises(BadStore, match=rf"has schema {SCHEMA + 1}, this tilery knows {SCHEMA}; .* update tilery"):
            use()


def test_a_broken_row_is_named_by_runs(store, monkeypatch, capsys):
    with store._open() as db:
        db.execute("UPDATE rows SET data = '{'")
    with settings.override(data_dir=store.path.parent):
        code, _, said = ended(monkeypatch, capsys, "runs")
    assert code == 2 and "a row of run" in said and "cannot be read" in said


def test_a_journal_of_another_form_is_measured_again(tmp_path):
    first = Journal(tmp_path, "softmax", "cpu", "session")
    first.path.write_text('{"session": "session", "job": "k", "measured": [{"nothing": 1}]}\n')
    assert Journal(tmp_path, "softmax", "cpu", "session").jobs == {}


def test_an_error_of_the_disk_that_nobody_expected_is_a_line(monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")

    monkeypatch.setattr(Store, "runs", full)
    assert ended(monkeypatch, capsys, "runs")[::2] == (
        2, "tilery: /some/file cannot be used: No space left on device\n",
    )  # fmt: skip


def test_any_other_error_keeps_its_traceback(monkeypatch):
    def wrong(*_):
        raise FileNotFoundError(errno.ENOENT, "a mistake of ours")

    monkeypatch.setattr(Store, "runs", wrong)
    monkeypatch.setattr(sys, "argv", ["tilery", "runs"])
    with pytest.raises(FileNotFoundError):
        main()


# Ctrl-C

STOPPED = """
    import sys, time
    from tilery import ceilings
    from tilery.cli import main
    from tilery.workbench import child, isolate
    from tilery.measure.result import Row

    hangs = sys.argv.pop(1) == "hangs"

    def measured(units, progress):
        worker = child.Child("tilery.measure.compile", 600)
        worker.send(("softmax", "numba", (), None, "cpu"))
        try:
            yield [Row("softmax", "numba", "m=1", "pass")]
            print(worker._process.pid, file=sys.stderr, flush=True)
            time.sleep(600)
        finally:
            if hangs:
                print("ending", file=sys.stderr, flush=True)
                time.sleep(600)
            worker.close()

    isolate.measured = measured
    ceilings.ceilings = lambda where: ceilings.Ceilings(1.0, 1.0, 1.0, {"fp32": 1.0}, 1.0)
    main()
"""


@pytest.mark.parametrize("ending", ["ends", "hangs"])
def test_one_interrupt_ends_a_bench_and_a_second_ends_it_at_once(tmp_path, ending):
    words = ("bench", "softmax", "--case", "m=1,n=8,dtype=fp32", "-b", "numba", "--peers", "none")
    child = command(ending, *words, script=STOPPED, env={**os.environ, "TILERY_DATA_DIR": str(tmp_path)})
    worker = os.pidfd_open(int(child.stderr.readline()))
    child.send_signal(signal.SIGINT)
    if ending == "hangs":
        assert child.stderr.readline() == "ending\n"
        child.send_signal(signal.SIGINT)
    out, said = child.communicate(timeout=120)
    (run,) = Store(tmp_path / "runs.sqlite3").runs()
    kept = f"stopped; 1 rows are kept as run {run.id}" if ending == "ends" else "stopped at once; what was kept until"
    assert child.returncode == 130 and said.startswith(f"tilery: {kept}") and said.count("\n") == 1 and not out
    assert len(Store(tmp_path / "runs.sqlite3").rows(run.id)) == 1 and run.finished is None
    assert select.select([worker], [], [], 60)[0], "its child has ended too"
    os.close(worker)


def test_where_interrupts_are_ignored_they_stay_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with surroundings.prepared():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    with surroundings.prepared():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
