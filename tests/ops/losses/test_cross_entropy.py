"""What the cases do not show: targets that are no class, rows that do not count, and torch's own loss."""

import math

import pytest
import torch
import torch.nn.functional as F

from tilery import languages
from tilery.base.spec import case
from tilery.core import plan as plan_module
from tilery.core import tuned
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.hardware import gpu
from tilery.measure.check import check
from tilery.measure.place import place
from tilery.ops.losses.call import READ_IGNORED_UP_TO

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
    """In its own row alone; the gradient of the weight is a sum over all rows."""
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


@pytest.mark.parametrize(("kernel", "few"), [("numba", None), ("triton", READ_IGNORED_UP_TO), ("triton", 2)])
def test_rows_to_ignore_do_not_count(kernel, few, monkeypatch):
    """Whether all rows are read at once, or each waits for its target."""
    op = REGISTRY["cross_entropy"]
    if few is not None:
        monkeypatch.setattr(type(op.kernel(kernel)), "read_ignored_up_to", few)
        op.plans.clear()  # they were made for another number
        launch = op.kernel(kernel).launches(call_for(op, case(m=5, n=37)), op.kernel(kernel).Config(64, 1))[0]
        assert launch.constants["READ_IGNORED"] == (few > 5)
    (logits,) = problem(kernel, "cross_entropy")
    logits[2] = float("nan")
    targets = torch.tensor([0, 1, -100, 2, 3], device=logits.device)
    loss, lse = op(logits, targets, backend=kernel)
    op.plans.clear()
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


def test_splits_and_chunks_of_the_vocabulary_add_up():
    """The default takes one of each for so few classes."""
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
    op = REGISTRY["cross_entropy"]
    kernel, call = op.kernel("cuda"), call_for(op, case(m=64, n=1024, dtype="bf16"))
    with gpu.pretend("sm_90"):
        assert said in kernel.refusal(call, kernel.Config(**config))
        assert kernel.refusal(call, kernel.Config(32, rows=8)) is None


@KERNELS
@pytest.mark.parametrize("ignore_index", [-(2**63), -(2**32), -1, 0, 1, 16, 2**31, 2**32 + 1, 2**63 - 1])
@pytest.mark.parametrize("name", ["cross_entropy", "fused_linear_cross_entropy"])
def test_every_integer_may_be_the_one_to_ignore(kernel, name, ignore_index):
    """One plan serves all of them: the first row alone has it, the second has its low 32 bits and is a class."""
    given = problem(kernel, name)
    other = ignore_index % 2**32 % 37 if ignore_index % 2**32 % 37 != ignore_index else 5
    targets = torch.tensor([ignore_index, other, 3, 17, 36], device=given[0].device)
    targets[2:][targets[2:] == ignore_index] = 4
    loss, lse = REGISTRY[name](*given, targets, 0.1, ignore_index, backend=kernel)
    assert loss[0] == lse[0] == 0 and loss[1:].isfinite().all() and (lse[1:] != 0).all()
    ones = torch.ones_like(lse)
    grad, *_ = plan_module.packed(
        REGISTRY[f"{name}_backward"](ones, ones, *given, targets, lse, 0.1, ignore_index, backend=kernel)
    )
    assert grad[0].eq(0).all() and grad[1:].isfinite().all() and grad[1:].ne(0).any(1).all()


def test_tuned_files_with_the_old_name_of_a_field_are_read():
    kind = REGISTRY["fused_linear_cross_entropy_backward"].kernel("triton").Config
    fields = {"block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2, "piece": 128}
    assert kind(**tuned.present_fields(kind, fields)).chunk == 128
