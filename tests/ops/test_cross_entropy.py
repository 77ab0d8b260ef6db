"""What the cases do not show: targets that are no class, rows that do not count, and torch's own loss."""

import math

import pytest
import torch
import torch.nn.functional as F

from tilery import languages
from tilery.base.spec import TensorSpec, case
from tilery.core import plan as plan_module
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.measure.check import check
from tilery.measure.place import place
from tilery.parts import losses

KERNELS = pytest.mark.parametrize("kernel", ["numba", "triton"])


def problem(kernel, name):
    """Arguments but for the targets, of logits [5, 37] or x [5, 37] and weight [40, 37]."""
    where = place(REGISTRY[name], kernel).device
    x = torch.randn(5, 37, device=where)
    return (x,) if name == "cross_entropy" else (x, torch.randn(40, 37, device=where) / 6)


@KERNELS
@pytest.mark.parametrize("name", ["cross_entropy", "fused_linear_cross_entropy"])
def test_a_target_that_is_no_class_gives_nan(kernel, name):
    given = problem(kernel, name)
    targets = torch.tensor([0, 40, -1, -100, 36], device=given[0].device)
    loss, lse = REGISTRY[name](*given, targets, backend=kernel)
    assert loss.isnan().tolist() == [False, True, True, False, False]
    assert loss[3] == lse[3] == 0


@KERNELS
@pytest.mark.parametrize("name", ["cross_entropy", "fused_linear_cross_entropy"])
def test_a_target_that_is_no_class_gives_a_gradient_of_nan(kernel, name):
    """Of its own row alone; that of the weight is a sum over all rows."""
    given = problem(kernel, name)
    targets = torch.tensor([0, 40, -(2**63), -100, 36], device=given[0].device)
    _, lse = REGISTRY[name](*given, targets, backend=kernel)
    ones = torch.ones_like(lse)
    backward = REGISTRY[f"{name}_backward"]
    grad, *rest = plan_module.packed(backward(ones, ones, *given, targets, lse, backend=kernel))
    assert grad.isnan().all(1).tolist() == grad.isnan().any(1).tolist() == [False, True, True, False, False]
    assert grad[3].eq(0).all() and all(dweight.isnan().all() for dweight in rest)


INF, NAN = float("inf"), float("nan")
INFINITE = {  # rows, and their lse
    "-inf alone": ([-INF] * 5, -INF),
    "-inf and NaN": ([-INF, NAN, -INF, -INF, -INF], NAN),
    "-inf and one": ([-INF, -INF, 2.0, -INF, -INF], 2.0),
    "inf": ([1.0, INF, 0.0, -1.0, 2.0], INF),
    "inf twice": ([1.0, INF, 0.0, INF, 2.0], INF),
    "inf and -inf": ([-INF, INF, 0.0, 1.0, 2.0], INF),
    "inf and NaN": ([NAN, INF, 0.0, 1.0, 2.0], NAN),
    "inf and -NaN": ([-NAN, INF, 0.0, 1.0, 2.0], NAN),
}


@pytest.mark.parametrize("row", INFINITE)
@pytest.mark.parametrize("name", ["cross_entropy", "fused_linear_cross_entropy"])
def test_infinite_logits_have_one_meaning(name, row):
    """In every language that runs here, in one block, and in several with a tail."""
    op, (values, wanted) = REGISTRY[name], INFINITE[row]
    for kernel in op.kernels:
        where = None if languages.missing(kernel) else place(op, kernel).device
        for count in (1, 700) if where is not None else ():
            logits = torch.tensor(values + [-INF] * (count - 1), device=where)[None]
            targets = torch.tensor([0], device=where)
            given = (logits,) if name == "cross_entropy" else (torch.ones(1, 1, device=where), logits.t().contiguous())
            right = REGISTRY["cross_entropy"].reference(logits.double(), targets)
            for found, expected in zip(op(*given, targets, backend=kernel), right, strict=True):
                assert torch.allclose(found.double(), expected, equal_nan=True), (kernel, count)
            assert right[1].item() == wanted or math.isnan(wanted)


