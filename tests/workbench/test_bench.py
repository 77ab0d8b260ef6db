"""Rows of a bench: what ran, what was compiled, what was wrong."""

import pytest
import torch

from tilery.op import REGISTRY
from tilery.spec import case
from tilery.workbench.bench import bench

SMALL = case(m=64, n=256, dtype="fp32")


def rows(op, kernels, compiler, given=SMALL):
    return {row.kernel: row for row in bench(REGISTRY[op], kernels, [given], compiler, rounds=6)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU nothing needs to be compiled")
def test_what_runs_is_timed_and_the_rest_is_compiled(compiler):
    found = rows("softmax", ["numba", "triton"], compiler)
    assert list(found) == ["baseline:torch", "control:torch", "numba", "triton"]
    for name in ("baseline:torch", "numba"):
        row = found[name]
        assert row.status == "pass" and row.ms_low <= row.ms <= row.ms_high and row.timed_by == "clock"
        assert row.gbps == pytest.approx(2 * 64 * 256 * 4 / row.ms / 1e6) and row.roof > 0
    assert found["baseline:torch"].ratio == 1.0 and found["numba"].error < 1e-6
    assert found["triton"].status == "compiled" and found["triton"].registers > 0 and found["triton"].arch == "sm_90"


def test_a_wrong_kernel_is_not_timed(compiler, monkeypatch):
    monkeypatch.setattr(REGISTRY["softmax"].kernel("numba"), "run", lambda outs, args, config: outs[0].zero_())
    row = rows("softmax", ["numba"], compiler)["numba"]
    assert row.status == "fail" and row.ms is None and "output 0 has error" in row.reason


def test_a_kernel_that_turns_wrong_while_it_is_timed_is_found(compiler, monkeypatch):
    kernel, calls = REGISTRY["softmax"].kernel("numba"), []
    right = kernel.run

    def run(outs, args, config):
        calls.append(1)
        right(outs, args, config)
        if len(calls) > 5:
            outs[0].zero_()

    monkeypatch.setattr(kernel, "run", run)
    row = rows("softmax", ["numba"], compiler)["numba"]
    assert row.status == "fail" and row.reason.startswith("right before it was timed, not after: softmax numba")


def test_the_control_is_the_baseline_timed_once_more(compiler, monkeypatch):
    op, calls = REGISTRY["softmax"], []

    def counted(x):
        calls.append(1)
        return torch.softmax(x, -1)

    monkeypatch.setitem(op.baselines, "baseline:torch", counted)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = rows("softmax", ["numba"], compiler)
    assert len(calls) == 2 * (2 + 6)  # two arms, each warmed up twice, then six rounds
    base, control = found["baseline:torch"], found["control:torch"]
    assert len(base.samples) == len(control.samples) == 6 and base.samples != control.samples
    assert control.ratio_low <= control.ratio <= control.ratio_high


def test_a_refusal_is_a_row_with_its_sentence(compiler, monkeypatch):
    monkeypatch.setattr(REGISTRY["softmax"].kernel("numba"), "refusal", lambda x, config=None: "not on Sundays")
    row = rows("softmax", ["numba"], compiler)["numba"]
    assert (row.status, row.reason) == ("refused", "not on Sundays")
