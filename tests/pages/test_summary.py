"""What rows add up to: ratios within a cell, the best of each case, means, lines over sizes."""

from dataclasses import replace

import pytest
from made_runs import CPU, GPU, cell, median_ratio, put, put_cpu, put_gpu, timed

from tilery.measure.result import Row
from tilery.pages import report, summary

BASE, LIGER = "baseline:torch", "baseline:liger"


def collected(store, *names):
    return summary.collect(store, list(names) or None)


def one(found, op, kernel, case):
    (match,) = [f for f in found if (f.row.op, f.row.kernel) == (op, kernel) and f.row.case.startswith(f"m={case},")]
    return match


def test_a_ratio_to_another_peer_is_taken_round_by_round(store):
    ours, theirs = (1.0, 2.0, 4.0, 8.0, 1.0, 2.0), (3.0, 2.0, 12.0, 4.0, 3.0, 1.0)
    case = "m=16,n=4096,dtype=bf16"
    put(
        store,
        [timed("softmax", "triton", case, 2, 2, samples=ours), timed("softmax", LIGER, case, 3, 2, samples=theirs)],
    )
    found = collected(store).found[0].ratios[LIGER]
    assert found[0] == median_ratio(ours, theirs) == 2.0 != 3 / 2 and found[1] <= 2.0 <= found[2]


def test_where_each_arm_stood_beside_torch_the_ratio_is_over_torch(store):
    """The card was twice as fast while the peer ran: torch beside it was so too, and no one gains from it."""
    case, ones, halves = "m=16,n=4096,dtype=bf16", (1.0,) * 6, (0.5,) * 6
    ours = timed("matmul", "triton", case, 1, 1, samples=ones, against=ones)
    theirs = timed("matmul", LIGER, case, 1, 1, samples=halves, against=halves)
    put(store, [ours, theirs])
    assert collected(store).found[0].ratios[LIGER] == (1.0, 1.0, 1.0)


def test_rounds_that_do_not_pair_are_left_out_and_said(store):
    rows = cell("softmax", "m=16,n=4096,dtype=bf16", 1.0, {"triton": 2.0, LIGER: 1.5})
    rows[2].samples = rows[2].samples[:-1]
    put(store, rows)
    triton = one(collected(store).found, "softmax", "triton", 16)
    assert LIGER not in triton.ratios and triton.ratios[BASE][0] == 2.0  # torch's stands in the row
    (said,) = [n["text"] for n in report.page_data(store, collected(store))["notices"] if "left out" in n["text"]]
    assert said == "1 ratio left out: kernel and peer were not sampled in the same rounds."


def test_sums_are_of_the_best_kernel_of_each_case(store):
    put_gpu(store)
    found = [f for f in collected(store).found if f.row.device == GPU]
    sums = summary.summary(found)
    assert sums["mean"] == pytest.approx((2.0**3 * 0.8) ** (1 / 4))
    assert (sums["kernels"], sums["cases"], sums["won"], sums["compared"], sums["failures"]) == (5, 4, 3, 4, 1)
    assert sums["best"]["ratio"] == 2.0 and sums["worst"] == {
        "op": "matmul", "case": "m=64,n=4096,k=4096,dtype=bf16", "kernel": "triton", "ratio": pytest.approx(0.8)
    }  # fmt: skip
    against_liger = summary.summary(found, LIGER)
    assert against_liger["mean"] == pytest.approx(2.0 / 1.6) and against_liger["compared"] == 3


def test_an_interval_that_reaches_1_is_not_a_win(store):
    put(store, cell("softmax", "m=16,n=4096,dtype=bf16", 1.0, {"triton": 1.005}))  # from 0.995
    assert summary.summary(collected(store).found)["won"] == 0