@KERNELS
@pytest.mark.parametrize("name", ["cross_entropy", "fused_linear_cross_entropy"])
def test_losses_are_those_of_torch(kernel, name):
    given = problem(kernel, name)
    targets = torch.tensor([0, 3, -7, 17, 36], device=given[0].device)
    loss, _ = REGISTRY[name](*given, targets, 0.2, -7, backend=kernel)
    logits = given[0] if len(given) == 1 else F.linear(*given)
    expected = F.cross_entropy(logits, targets, ignore_index=-7, reduction="none", label_smoothing=0.2)
    assert torch.allclose(loss, expected, atol=1e-5)


@KERNELS
@pytest.mark.parametrize("few", [losses.FEW, 2])
def test_rows_to_ignore_do_not_count(kernel, few, monkeypatch):
    monkeypatch.setattr(REGISTRY["cross_entropy"].kernel(kernel), "FEW", few, raising=False)
    (logits,) = problem(kernel, "cross_entropy")
    logits[2] = float("nan")
    targets = torch.tensor([0, 1, -100, 2, 3], device=logits.device)
    loss, lse = REGISTRY["cross_entropy"](logits, targets, backend=kernel)
    assert loss[2] == lse[2] == 0 and loss.isfinite().all()
    others = targets != -100
    assert torch.allclose(lse[others], logits[others].logsumexp(-1), atol=1e-5)
    ones = torch.ones_like(loss)
    grad = REGISTRY["cross_entropy_backward"](ones, ones, logits, targets, lse, backend=kernel)
    assert grad[2].eq(0).all() and grad.isfinite().all()


@pytest.mark.parametrize("name", ["cross_entropy", "fused_linear_cross_entropy"])
def test_a_gradient_of_the_losses_alone(name):
    """lse got none."""
    given = tuple(t.requires_grad_() for t in problem("numba", name))
    targets = torch.tensor([0, 3, -100, 17, 36])
    REGISTRY[name](*given, targets)[0].mean().backward()
    found = [t.grad for t in given]
    for t in given:
        t.grad = None
    logits = given[0] if len(given) == 1 else F.linear(*given)
    F.cross_entropy(logits, targets, reduction="none").mean().backward()
    for ours, t in zip(found, given, strict=True):
        assert torch.allclose(ours, t.grad, atol=1e-6)


def test_pieces_of_the_vocabulary_add_up():
    """Several pieces and splits: the default takes one of each for so few classes."""
    tiles = (16, 16, 16, 4, 2)
    for name, cut in (("fused_linear_cross_entropy", 4), ("fused_linear_cross_entropy_backward", 32)):
        op = REGISTRY[name]
        config = op.kernel("triton").Config(*tiles, cut)
        wanted = case(m=20, n=100, k=24, dtype="fp32", label_smoothing=0.1, z_loss=1e-3)
        assert check(op, "triton", wanted, place(op, "triton").device, config=config).refused is None


@pytest.mark.parametrize(
    ("config", "said"),
    [({"threads": 32, "rows": 3}, "rows must be one of 1, 2, 4, 8, got 3"),
     ({"threads": 64, "rows": 2}, "32 threads each"),
     ({"threads": 32, "cluster": 2, "rows": 2}, "no cluster")],
)  # fmt: skip
def test_a_block_takes_several_rows_only_with_a_warp_for_each(config, said):
    if why := languages.missing("cuda"):
        pytest.skip(why)
    kernel = REGISTRY["cross_entropy"].kernel("cuda")
    logits = TensorSpec.contiguous((64, 1024), torch.bfloat16, "cuda:0")
    targets = TensorSpec.contiguous((64,), torch.int64, "cuda:0")
    with device.pretend("sm_90"):
        assert said in kernel.refusal(logits, targets, config=kernel.Config(**config))
        assert kernel.refusal(logits, targets, config=kernel.Config(32, rows=8)) is None
