"""Which file of tuned configs is used: this device's, the user's before the one that is shipped."""

import pytest
import torch

from tilery.base import settings
from tilery.base.spec import TensorSpec
from tilery.core import tuned
from tilery.core.op import Op
from tilery.hardware import device
from tilery.ops import matmul

SPECS = (*(TensorSpec.contiguous(shape, torch.float32, "cpu") for shape in ((4096, 256), (256, 8192))), "ieee")
HERE = device.slug(torch.device("cpu"))


def configs():
    kernel = matmul.kernel("numba")
    return [config for config in kernel.configs(*SPECS) if config != kernel.default(*SPECS)]


def entry(config):
    bucket = matmul.bucket(*SPECS)
    return tuned.Entry(
        "numba", bucket.exact, bucket.scaled, config, ms=1.0, interval=[0.9, 1.1], error=1e-7, bit_identical=True,
        registers=None, spills=None, roof=0.5, versions={}, device="CPU", when="2026-01-01T00:00:00Z",
    )  # fmt: skip


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """Keeps a config of a device, for the user or as it is shipped."""
    users, shipped = tmp_path / "users", tmp_path / "shipped"
    monkeypatch.setattr(Op, "folder", property(lambda op: shipped / op.name))

    def write(config, slug=HERE, own=True):
        path = tuned.write(matmul, slug, [entry(config)], users if own else tmp_path / "made")
        if not own:
            (shipped / "matmul" / "tuned").mkdir(parents=True)
            path.rename(shipped / "matmul" / "tuned" / path.name)
            tuned.reload()

    with settings.override(config_dir=users):
        yield write
    monkeypatch.undo()
    tuned.reload()


@pytest.mark.parametrize("own", [True, False], ids=["the user's", "shipped"])
def test_what_was_tuned_for_another_device_is_not_used(keep, own):
    keep(configs()[0], slug="a_faster_machine", own=own)
    assert matmul.plan(SPECS).source == "default"


def test_the_users_entry_goes_before_the_shipped_one(keep):
    shipped, own = configs()[:2]
    keep(shipped, own=False)
    assert (matmul.plan(SPECS).config, matmul.plan(SPECS).source) == (shipped, "tuned")
    keep(own)
    assert matmul.plan(SPECS).config == own
