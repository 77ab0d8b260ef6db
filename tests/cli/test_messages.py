"""What a command says where its surroundings are odd: in a sentence, with an exit code, never with a traceback."""

import errno
import json
import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest

from processes import HANG_S
from tilery.base import settings
from tilery.base.errors import NotWritten
from tilery.cli import main, surroundings
from tilery.measure import ceilings
from tilery.measure.ceilings import Ceilings
from tilery.measure.result import Row
from tilery.measure.store import SCHEMA, Store, export

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


def test_every_verb_that_writes_says_what_it_cannot_write(monkeypatch, capsys, tmp_path, below_a_file):
    monkeypatch.setattr(ceilings, "_measured", lambda where, say: Ceilings(1.0, 1.0, 1.0, {"fp32": 1.0}, 1.0))
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


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "runs.sqlite3")
    made.add(made.start("first"), ROW)
    return made


def test_a_broken_row_is_named_by_runs(store, monkeypatch, capsys):
    with store._open() as db:
        db.execute("UPDATE rows SET data = '{'")
    with settings.override(data_dir=store.path.parent):
        code, _, said = ended(monkeypatch, capsys, "runs")
    assert code == 2 and "a row of run" in said and "cannot be read" in said


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
    import sys, threading
    from tilery.cli import main
    from tilery.measure import ceilings, child
    from tilery.measure.result import Row
    from tilery.workbench import isolate

    hangs = sys.argv.pop(1) == "hangs"

    def measured(units, progress):
        worker = child.Child("tilery.measure.compile", 600)
        worker.send(("softmax", "numba", (), None, "cpu"))
        try:
            yield [Row("softmax", "numba", "m=1", "pass")]
            print(worker._process.pid, file=sys.stderr, flush=True)
            threading.Event().wait(600)
        finally:
            if hangs:
                print("ending", file=sys.stderr, flush=True)
                threading.Event().wait(600)
            worker.close()

    isolate.measured = measured
    ceilings.ceilings = lambda where, **_: ceilings.Ceilings(1.0, 1.0, 1.0, {"fp32": 1.0}, 1.0)
    main()
"""


@pytest.mark.parametrize(
    ("ending", "number"), [("ends", signal.SIGINT), ("ends", signal.SIGTERM), ("hangs", signal.SIGINT)]
)
def test_one_interrupt_ends_a_bench_and_a_second_ends_it_at_once(tmp_path, ending, number):
    words = ("bench", "softmax", "--case", "m=1,n=8,dtype=fp32", "-b", "numba", "--peers", "none")
    child = command(ending, *words, script=STOPPED, env={**os.environ, "TILERY_DATA_DIR": str(tmp_path)})
    worker = os.pidfd_open(int(child.stderr.readline()))
    child.send_signal(number)
    if ending == "hangs":
        assert child.stderr.readline() == "ending\n"
        child.send_signal(signal.SIGINT)
    out, said = child.communicate(timeout=HANG_S)
    (run,) = Store(tmp_path / "runs.sqlite3").runs()
    kept = f"stopped; 1 rows are kept as run {run.id}" if ending == "ends" else "stopped at once; what was kept until"
    assert child.returncode == 130 and said.startswith(f"tilery: {kept}") and said.count("\n") == 1 and not out
    assert len(Store(tmp_path / "runs.sqlite3").rows(run.id)) == 1 and run.finished is None
    assert select.select([worker], [], [], HANG_S)[0], "its child has ended too"
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
