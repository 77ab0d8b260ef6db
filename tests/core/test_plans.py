"""Plans: what they bind and launch, their keys, how few and how recent they are, threads, devices, what drops them."""

import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilery
from tilery import languages
from tilery.base import settings
from tilery.base.errors import BadInput, CompileFailed
from tilery.base.launch import Argument, Host, Launch
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


def test_tensors_of_another_device_have_another_key():
    keys = [rms_norm.signature.key((X.to(where), W.to(where), 1e-6, 0.0), None, None) for where in ("cpu", "meta")]
    assert None not in keys and keys[0] != keys[1]


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


def fake_plan(*launches, **more):
    blank = {"op": "t", "kernel": "t", "config": None, "source": "default", "device": torch.device("cpu"), "outs": ()}
    return plan_module.Plan(**blank | {"workspace": (), "launches": launches} | more)


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


@pytest.fixture
def devices(monkeypatch):
    """A list of what happens on devices that are not there; its `current` is the number of the current one."""

    class Log(list):
        current = 0

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.before, log.current = log.current, self.index
            log.append(f"enter {self.index}")

        def __exit__(self, *_):
            log.current = self.before
            log.append(f"exit {self.index}")

    log = Log()
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(plan_module, "_current_device", lambda: log.current)
    return log


def on_device(devices, index):
    return fake_plan(Host(lambda: devices.append(f"run on {devices.current}"), ()), device=torch.device("cuda", index))


def test_a_tensor_on_another_device_than_the_current_runs_there(devices):
    on_device(devices, 0)(())
    on_device(devices, 1)(())
    assert devices == ["run on 0", "enter 1", "run on 1", "exit 1"]
    on_device(devices, 1).launch((), ())
    assert devices[4:] == ["enter 1", "run on 1", "exit 1"]


def test_a_tensor_on_the_first_device_runs_there_while_the_second_is_current(devices):
    devices.current = 1
    on_device(devices, 0)(())
    assert devices == ["enter 0", "run on 0", "exit 0"] and devices.current == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs; the guard is tested with fakes")
def test_a_tensor_on_a_real_second_device_runs_there():
    x = X.to("cuda:1")
    assert torch.allclose(rms_norm(x, W.to("cuda:1")).cpu(), reference(X, W), atol=1e-5)


# Launches


def test_nothing_is_launched_where_there_is_nothing_to_write():
    empty, one = (TensorSpec.contiguous((m, 8), torch.float32, "cpu") for m in (0, 1))
    launch = Host(pytest.fail, ("launched",))
    fake_plan(launch, outs=(empty,))(())
    with pytest.raises(pytest.fail.Exception, match="launched"):
        fake_plan(launch, outs=(empty, one))(())


def test_a_launch_sees_arguments_outputs_and_workspace_in_this_order():
    seen, spec = [], TensorSpec.contiguous((3,), torch.float32, "cpu")
    places = tuple(Argument.at_slot(spec, slot) for slot in (0, 2, 3))
    plan = fake_plan(Host(lambda *found: seen.append(found), places), outs=(spec,), workspace=(spec, spec))
    x, out, given = torch.zeros(3), torch.zeros(3), (torch.ones(3), torch.ones(3))
    plan.launch((out,), (x,), given)
    assert all(found is wanted for found, wanted in zip(seen[0], (x, *given), strict=True))
    plan.launch((out,), (x,))
    made = seen[1][1:]
    assert [t.shape for t in made] == [(3,), (3,)] and made[0].data_ptr() != made[1].data_ptr()


@pytest.fixture
def glue(monkeypatch):
    """A language that writes down what it binds and runs; `fails` is how often its compiler will."""
    made = SimpleNamespace(log=[], fails=0)

    def bind(launch, where):
        if made.fails:
            made.fails -= 1
            raise CompileFailed("not today")
        made.log.append(f"bind {launch.kernel} on {where}")
        return lambda values: made.log.append(f"run {launch.kernel} {values}")

    monkeypatch.setattr(languages, "load", lambda kernel: SimpleNamespace(bind=bind))
    return made


def test_launches_are_bound_at_the_first_run_and_run_in_order_ever_after(glue):
    plan = fake_plan(
        Launch("a", 1, {}), Host(lambda: glue.log.append("host"), ()), Launch("b", 1, {}), device=torch.device("cpu")
    )
    assert glue.log == []
    plan((1,))
    assert glue.log == ["bind a on cpu", "bind b on cpu", "run a (1,)", "host", "run b (1,)"]
    plan((2,))
    assert glue.log[5:] == ["run a (2,)", "host", "run b (2,)"]


def test_a_single_launch_is_called_without_a_step_between(glue):
    plan = fake_plan(Launch("a", 1, {}))
    plan((1,))
    plan.run((2,))
    assert glue.log == ["bind a on cpu", "run a (1,)", "run a (2,)"]


def test_a_plan_that_did_not_build_tries_again(glue):
    plan, glue.fails = fake_plan(Launch("a", 1, {})), 1
    with pytest.raises(CompileFailed):
        plan((1,))
    plan((1,))
    assert glue.log == ["bind a on cpu", "run a (1,)"]


def test_what_an_op_checks_at_every_call_comes_before_the_launch(glue):
    def check(args):
        if args[0] < 0:
            raise BadInput("too small")

    plan = fake_plan(Launch("a", 1, {}), check=check)
    with pytest.raises(BadInput, match="too small"):
        plan((-1,))
    assert glue.log == []
    plan((1,))
    assert glue.log[-1] == "run a (1,)"


# What a plan may write to


@pytest.mark.parametrize("shift", [-4, 4, 28])
def test_out_may_not_overlap_an_argument_in_part(shift):
    storage = torch.randn(96)
    x, out = (storage[start : start + 32].view(4, 8) for start in (32, 32 + shift))
    with pytest.raises(BadInput, match=r"out\[0\] must not share memory with another argument"):
        softmax(x, out=out)


def test_out_may_lie_right_beside_an_argument():
    storage = torch.randn(96)
    x, out = storage[32:64].view(4, 8), storage[64:].view(4, 8)
    assert softmax(x, out=out) is out and torch.allclose(out, torch.softmax(x, -1))


def test_autograd_sees_what_an_op_writes_in_place():
    """A backward that saved the tensor before must not use what it holds now."""
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 1, 8)
    cos, sin, g = torch.rand(3, 4), torch.rand(3, 4), torch.randn(1, 3, 2, 8, requires_grad=True)
    saved = (g * q).sum()
    tilery.rope_(q, k, cos, sin)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


# What drops plans


def test_settings_and_tuned_data_drop_plans():
    rms_norm(X, W)
    assert len(rms_norm.plans)
    with settings.override(explain=False):
        assert not len(rms_norm.plans)
    rms_norm(X, W)
    tuned.reload()
    assert not len(rms_norm.plans)
