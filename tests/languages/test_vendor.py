"""The vendor's kernels through torch: chosen where named or tuned, never else, never counted as ours."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch

import plant
import tilery
from tilery import languages
from tilery.base import settings
from tilery.base.errors import NoBackend
from tilery.base.spec import case
from tilery.core import tuned
from tilery.core.cases import specs_for
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.languages import vendor_glue
from tilery.measure import place, result
from tilery.ops import linear, matmul
from tilery.pages import pairs, summary

CASE = case(m=24, n=40, k=32, dtype="fp32")
SPECS = specs_for(matmul, CASE, "cpu")
CALL = matmul.call(SPECS)
HERE = device.slug(torch.device("cpu"))
WITH_VENDOR = [op for op in REGISTRY.values() if "vendor" in op.kernels]
PRECISION = (torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter)


def entry(kernel, rank=0, **config):
    bucket = matmul.bucket(CALL)
    return tuned.Entry(
        kernel, bucket.exact, bucket.scaled, config, ms=1.0 + rank, interval=[0.9, 1.1], error=1e-7, rank=rank,
        bit_identical=True, registers=None, spills=None, roof=0.5, versions={}, device="CPU", when="2026-01-01",
    )  # fmt: skip


def numbas():
    return dataclasses.asdict(matmul.kernel("numba").default(CALL))


# Who runs


@pytest.mark.parametrize("op", WITH_VENDOR, ids=lambda op: op.name)
def test_it_is_last_and_no_untuned_call_is_its(op):
    assert list(op.kernels)[-1] == "vendor" and not languages.is_ours("vendor")
    for one in op.cases["test"]:
        assert op.plan(specs_for(op, one, "cpu")).kernel != "vendor"


def test_where_every_other_kernel_refuses_it_is_named_and_does_not_run(monkeypatch):
    for kernel in ("numba", "triton"):  # Triton may interpret
        plant.refusing(monkeypatch, matmul, kernel, "not today")
    with pytest.raises(NoBackend) as caught:
        matmul.plan(SPECS)
    said = str(caught.value)
    assert "\n  numba: not today" in said
    assert "\n  vendor: takes it, but runs only where it is tuned or named: backend='vendor'" in said
    assert matmul.plan(SPECS, "vendor").kernel == "vendor"


def test_what_is_tuned_runs_and_is_said(ship, capsys):
    tuned.write(matmul, HERE, [entry("vendor"), entry("numba", 1, **numbas())])
    with settings.override(explain=True):
        plan = matmul.plan(SPECS)
    assert (plan.kernel, plan.source, plan.library) == ("vendor", "tuned", "oneDNN and MKL through torch")
    assert "runs vendor (oneDNN and MKL through torch) with Config(), tuned" in capsys.readouterr().err
    assert vendor_glue.library(torch.device("cuda")) == "cuBLAS through torch"


def test_a_setting_leaves_it_out(ship, monkeypatch):
    tuned.write(matmul, HERE, [entry("vendor"), entry("numba", 1, **numbas())])
    assert matmul.plan(SPECS).kernel == "vendor"
    with settings.override(vendor=False):
        plan = matmul.plan(SPECS)
        assert (plan.kernel, plan.source) == ("numba", "tuned")
        with pytest.raises(NoBackend, match="vendor: TILERY_VENDOR=0 leaves it out"):
            matmul.plan(SPECS, "vendor")
    assert matmul.plan(SPECS).kernel == "vendor"
    for value, wanted in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv("TILERY_VENDOR", value)
        assert settings.from_environment().vendor is wanted


def test_gradients_go_through_what_is_tuned(ship):
    tuned.write(matmul, HERE, [entry("vendor")])
    a, b = torch.randn(24, 32, requires_grad=True), torch.randn(40, 32, requires_grad=True)
    assert matmul.plan(SPECS).kernel == "vendor"
    y = tilery.matmul(a, b.t())
    found = torch.autograd.grad(y.sum(), (a, b))
    wanted = torch.autograd.grad((a @ b.t()).sum(), (a, b))
    torch.testing.assert_close(found, wanted)
    assert y.grad_fn is not None
    plan = matmul.plan(SPECS)  # an engine may hold it, and give it parameters
    assert not plan((a, b.t(), "ieee")).requires_grad


@pytest.mark.gpu
def test_it_runs_in_a_cuda_graph():
    a, b = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = matmul(a, b, backend="vendor")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul(a, b, backend="vendor", out=out)
    a.copy_(torch.randn_like(a))
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out, torch.matmul(a, b))


# Precision


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_the_setting_of_precision_is_the_callers_again(monkeypatch, fails):
    """A product of fp32 is exact, whatever a program allows torch's own."""
    get, put = PRECISION
    matmul.kernel("vendor")  # imports its module
    seen = []

    def watched(a, b, out):
        seen.append(get("mkldnn", "matmul"))
        if fails:
            raise RuntimeError("no memory")
        torch.mm(a, b, out=out)

    monkeypatch.setattr(sys.modules["tilery.ops.matmul.vendor_kernels"], "_mm", watched)
    a, b, out = torch.randn(24, 32), torch.randn(32, 40), torch.empty(24, 40)
    put("mkldnn", "matmul", "bf16")
    try:
        plan = matmul.plan(matmul.specs((a, b, "ieee")), "vendor")
        if fails:
            with pytest.raises(RuntimeError, match="no memory"):
                plan((a, b, "ieee"), out)
        else:
            plan((a, b, "ieee"), out)
        assert (seen, get("mkldnn", "matmul")) == (["ieee"], "bf16")
    finally:
        put("mkldnn", "matmul", "none")


