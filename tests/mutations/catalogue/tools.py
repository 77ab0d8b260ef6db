"""Bugs in what users see: models, the command line, the patch for Hugging Face, the ladder."""

from mutations.mutation import Layer

MODELS, CLI, PATCH, LADDER, SANITIZE = LAYERS = (
    Layer("models"),
    Layer("command line"),
    Layer("patch"),
    Layer("ladder"),
    Layer("sanitize"),
)

MODELS.add(
    "ranks-ignored",
    "        return size // self.tp\n",
    "        return size\n",
    "test_plan.py::test_ranks_share_the_matrices",
    inside="_share",
)
MODELS.add(
    "no-head-left-for-a-rank",
    "return max(heads // self.tp, 1)",
    "return heads // self.tp",
    "test_models.py::test_keys_are_copied_where_there_are_more_ranks_than_heads",
)
MODELS.add(
    "layers-counted-once",
    "(sum(step.count * step.cost[i] for step in self.steps)",
    "(sum(step.cost[i] for step in self.steps)",
    "test_plan.py::test_llama_8b_reads_15_gb_of_weights_and_its_cache",
)
MODELS.add(
    "case-of-the-last-pass-alone",
    "Worth(step.op, step.case, ms + (found[key].ms if key in found else 0.0))",
    "Worth(step.op, step.case, ms)",
    "test_plan.py::test_cases_are_distinct_exist_and_come_most_valuable_first",
)
MODELS.add(
    "least-valuable-first",
    "key=lambda worth: -worth.ms)",
    "key=lambda worth: worth.ms)",
    "test_plan.py::test_cases_are_distinct_exist_and_come_most_valuable_first",
)
MODELS.add(
    "every-expert-read",
    "weights = experts_hit(tokens, experts, topk) * (n * k + 4 * blocks)",
    "weights = experts * (n * k + 4 * blocks)",
    "test_estimates.py::test_estimates_are_what_a_hand_makes_of_them",
)
MODELS.add(
    "keys-without-values",
    'Linear("qkv", (queries + 2 * keys) * size, self.hidden_size)',
    'Linear("qkv", (queries + keys) * size, self.hidden_size)',
    "test_models.py::test_llama_8b",
)

CLI.add(
    "failed-check-exits-0",
    "raise typer.Exit(1 if failed else 0)",
    "raise typer.Exit(0)",
    "test_cli.py::test_a_failed_check_exits_1",
    inside="check",
)
CLI.add(
    "regression-exits-0",
    "raise typer.Exit(1 if worse else 0)",
    "raise typer.Exit(0)",
    "test_regression_gate.py::test_a_slower_run_exits_1",
)
CLI.add(
    "bad-usage-exits-1",
    "            sys.exit(2)\n",
    "            sys.exit(1)\n",
    "test_cli.py::test_bad_usage_exits_2_and_says_what_was_expected",
    inside="main",
)
CLI.add(
    "words-before-the-json",
    "    print(json.dumps(document(rows, **more)))\n",
    '    print("tilery:", json.dumps(document(rows, **more)))\n',
    "test_cli.py::test_ops_lists_every_kernel",
    inside="print_json",
)
CLI.add(
    "zero-accepted",
    "if not all(part.isdecimal() and int(part) for part in parts):",
    "if not all(part.isdecimal() for part in parts):",
    "test_cli.py::test_bad_usage_exits_2_and_says_what_was_expected",
)
CLI.add(
    "case-of-text",
    "if int in kinds:",
    "if None in kinds:",
    "test_cli.py::test_check_takes_a_case_by_its_numbers",
    inside="_parsed",
)
CLI.add(
    "floats-of-a-case-stay-text",
    "return float(value)",
    "return value",
    "test_cli.py::test_every_case_can_be_named_on_the_command_line[rms_norm]",
    inside="_parsed",
)

