"""The check itself: what counts as an error."""

import pytest
import torch

from tilery.errors import Wrong
from tilery.op import REGISTRY
from tilery.spec import case
from tilery.workbench import check as workbench
from tilery.workbench.check import check, error

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
