"""The check itself: what counts as an error."""

import pytest
import torch

from tilery.base.errors import Wrong
from tilery.base.spec import case
from tilery.core.op import REGISTRY
from tilery.measure import check as workbench
from tilery.measure.check import check, error
from tilery.measure.judge import judge

NAN, INF = float("nan"), float("inf")


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
    """Ten of eight million: too few for the rms of the whole to notice."""
    op = REGISTRY[name]
    kernel = op.kernel("numba")
    right, problem = kernel.run, case(m=2048, n=4096, dtype="bf16")

    def drops_some(outs, args, config):
        right(outs, args, config)
        outs[0].view(-1)[:: outs[0].numel() // 10] = 0

    assert check(op, "numba", problem, "cpu").errors
    monkeypatch.setattr(kernel, "run", drops_some)
    with pytest.raises(Wrong, match=r"output 0 is 0 at \[\d+, \d+\] where .* is right, .* × what rounding allows"):
        check(op, "numba", problem, "cpu")


@pytest.mark.parametrize("per", ["tensor", "token", "group", "block"])
def test_an_fp8_value_beside_the_right_one_is_found(per, monkeypatch):
    op = REGISTRY["quantize_fp8"]
    kernel = op.kernel("numba")
    right, problem = kernel.run, case(m=40, n=128, dtype="fp32", per=per)

    def steps_aside(outs, args, config):
        right(outs, args, config)
        bits = outs[0].view(torch.uint8).view(-1)
        bits[1234] = bits[1234] + (1 if bits[1234] & 0x7F < 0x40 else -1)

    for seed in range(5):
        monkeypatch.setattr(kernel, "run", right)
        assert check(op, "numba", problem, "cpu", seed=seed).errors
        monkeypatch.setattr(kernel, "run", steps_aside)
        with pytest.raises(Wrong, match=r"output 0 is .* at \[9, 82\] where"):
            check(op, "numba", problem, "cpu", seed=seed)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_one_rounding_is_allowed_and_the_neighbour_is_not(dtype):
    ref = torch.randn(64, 33, dtype=torch.float64).clamp(-3, 3)
    out = ref.float().to(dtype)
    assert 0.5 < judge(out, ref, 1e-9).excess <= 1 + 2**-12  # torch rounds a double to fp16 by way of fp32
    bits = out.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.itemsize])
    bits[40, 20] += 1
    found = judge(out, ref, 1e-9)
    assert found.excess > 1 and found.element == (40, 20)
    assert judge(out, ref, 1.0).excess < 1  # slack is for what comes before the rounding


def test_an_element_that_is_not_written_is_found(monkeypatch):
    op = REGISTRY["softmax"]

    def forgets_one(outs, args, config):
        kept = outs[0][-1, -1].clone()
        outs[0].copy_(torch.softmax(args[0], -1))
        outs[0][-1, -1] = kept

    monkeypatch.setattr(op.kernel("numba"), "run", forgets_one)
    for problem in (case(m=64, n=1024, dtype="bf16"), case(m=1, n=8, dtype="fp32", special="nan")):
        with pytest.raises(Wrong, match="output 0 has error"):
            check(op, "numba", problem, "cpu")


def test_a_kernel_that_writes_its_input_is_found(monkeypatch):
    op = REGISTRY["softmax"]

    def in_place(outs, args, config):
        outs[0].copy_(torch.softmax(args[0], -1))
        args[0].copy_(outs[0])

    monkeypatch.setattr(op.kernel("numba"), "run", in_place)
    with pytest.raises(Wrong, match="wrote its input x"):
        check(op, "numba", case(m=2, n=8, dtype="fp32"), "cpu")


def test_inputs_are_fresh_every_time(monkeypatch):
    op, seen = REGISTRY["softmax"], []
    original = op.kernel("numba").run

    def run(outs, args, config):
        seen.append(args[0].clone())
        original(outs, args, config)

    monkeypatch.setattr(op.kernel("numba"), "run", run)
    for _ in range(2):
        check(op, "numba", case(m=2, n=8, dtype="fp32"), "cpu")
    assert not torch.equal(*seen)


def test_an_exception_is_a_row_that_says_it(monkeypatch, compiler):
    op = REGISTRY["softmax"]
    monkeypatch.setattr(op.kernel("numba"), "run", lambda *_: 1 // 0)
    (row,) = workbench.rows(op, ["numba"], [case(m=2, n=8, dtype="fp32")], compiler)
    assert row.status == "fail" and row.reason.startswith("ZeroDivisionError")
