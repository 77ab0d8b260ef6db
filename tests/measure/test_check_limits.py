"""The check at its limits: one element among many, outputs that are missing, memory that nobody wrote."""

import pytest
import torch

import plant
from tilery.base.errors import Wrong
from tilery.base.spec import DTYPES, TensorSpec, case
from tilery.core.op import REGISTRY
from tilery.measure import check as workbench
from tilery.measure.check import check, error, poisoned, reference

OP = REGISTRY["softmax"]


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.int32, torch.int64], ids=str)
def test_outputs_hold_what_no_kernel_writes(dtype):
    """Far from any result in all of them: what memory held before might be right by chance."""
    found = poisoned(TensorSpec.contiguous((3, 5), dtype, "cpu")).double()
    assert (found == found[0, 0]).all() and found[0, 0] <= -400


@pytest.mark.parametrize(
    ("at", "count", "said"), [(-1, 1, "1 of 256 elements before it"), (15, 2, "2 of 256 elements behind it")]
)
def test_a_write_outside_of_an_output_is_found(monkeypatch, at, count, said):
    def outside(x, y):
        y.copy_(torch.softmax(x.double(), -1))
        y.as_strided((count,), (1,), y.storage_offset() + at).fill_(0)

    plant.instead(monkeypatch, OP, "numba", outside, "x", "y")
    with pytest.raises(Wrong, match=f"wrote outside of an output or workspace: {said}"):
        check(OP, "numba", case(m=3, n=5, dtype="fp16"), "cpu")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_one_element_that_is_off_is_found(monkeypatch, dtype):
    """Over all elements it is nothing; at its own place it is far more than rounding may leave."""
    factor = {"fp16": 1.05, "bf16": 1.5}[dtype]

    def off(x, y):
        right = torch.softmax(x.double(), -1)
        right[3, 5] *= factor
        y.copy_(right)

    plant.instead(monkeypatch, OP, "numba", off, "x", "y")
    with pytest.raises(Wrong, match=r"output 0 is .* at \[3, 5\] where .* is right"):
        check(OP, "numba", case(m=64, n=1024, dtype=dtype), "cpu", seed=1)  # here it is no large one


@pytest.mark.parametrize(("factor", "good"), [(1.0, True), (1.02, False)])
def test_subnormal_numbers_may_be_off_by_their_rounding_and_no_more(monkeypatch, factor, good):
    """Over 100,000 classes fp16 rounds the probabilities to multiples of 6e-8, which is 1 % of one."""
    plant.instead(monkeypatch, OP, "numba", lambda x, y: y.copy_(torch.softmax(x.double(), -1) * factor), "x", "y")
    given = case(m=2, n=100352, dtype="fp16")
    if good:
        assert max(check(OP, "numba", given, "cpu").errors) < 5e-4
    else:
        with pytest.raises(Wrong, match="output 0 has error 2"):
            check(OP, "numba", given, "cpu")


def test_the_error_is_of_all_elements_together():
    """Differences of both signs do not cancel, and a large one counts more than several small ones."""
    ref = torch.tensor([3.0, 4.0, 0.0, 0.0])
    assert error(ref + torch.tensor([2.0, 0.0, 0.0, -1.0]), ref) == pytest.approx(5**0.5 / 5)


def test_a_peer_that_gives_too_few_outputs_is_found(monkeypatch):
    op = REGISTRY["cross_entropy"]
    monkeypatch.setitem(op.baselines, "baseline:torch", lambda *args: torch.zeros(3))
    with pytest.raises(Wrong, match="should give 2 outputs, gave 1"):
        workbench.check_baseline(op, "baseline:torch", case(m=3, n=8, dtype="fp32"), "cpu")


def test_the_reference_is_computed_in_float64():
    (found,) = reference(OP, (torch.randn(3, 5),))
    assert found.dtype == torch.float64
