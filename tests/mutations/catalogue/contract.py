"""Bugs in what an op means: its arguments, checks, outputs, costs, gradients."""

from mutations.mutation import Layer, case

OP, SPEC, CALL, INDICES = LAYERS = Layer("op"), Layer("spec"), Layer("call"), Layer("indices")

OP.add(
    "unknown-keyword-accepted",
    "if given == len(kwargs):",
    "if given <= len(kwargs):",
    "test_op.py::test_bad_input_is_named",
)
OP.add(
    "two-devices-accepted",
    "if len(devices) != 1:",
    "if not devices:",
    "test_op.py::test_tensors_on_two_devices_are_named",
)
OP.add(
    "expanded-accepted",
    "if stride == 0 and size > 1:",
    "if stride == 0 and size < 1:",
    "test_op.py::test_bad_input_is_named",
)
OP.add(
    "weight-dtype-unchecked",
    "require(vector.dtype == x.dtype,",
    "require(vector.dtype.is_floating_point,",
    "test_op.py::test_bad_input_is_named",
)
OP.add(
    "like-dtype-unchecked",
    "x.dtype == other.dtype,",
    "x.dtype.is_floating_point,",
    "test_second_tensors.py::test_a_second_tensor_of_another_dtype_is_named",
    inside="check_like",
)
OP.add(
    "nan-eps-accepted",
    "if not 0 <= eps < math.inf:",
    "if eps < 0 or eps == math.inf:",
    "test_scalars.py::test_it_is_refused_by_name",
)
OP.add(
    "output-strided-as-input",
    "    return TensorSpec.contiguous(x.shape, dtype or x.dtype, x.device)\n",
    "    return x\n",
    case("rms_norm", "numba", "m=5,n=256,dtype=fp16,layout=padded"),
    inside="like",
)
OP.add(
    "calls-not-validated",
    "        self.validate(specs, found)\n",
    "",
    "test_fake_inputs.py::test_a_fake_call_is_refused_as_a_real_one_is",
)
OP.add(
    "integer-of-64-bits-off-by-one",
    "-(2**63) <= value < 2**63",
    "-(2**63) <= value <= 2**63",
    "test_transforms.py::test_integers_past_64_bits_are_refused_by_name",
)
OP.add(
    "expanded-gradient-passed-on",
    "g if g is None else g.contiguous() for g in grads",
    "g for g in grads",
    "test_fake_inputs.py::test_a_backward_takes_the_expanded_gradient_of_a_sum",
)
OP.add(
    "gradient-cut",
    "graded = [n for n, v in tensors if v.requires_grad] if torch.is_grad_enabled() else []",
    "graded = []",
    "test_op.py::test_grad_is_refused_not_cut",
)
OP.add(
    "tangent-lost",
    "if forward_ad._current_level >= 0:",
    "if forward_ad._current_level > 0:",
    "test_transforms.py::test_transforms_that_differentiate_are_refused_by_name",
)
OP.add(
    "runtime-check-only-once",
    "if check is not None and given != accepted:\n",
    "if check is not None and accepted is None:\n",
    "test_scalars.py::test_it_is_refused_by_name",
    inside="checks_at_calls",
)
OP.add(
    "first-kernel-ignored",
    "return tuple(self.kernels) if first is None else (first, *(name for name in self.kernels if name != first))",
    "return tuple(self.kernels)",
    "test_policy.py::test_a_problem_may_be_for_another_kernel_first",
)

SPEC.add(
    "aligned-to-4-bytes",
    "t.data_ptr() % 16 == 0 if aligned is None",
    "t.data_ptr() % 4 == 0 if aligned is None",
    "test_candidates.py::test_specs_of_a_saved_call_keep_strides_and_alignment",
)
SPEC.add(
    "writes-counted-twice",
    "return self.reads + self.writes",
    "return self.reads + 2 * self.writes",
    "test_bench.py::test_what_runs_is_timed_beside_its_peers",
)
SPEC.add(
    "bytes-without-itemsize",
    "return prod(self.shape) * self.dtype.itemsize",
    "return prod(self.shape) * 2",
    "test_bench.py::test_what_runs_is_timed_beside_its_peers",
)

CALL.add(
    "names-taken-twice",
    'assert not both, f"an output',
    'assert both is not None, f"an output',
    "test_call.py::test_a_longer_call_is_another_of_the_same_class",
)
CALL.add(
    "plain-call-of-a-familys-own",
    "return type(self)({**self._values, **more})",
    "return Call({**self._values, **more})",
    "test_call.py::test_a_longer_call_is_another_of_the_same_class",
)
CALL.add(
    "workspace-over-the-outputs",
    "first = len(op.names) + len(op.output_specs(call))",
    "first = len(op.names)",
    "test_policy.py::test_workspace_comes_after_arguments_and_outputs",
)
CALL.add(
    "runtime-scalars-take-no-place",
    "for slot, (name, kind) in enumerate(zip(self.names, self.kinds)):",
    "for slot, (name, kind) in enumerate(sorted(zip(self.names, self.kinds), key=lambda each: not each[1].decides)):",
    "test_signature.py::test_references_name_tensors_and_runtime_scalars_by_their_places",
)
CALL.add(
    "gradients-by-place",
    "return tuple(found.get(name) for name in op.names)",
    "return (*found.values(), *[None] * (len(op.names) - len(found)))",
    "test_library.py::test_gradients_are_given_by_name",
)

INDICES.add(
    "highest-refused",
    "wrong = (indices < low) | (indices > high)",
    "wrong = (indices < low) | (indices >= high)",
    "test_checked_indices.py::test_what_is_right_passes",
)
INDICES.add(
    "lowest-not-looked-at",
    "wrong = (indices < low) | (indices > high)",
    "wrong = indices > high",
    "test_checked_indices.py::test_the_first_wrong_entry_is_named",
)
INDICES.add(
    "falling-offsets-accepted",
    "    if (lengths < 0).any():",
    "    if (lengths < -(2**31)).any():",
    "test_attention_indices.py::test_the_first_wrong_entry_is_named[attention_lse]",
)
