"""The check itself: what counts as an error."""

import pytest
import torch

import plant
from tilery.base.errors import Wrong
from tilery.base.spec import TensorSpec, case
from tilery.core.op import REGISTRY
from tilery.measure import check as workbench
from tilery.measure.check import check, error
from tilery.measure.judge import judge

NAN, INF = float("nan"), float("inf")
SOFTMAX, SMALL = REGISTRY["softmax"], case(m=2, n=8, dtype="fp32")


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("out", "ref", "wanted"),
    [
        (t(1, 2), t(1, 2), 0.0),
        (t(1, 2), t(1, NAN), INF),
        (t(1, NAN), t(1, 2), INF),
        (t(1, NAN), t(1, NAN), 0.0),
        (t(1, INF), t(1, INF), 0.0),
        (t(1, -INF), t(1, INF), INF),
        (t(1, INF), t(1, NAN), INF),
        (t(0, 0), t(3, 4), 1.0),
        (t(1, 0), t(0, 0), INF),
        (t(), t(), 0.0),
    ],
)
def test_error(out, ref, wanted):
    assert error(out, ref) == wanted


@pytest.mark.parametrize("name", ["silu_mul", "rms_norm", "softmax"])
def test_few_wrong_elements_of_many_are_found(name, monkeypatch):
    """Four of two million: too few for the rms of the whole to notice. The seed draws none that is very large."""
    op, problem = REGISTRY[name], case(m=512, n=4096, dtype="bf16")

    def drops_some(out):
        out.view(-1)[:: out.numel() // 4] = 0

    assert check(op, "numba", problem, "cpu", seed=1).errors
    plant.after(monkeypatch, op, "numba", drops_some)
    with pytest.raises(Wrong, match=r"output 0 is 0 at \[\d+, \d+\] where .* is right, .* × what rounding allows"):
        check(op, "numba", problem, "cpu", seed=1)


@pytest.mark.parametrize("per", ["tensor", "token", "group", "block"])
def test_an_fp8_value_beside_the_right_one_is_found(per, monkeypatch):
    op, problem = REGISTRY["quantize_fp8"], case(m=40, n=128, dtype="fp32", per=per)

    def steps_aside(values):
        bits = values.view(torch.uint8).view(-1)
        bits[1234] = bits[1234] + (1 if bits[1234] & 0x7F < 0x40 else -1)

    for seed in range(5):
        assert check(op, "numba", problem, "cpu", seed=seed).errors
        with monkeypatch.context() as patch:
            plant.after(patch, op, "numba", steps_aside)
            with pytest.raises(Wrong, match=r"output 0 is .* at \[9, 82\] where"):
                check(op, "numba", problem, "cpu", seed=seed)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_one_rounding_is_allowed_and_the_neighbour_is_not(dtype):
    ref = torch.randn(64, 33, dtype=torch.float64).clamp(-3, 3)
    ref[40, 20] = 1.7  # a step of it is more than the slack below
    out = ref.float().to(dtype)
    assert 0.5 < judge(out, ref, 1e-9).excess <= 1 + 2**-12  # torch rounds a double to fp16 by way of fp32
    bits = out.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.itemsize])
    bits[40, 20] += 1
    found = judge(out, ref, 1e-9)
    assert found.excess > 1 and found.element == (40, 20)
    assert judge(out, ref, 1.0).excess < 1  # slack is for what comes before the rounding


def test_short_rows_are_judged_by_the_size_of_all():
    """A gradient near 0 is as good as the terms that cancelled in it; long rows say how large those were."""
    ref = torch.ones(9, 1, dtype=torch.float64)
    ref[8] = 1e-6
    out = (ref + 1e-9 * torch.eye(9, 1).flip(0)).float()
    assert judge(out, ref, 1e-7).excess < 1 < judge(out[8:], ref[8:], 1e-9).excess
    wide = ref.expand(9, 64).contiguous()
    assert judge((wide + 1e-9 * (wide < 1)).float(), wide, 1e-7).excess > 1


def test_where_rows_cancel_each_is_judged_by_all_or_by_itself_if_that_is_more():
    """The first rows of causal gradients have the largest terms: roundings of those are more than all rows' rms."""
    ref = torch.full((100, 64), 1e-2, dtype=torch.float64)
    ref[0], ref[1] = 10.0, 0.0  # the largest terms; terms that cancel
    off = torch.zeros_like(ref)
    off[0, 5], off[1, 5] = 0.15, 0.009  # slack allows 0.01 × (10 + 10), and 0.01 × (0 + 1)
    assert judge((ref + off).float(), ref, 0.01, whole=True).excess < 1
    assert judge((ref + 4 * off).float(), ref, 0.01, whole=True).element == (1, 5)
    assert judge((ref + 4 * off).float()[:1], ref[:1], 0.01, whole=True).excess > 1


def test_an_element_that_is_not_written_is_found(monkeypatch):
    def forgets_one(x, y):
        kept = y[-1, -1].clone()
        y.copy_(torch.softmax(x, -1))
        y[-1, -1] = kept

    plant.instead(monkeypatch, SOFTMAX, "numba", forgets_one, "x", "y")
    for problem in (case(m=64, n=1024, dtype="bf16"), case(m=1, n=8, dtype="fp32", special="nan")):
        with pytest.raises(Wrong, match="output 0 has error"):
            check(SOFTMAX, "numba", problem, "cpu")


def test_a_kernel_that_writes_its_input_is_found(monkeypatch):
    plant.after(monkeypatch, SOFTMAX, "numba", lambda x, y: x.copy_(y), "x", "y")
    with pytest.raises(Wrong, match="wrote its input x"):
        check(SOFTMAX, "numba", SMALL, "cpu")


def test_inputs_are_fresh_every_time(monkeypatch):
    seen = []
    plant.after(monkeypatch, SOFTMAX, "numba", lambda x: seen.append(x.clone()), "x")
    for _ in range(2):
        check(SOFTMAX, "numba", SMALL, "cpu")
    assert not torch.equal(*seen)


def test_workspace_is_poisoned_too(monkeypatch):
    """A kernel that takes what it finds there for zeros gives itself away."""

    class Summing(plant.ByTorch):
        def workspace(self, call, config):
            return {"sums": TensorSpec.contiguous(call.x.shape[:1], torch.float32, "cpu")}

    def softmax(x, y, sums):
        y.copy_(x.exp() / sums.add_(x.exp().sum(-1))[:, None])

    plant.add(monkeypatch, SOFTMAX, "numba.summing", Summing(softmax, "x", "y", "sums"))
    with pytest.raises(Wrong, match="output 0 has error"):
        check(SOFTMAX, "numba.summing", SMALL, "cpu")


def test_an_exception_is_a_row_that_says_it(monkeypatch, compiler):
    plant.instead(monkeypatch, SOFTMAX, "numba", lambda: 1 // 0)
    (row,) = workbench.rows(SOFTMAX, ["numba"], [SMALL], compiler)
    assert row.status == "fail" and row.reason.startswith("ZeroDivisionError")
