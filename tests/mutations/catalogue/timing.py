"""Bugs in what says how fast a kernel is: the timer, the bench, the peers, the ceilings."""

from mutations.mutation import Layer

TIMING, BENCH, PEERS, CEILINGS = LAYERS = Layer("timing"), Layer("bench"), Layer("peers"), Layer("ceilings")

TIMING.add(
    "not-in-pairs",
    "_groups(order, base if paired else None)",
    "_groups(order, None)",
    "test_timing.py::test_in_pairs_every_arm_stands_between_turns_of_the_base",
)
TIMING.add(
    "held-against-the-whole-round",
    "self._beside[name] = bases\n",
    "self._beside[name] = self._beside.setdefault(self._base, []) + bases\n",
    "test_timing.py::test_an_arm_is_held_against_the_turns_of_the_base_beside_it",
)
TIMING.add(
    "ratio-inverted",
    "rounds = [b / t for t, b in zip(self.samples, self.against, strict=True)]",
    "rounds = [t / b for t, b in zip(self.samples, self.against, strict=True)]",
    "test_timing.py::test_the_ratio_is_taken_round_by_round",
)
TIMING.add(
    "ratio-of-medians",
    "return statistics.median(rounds), *median_interval(rounds)",
    "return statistics.median(self.against) / self.median, *median_interval(rounds)",
    "test_summary.py::test_a_ratio_to_another_peer_is_taken_round_by_round",
    inside="ratio",
)
TIMING.add(
    "no-least-number-of-rounds",
    "if i + 1 >= LEAST_ROUNDS and time",
    "if time",
    "test_timing.py::test_a_budget_ends_the_rounds_but_not_before_six",
)
TIMING.add(
    "same-order-every-round",
    "        random.shuffle(order)\n",
    "",
    "test_timing.py::test_arms_take_turns_there_and_back",
)
TIMING.add(
    "there-and-not-back",
    "return [order + order[::-1]]",
    "return [order + order]",
    "test_timing.py::test_drift_falls_on_all_arms_alike",
)
TIMING.add(
    "interval-too-narrow",
    "(0.025, 0.975)",
    "(0.25, 0.75)",
    "test_timing.py::test_the_interval_covers_the_median_as_often_as_it_says",
)
TIMING.add(
    "interval-of-single-samples",
    "np.quantile(np.median(values[drawn], axis=1), (0.025, 0.975))",
    "np.quantile(values[drawn], (0.025, 0.975))",
    "test_timing.py::test_the_interval_covers_the_median_as_often_as_it_says",
)
TIMING.add(
    "warm-up-not-until-it-settles",
    "if spent > depth.warm_s and abs(now - before) < _STEADY * now:",
    "if spent > depth.warm_s:",
    "test_timing.py::test_warming_up_lasts_its_time_and_until_two_passes_agree",
)
TIMING.add(
    "caches-stay-warm",
    "self.flush.fill_(self.calls + calls)\n",
    "pass\n",
    "test_timing.py::test_caches_are_overwritten_before_every_cold_call",
)
TIMING.add(
    "one-set-in-the-graph",
    "                    arm(i % sets)\n",
    "                    arm(0)\n",
    "test_timing.py::test_every_set_was_called_before_a_graph_is_captured",
    inside="_gpu_sampler",
)
TIMING.add(
    "events-never-rotate", "            self.next += 1\n", "", "test_timing.py::test_by_events_all_sets_come_round"
)
TIMING.add(
    "replays-not-counted",
    "return ms / (self.replays * self.calls)",
    "return ms / self.calls",
    "test_timing.py::test_a_graphs_time_is_that_of_one_call",
)
BENCH.add(
    "defaults-as-tuned",
    "with settings.override(tuned=unit.tuned):",
    "with settings.override(tuned=True):",
    "test_bench.py::test_defaults_are_the_kernel_and_config_of_an_untuned_call",
)