def test_warm_and_cold_rows_are_in_no_mean_together(store):
    rows = [
        replace(row, inputs=inputs)
        for inputs, m, ratio in (("cold", 16, 2.0), ("warm", 32, 8.0), ("cold", 64, 0.5))
        for row in cell("softmax", f"m={m},n=4096,dtype=bf16", 1.0, {"triton": ratio})
    ]
    put(store, rows)
    found = collected(store).found
    assert summary.summary(found)["mean"] == pytest.approx(1.0) and summary.summary(found)["compared"] == 2
    assert summary.heat(found)["softmax", "triton"] == (pytest.approx(1.0), 2)
    (notice,) = [n for n in report.page_data(store, collected(store))["notices"] if "warm" in n["text"]]
    assert notice["items"] == ["softmax m=32,n=4096,dtype=bf16"]
    warm = [one for one in found if one.row.inputs == "warm"]
    assert summary.summary(warm)["mean"] == pytest.approx(8.0)  # where all are warm they have a mean


def test_of_variants_the_heat_map_takes_the_best_of_each_case(store):
    put_gpu(store)
    cells = summary.heat(collected(store).found)
    assert cells["softmax", "cuda"] == (pytest.approx(1.25), 3) and cells["matmul", "cuda"] == (pytest.approx(0.02), 1)
    assert not any(":" in language for _, language in cells)


def test_a_wrong_kernel_has_no_speed(store):
    rows = cell("softmax", "m=16,n=4096,dtype=bf16", 1.0, {"triton": 9.0, "cuda": 2.0})
    rows[2].status, rows[2].reason = "fail", "right before it was timed, not after"
    put(store, rows)
    found = collected(store).found
    assert one(found, "softmax", "triton", 16).ratios == {}
    assert summary.summary(found)["mean"] == pytest.approx(2.0) and summary.heat(found).keys() == {("softmax", "cuda")}


def test_a_line_joins_cases_that_differ_in_one_number(store):
    put_gpu(store)
    (chart,) = summary.size_charts(collected(store).found)  # matmul has one size: it is in none
    assert (chart.op, chart.x, chart.fixed, chart.device) == ("softmax", "m", "n=4096, dtype=bf16", GPU)
    assert {summary.params(f.row.case)["m"] for f in chart.found} == {16, 1024, 8192}
    assert not any(f.is_control for f in chart.found)


def test_where_m_stays_another_number_is_the_size(store):
    put(store, [row for n in (64, 128) for row in cell("softmax", f"m=16,n={n},dtype=bf16", 1.0, {"triton": 2.0})])
    (chart,) = summary.size_charts(collected(store).found)
    assert (chart.x, chart.fixed) == ("n", "m=16, dtype=bf16")


def test_devices_are_never_mixed(store):
    put_gpu(store), put_cpu(store)
    both = collected(store, "20260101", "20260102")
    cells = {}
    for f in both.found:
        cells.setdefault(f.cell, set()).add((f.run.id, f.row.device))
    assert all(len(kinds) == 1 for kinds in cells.values())
    assert both.devices == [GPU, CPU]
    by_device = summary.document(both)["summary"]
    assert by_device[CPU]["mean"] == pytest.approx(4.0) and by_device[GPU]["mean"] == pytest.approx(
        (2.0**3 * 0.8) ** (1 / 4)
    )
    assert all(len({both.found[i].row.device for i in c["rows"]}) == 1 for c in report.page_data(store, both)["sizes"])


def test_two_runs_of_one_device_are_not_held_against_each_other(store):
    put_gpu(store), put_gpu(store, "20260103-120000-cccccc")
    one_run, both = collected(store, "20260103"), collected(store, "20260101", "20260103")
    assert len({f.cell for f in both.found}) == 2 * len({f.cell for f in one_run.found})
    assert summary.summary(both.found)["compared"] == 2 * summary.summary(one_run.found)["compared"]


def test_a_run_named_twice_is_shown_once(store):
    run = put_gpu(store)
    assert collected(store, run.id, "last", run.id[:9]).runs == [run]


def test_runs_without_flops_and_bytes_have_an_intensity_from_their_rates(store):
    row = timed("softmax", "triton", "m=16,n=4096,dtype=bf16", 1.0, 1.0)
    wanted = summary.intensity(row)
    row.flops = row.bytes = None
    assert summary.intensity(row) == pytest.approx(wanted) == pytest.approx(1.25)
    assert summary.intensity(Row("softmax", "triton", "", "pass")) is None
