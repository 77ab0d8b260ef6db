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
