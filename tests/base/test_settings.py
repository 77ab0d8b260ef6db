"""Settings: what the environment may say, and what is said of what it may not."""

import errno
import os
import pwd

import pytest

from tilery.base import settings
from tilery.base.errors import BadSetting


def test_folders_move_with_the_environment(monkeypatch, tmp_path):
    for name in ("DATA", "CACHE"):
        monkeypatch.setenv(f"TILERY_{name}_DIR", str(tmp_path / name))
    monkeypatch.delenv("TILERY_CONFIG_DIR", raising=False)
    found = settings.from_environment()
    assert (found.data_dir, found.cache_dir) == (tmp_path / "DATA", tmp_path / "CACHE")
    assert found.config_dir == tmp_path / "DATA" / "tuned"
    monkeypatch.setenv("TILERY_CONFIG_DIR", str(tmp_path / "mine"))
    assert settings.from_environment().config_dir == tmp_path / "mine"


@pytest.mark.parametrize(("value", "on"), [("", False), ("0", False), ("1", True)])
def test_explain_is_a_switch(monkeypatch, value, on):
    monkeypatch.setenv("TILERY_EXPLAIN", value)
    assert settings.from_environment().explain is on


def test_a_bad_value_raises(monkeypatch, tmp_path):
    monkeypatch.setenv("TILERY_EXPLAIN", "yes")
    with pytest.raises(BadSetting, match="TILERY_EXPLAIN must be 0 or 1, got 'yes'"):
        settings.from_environment()
    monkeypatch.delenv("TILERY_EXPLAIN")
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TILERY_CACHE_DIR", str(file))
    with pytest.raises(BadSetting, match="TILERY_CACHE_DIR must name a folder, got the file"):
        settings.from_environment()


def test_override_ends_with_its_block(tmp_path):
    before = settings.get()
    with settings.override(cache_dir=tmp_path):
        assert settings.get().cache_dir == tmp_path
    assert settings.get() == before


@pytest.mark.parametrize("variable", ["TILERY_DATA_DIR", "TILERY_CACHE_DIR", "TILERY_CONFIG_DIR"])
def test_a_folder_below_a_file_is_named(monkeypatch, tmp_path, variable):
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / "file" / "data"))
    with pytest.raises(BadSetting, match=rf"{variable} must name a folder, got the file {tmp_path / 'file'}, below"):
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