BENCH.add(
    "arithmetic-not-in-pairs",
    "paired = arithmetic and base is not None and len(arms) > 1",
    "paired = False",
    "test_bench.py::test_where_power_is_the_limit_arms_are_timed_in_pairs",
    inside="_measured",
)
BENCH.add(
    "pairs-where-memory-is-the-limit",
    "paired = arithmetic and base is not None and len(arms) > 1",
    "paired = base is not None and len(arms) > 1",
    "test_bench.py::test_where_power_is_the_limit_arms_are_timed_in_pairs",
    inside="_measured",
)
BENCH.add(
    "inputs-never-rotate",
    "held[i] = call(*sets[i])",
    "held[i] = call(*sets[0])",
    "test_bench.py::test_every_set_is_called_with_its_own_inputs",
)
BENCH.add(
    "outputs-not-held",
    "held[i] = call(*sets[i])",
    "held[0] = call(*sets[i])",
    "test_bench.py::test_every_set_is_called_with_its_own_inputs",
)
BENCH.add(
    "one-set-on-a-gpu",
    "count = min(max(wanted, 2), _MOST_SETS",
    "count = min(1, _MOST_SETS",
    "test_bench.py::test_a_gpus_inputs_are_several_times_its_cache",
)
BENCH.add(
    "control-missing",
    '    if BASE in arms:\n        arms[CONTROL] = _arm(op, BASE, sets, Row("", "", "", ""))\n',
    "",
    "test_bench.py::test_what_runs_is_timed_beside_its_peers",
)
BENCH.add(
    "wrong-kernel-timed",
    'unit.case, where)\n        if row.status == "pass":',
    'unit.case, where)\n        if row.status != "refused":',
    "test_bench.py::test_a_wrong_kernel_is_not_timed",
    inside="_measured",
)
BENCH.add(
    "not-checked-again",
    'if again.status != "pass":',
    'if again.status == "refused":',
    "test_bench.py::test_a_kernel_that_turns_wrong_while_it_is_timed_is_found",
    inside="_measured",
)
BENCH.add(
    "impossible-times-kept",
    "    if ms >= _IMPOSSIBLE * least:\n        return None\n",
    "    if ms > 0:\n        return None\n",
    "test_bench.py::test_a_time_below_the_roof_is_a_measurement_error",
)
BENCH.add(
    "tflops-a-thousandfold",
    "cost.flops / found.median / 1e9",
    "cost.flops / found.median / 1e6",
    "test_bench.py::test_rates_are_of_the_least_an_op_needs",
    inside="note",
)

PEERS.add(
    "saved-for-other-values",
    "given = x._version, *more",
    "given = 0, *more",
    "test_peers.py::test_what_a_forward_saves_is_computed_once_for_each_input",
)
PEERS.add(
    "compiled-once-for-all-shapes",
    "if shapes != self._shapes:",
    "if self._shapes is None:",
    "test_peers.py::test_torch_compile_is_made_anew_for_each_shape",
)
PEERS.add(
    "gpu-peer-on-a-cpu",
    "if peer.gpu and not torch.cuda.is_available():",
    "if peer.gpu is None:",
    "test_peers.py::test_a_missing_peer_says_what_adds_it",
)

CEILINGS.add(
    "roof-of-the-faster",
    "return max(self.memory_ms(cost), self.arithmetic_ms(cost, dtype))",
    "return min(self.memory_ms(cost), self.arithmetic_ms(cost, dtype))",
    "test_ceilings.py::test_the_roof_is_the_slower_of_memory_and_arithmetic",
)
CEILINGS.add(
    "writes-not-counted",
    "2 * min(cost.reads, cost.writes) / self.copy + rest",
    "2 * min(cost.reads, cost.writes) / self.copy",
    "test_ceilings.py::test_the_roof_is_the_slower_of_memory_and_arithmetic",
)
CEILINGS.add(
    "measured-every-time",
    "    if not measure:\n        try:",
    "    if measure:\n        try:",
    "test_ceilings.py::test_they_are_measured_once_and_kept",
    inside="ceilings",
)
