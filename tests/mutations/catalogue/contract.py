"""Bugs in what an op means: its arguments, checks, outputs, costs, gradients."""

from mutations.mutation import Layer, case

OP, SPEC, INDICES = LAYERS = Layer("op"), Layer("spec"), Layer("indices")

OP.add(
    "unknown-keyword-accepted",
    "if given == len(kwargs):",
    "if given <= len(kwargs):",
    "test_dispatch.py::test_bad_input_is_named",
)
OP.add(
    "two-devices-accepted",
    "if len(devices) != 1:",
    "if not devices:",
    "test_dispatch.py::test_tensors_on_two_devices_are_named",
)
OP.add(
    "expanded-accepted",
    "if stride == 0 and size > 1:",
    "if stride == 0 and size < 1:",
    "test_dispatch.py::test_bad_input_is_named",
)
OP.add(
    "weight-dtype-unchecked",
    "require(vector.dtype == x.dtype,",
    "require(vector.dtype.is_floating_point,",
    "test_dispatch.py::test_bad_input_is_named",
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
    "fake-not-validated",
    "        self.validate(specs)\n        return plan_module.unpacked(",
    "        return plan_module.unpacked(",
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
    "test_dispatch.py::test_grad_is_refused_not_cut",
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
    "return self.kernels if first is None else (first, *(name for name in self.kernels if name != first))",
    "return self.kernels",
    "test_dispatch.py::test_a_problem_may_be_for_another_kernel_first",
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
