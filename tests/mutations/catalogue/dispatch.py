"""Bugs in plans and launches: which call has which plan, what it gets, what is launched and with which arguments."""

from mutations.mutation import Layer, case

DISPATCH, LAUNCH, BIND = LAYERS = Layer("dispatch"), Layer("launch"), Layer("bind")
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
    "test_plans.py::test_tensors_of_another_device_have_another_key",
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
    "test_policy.py::test_a_backend_that_is_named_and_refuses_is_not_run",
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
    "test_plans.py::test_out_may_not_overlap_an_argument_in_part",
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
    "test_plans.py::test_a_tensor_on_the_first_device_runs_there_while_the_second_is_current",
)
DISPATCH.add(
    "in-place-write-unseen",
    "torch.autograd.graph.increment_version([args[i] for i in self.mutated])",
    "pass",
    "test_plans.py::test_autograd_sees_what_an_op_writes_in_place",
)
DISPATCH.add(
    "explained-on-stdout",
    "print(explained(plan, op.specs_in(call), kernel.expected_us(call, config)), file=sys.stderr)",
    "print(explained(plan, op.specs_in(call), kernel.expected_us(call, config)))",
    "test_policy.py::test_explain_says_who_was_chosen_and_who_refused",
)
DISPATCH.add(
    "unhashable-backend-raises",
    "if backend is not None and backend not in tuple(op.kernels):",
    "if backend is not None and backend not in op.kernels:",
    "test_op.py::test_bad_input_is_named",
)
DISPATCH.add(
    "untuned-call-becomes-torchs",
    "untuned = [name for name in asked if backend is not None or languages.runs_unnamed(name, where)]",
    "untuned = list(asked)",
    "test_vendor.py::test_where_every_other_kernel_refuses_it_is_named_and_does_not_run",
)
DISPATCH.add(
    "vendor-not-left-out",
    'return None if settings.get().vendor else "TILERY_VENDOR=0 leaves it out"',
    "return None",
    "test_vendor.py::test_a_setting_leaves_it_out",
)
DISPATCH.add(
    "library-sums-fp16-in-fp16",
    '_both(_reduction("fp16"), _accumulation())',
    '_reduction("fp16")',
    "test_vendor.py::test_sums_of_16_bits_are_fp32",
)
DISPATCH.add(
    "precision-of-products-alone-left-behind",
    'set_(backend, "matmul", "none")  #',
    "pass  #",
    "test_vendor.py::test_what_is_set_for_all_of_torch_is_not_set_for_products_alone",
)
DISPATCH.add(
    "torchs-precision-stays-changed",
    "    finally:\n        switch.set(before)",
    "    finally:\n        pass",
    "test_vendor.py::test_the_setting_of_precision_is_the_callers_again",
)
DISPATCH.add(
    "vendor-leaves-a-product-times-zero-out",
    "        a, alpha = a * alpha, 1.0\n",
    "        pass\n",
    "test_vendor.py::test_a_product_times_zero_keeps_its_nan_and_infinity",
)
DISPATCH.add(
    "vendor-under-autograd",
    "        with _below_autograd():\n            function(*resolved(values))",
    "        function(*resolved(values))",
    "test_vendor.py::test_gradients_go_through_what_is_tuned",
)
DISPATCH.add(
    "light-launch-shown",
    "return max(made, key=lambda artifact: (artifact.spills or 0, artifact.registers or 0))",
    "return made[0]",
    "test_policy.py::test_of_several_launches_the_compiled_one_is_that_which_takes_most_of_an_sm",
)
DISPATCH.add(
    "bound-at-every-run",
    "self.run = bound[0] if len(bound) == 1 else _one_after_another(bound)\n        self.run(values)",
    "(bound[0] if len(bound) == 1 else _one_after_another(bound))(values)",
    "test_plans.py::test_launches_are_bound_at_the_first_run_and_run_in_order_ever_after",
)
DISPATCH.add(
    "last-launch-first",
    "        for each in runs:\n            each(values)",
    "        for each in reversed(runs):\n            each(values)",
    "test_plans.py::test_launches_are_bound_at_the_first_run_and_run_in_order_ever_after",
)
DISPATCH.add(
    "workspace-before-outputs",
    "self.run((*args, *outs, *(workspace or [new() for new in self._new_workspace])))",
    "self.run((*args, *(workspace or [new() for new in self._new_workspace]), *outs))",
    "test_plans.py::test_a_launch_sees_arguments_outputs_and_workspace_in_this_order",
)

# Launches as data

