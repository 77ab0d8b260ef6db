"""Which language a kernel is of, whether it is here, and which devices its code serves."""

import pytest
import torch

from tilery import languages
from tilery.hardware import device


def test_a_variant_is_of_its_language():
    assert languages.language("cuda.hopper").name == "cuda" and languages.language("cuda").install.endswith("[cuda]'")
    assert languages.load("numba.planted").__name__ == "tilery.languages.numba_glue"


@pytest.fixture
def only(monkeypatch):
    """Only these packages are installed."""

    def installed(*packages):
        monkeypatch.setattr(languages, "installed", lambda package: package in packages)
        languages.missing.cache_clear()

    yield installed
    languages.missing.cache_clear()


def test_what_is_missing_is_said_with_the_command_that_adds_it(only):
    only("numba_cuda")
    assert languages.missing("numba_cuda") == (
        "numba_cuda is not installed: pip install 'tilery[numba-cuda]' (no cuda.core)"
    )
    assert languages.missing("triton") == "triton is not installed: pip install triton (no triton)"
    only("numba_cuda", "cuda.core")
    assert languages.missing("numba_cuda") is None


def test_a_part_of_a_package_that_is_not_there_is_not_installed():
    assert languages.installed("torch.nn") and not languages.installed("no_such_package.part")


def test_an_architecture_that_is_not_claimed_is_refused():
    with device.pretend("sm_75"):
        why = languages.refusal("cuda", torch.device("cuda", 0), ("sm_80", "sm_90"), ())
    assert why == "builds for sm_80, sm_90, and cuda:0 is sm_75"


@pytest.mark.parametrize(
    ("kernel", "archs", "where", "why"),
    [("numba", ("cpu",), "cuda:0", "needs a CPU tensor, got one on cuda:0"),
     ("cupy", ("sm_90",), "cpu", "needs a CUDA tensor, got one on cpu"),
     ("cuda", ("sm_90",), "mps:0", "needs a CUDA tensor, got one on mps:0"),
     ("numba", ("cpu",), "cpu", None)],
)  # fmt: skip
def test_a_tensor_elsewhere_is_refused(kernel, archs, where, why):
    assert languages.refusal(kernel, torch.device(where), archs, ()) == why


@pytest.mark.parametrize(
    ("built", "present", "runs"),
    [("sm_80", "sm_80", True), ("sm_80", "sm_86", True), ("sm_80", "sm_90", False), ("sm_89", "sm_80", False),
     ("sm_100", "sm_103", True), ("sm_120", "sm_100", False), ("cpu", "cpu", True), ("cpu", "sm_90", False)],
)  # fmt: skip
def test_which_code_serves_which_card(built, present, runs):
    assert languages.serves(built, present) is runs
