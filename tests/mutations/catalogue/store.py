"""Bugs in what is kept of runs and what is made of them: the store, comparisons, summaries, pairs."""

from mutations.mutation import Layer

STORE, SUMMARY = LAYERS = Layer("store"), Layer("summaries")
SUMS = "test_summary.py::test_sums_are_of_the_best_kernel_of_each_case"
OWN_RUN = "test_store.py::test_a_change_of_one_run_leaves_the_others_alone"

STORE.add(
    "no-transaction",
    "closing(sqlite3.connect(self.path, timeout=_WAIT_S)) as connection:\n            _use_wal",
    "closing(sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None)) as connection:\n            _use_wal",
    "test_store.py::test_rows_are_added_all_or_none",
)
STORE.add(
    "replace-touches-every-run",
    "UPDATE rows SET data = ? WHERE run = ? AND n = ?",
    "UPDATE rows SET data = ? WHERE ? != '' AND n = ?",
    OWN_RUN,
)
STORE.add(
    "rows-counted-over-all-runs",
    'FROM rows WHERE run = ?",\n                    (run',
    "FROM rows WHERE ? != ''\",\n                    (run",
    OWN_RUN,
)
STORE.add(
    "finish-touches-every-run",
    "UPDATE runs SET finished = ? WHERE id = ?",
    "UPDATE runs SET finished = ? WHERE ? != ''",
    OWN_RUN,
)
STORE.add(
    "rows-of-every-run",
    "SELECT data FROM rows WHERE run = ? ORDER BY n",
    "SELECT data FROM rows WHERE ? != '' ORDER BY n",
    OWN_RUN,
)
STORE.add(
    "oldest-run-is-the-last",
    "FROM runs ORDER BY started, rowid",
    "FROM runs ORDER BY started DESC, rowid DESC",
    "test_store.py::test_the_latest_run_comes_last",
)
STORE.add(
    "newer-schema-read",
    "if version not in (0, SCHEMA):",
    "if version < 0:",
    "test_store.py::test_a_store_of_a_newer_tilery_is_left_alone",
)
STORE.add(
    "regression-by-the-middle",
    "return self.high < 1 - threshold",
    "return self.speed < 1 - threshold",
    "test_compare.py::test_a_regression_is_one_only_if_the_interval_says_so",
)
STORE.add(
    "doubt-of-the-first-run-ignored",
    "b.ratio_high / a.ratio_low  # type",
    "b.ratio_high / a.ratio  # type",
    "test_compare.py::test_the_doubt_of_both_runs_counts",
)
STORE.add(
    "peers-are-compared",
    "if row.ms is not None and is_ours(row.kernel))",
    "if row.ms is not None)",
    "test_compare.py::test_what_kernels_are_held_against_is_not_compared",
)

SUMMARY.add(
    "arithmetic-mean",
    "return math.exp(sum(logs) / len(logs)) if logs else None",
    "return sum(map(math.exp, logs)) / len(logs) if logs else None",
    SUMS,
)
SUMMARY.add(
    "worst-kernel-of-a-case",
    "if one.ratios[peer][0] > held.ratios[peer][0]:",
    "if one.ratios[peer][0] < held.ratios[peer][0]:",
    SUMS,
)
SUMMARY.add(
    "won-by-the-middle",
    "sum(one.ratios[peer][1] > 1 for one in best)",
    "sum(one.ratios[peer][0] > 1 for one in best)",
    "test_summary.py::test_an_interval_that_reaches_1_is_not_a_win",
)
SUMMARY.add(
    "wrong-kernels-count",
    'return self.row.status == "pass" and positive(self.row.ms)',
    "return positive(self.row.ms)",
    "test_summary.py::test_a_wrong_kernel_has_no_speed",
)
SUMMARY.add(
    "not-over-torch",
    "ours, theirs = _over(ours, row.against), _over(theirs, peer.against)",
    "pass",
    "test_summary.py::test_where_each_arm_stood_beside_torch_the_ratio_is_over_torch",
)
SUMMARY.add(
    "cells-over-runs",
    "key = (run.id, row.op, row.case, row.device, row.inputs, row.stage)",
    "key = (row.op, row.case, row.device, row.inputs, row.stage)",
    "test_summary.py::test_two_runs_of_one_device_are_not_held_against_each_other",
)
SUMMARY.add(
    "pairs-take-a-wrong-kernel",
    'key=lambda arm: (arm.status != "pass", arm.ms is None, arm.ms or 0.0)',
    "key=lambda arm: (arm.ms is None, arm.ms or 0.0)",
    "test_pairs.py::test_ours_is_the_fastest_that_is_right",
)
SUMMARY.add(
    "pairs-of-a-wrong-peer",
    'if peer.status != "pass":',
    'if peer.status == "skipped":',
    "test_pairs.py::test_a_peer_without_a_time_says_why",
)
