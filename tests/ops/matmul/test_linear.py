"""Products with an epilogue: what the conformance test does not ask of them."""

import re

import pytest
import torch
import torch.nn.functional as F

import plant
from tilery import languages
from tilery.base.errors import BadInput, NoBackend, Wrong
from tilery.base.spec import case
from tilery.core.cases import call_for, specs_for
from tilery.core.op import REGISTRY
from tilery.measure import check
from tilery.ops import activation_backward, linear, linear_silu_mul, matmul, matmul_add, silu_mul
from tilery.ops.matmul import contract
from tilery.ops.matmul.numba.gemm import Config

X, W, BIAS = torch.randn(2, 3, 8), torch.randn(6, 8), torch.randn(6)
R = torch.randn(2, 3, 6)
A, B, C = torch.randn(4, 8), torch.randn(8, 6), torch.randn(4, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear(X, W, BIAS[:5]), r"bias must be fp32\[6\], got fp32\[5\]"),
        (lambda: linear(X, W, BIAS.half()), r"bias must be fp32\[6\], got fp16\[6\]"),
        (lambda: linear(X, W, torch.randn(12)[::2]), "bias must be contiguous, got stride 2"),
        (lambda: linear(X, W, None, X), r"residual must be fp32\[2, 3, 6\] as the output is, got fp32\[2, 3, 8\]"),
        (lambda: linear(X, W, activation="tanh"), "activation must be one of none, relu, .*, got 'tanh'"),
        (lambda: linear(X, W, precision="fast"), "precision must be one of ieee, tf32, got 'fast'"),
        (lambda: linear(X.half(), W.half(), precision="tf32"), "precision tf32 is a way to multiply fp32, got fp16"),
        (lambda: linear(X.transpose(0, 1), W), "x must have its rows evenly spaced"),
        (lambda: linear(X, torch.randn(12, 16)[::2, ::2]), "weight must have stride 1 along one dimension"),
        (lambda: activation_backward(R, R, "none"), "activation must be one of relu, gelu, .*, got 'none'"),
        (lambda: activation_backward(R, R.half(), "relu"), "dy must be fp16 as z is, got fp32"),
        (lambda: activation_backward(R, X, "relu"), r"dy must be \[2, 3, 8\] as z is, got \[2, 3, 6\]"),
        (lambda: linear_silu_mul(X, W[:5]), r"weight must be \[2N, K\], .*, got \[5, 8\]"),
        (lambda: matmul(A, B, precision="fast"), "precision must be one of ieee, tf32, got 'fast'"),
        (lambda: matmul(A.half(), B.half(), "tf32"), "precision tf32 is a way to multiply fp32, got fp16"),
        (lambda: matmul_add(A, B, C[:3]), r"c must be fp32\[4, 6\] as a · b is, got fp32\[3, 6\]"),
        (lambda: matmul_add(A, B, BIAS.expand(4, 6)), "c must not be expanded"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(BadInput, match=message):
        call()


def test_linear_is_what_torch_has_in_three_calls():
    y = linear(X, W, BIAS, R, "gelu")
    assert torch.allclose(y, F.gelu(F.linear(X, W, BIAS)) + R, atol=1e-5)
    assert torch.allclose(linear(X[0, 0], W, BIAS), F.linear(X[0, 0], W, BIAS), atol=1e-5)
    assert linear(torch.randn(0, 8), W).shape == (0, 6)
    assert torch.equal(linear(torch.randn(4, 0), torch.randn(3, 0), torch.ones(3)), torch.ones(4, 3))


def test_gate_and_up_lie_as_silu_mul_has_them_packed():
    assert torch.allclose(linear_silu_mul(X, W), silu_mul(linear(X, W)), atol=1e-5)


def test_one_product_serves_all():
    """The same sums: an epilogue that does nothing changes no bit."""
    right = matmul(A, B)
    assert torch.equal(matmul_add(A, B, torch.zeros(4, 6)), right)
    assert torch.equal(linear(A, B.t()), right)


def test_beta_of_zero_reads_no_c():
    c = torch.full((4, 6), float("nan"))
    assert torch.equal(matmul_add(A, B, c, 2.0, 0.0), 2 * matmul(A, B))
    assert matmul_add(A, B, c).isnan().all()


def test_alpha_and_beta_make_no_new_plan():
    matmul_add.plans.clear()
    for beta in (0.0, 0.5, 2):
        assert torch.allclose(matmul_add(A, B, C, 0.5, beta), torch.addmm(C, A, B, alpha=0.5, beta=beta), atol=1e-5)
    assert len(matmul_add.plans) == 1


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("tile", [(0, 0), (24, 64), (48, 32)])
def test_tiles_and_dot_products_of_numba_agree(rows, tile):
    x, w, bias, residual = torch.randn(rows, 100), torch.randn(2 * 301, 100), torch.randn(602), torch.randn(rows, 602)
    config = Config(*tile, parallel=True)
    y = linear(x, w, bias, residual, "silu", backend="numba", config=config)
    assert torch.allclose(y, F.silu(F.linear(x, w, bias)) + residual, atol=1e-4)
    y = linear_silu_mul(x, w, backend="numba", config=config)
    assert torch.allclose(y, F.silu(x @ w[:301].t()) * (x @ w[301:].t()), atol=1e-3)


def test_dot_products_refuse_many_rows():
    with pytest.raises(NoBackend, match="dot products need at most 96 rows"):
        linear(torch.randn(97, 8), W, backend="numba", config=Config(0, 0, parallel=False))


@pytest.mark.parametrize("name", ["matmul", "linear", "linear_silu_mul", "matmul_add"])
def test_only_tf32_may_be_as_rough_as_tf32(name):
    op = REGISTRY[name]
    calls = {p: call_for(op, case(m=4, n=8, k=8, dtype="fp32", precision=p), "cpu") for p in contract.PRECISIONS}
    assert op.tolerance(calls["ieee"])[torch.float32] < 1e-5 < 3e-4 < op.tolerance(calls["tf32"])[torch.float32]
    plain, rough = (op.bucket(calls[p]) for p in contract.PRECISIONS)
    assert rough == plain._replace(exact=f"{plain.exact},tf32")


@pytest.mark.parametrize("name", ["matmul", "linear", "linear_silu_mul", "matmul_add"])
def test_triton_multiplies_in_tf32_where_it_is_asked_for(name, compiler):
    if why := languages.missing("triton"):
        pytest.skip(why)
    op, found = REGISTRY[name], {}
    for precision in contract.PRECISIONS:
        specs = specs_for(op, case(m=128, n=64, k=64, dtype="fp32", precision=precision))
        code = compiler.compile(name, "triton", specs, "sm_90").code["ptx"]
        found[precision] = bool(re.search(r"mma\S*\.tf32", code))
    assert found == {"ieee": False, "tf32": True}


def test_what_is_rounded_to_tf32_fails_where_it_was_not_asked_for(monkeypatch):
    """As a kernel would that multiplied in tf32 whatever it was told."""

    def rough(x, weight, y):
        cut = [(t.view(torch.int32) & -(2**13)).view(torch.float32) for t in (x, weight)]
        torch.matmul(cut[0], cut[1].t(), out=y)

    plant.instead(monkeypatch, linear, "numba", rough, "x", "weight", "y")
    problem = {"m": 33, "n": 65, "k": 97, "dtype": "fp32"}
    assert 1e-4 < check.check(linear, "numba", case(**problem, precision="tf32"), "cpu").errors[0] < 1e-3
    with pytest.raises(Wrong, match="has error"):
        check.check(linear, "numba", case(**problem), "cpu")


def test_peers_get_the_precision_that_is_asked_for():
    seen = []
    flags = torch.backends.cuda.matmul
    note = contract.peer(lambda *args: seen.append(flags.allow_tf32))
    before = flags.allow_tf32
    note("tf32"), note("ieee")
    assert seen == [True, False]
    assert flags.allow_tf32 == before