RESOLVED = "test_launch.py::test_groups_keep_their_kind_at_any_depth"
DISPATCH.add(
    "sizes-of-zero-taken",
    "return config_refusal(kernel, config) or kernel.refusal(call, config)",
    "return kernel.refusal(call, config)",
    "test_config_refusals.py::test_sizes_below_one_and_odd_warps_are_refused[silu_mul-triton]",
)
LAUNCH.add(
    "offset-of-a-view-of-a-view-forgotten",
    "made.offset = self.offset + step",
    "made.offset = step",
    "test_launch.py::test_views_of_views_add_up",
)
LAUNCH.add(
    "offset-in-elements",
    "step = start * self.dtype.itemsize",
    "step = start",
    "test_launch.py::test_a_view_shows_the_same_memory_with_other_sizes",
)
LAUNCH.add(
    "view-always-aligned",
    "aligned=self.aligned and step % _VECTOR == 0)",
    "aligned=self.aligned)",
    "test_launch.py::test_a_view_is_aligned_where_it_starts_on_16_bytes",
)
LAUNCH.add(
    "view-from-the-storages-start",
    "found.storage_offset() + self.offset // self.dtype.itemsize",
    "self.offset // self.dtype.itemsize",
    "test_launch.py::test_a_view_begins_where_the_tensor_does",
)
LAUNCH.add(
    "transforms-in-the-wrong-order",
    "lambda value: function(before(value))",
    "lambda value: before(function(value))",
    "test_launch.py::test_what_becomes_of_a_scalar_is_applied_in_order",
)
LAUNCH.add(
    "ints-passed-as-they-come",
    "found = given if given is None else self.kind(given)",
    "found = given",
    "test_launch.py::test_a_scalar_is_of_its_kind_whatever_number_came",
)
LAUNCH.add(
    "names-of-a-group-lost",
    'return type(group)(*values) if hasattr(group, "_fields") else tuple(values)',
    "return tuple(values)",
    RESOLVED,
)
LAUNCH.add(
    "arguments-of-the-call-before",
    "        made = fixed.copy()\n",
    "        made = fixed\n",
    "test_launch.py::test_the_resolver_gives_every_call_a_list_of_its_own",
)

# What languages are given

BIND.add(
    "profilers-not-told",
    "if found is None or _called(enter) or _called(leave):",
    "if found is None:",
    "test_triton_glue.py::test_while_a_profiler_listens_every_call_goes_through_triton",
)
BIND.add(
    "one-code-for-all-devices",
    "code = (index, *[x.value(values) for x in deciding]) if deciding else index",
    "code = (0, *[x.value(values) for x in deciding])",
    "test_triton_glue.py::test_every_device_has_its_own_code",
)
BIND.add(
    "one-code-for-all-constants",
    "code = (index, *[x.value(values) for x in deciding]) if deciding else index",
    "code = index",
    "test_triton_glue.py::test_a_scalar_among_the_constants_has_code_of_its_own_for_each_value",
)
BIND.add(
    "one-code-for-all-integers",
    "if p.annotation_type and p.do_not_specialize}",
    "if p.annotation_type}",
    "test_triton_glue.py::test_an_integer_that_may_change_the_code_goes_through_triton_every_time",
)
BIND.add(
    "dependent-launch-on-any-device",
    "pdl = launch.pdl and device.arch_number(where) >= PDL",
    "pdl = launch.pdl",
    "test_triton_glue.py::test_a_kernel_is_launched_as_a_dependent_where_it_says_so_and_the_device_can",
)
BIND.add(
    "persistent-grid-cuts-clusters",
    "blocks = min(blocks.most, kernel.resident() // launch.cluster * launch.cluster)",
    "blocks = min(blocks.most, kernel.resident())",
    "test_cuda_launch.py::test_a_persistent_grid_has_as_many_blocks_as_run_at_once_in_whole_clusters",
)
BIND.add(
    "arguments-as-the-launch-names-them",
    "tuple(args[f.name] for f in p.type.fields) if _is_struct(p) else args[p.name] for p in self.parameters",
    "v if not _is_struct(p) else tuple(args[f.name] for f in p.type.fields) "
    "for p, v in zip(self.parameters, args.values())",
    "test_cuda_launch.py::test_arguments_are_given_in_the_kernels_order",
)
BIND.add(
    "comments-read-as-code",
    'return re.sub(r"//[^\\n]*|/\\*.*?\\*/", "", text, flags=re.DOTALL)',
    "return text",
    "test_cuda_signature.py::test_parameters_are_read_with_their_types",
)
BIND.add(
    "fields-of-one-line-lost",
    'fields += [head, *(Parameter(name.strip(" *"), head.type) for name in more)]',
    "fields += [head]",
    "test_cuda_signature.py::test_structs_are_laid_out_as_c_lays_them_out",
)
DISPATCH.add(
    "vendor-adds-in-16-bits",
    'return adds_refusal(call.a.dtype, "c") or span_refusal(a=call.a, b=call.b, c=call.addend)',
    "return span_refusal(a=call.a, b=call.b, c=call.addend)",
    "test_vendor.py::test_a_residual_in_16_bits_is_refused",
)
DISPATCH.add(
    "vendor-takes-rows-far-apart",
    "if matrix_span > max(_MOST, math.prod(x.shape[-2:])):",
    "if matrix_span > 2 * _MOST:",
    "test_vendor.py::test_rows_too_far_apart_for_cublas_are_refused",
)
