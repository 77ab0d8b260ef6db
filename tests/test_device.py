import json

import pytest
import torch

from tilery import device, settings
from tilery.device import Ceilings

CPU = torch.device("cpu")


def test_ceilings_are_measured_once_and_kept(tmp_path, monkeypatch):
    measured = []

    def measure(where):
        measured.append(where)
        return Ceilings(bandwidth=1e9 * len(measured), flops={"fp32": 1e12})

    monkeypatch.setattr(device, "_measured", measure)
    with settings.override(data_dir=tmp_path):
        assert device.ceilings(CPU) == device.ceilings(CPU) == Ceilings(1e9, {"fp32": 1e12})
        assert device.ceilings(CPU, measure=True).bandwidth == 2e9
        assert device.ceilings(CPU).bandwidth == 2e9
    (kept,) = (tmp_path / "ceilings").iterdir()
    assert json.loads(kept.read_text())["bandwidth"] == 2e9


def test_ceilings_that_cannot_be_read_or_kept_are_measured_again_and_said(tmp_path, monkeypatch):
    found = Ceilings(bandwidth=1e9, flops={"fp32": 1e12})
    monkeypatch.setattr(device, "_measured", lambda where: found)
    with settings.override(data_dir=tmp_path):
        device.ceilings(CPU)
        (kept,) = (tmp_path / "ceilings").iterdir()
        kept.write_text("nonsense")
        with pytest.warns(UserWarning, match="cannot be read .* measuring again"):
            assert device.ceilings(CPU) == found
        assert device.ceilings(CPU) == found
    (tmp_path / "file").write_text("")
    with settings.override(data_dir=tmp_path / "file"), pytest.warns(UserWarning, match="cannot keep"):
        assert device.ceilings(CPU) == found


def test_ceilings_of_this_machine_are_plausible(tmp_path):
    with settings.override(data_dir=tmp_path):
        found = device.ceilings(device.default())
    assert 1e8 < found.bandwidth < 1e14 and all(1e9 < rate < 1e16 for rate in found.flops.values())


def test_the_roof_is_the_slower_of_two():
    ceilings = Ceilings(bandwidth=1e9, flops={"fp32": 1e12})
    assert ceilings.roof_ms(flops=0, nbytes=10**6, dtype="fp32") == pytest.approx(1.0)
    assert ceilings.roof_ms(flops=10**10, nbytes=10**6, dtype="fp32") == pytest.approx(10.0)


def test_pretending_ends_with_its_block():
    where = torch.device("cuda", 0)
    with device.pretend("sm_89"):
        assert device.arch(where) == "sm_89" and device.arch(CPU) == "cpu"
        with device.pretend("sm_90"):
            assert device.arch(where) == "sm_90"
        assert device.arch(where) == "sm_89"


def test_names_make_file_names():
    slug = device.slug(CPU)
    assert slug and slug == slug.lower() and all(c.isalnum() or c == "_" for c in slug)