@pytest.mark.parametrize(
    ("precision", "before", "inside"),
    [("ieee", "none", "none"), ("ieee", "ieee", "ieee"), ("ieee", "tf32", "ieee"), ("tf32", "none", "tf32"),
     ("tf32", "tf32", "tf32")],
)  # fmt: skip
def test_tf32_is_for_the_call_that_asks_for_it(precision, before, inside):
    switch = vendor_glue._switch("cuda", torch.float32, precision)
    put = PRECISION[1]
    put("cuda", "matmul", before)
    try:
        with vendor_glue.switched(switch):
            assert switch.get() == inside
        assert switch.get() == before
    finally:
        put("cuda", "matmul", "none")


def test_what_is_set_for_all_of_torch_is_not_set_for_products_alone():
    """A product of fp32 under torch.backends.fp32_precision, which the caller takes back afterwards."""
    torch.backends.fp32_precision = "tf32"
    try:
        switch = vendor_glue._switch("cuda", torch.float32, "ieee")
        with vendor_glue.switched(switch):
            assert switch.get() == "ieee"
        assert switch.get() == "tf32"
    finally:
        torch.backends.fp32_precision = "none"
    assert switch.get() == "none"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bits_are_fp32(dtype):
    switch, flags = vendor_glue._switch("cuda", dtype, "ieee"), torch.backends.cuda.matmul
    name = "fp16" if dtype == torch.float16 else "bf16"
    reduced = f"allow_{name}_reduced_precision_reduction"
    before = getattr(flags, reduced)
    flags.allow_fp16_accumulation = dtype == torch.float16
    try:
        with vendor_glue.switched(switch):
            assert getattr(flags, reduced) is False and flags.allow_fp16_accumulation is False
        assert getattr(flags, reduced) == before and flags.allow_fp16_accumulation == (dtype == torch.float16)
    finally:
        flags.allow_fp16_accumulation = False
    assert vendor_glue._switch("cpu", dtype, "ieee") is None
    flag, wanted = SimpleNamespace(value=True), vendor_glue._reduction(name).wanted
    older = vendor_glue.Switch(lambda: flag.value, lambda to: setattr(flag, "value", to), wanted)
    with vendor_glue.switched(older):
        assert flag.value is False
    assert flag.value is True


def test_a_product_times_zero_keeps_its_nan_and_infinity():
    a, b, addend = torch.ones(3, 8), torch.ones(8, 5), torch.zeros(3, 5)
    a[0, 2], a[2, 4] = torch.nan, torch.inf
    out = tilery.matmul_add(a, b, addend, alpha=0.0, beta=2.0, backend="vendor")
    assert out[0].isnan().all() and out[2].isnan().all() and (out[1] == 0).all()