CLI.add(
    "columns-wider-than-the-terminal",
    "        if free >= 0:\n",
    "        if free >= -20:\n",
    "test_tables.py::test_a_table_fits_and_keeps_every_figure[bench-80]",
    inside="_widths",
)
CLI.add(
    "columns-left-out-in-silence",
    "if left_out := [self.columns[i].name for i in self.indices if i not in chosen.shown]:",
    "if left_out := [self.columns[i].name for i in self.indices if i not in self.indices]:",
    "test_tables.py::test_a_table_fits_and_keeps_every_figure[bench-80]",
)
CLI.add(
    "worst-error-of-what-passes",
    'return row.status == "fail", used',
    'return row.status == "pass", used',
    "test_cli.py::test_check_says_the_worst_error_beside_what_is_allowed_and_each_reason_once",
)
CLI.add(
    "seed-not-used",
    "compiler, say, seed)",
    "compiler, say)",
    "test_cli.py::test_a_failure_is_repeated_by_the_command_that_it_names",
    inside="check",
)

PATCH.add(
    "window-dropped",
    '"window": mask.window, "key_mask": mask.seen}',
    '"window": 0, "key_mask": mask.seen}',
    "test_attention_masks.py::test_all_that_a_mask_says_reaches_attention",
)
PATCH.add(
    "padding-dropped",
    '"window": mask.window, "key_mask": mask.seen}',
    '"window": mask.window, "key_mask": None}',
    "test_attention_masks.py::test_all_that_a_mask_says_reaches_attention",
)
PATCH.add(
    "window-to-both-sides-off-by-one",
    "known[False, local + 1] = ",
    "known[False, local] = ",
    "test_huggingface.py::test_masks_that_kernels_know_are_not_spelt_out",
)
PATCH.add(
    "static-cache-taken-for-full",
    "isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length",
    "isinstance(q_offset, int)",
    "test_huggingface.py::test_other_masks_are_spelt_out",
)
PATCH.add(
    "another-window-taken",
    "return isinstance(a, int) and isinstance(b, int) and a == b",
    "return isinstance(a, int) and isinstance(b, int)",
    "test_huggingface.py::test_other_masks_are_spelt_out",
)

LADDER.add(
    "clusters-cut-in-half",
    "blocks = min(blocks.most, kernel.resident() // launch.cluster * launch.cluster)",
    "blocks = min(blocks.most, kernel.resident())",
    "test_ladder.py::test_launches_a_block_for_every_tile_or_as_many_as_run",
)
CLI.add(
    "vendor-counted-as-ours",
    "return not is_peer(kernel) and not is_control(kernel) and languages.is_ours(kernel)",
    "return not is_peer(kernel) and not is_control(kernel)",
    "test_vendor.py::test_tables_do_not_count_it",
)
CLI.add(
    "vendor-timed-beside-torch",
    "return tuple(k for k in chosen_kernels(op, asked) if asked or languages.is_ours(k))",
    "return chosen_kernels(op, asked)",
    "test_vendor.py::test_a_bench_times_it_where_it_is_asked_for",
)
LADDER.add(
    "wrong-rung-passes",
    "    row.error, row.max_diff = found.error, found.largest\n    if why is not None:",
    '    row.error, row.max_diff = found.error, found.largest\n    if why == "":',
    "test_ladder.py::test_rows_are_checked_timed_and_held_against_torch",
)
SANITIZE.add(
    "children-start-after-an-interrupt",
    "        _stopped.set()\n        kill_all()",
    "        kill_all()",
    "test_sanitize.py::test_nothing_is_started_after_an_interrupt",
)
SANITIZE.add(
    "stopped-for-good",
    "        pool.shutdown(cancel_futures=True)\n        _stopped.clear()",
    "        pool.shutdown(cancel_futures=True)",
    "test_sanitize.py::test_nothing_is_started_after_an_interrupt",
)
SANITIZE.add(
    "interrupt-loses-its-rows",
    "        except KeyboardInterrupt:\n            interrupted = True",
    "        except KeyboardInterrupt:\n            raise",
    "test_sanitize.py::test_an_interrupt_prints_what_was_examined",
    inside="sanitize",
)
SANITIZE.add(
    "run-though-the-tool-cannot-examine-it",
    "if reason := unfit_reason(tool, op.name, kernel):",
    "if reason := None:",
    "test_sanitize.py::test_a_kernel_that_a_tool_cannot_examine_is_not_run",
)
