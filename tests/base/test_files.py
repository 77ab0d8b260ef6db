"""Writing files: whole or not at all, and what goes wrong is said with the file's name."""

import os
from pathlib import Path

import pytest

from tilery.base import files
from tilery.base.errors import NotWritten


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


@pytest.mark.parametrize("data", ["text ×", b"bytes"])
def test_what_is_written_is_there_and_nothing_beside_it(tmp_path, data):
    files.write(tmp_path / "x", data)
    assert (tmp_path / "x").read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, step):
    def full(*_):
        raise OSError(28, "No space left on device")

    files.write(tmp_path / "x", "old")
    monkeypatch.setattr(os, step, full)
    with pytest.raises(NotWritten, match="x cannot be written: No space left on device; what it held is as it was"):
        files.write(tmp_path / "x", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(NotWritten, match="No such file or directory"):
        files.write(tmp_path / "no" / "x", "text")