def test_an_epilogue_that_would_round_twice_is_refused():
    x, w, bias = torch.randn(4, 8).bfloat16(), torch.randn(6, 8).bfloat16(), torch.randn(6).bfloat16()
    residual = torch.randn(4, 6).bfloat16()
    for more in ((bias, None, "relu"), (bias, None, "none")):
        assert linear.plan(linear.specs((x, w, *more, "ieee")), "vendor").kernel == "vendor"
    with pytest.raises(NoBackend, match="rounds to bf16 before silu and residual, which the contract does once"):
        linear.plan(linear.specs((x, w, bias, residual, "silu", "ieee")), "vendor")


def test_a_residual_in_16_bits_is_refused():
    """On an H200 cuBLAS rounded some products before it added to them."""
    x, w, residual = (torch.randn(shape) for shape in ((4, 8), (6, 8), (4, 6)))
    given = linear.specs((x, w, None, residual, "none", "ieee"))
    assert linear.plan(given, "vendor").kernel == "vendor"
    half = linear.specs(tuple(x.half() for x in (x, w)) + (None, residual.half(), "none", "ieee"))
    with pytest.raises(NoBackend, match="rounds to fp16 before residual, which the contract does once"):
        linear.plan(half, "vendor")
    with pytest.raises(NoBackend, match="rounds to fp16 before c, which the contract does once"):
        tilery.matmul_add(x.half(), w.half().t(), residual.half(), backend="vendor")


def test_rows_too_far_apart_for_cublas_are_refused():
    """It numbers values in 32 bits in some kernels, and read outside of such a tensor on an H200."""
    takes = matmul.kernel("vendor").refusal
    rows, columns = CALL.a.shape
    step = (2**31 - columns) // (rows - 1)
    far, farther = (CALL.a._replace(strides=(step + more, 1)) for more in (0, 1))
    assert takes(SimpleNamespace(a=far, b=CALL.b)) is None
    refused = takes(SimpleNamespace(a=farther, b=CALL.b))
    assert refused == f"a must not span 2**31 values with gaps between its rows, got strides [{step + 1}, 1]"
    dense = CALL.a._replace(shape=(2**17, 2**15), strides=(2**15, 1))
    assert takes(SimpleNamespace(a=dense, b=CALL.b)) is None


# Nothing counts it as ours


def test_a_bench_times_it_where_it_is_asked_for():
    assert "vendor" not in place.timed_kernels(matmul, None) and "numba" in place.timed_kernels(matmul, None)
    assert place.timed_kernels(matmul, ["vendor"]) == ("vendor",)
    assert "vendor" in place.chosen_kernels(matmul, None)  # check and tune


def test_tables_do_not_count_it():
    def row(kernel, ms):
        made = result.Row("matmul", kernel, "m=16,n=256,k=128,dtype=bf16", "pass", device="a GPU", ms=ms, tflops=1 / ms)
        made.samples = made.against = (ms, ms, ms)
        made.ratio = made.ratio_low = made.ratio_high = 2.0 / ms
        return made

    rows = [row("baseline:torch", 2.0), row("triton", 1.5), row("vendor", 0.5)]
    assert not result.is_ours("vendor") and not result.is_peer("vendor") and not result.is_control("vendor")
    assert [line["kernel"] for line in pairs.lines(rows)] == ["triton"]
    found = [summary.Found(SimpleNamespace(id="run"), one, 0) for one in rows]
    summary._add_ratios(found)
    assert [one.row.kernel for one in summary.best_per_cell(found)] == ["triton"]
    assert summary.summary(found)["best"]["kernel"] == "triton" and summary.summary(found)["kernels"] == 1
    assert [(style.name, style.peer) for style in summary.styles(found)] == [
        ("triton", False), ("baseline:torch", True), ("vendor", True)
    ]  # fmt: skip
    assert not any(one.is_control for one in found)


def test_a_verdict_leaves_it_out():
    from tilery.cli import bench

    rows = [
        result.Row("matmul", kernel, "m=1", "pass", ratio=2.0, ratio_low=1.9, ratio_high=2.1)
        for kernel in ("triton", "vendor")
    ]
    assert bench._verdicts(rows) == ["triton is ahead of torch in 1 of 1 row."]
