"""Ways of cutting a row that the small cases' defaults do not take."""

import functools

import pytest
import torch

from tilery import languages
from tilery.base.spec import TensorSpec, case
from tilery.core import plan as plan_module
from tilery.core.op import REGISTRY
from tilery.hardware.gpu import pretend
from tilery.measure.check import check
from tilery.measure.place import place
from tilery.ops.softmax import triton_kernels

INF, NAN = float("inf"), float("nan")
FORWARDS, BACKWARDS = ("softmax", "log_softmax"), ("softmax_backward", "log_softmax_backward")
CUTS = [(name, cut) for name in FORWARDS for cut in ((64, 1), (64, 4), (256, 8))]
CUTS += [(name, (64,)) for name in BACKWARDS]


@pytest.mark.parametrize("special", ["none", "nan", "-inf"])
@pytest.mark.parametrize(("name", "cut"), CUTS)
def test_rows_in_blocks_and_in_pieces(name, cut, special):
    op = REGISTRY[name]
    kernel, (block, *splits) = op.kernel("triton"), cut
    config = kernel.Config(block, 1, *splits)
    problem = case(m=3, n=333, dtype="fp32", special=special)
    assert check(op, "triton", problem, place(op, "triton").device, config=config).refused is None


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("kernel", ["numba", "triton"])
def test_pieces_of_minus_infinity_alone_are_worth_nothing(name, kernel):
    """The first blocks of a row may hold no finite value at all."""
    op = REGISTRY[name]
    where = place(op, kernel).device
    x = torch.randn(2, 300, device=where)
    x[:, :200] = -float("inf")
    for config in [None] if kernel == "numba" else [triton_kernels.Config(64, 1), triton_kernels.Config(64, 1, 4)]:
        y = op(x, backend=kernel, config=config)
        assert torch.allclose(y, op.reference(x), atol=1e-6)


@pytest.mark.parametrize(
    ("m", "n", "splits"), [(1, 128256, 16), (16, 128256, 16), (64, 128256, 4), (1024, 128256, 1), (1, 32768, 1)]
)
def test_few_long_rows_are_shared_out(m, n, splits):
    softmax, x = REGISTRY["softmax"], TensorSpec.contiguous((m, n), torch.bfloat16, "cuda:0")
    with pretend("sm_90"):
        assert softmax.kernel("triton").default(softmax.call((x,))).splits == splits


ROWS = {
    "-inf alone": [-INF] * 4,
    "inf": [1.0, INF, 0.0, -1.0],
    "inf and NaN": [NAN, INF, 0.0, 1.0],
    "-inf and NaN": [-INF, NAN, -INF, 1.0],
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", [*FORWARDS, "topk_softmax"])
def test_infinite_values_have_one_meaning(name, row):
    """In every language that runs here, short and in several blocks; not the order of what is NaN."""
    op, more = REGISTRY[name], (3, False) if name == "topk_softmax" else ()
    for kernel in op.kernels:
        where = None if languages.missing(kernel) else place(op, kernel).device
        for count in (0, 700) if where is not None else ():
            x = torch.tensor(ROWS[row] + [-INF] * count, device=where)[None]
            found, right = (
                plan_module.packed(f(x, *more))[0] for f in (functools.partial(op, backend=kernel), op.reference)
            )
            assert torch.allclose(found, right, equal_nan=True), (kernel, count)
