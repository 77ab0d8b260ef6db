"""One line a product and peer: the fastest right kernel of ours beside it, and why where there is no figure."""

import csv

import pytest

from tilery.measure import csv_file
from tilery.measure.result import Row
from tilery.pages import pairs

CASE = "m=16,n=256,k=128,dtype=e4m3"


def row(kernel, ms=None, status="pass", reason="", case=CASE, **more):
    made = Row("fp8_matmul", kernel, case, status, reason, device="a GPU" if case else "", **more)
    if ms is not None:
        made.ms, made.tflops, made.samples = ms, 1 / ms, (ms, ms * 1.1, ms)
    return made


def test_ours_is_the_fastest_that_is_right():
    found = pairs.lines([
        row("baseline:cublaslt", 2.0), row("baseline:deepgemm", 1.5), row("triton", 1.0, max_diff=0.25),
        row("numba", 3.0), row("cuda", 0.5, "fail", "wrong"), row("control:copy", 0.1),
    ])  # fmt: skip
    assert [(x["peer"], x["kernel"], x["ours_ms"], x["peer_ms"]) for x in found] == [
        ("cublaslt", "triton", 1.0, 2.0), ("deepgemm", "triton", 1.0, 1.5),
    ]  # fmt: skip
    first = found[0]
    assert (first["M"], first["N"], first["K"]) == (16, 256, 128) and first["acc_pass"] and first["max_diff"] == 0.25
    assert first["speedup"] == first["speedup_low"] == first["speedup_high"] == pytest.approx(2.0)
    assert (first["ours_tflops"], first["peer_tflops"], first["note"]) == (1.0, 0.5, "")


def test_beside_torch_each_is_held_against_its_own_turns():
    ours = row("triton", 1.0, against=(4.0, 4.4, 4.0))
    peer = row("baseline:cublaslt", 1.0, against=(2.0, 2.2, 2.0))
    assert pairs.lines([peer, ours])[0]["speedup"] == pytest.approx(2.0)


def test_a_peer_without_a_time_says_why():
    absent = row("baseline:deepgemm", status="skipped", reason="is not installed", case="")
    wrong = row("baseline:cublaslt", status="fail", reason="has error 1")
    first, second = pairs.lines([absent, wrong, row("triton", 1.0)])
    assert (first["peer"], first["note"]) == ("deepgemm", "deepgemm: is not installed")
    assert (second["peer"], second["note"]) == ("cublaslt", "cublaslt: has error 1")
    assert not {"peer_ms", "speedup"} & {*first, *second} and first["ours_ms"] == 1.0


def test_a_wrong_kernel_has_no_speed():
    (line,) = pairs.lines([row("baseline:cublaslt", 1.0), row("triton", status="fail", reason="off by 3")])
    assert line["acc_pass"] is False and line["note"] == "off by 3" and line["peer_ms"] == 1.0
    assert not {"ours_ms", "speedup"} & set(line)


def test_without_peers_there_is_a_line_a_product_and_none_for_what_only_compiled(tmp_path):
    other = "m=32,n=256,k=128,dtype=e4m3"
    rows = [row("triton", 1.0), row("triton", 2.0, case=other), row("cuda", status="compiled", case="m=1,n=1,k=1")]
    csv_file.write(tmp_path / "x.csv", pairs.COLUMNS, pairs.lines(rows))
    with (tmp_path / "x.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(x["M"], x["ours_ms"], x["peer"], x["speedup"]) for x in lines] == [
        ("16", "1.0", "", ""),
        ("32", "2.0", "", ""),
    ]
    assert list(lines[0]) == list(pairs.COLUMNS)


def test_the_control_of_the_same_problem_and_the_source_stand_beside_the_ratio():
    other = "m=32,n=256,k=128,dtype=e4m3"
    rows = [
        row("baseline:torch", 2.0),
        row("control:torch", 2.0, ratio=1.136),
        row("triton", 1.0, source="0123456789ab"),
    ]
    first, second = pairs.lines([*rows, row("baseline:torch", 2.0, case=other), row("triton", 1.0, case=other)])
    assert (first["control"], first["source"]) == (1.136, "0123456789ab")
    assert (second["control"], second["source"]) == (None, "")
