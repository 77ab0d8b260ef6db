"""What is printed and read where the terminal or the locale has no Unicode, or nobody reads."""

import ast
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import tilery
from processes import HANG_S
from tilery.cli import common, surroundings

SOURCE = Path(tilery.__file__).parent


def command(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "tilery", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "encoding", "shown"),
    [
        (("plan", "qwen3-8b", "--batch", "1", "--device", "h200"), "ascii", "roof us"),
        (("bench", "--help"), "ascii", "quick ..."),
        (("bench", "--help"), "latin-1", "quick ..."),
    ],
)
def test_a_terminal_without_unicode_can_be_read(words, encoding, shown):
    child = command(*words, env={**os.environ, "PYTHONIOENCODING": encoding})
    out, said = child.communicate(timeout=HANG_S)
    assert child.returncode == 0 and "Traceback" not in said and shown in out, said


def test_without_utf8_the_files_of_the_package_are_read():
    bare = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    child = command("show", "softmax", "-b", "cuda", "--stage", "source", env=bare)
    out, said = child.communicate(timeout=HANG_S)
    assert child.returncode == 0 and "__global__" in out, said


@pytest.mark.parametrize(
    ("text", "spelt"), [("2 × 3 µs ± 1 …", "2 x 3 us +- 1 ..."), ("naïve ∇ ②", "naive grad 2"), ("\udcff☃", "\\xff?")]
)
def test_what_an_encoding_does_not_have_is_spelt(text, spelt):
    assert text.encode("ascii", "tilery").decode() == spelt


def test_columns_are_as_wide_as_they_look(monkeypatch, tmp_path):
    from rich.console import Console

    from tilery.cli.tables import Table, figure, key

    with (tmp_path / "out").open("w", encoding="ascii", errors="tilery") as file:
        monkeypatch.setattr(sys, "stdout", file)
        made = Table("Title", (figure("± 95 %"), key("next")), [("1", "a"), ("2", "b")])
        Console(file=file, width=60).print(made)
    _, head, *lines = (tmp_path / "out").read_text().splitlines()
    assert {line.index(letter) for line, letter in zip(lines, "ab")} == {head.index("next")}


def test_a_reader_that_has_enough_ends_the_command_quietly():
    child = command("ops", "--markdown")
    child.stdout.close()
    assert child.stderr.read() == "" and child.wait() == 1


def test_a_full_disk_behind_stdout_is_said():
    with Path("/dev/full").open("wb") as full:
        child = subprocess.run(
            [sys.executable, "-m", "tilery", "runs"], stdout=full, stderr=subprocess.PIPE, encoding="utf-8"
        )
    assert (child.returncode, child.stderr) == (2, "tilery: the output cannot be used: No space left on device\n")


def test_closed_streams_are_no_error():
    script = f"{sys.executable} -m tilery runs <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", script]).returncode == 0


def test_a_warning_of_ours_is_a_sentence():
    with surroundings.prepared():
        ours, other = (
            warnings.formatwarning(UserWarning("it is so"), UserWarning, str(where), 1)
            for where in (SOURCE / "ceilings.py", "/other/package.py")
        )
    assert ours == "tilery: it is so\n" and other.startswith("/other/package.py:1: UserWarning: it is so")


def calls(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def opens_text_as_the_locale_says(call):
    """Whether a call reads or writes text without saying in which encoding."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = call.func.value.id if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) else ""
    words = {word.arg: word.value for word in call.keywords}
    if "encoding" in words or owner in ("files", "tuned_files"):
        return False
    given = [*call.args, *words.values()]
    mode = next((a.value for a in given if isinstance(a, ast.Constant) and isinstance(a.value, str)), "")
    if name in ("read_text", "write_text"):
        return isinstance(call.func, ast.Attribute)
    if name == "open" and owner != "os":
        return "b" not in mode
    if name == "fdopen":
        return "b" not in mode
    if name in ("TemporaryFile", "NamedTemporaryFile"):
        return mode[:1] in ("w", "r", "a") and "b" not in mode
    return any(isinstance(words.get(n), ast.Constant) and words[n].value for n in ("text", "universal_newlines"))


@pytest.mark.parametrize(("every", "lines"), [(0.0, ["at one", "at two"]), (3600.0, [])])
def test_progress_in_a_log_is_a_line_now_and_then(every, lines, monkeypatch, capsys):
    monkeypatch.setattr(common, "_LINE_EVERY_S", every)
    with common.progress(2) as (say, count):
        for text in ("at one", "at two"):
            say(text)
            count()
    out, said = capsys.readouterr()
    assert out == "" and [line.split(":")[1].split(",")[0].strip() for line in said.splitlines()] == lines


def test_every_text_names_its_encoding():
    found = [
        f"{path.relative_to(SOURCE)}:{call.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        for call in calls(ast.parse(path.read_text(encoding="utf-8")))
        if opens_text_as_the_locale_says(call)
    ]
    assert found == [], 'text is read and written with encoding="utf-8"'


@pytest.mark.parametrize(
    ("line", "locale"),
    [
        ("path.read_text()", True), ("path.read_text(encoding='utf-8')", False), ("path.open('w')", True),
        ("open(path)", True), ("path.open('rb')", False), ("run(x, text=True)", True), ("os.open(path, 0)", False),
        ("TemporaryFile('w+')", True), ("TemporaryFile()", False), ("os.fdopen(1, 'wb')", False),
    ],
)  # fmt: skip
def test_the_search_for_it_finds_them(line, locale):
    assert [opens_text_as_the_locale_says(call) for call in calls(ast.parse(line))] == [locale]
