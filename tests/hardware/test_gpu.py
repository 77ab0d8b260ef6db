"""What is known of GPUs: asked of the one that is here, pretended by name or by architecture."""

from types import SimpleNamespace

import pytest
import torch

from tilery.hardware import gpu as hardware
from tilery.hardware.gpu import ARCHS, KNOWN, Gpu, arch_number, gpu, pretend

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_a_pretended_gpu_is_known_by_its_name():
    with pretend("h100-pcie"):
        found = gpu(CUDA)
    assert (found.name, found.arch, found.number, found.sms) == ("NVIDIA H100 PCIe", "sm_90", 90, 114)
    assert found == KNOWN["h100-pcie"] != KNOWN["h200"]


@pytest.mark.parametrize("arch", ARCHS)
def test_an_architecture_stands_for_a_card_that_has_it(arch):
    with pretend(arch):
        found = gpu(CUDA)
    assert found.arch == arch and found in KNOWN.values()


def test_an_h200_stands_for_its_architecture_and_for_the_interpreter():
    """Defaults of kernels were tuned on one; where Triton interprets on a CPU they are the same."""
    with pretend("sm_90"):
        assert gpu(CUDA) == KNOWN["h200"]
    assert gpu(CPU) == KNOWN["h200"] and KNOWN["h200"].sms == 132


def test_an_architecture_that_no_known_card_has_is_a_modest_one():
    with pretend("sm_86"):
        found = gpu(CUDA)
    assert (found.arch, found.number, found.shared_per_block) == ("sm_86", 86, 99 * 1024) and 0 < found.sms < 108


def test_a_gpu_may_be_made_up():
    mine = Gpu("mine", "sm_90", sms=3, shared_per_block=1000, shared_per_sm=2000, l2=4000)
    with pretend(mine):
        assert gpu(CUDA) is mine and gpu(CPU) is mine


def test_pretending_ends_with_its_block_also_after_an_error():
    with pretend("a100"):
        with pytest.raises(KeyError), pretend("b200"):
            raise KeyError(gpu(CUDA).arch)
        assert gpu(CUDA).arch == "sm_80"
    assert gpu(CPU) == KNOWN["h200"]


@pytest.mark.parametrize("card", KNOWN.values(), ids=KNOWN)
def test_known_cards_hang_together(card):
    assert card.arch in ARCHS and card.number == arch_number(card.arch)
    assert card.shared_per_sm == card.shared_per_block + card.reserved_shared  # one block may have all but that
    assert card.largest_cluster == (8 if card.number >= 90 else 1)
    assert card.l2 >= 32 * 2**20 and card.sms >= 100


@pytest.mark.parametrize(("arch", "number"), [("sm_80", 80), ("sm_120", 120), ("cpu", 0)])
def test_the_number_of_an_architecture(arch, number):
    assert arch_number(arch) == number


@pytest.fixture
def driver(monkeypatch):
    """A driver that says these properties of a device."""

    def says(**properties):
        known = {"name": "NVIDIA X", "major": 9, "minor": 0, "multi_processor_count": 7, "L2_cache_size": 11}
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: SimpleNamespace(**known | properties))
        hardware._present.cache_clear()

    yield says
    hardware._present.cache_clear()


def test_the_gpu_that_is_here_is_asked(driver):
    driver(shared_memory_per_block_optin=5, shared_memory_per_multiprocessor=6, regs_per_multiprocessor=8)
    assert gpu(CUDA) == Gpu("NVIDIA X", "sm_90", 7, 5, 6, 11, registers_per_sm=8)
    with pretend("a100"):
        assert gpu(CUDA) == KNOWN["a100"]


def test_what_an_older_torch_does_not_say_is_known_of_the_architecture(driver):
    driver(major=8)
    assert gpu(CUDA) == Gpu("NVIDIA X", "sm_80", 7, 163 * 1024, 164 * 1024, 11)


@pytest.mark.gpu
def test_the_gpu_of_this_machine():
    found = gpu(CUDA)
    assert found.name == torch.cuda.get_device_name(0) and found.sms > 0
    assert 0 < found.shared_per_block <= found.shared_per_sm and found.l2 > 2**20
