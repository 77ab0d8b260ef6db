"""Plans: their keys, how few and how recent they are, threads, devices, what drops them."""

import gc
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilery.base import settings
from tilery.base.spec import TensorSpec
from tilery.core import plan as plan_module
from tilery.core import tuned
from tilery.ops import rms_norm, softmax

X, W = torch.randn(4, 8), torch.randn(8)


def reference(x, w, eps=1e-6):
    return rms_norm.reference(x.double(), w.double(), eps).to(x.dtype)


def test_key_holds_what_decides_and_nothing_else():
    rms_norm.plans.clear()
    one, other = (rms_norm(X, W, eps) for eps in (1e-6, 1.0))
    assert len(rms_norm.plans) == 1 and not torch.equal(one, other)  # eps reaches the kernel, not the key
    for x in (torch.randn(33)[1:].view(4, 8), torch.randn(4, 16)[:, :8], X.half(), torch.randn(5, 8)):
        before = len(rms_norm.plans)
        rms_norm(x, W.to(x.dtype))
        assert len(rms_norm.plans) == before + 1  # misaligned, strided, of another dtype, of another shape


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops = [*getattr(self, "ops", []), str(func)]
        return func(*args, **kwargs or {})


def test_a_recent_plan_takes_only_calls_with_its_own_key():
    """The quick question before the key: each of these must be told from the call that made the plan."""
    rms_norm.plans.clear()
    wanted = rms_norm(X, W)
    (plan,) = rms_norm.plans.recent
    assert plan.takes((X, W, 1.0, 0.5)) and plan.takes((torch.randn(4, 8), W, 3, 0))
    misaligned = torch.randn(33)[1:].view(4, 8)
    for other in (X.half(), X[:2], torch.randn(4, 16)[:, :8], X.t(), misaligned, [1.0], None, X.numpy(), X.to("meta")):
        assert not plan.takes((other, W, 1e-6, 0.0))
    assert not plan.takes((X, W, "1e-6", 0.0)) and not plan.takes((X, torch.nn.Parameter(W), 1e-6, 0.0))
    assert not plan.takes((torch.complex(X, X).conj().imag, W, 1e-6, 0.0))
    with Seen() as seen:
        assert torch.equal(rms_norm(X, W), wanted)
    assert "tilery.rms_norm.default" in seen.ops
    assert torch.equal(torch.vmap(lambda x: rms_norm(x, W))(X.expand(3, 4, 8).clone())[2], wanted)
    assert rms_norm(X.clone().requires_grad_(), W).requires_grad
    with torch.inference_mode():
        assert torch.equal(rms_norm(X, W), wanted)


def test_recent_plans_are_few_and_dropped_with_the_others():
    rms_norm.plans.clear()
    for m in range(1, 21):
        rms_norm(torch.randn(m, 8), W)
    assert len(rms_norm.plans) == 20 and len(rms_norm.plans.recent) == 8
    newest = rms_norm.plans.recent[0]
    rms_norm(torch.randn(20, 8), W)
    assert rms_norm.plans.recent[0] is newest
    rms_norm.plans.clear()
    assert rms_norm.plans.recent == ()
    rms_norm.plans.promote("gone", newest, lambda _: True)
    assert rms_norm.plans.recent == ()


def fake_plan(**more):
    blank = {"op": "t", "kernel": "t", "config": None, "source": "default", "device": torch.device("cpu"), "outs": ()}
    return plan_module.Plan(**blank | {"workspace": (), "run": lambda *_: None} | more)


def test_plans_drop_what_was_used_least_recently():
    plans = plan_module.Plans(limit=4)
    for key in "abcd":
        plans.make(key, fake_plan)
    plans.get("a")
    plans.make("e", fake_plan)
    assert plans.get("b") is None and all(plans.get(key) for key in "acde")


def test_one_new_problem_in_eight_threads_is_planned_once():
    plans, made, gate = plan_module.Plans(), [], threading.Barrier(8)

    def make():
        made.append(1)
        return fake_plan()

    def call():
        gate.wait()
        plans.make("key", make)

    threads = [threading.Thread(target=call) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(made) == 1


def test_a_failed_plan_is_not_remembered():
    plans = plan_module.Plans()
    with pytest.raises(ZeroDivisionError):
        plans.make("key", lambda: 1 // 0)
    assert plans.make("key", fake_plan) is plans.get("key")


def test_ten_thousand_shapes_do_not_grow_memory():
    for n in range(1, 10_001):
        rms_norm.plans.make(("shape", n), fake_plan)
    assert len(rms_norm.plans) <= rms_norm.plans.limit
    gc.collect()
    assert sum(type(o) is plan_module.Plan for o in gc.get_objects()) < 2 * rms_norm.plans.limit
    rms_norm.plans.clear()


def test_ten_thousand_real_shapes_stay_bounded():
    x = torch.randn(10_000)
    for m in range(1, 10_001):
        softmax(x[:m].unsqueeze(1) if m % 2 else x[:m])
    assert len(softmax.plans) <= softmax.plans.limit


def test_eight_threads_get_right_answers():
    problems = [(torch.randn(16 + i, 64 * (1 + i % 3)), torch.randn(64 * (1 + i % 3))) for i in range(8)]
    wanted = [reference(x, w) for x, w in problems]
    wrong, gate = [], threading.Barrier(8)

    def work(i):
        gate.wait()
        for round in range(50):
            x, w = problems[(i + round) % 8]
            if not torch.allclose(rms_norm(x, w), wanted[(i + round) % 8], atol=1e-5):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_a_tensor_on_the_second_device_runs_there(monkeypatch):
    """With fakes: the launch happens inside a guard for cuda:1, and only if that is not the current device."""
    log = []

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            log.append(f"enter {self.index}")

        def __exit__(self, *_):
            log.append(f"exit {self.index}")

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(plan_module, "_current_device", lambda: int(log[-1][-1]) if log and "enter" in log[-1] else 0)
    for index in (0, 1):
        plan = fake_plan(device=torch.device("cuda", index), run=lambda *_, i=index: log.append(f"run {i}"))
        plan(())
    assert log == ["run 0", "enter 1", "run 1", "exit 1"]
    plan.launch((), ())
    assert log[4:] == ["enter 1", "run 1", "exit 1"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs; the guard is tested with fakes")
def test_a_tensor_on_a_real_second_device_runs_there():
    x = X.to("cuda:1")
    assert torch.allclose(rms_norm(x, W.to("cuda:1")).cpu(), reference(X, W), atol=1e-5)


def test_nothing_is_launched_where_there_is_nothing_to_write():
    empty = TensorSpec.contiguous((0, 8), torch.float32, "cpu")
    fake_plan(outs=(empty,), run=lambda *_: pytest.fail("launched"))(())


def test_workspace_is_allocated_and_handed_over():
    got = []
    spec = TensorSpec.contiguous((3,), torch.float32, "cpu")
    fake_plan(workspace=(spec,), run=lambda outs, args, config, *scratch: got.extend(scratch)).launch((), ())
    assert len(got) == 1 and got[0].shape == (3,)


def test_settings_and_tuned_data_drop_plans():
    rms_norm(X, W)
    assert len(rms_norm.plans)
    with settings.override(explain=False):
        assert not len(rms_norm.plans)
    rms_norm(X, W)
    tuned.reload()
    assert not len(rms_norm.plans)
