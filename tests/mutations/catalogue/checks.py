"""Bugs in what says that a kernel is right."""

from mutations.mutation import Layer

(CHECK,) = LAYERS = (Layer("check"),)
WRITTEN = "test_check.py::test_an_element_that_is_not_written_is_found"

CHECK.add(
    "outputs-not-poisoned",
    "return spec.empty().fill_(_POISON.get(spec.dtype, _POISON_ELSE))",
    "return spec.empty()",
    "test_check_limits.py::test_outputs_hold_what_no_kernel_writes",
)
CHECK.add(
    "writes-behind-an-output-not-seen",
    "self._around += [memory[:lead], memory[end:]]",
    "self._around += [memory[:lead], memory[:lead]]",
    "test_check_limits.py::test_a_write_outside_of_an_output_is_found",
)
CHECK.add(
    "inputs-may-be-written",
    "name not in op.mutates and not torch.equal(_bits(a), _bits(b))",
    "name in op.mutates and not torch.equal(_bits(a), _bits(b))",
    "test_check.py::test_a_kernel_that_writes_its_input_is_found",
)
CHECK.add(
    "single-elements-not-judged",
    "if not found.excess <= 1:",
    "if found.excess < 0:",
    "test_check_limits.py::test_one_element_that_is_off_is_found",
)
CHECK.add(
    "nan-may-stand-anywhere",
    "if not in_place or not o[finite].isfinite().all():",
    "if not in_place:",
    "test_check.py::test_error",
)
CHECK.add(
    "infinities-unsigned",
    "o[~finite].nan_to_num(nan=1.5), r[~finite].nan_to_num(nan=1.5)",
    "o[~finite].abs().nan_to_num(nan=1.5), r[~finite].abs().nan_to_num(nan=1.5)",
    "test_check.py::test_error",
)
CHECK.add(
    "error-of-the-sum",
    "off.square().sum().item() -",
    "off.sum().item() ** 2 / max(off.numel(), 1) -",
    "test_check_limits.py::test_the_error_is_of_all_elements_together",
)
CHECK.add(
    "subnormal-numbers-may-be-off-by-anything",
    "count * (kind.smallest_normal * kind.eps) ** 2 / 12",
    "count * (kind.smallest_normal * kind.eps) ** 2",
    "test_check_limits.py::test_subnormal_numbers_may_be_off_by_their_rounding_and_no_more",
)
CHECK.add(
    "peer-may-be-off-by-half",
    "_PEER_ALLOWED = 2e-2",
    "_PEER_ALLOWED = 2.0",
    "test_bench.py::test_a_peer_that_is_off_by_a_tenth_is_not_timed",
)
CHECK.add(
    "fp32-peer-may-round-as-16-bits",
    "a.itemsize < 4 for a in args)",
    "a.itemsize <= 4 for a in args)",
    "test_bench.py::test_a_peer_in_fp32_is_held_to_fp32",
)
CHECK.add(
    "same-data-every-time",
    "return random.randrange(2**31)",
    "return 0",
    "test_check.py::test_inputs_are_fresh_every_time",
)
CHECK.add(
    "undeclared-refusal-passes",
    "if expected is None and found.refused is not None:",
    'if expected is None and found.refused == "":',
    "test_ops.py::test_refusing_what_it_should_take_fails",
)
CHECK.add(
    "declared-refusal-not-asked-for",
    "(found.refused is None or expected not in found.refused)",
    "(found.refused is not None and expected not in found.refused)",
    "test_ops.py::test_taking_what_it_should_refuse_fails",
)
CHECK.add(
    "missing-outputs-pass",
    "if len(outs) != len(refs):",
    "if len(outs) > len(refs):",
    "test_check_limits.py::test_a_peer_that_gives_too_few_outputs_is_found",
)
CHECK.add(
    "reference-in-fp32",
    "wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]",
    "wide = [a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]",
    "test_check_limits.py::test_the_reference_is_computed_in_float64",
)
CHECK.add(
    "rows-of-large-terms-judged-by-all",
    "squares.mean(-1, keepdim=True).sqrt_().clamp_(min=least)",
    "squares.mean(-1, keepdim=True).sqrt_().clamp_(min=least, max=least or None)",
    "test_check.py::test_where_rows_cancel_each_is_judged_by_all_or_by_itself_if_that_is_more",
)
