"""Bugs in plans: which call has which plan, which kernel and config it gets, what is launched."""

from mutations.mutation import Layer, case

(DISPATCH,) = LAYERS = (Layer("dispatch"),)
KEY = "key += (value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16 == 0)"
PLAN_KEY = "test_plans.py::test_key_holds_what_decides_and_nothing_else"
RECENT = "test_plans.py::test_a_recent_plan_takes_only_calls_with_its_own_key"
EXPLICIT = "test_tuned.py::test_tuned_beats_default_and_explicit_beats_tuned"

DISPATCH.add("key-without-alignment", KEY, KEY.replace(", value.data_ptr() % 16 == 0", ""), PLAN_KEY)
DISPATCH.add("key-without-dtype", KEY, KEY.replace("value.dtype, ", ""), PLAN_KEY)
DISPATCH.add("key-without-stride", KEY, KEY.replace("value.stride(), ", ""), PLAN_KEY)
DISPATCH.add(
    "key-without-device",
    KEY,
    KEY.replace("value.device, ", ""),
    "test_plan_choice.py::test_tensors_of_another_device_have_another_key",
)
DISPATCH.add(
    "guard-without-strides",
    "sizes, strides = ([list(f(t)) for t in tensors] for f in (Tensor.size, Tensor.stride))",
    "sizes, strides = [list(t.size()) for t in tensors], [[None] * t.dim() for t in tensors]",
    RECENT,
)
DISPATCH.add("guard-without-alignment", "t.is_nested or t.data_ptr() & 15:", "t.is_nested or t.data_ptr() & 3:", RECENT)
DISPATCH.add(
    "guard-without-scalars",
    "(now != value if decides else kind is int and not _fits(now))",
    "(kind is int and not _fits(now))",
    "test_library.py::test_a_scalar_that_decides_is_part_of_the_key",
)
DISPATCH.add(
    "modes-ignored",
    "_modes = torch._C._len_torch_dispatch_stack\n",
    "_modes = lambda: 0  # noqa: E731\n",
    "test_transforms.py::test_a_mode_sees_a_warm_op",
)
DISPATCH.add(
    "modes-ignored-by-the-guard",
    "if _modes() or not same(*tensors)",
    "if not same(*tensors)",
    "test_transforms.py::test_a_warm_op_under_a_fake_mode_computes_nothing",
)
DISPATCH.add(
    "tracing-ignored",
    "or torch._C._get_tracing_state() is not None\n",
    "or False\n",
    "test_transforms.py::test_torch_jit_trace_records_the_op",
)
DISPATCH.add("explicit-config-ignored", "    elif config is None:\n", "    else:\n", EXPLICIT, inside="decide")
DISPATCH.add("tuned-over-explicit", "refusals) if config is None else None\n", "refusals)\n", EXPLICIT, inside="decide")
DISPATCH.add(
    "refusal-of-a-named-backend-ignored",
    "return refusals[name] is None\n",
    "return refusals[name] is None or name == backend\n",
    "test_plan_choice.py::test_a_backend_that_is_named_and_refuses_is_not_run",
)
DISPATCH.add(
    "newest-plans-evicted",
    "key=lambda item: item[1].used)",
    "key=lambda item: -item[1].used)",
    "test_plans.py::test_plans_drop_what_was_used_least_recently",
)
DISPATCH.add(
    "plans-outlive-settings",
    "settings.on_change(drop_plans)\n",
    "",
    "test_plans.py::test_settings_and_tuned_data_drop_plans",
)
DISPATCH.add(
    "out-may-overlap-in-part",
    "return a0 < b1 and b0 < a1",
    "return a0 == b0",
    "test_plan_choice.py::test_out_may_not_overlap_an_argument_in_part",
)
DISPATCH.add(
    "one-empty-output-launches-nothing",
    "not any(prod(spec.shape) for spec in self.outs)",
    "not all(prod(spec.shape) for spec in self.outs)",
    case("rms_norm_backward", "numba", "m=0,n=128,dtype=fp32"),
)
DISPATCH.add(
    "device-0-is-no-device",
    "if self._index is not None and self._index != _current_device():",
    "if self._index and self._index != _current_device():",
    "test_plan_choice.py::test_a_tensor_on_the_first_device_runs_there_while_the_second_is_current",
)
DISPATCH.add(
    "in-place-write-unseen",
    "torch.autograd.graph.increment_version([args[i] for i in self.mutated])",
    "pass",
    "test_plan_choice.py::test_autograd_sees_what_an_op_writes_in_place",
)
DISPATCH.add(
    "explained-on-stdout",
    "print(explained(plan, specs), file=sys.stderr)",
    "print(explained(plan, specs))",
    "test_dispatch.py::test_explain_says_who_was_chosen_and_who_refused",
)
