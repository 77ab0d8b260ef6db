"""Which file of tuned configs is used: this device's, the user's before the one that is shipped."""

import pytest
import torch

from tilery import languages
from tilery.base import settings
from tilery.base.errors import BadTunedFile
from tilery.base.spec import TensorSpec
from tilery.core import tuned
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.ops import softmax

SPECS = (TensorSpec.contiguous((4096, 256), torch.float32, "cpu"),)
CALL = softmax.call(SPECS)
HERE = device.slug(torch.device("cpu"))
NUMBA = softmax.kernel("numba")
SHIPPED, OWN = (NUMBA.Config(parallel) for parallel in (False, True))


def entry(config):
    bucket = softmax.bucket(CALL)
    return tuned.Entry(
        "numba", bucket.exact, bucket.scaled, config, ms=1.0, interval=[0.9, 1.1], error=1e-7, bit_identical=True,
        registers=None, spills=None, roof=0.5, versions={}, device="CPU", when="2026-01-01T00:00:00Z",
    )  # fmt: skip


def keep(ship, config, own, slug=HERE):
    """Keeps a config for a device, for the user or as it is shipped."""
    return tuned.write(softmax, slug, [entry(config)]) if own else ship(softmax, slug, entry(config))


@pytest.mark.parametrize("own", [True, False], ids=["the user's", "shipped"])
def test_what_was_tuned_for_another_device_is_not_used(ship, own):
    keep(ship, OWN, own, slug="a_faster_machine")
    assert softmax.plan(SPECS).source == "default"


def test_the_users_entry_goes_before_the_shipped_one(ship):
    keep(ship, SHIPPED, own=False)
    assert (softmax.plan(SPECS).config, softmax.plan(SPECS).source) == (SHIPPED, "tuned")
    keep(ship, OWN, own=True)
    assert softmax.plan(SPECS).config == OWN


def test_tuned_configs_can_be_left_out(ship, monkeypatch):
    keep(ship, SHIPPED, own=False)
    keep(ship, OWN, own=True)
    with settings.override(tuned=False):
        assert softmax.plan(SPECS).source == "default"
    assert softmax.plan(SPECS).source == "tuned"
    monkeypatch.setenv("TILERY_TUNED", "0")
    assert settings.from_environment().tuned is False
    monkeypatch.delenv("TILERY_TUNED")
    assert settings.from_environment().tuned is True


def test_a_shipped_file_lies_in_the_folder_of_its_device(ship):
    path = keep(ship, SHIPPED, own=False)
    assert path == softmax.folder / "tuned" / HERE / "softmax.json" == tuned.files(softmax, HERE)[1]
    assert tuned.shipped(softmax) == {HERE: path} and tuned.shipped(REGISTRY["matmul"]) == {}
    path.parent.rename(path.parent.with_name("elsewhere"))
    with pytest.raises(BadTunedFile, match=f"expected the entries of softmax on elsewhere, got those of .* {HERE}"):
        tuned.read(tuned.shipped(softmax)["elsewhere"], softmax)


# What is shipped

FILES = [pytest.param(op, path, id=f"{op.name}-{slug}") for op in REGISTRY.values()
         for slug, path in tuned.shipped(op).items()]  # fmt: skip


def test_there_are_shipped_files():
    assert len(FILES) >= 6


@pytest.mark.parametrize(("op", "path"), FILES)
def test_a_shipped_file_is_read_and_its_configs_are_those_of_its_kernels(op, path):
    entries = tuned.read(path, op)
    assert entries
    for each in entries:
        if languages.missing(each.kernel) is None:
            kind = op.kernel(each.kernel).Config
            assert isinstance(tuned.config_of(op, each, path), kind)
            assert tuned.present_fields(kind, each.config) == each.config, "shipped files have the names of now"
