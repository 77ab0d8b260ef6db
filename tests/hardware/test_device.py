import torch

from tilery.hardware import device

CPU = torch.device("cpu")


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
