"""Bugs in the tuner: who wins, what is measured, what survives a stop."""

from mutations.mutation import Layer

SEARCH, MEASURE, JOURNAL = LAYERS = Layer("tuner search"), Layer("tuner measures"), Layer("tuner journal")

SEARCH.add(
    "loser-kept",
    "best = min(able, key=self._median)",
    "best = max(able, key=self._median)",
    "test_search.py::test_the_fastest_wins_wherever_it_stands",
    inside="_contenders",
)
SEARCH.add(
    "last-of-equals",
    "return place != self.rules.present, place",
    "return place != self.rules.present, -place",
    "test_search.py::test_among_equals_the_first_wins_and_what_is_tuned_now_stays",
)
SEARCH.add(
    "present-one-forgotten",
    "return place != self.rules.present, place",
    "return False, place",
    "test_search.py::test_among_equals_the_first_wins_and_what_is_tuned_now_stays",
)
SEARCH.add(
    "spilling-ones-measured",
    "        elif built.spills:",
    "        elif built.spills is None:",
    "test_search.py::test_what_does_not_build_or_spills_is_not_measured",
)
SEARCH.add(
    "bits-not-compared",
    "return [i for i in steady if self.found[i].digest == self.found[steady[0]].digest]",
    "return steady",
    "test_search.py::test_stable_bits_are_those_of_the_default",
)
SEARCH.add(
    "late-is-ignored",
    "if self.reference is not None and self.rules.late():",
    "if self.reference is not None and False:",
    "test_search.py::test_when_time_is_up_the_best_so_far_play_the_final",
)
SEARCH.add(
    "rounds-not-paired",
    "now = tuple(base * mine / first for mine, first in zip(answer.samples, answer.against, strict=True))",
    "now = tuple(base * mine / statistics.median(answer.against) for mine in answer.samples)",
    "test_search.py::test_a_drift_that_all_share_decides_nothing",
)
SEARCH.add(
    "reference-not-first",
    "places = [*first, *(i for i in sorted(places) if i not in first)]",
    "places = sorted({*first, *places}, reverse=True)",
    "test_search.py::test_halving_is_short_for_many_and_long_for_few",
)
SEARCH.add(
    "worse-half-plays-on",
    "able = sorted(self.eligible(), key=self._median)\n        if not able:",
    "able = sorted(self.eligible(), key=lambda i: -self._median(i))\n        if not able:",
    "test_search.py::test_the_fastest_wins_wherever_it_stands",
    inside="leading",
)
SEARCH.add(
    "budget-ignored",
    "        elif left > 0:",
    "        else:",
    "test_tuner.py::test_a_budget_that_ends_leaves_the_rest_for_the_next_time",
    inside="_next",
)
SEARCH.add(
    "hopeless-by-the-slowest",
    "best = min(modelled.values(), default=0.0)",
    "best = max(modelled.values(), default=0.0)",
    "test_candidates.py::test_what_the_model_thinks_hopeless_is_listed_and_the_default_stays",
)
SEARCH.add(
    "default-pruned",
    "if default or candidate.origin or modelled",
    "if candidate.origin or modelled",
    "test_candidates.py::test_what_the_model_thinks_hopeless_is_listed_and_the_default_stays",
)
SEARCH.add(
    "other-kernels-forgotten",
    "ranked = [*before, *new, *(e for e in others if e not in before)]",
    "ranked = new",
    "test_tuner.py::test_a_tune_of_one_backend_keeps_what_is_known_of_others",
)

SEARCH.add(
    "older-names-forgotten",
    "fields = tuned.present_fields(self.op.kernel(now.kernel).Config, now.config)",
    "fields = now.config",
    "test_tuner.py::test_what_is_tuned_now_is_known_under_the_names_of_now",
)
SEARCH.add(
    "all-built-before-the-first-job",
    "built=lambda i: task.builds[i].result() if task.builds else Built(),",
    "built=lambda i: [b.result() for b in task.builds][i] if task.builds else Built(),",
    "test_tuner.py::test_compiling_and_measuring_overlap",
)

MEASURE.add(
    "wrong-one-is-good",
    'return Measured(candidate, "wrong", str(error))',
    "return Measured(candidate, reason=str(error))",
    "test_worker.py::test_bad_ones_say_why_and_have_no_time[wrong-wrong-output 0 has error]",
)
MEASURE.add(
    "not-checked-again",
    "        if again.status != GOOD:",
    '        if again.status == "refused":',
    "test_worker.py::test_bad_ones_say_why_and_have_no_time[wrong_late-wrong-right before it was timed, not after]",
    inside="measured",
)
MEASURE.add(
    "bits-said-to-repeat",
    "repeats = all(map(torch.equal, first, second))",
    "repeats = True",
    "test_worker.py::test_bits_that_change_from_run_to_run_are_noticed",
)
MEASURE.add(
    "arguments-laid-anew",
    "return storage.as_strided(t.shape, t.stride(), skip).copy_(t.detach())",
    "return t.detach().clone()",
    "test_worker.py::test_saved_arguments_are_measured_as_they_lie",
)
MEASURE.add(
    "digest-without-places",
    "sums = torch.stack([(words * place).sum(), (mixed * place).sum()])",
    "sums = torch.stack([words.sum(), mixed.sum()])",
    "test_worker.py::test_the_digest_depends_on_where_a_value_stands",
)
MEASURE.add(
    "arithmetic-not-in-pairs",
    "paired = judge is not None and judge.arithmetic and len(arms) > 1",
    "paired = False",
    "test_measure_pairs.py::test_where_power_is_the_limit_candidates_are_timed_in_pairs",
)
MEASURE.add(
    "inputs-not-rotated",
    "return bench.rotating(lambda *args: plan(args), sets)",
    "return lambda i: plan(sets[0])",
    "test_measure_pairs.py::test_a_candidate_is_timed_on_every_set",
)
MEASURE.add(
    "impossible-times-win",
    'timed[number] = replace(timed[number], status="wrong", reason=why)',
    "pass",
    "test_measure_pairs.py::test_a_time_that_cannot_be_true_wins_nothing",
)

JOURNAL.add(
    "not-synced",
    "                os.fsync(file.fileno())\n            except OSError",
    "            except OSError",
    "test_journal.py::test_a_full_disk_is_said_and_what_was_there_stays",
)
JOURNAL.add(
    "ignored-on-resume",
    "found = book.jobs.get(key)",
    "found = None",
    "test_tuner.py::test_a_tune_that_broke_goes_on_and_measures_nothing_twice",
    inside="_measured",
)
JOURNAL.add(
    "other-sessions-taken",
    'if record["session"] == session:',
    'if record["session"]:',
    "test_journal.py::test_what_was_added_is_there_for_the_same_session_alone",
)
JOURNAL.add(
    "torn-line-joined",
    'file.write(b"\\n" + line if torn else line)',
    "file.write(line)",
    "test_journal.py::test_a_torn_last_line_is_ignored_and_the_next_is_whole",
)
JOURNAL.add(
    "versions-not-in-the-key",
    "return key_of(problem, dict(versions), candidates",
    "return key_of(problem, candidates",
    "test_journal.py::test_a_job_is_known_by_what_decides_its_result",
)
JOURNAL.add(
    "done-means-nothing",
    'if record.get("done"):\n            self.jobs.clear()',
    'if record.get("done"):\n            self.jobs.copy()',
    "test_journal.py::test_a_session_that_is_done_starts_anew",
)
