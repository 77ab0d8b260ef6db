"""`tilery sanitize`: its cases, its command and what it makes of compute-sanitizer's words."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tilery
from tilery.base.errors import ToolMissing
from tilery.base.spec import case
from tilery.cli import app, main
from tilery.core.op import REGISTRY
from tilery.hardware import toolkit
from tilery.measure.place import Place
from tilery.workbench import sanitize
from tilery.workbench.sanitize import child as sanitize_child
from tilery.workbench.sanitize.cases import ALL, chosen_cases, covering
from tilery.workbench.sanitize.report import Finding, known_reason, parse

SOFTMAX = Path(tilery.__file__).parent / "ops" / "softmax"

CLEAN = """
========= COMPUTE-SANITIZER
========= ERROR SUMMARY: 0 errors
"""
OVERRUN = f"""
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at _overrun+0x1d0 in {SOFTMAX}/triton_kernels.py:41
=========     by thread (127,0,0) in block (0,0,0)
=========     Address 0x7f21e5c001fc is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f21e5c00000 of size 508 bytes
=========
========= Invalid __global__ write of size 4 bytes
=========     at _overrun+0x1d0 in {SOFTMAX}/triton_kernels.py:41
=========     by thread (126,0,0) in block (3,0,0)
=========     Address 0x7f21e5c00200 is out of bounds
=========     and is 5 bytes after the nearest allocation at 0x7f21e5c00000 of size 508 bytes
=========
========= ERROR SUMMARY: 2 errors
"""
RACE = """
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at void softmax<float>(float *, long)+0x90 in /tmp/softmax.cu:41
=========     and Read access at void softmax<float>(float *, long)+0x100 in softmax.cu:51 [508 hazards]
=========     and Write access at void softmax<float>(float *, long)+0x1b0 in softmax.cu:53 [4 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
UNINITIALIZED = """
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void rows<float>(const float *)+0x70
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= ERROR SUMMARY: 3 errors
"""
BARRIER = """
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in warp.
=========     at rows(float *)+0xa0 in /elsewhere/rows.cu:61
=========     by thread (19,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
STRANGE = """
========= COMPUTE-SANITIZER
========= Warpgroup frobnication of the third kind
=========     in a place that has no name
========= ERROR SUMMARY: 1 error
"""
NO_DEVICE = """
========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the "Supported Devices" section of the documentation
=========
"""
NOTHING_SEEN = """
========= COMPUTE-SANITIZER
========= Error: Target application terminated before first instrumented API call
========= Tracking kernels launched by child processes requires the --target-processes all option.
"""

FAKE = f"""#!{sys.executable}
import json, os, sys
words = sys.argv[1:]
said = json.loads(os.environ["FAKE_SANITIZER"])
request, done = words[-2:]
cases = [run["case"] for run in json.load(open(request))]
hit = [all(given.get(name) == value for name, value in said["only"].items()) for given in cases]
with open(done, "w") as file:
    for index, struck in enumerate(hit):
        status = said["status"] if struck else "ran"
        file.write(json.dumps({{"run": index, "status": status, "reason": "so it is"}}) + "\\n")
with open(words[words.index("--log-file") + 1], "w") as file:
    file.write(said["log"] if any(hit) else said["else"])
sys.exit(said["code"] if any(hit) else 0)
"""


# Cases


@pytest.mark.parametrize("name", ["softmax", "matmul", "attention", "rope_cache_write_"])
def test_few_cases_cover_what_all_have(name):
    op = REGISTRY[name]
    chosen = chosen_cases(op, "triton", "memcheck", None)
    everything = chosen_cases(op, "triton", "memcheck", ALL)
    assert 3 <= len(chosen) < len(everything)
    for param in ("dtype", "layout", "order", "per"):
        small = {c.params[param] for c in everything if param in c.params}
        assert {c.params[param] for c in chosen if param in c.params} >= small - {"far"}
    assert len(chosen_cases(op, "triton", "memcheck", 2)) == 2


def test_racecheck_is_given_the_smallest_case_of_each_dtype():
    chosen = chosen_cases(REGISTRY["softmax"], "triton", "racecheck", None)
    assert len(chosen) == len({c.params["dtype"] for c in chosen}) == 3
    assert all(c.params["m"] * c.params["n"] <= 4096 for c in chosen)


def test_neither_empty_nor_refused_cases_are_run():
    for name, kernel in (("softmax", "triton"), ("matmul", "cuda.hopper")):
        for chosen in chosen_cases(REGISTRY[name], kernel, "memcheck", ALL):
            assert kernel not in chosen.refused_by and 0 not in (chosen.params["m"], chosen.params["n"])


def test_a_tail_and_a_switch_are_covered_once():
    plain, tail, switch = case(m=16, n=32), case(m=17, n=32), case(m=32, n=33, packed=True)
    assert covering([plain, tail, switch]) == [switch, tail]
    assert covering([]) == []


# The log


def test_an_overrun_is_told_with_its_line_and_counted():
    report = parse(OVERRUN)
    (found,) = report.findings
    assert found.what == (
        "Invalid __global__ write of size 4 bytes: is out of bounds, after the nearest allocation of size 508 bytes"
    )
    assert found.function == "_overrun" and found.count == 2 and report.errors == 2
    assert found.where == str(Path("tilery/ops/softmax/triton_kernels.py:41"))


def test_a_race_names_both_sides():
    (found,) = parse(RACE).findings
    assert found.where == str(Path("tilery/ops/softmax/softmax.cu:41"))  # NVRTC puts the working folder before the name
    assert "Error: race between a write at" in found.what and "a read at" in found.what
    assert "softmax.cu:51, 508 hazards" in found.what and "softmax.cu:53, 4 hazards" in found.what
    assert found.function == "void softmax<float>(float *, long)"


def test_code_without_line_information_is_told_by_its_name():
    (found,) = parse(UNINITIALIZED).findings
    assert found == Finding("Uninitialized __global__ memory read of size 4 bytes", "void rows<float>(const float *)")


def test_a_barrier_is_told_with_its_line():
    (found,) = parse(BARRIER).findings
    assert found.what == "Barrier error detected. Divergent thread(s) in warp."
    assert found.where == "/elsewhere/rows.cu:61" and found.function == "rows(float *)"


def test_what_is_not_understood_is_a_finding_all_the_same():
    (found,) = parse(STRANGE).findings
    assert found.what == "Warpgroup frobnication of the third kind; in a place that has no name"
    (found,) = parse("========= ERROR SUMMARY: 7 errors\n").findings
    assert "7 errors were counted" in found.what


def test_a_log_without_its_summary_is_not_clean():
    assert parse(CLEAN).errors == 0 and not parse(CLEAN).findings
    assert parse("========= COMPUTE-SANITIZER\n").errors is None
    assert "Device not supported" in parse(NO_DEVICE).not_attached and not parse(NO_DEVICE).findings
    assert "first instrumented API call" in parse(NOTHING_SEEN).not_attached


@pytest.mark.parametrize(
    ("tool", "op", "kernel", "log", "own"),
    [
        ("racecheck", "fp8_matmul", "cuda", RACE, True),
        ("racecheck", "softmax", "cuda", RACE, False),
        ("initcheck", "matmul", "cuda.hopper", UNINITIALIZED, True),
        ("initcheck", "matmul", "triton", UNINITIALIZED, False),
        ("memcheck", "matmul", "cuda.hopper", OVERRUN, False),
        ("synccheck", "matmul", "cuda.hopper", BARRIER, False),
    ],
)
def test_only_what_the_table_names_is_the_tools_own(tool, op, kernel, log, own):
    (found,) = parse(log).findings
    assert (known_reason(tool, op, kernel, found) is not None) == own


def test_an_overrun_of_torchs_kernel_is_not_ours():
    found = Finding("Invalid __global__ read of size 4 bytes", "void at::native::vectorized_elementwise_kernel<4>()")
    assert "torch's own" in known_reason("memcheck", "softmax", "triton", found)


# The command


def batch(tool="memcheck"):
    return sanitize.Batch(tool, (sanitize.Run("softmax", "triton", case(m=3, n=5, dtype="fp32")),))


def test_the_command_watches_one_process_with_separate_allocations(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    words = sanitize.command(Path("/opt/compute-sanitizer"), batch(), tmp_path, sanitize.Asked())
    options = dict(zip(words[1:-5:2], words[2:-5:2]))
    assert words[0] == "/opt/compute-sanitizer" and words[-5:-2] == [sys.executable, "-m", sanitize_child.__name__]
    assert options["--tool"] == "memcheck" and options["--report-api-errors"] == "no"
    assert options["--target-processes"] == "application-only" and options["--destroy-on-device-error"] == "kernel"
    other = sanitize.command(Path("cs"), batch("racecheck"), tmp_path, sanitize.Asked())
    assert "--padding" in words and "--padding" not in other
    env = sanitize.environment()
    assert env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" and "TRITON_INTERPRET" not in env
    assert env["TILERY_CHECK_INDICES"] == "0"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A compute-sanitizer that runs nothing: it says what the test tells it for the cases that the test names."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(toolkit, "folders", lambda name: [])
    monkeypatch.setattr(sanitize, "require_gpu", lambda: None)
    on_gpu = Place(device=torch.device("cuda:0"))
    monkeypatch.setattr(sanitize, "place", lambda op, k: Place(device=torch.device("cpu")) if k == "numba" else on_gpu)

    def says(log=CLEAN, only=None, status="ran", code=0, otherwise=CLEAN):
        told = {"log": log, "only": only or {}, "status": status, "code": code, "else": otherwise}
        monkeypatch.setenv("FAKE_SANITIZER", json.dumps(told))

    says()
    return says


def run(*words, code=0):
    done = CliRunner().invoke(app, ["sanitize", *words])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout


def run_json(*words, code=0):
    found = json.loads(run(*words, "--json", code=code))
    assert found["schema"] == 1 and found["machine"]["torch"] == torch.__version__
    return found["rows"]


def test_clean_kernels_are_counted_and_the_exit_code_is_0(fake):
    said = run("softmax", "--backend", "triton", "--backend", "cuda")
    cases = sum(len(chosen_cases(REGISTRY["softmax"], k, "memcheck", None)) for k in ("triton", "cuda"))
    assert said.rstrip().endswith(f"{cases} cases of 2 kernels are clean.")
    assert all(len(line) <= 80 for line in said.splitlines())
    assert {row["status"] for row in run_json("softmax", "--cases", "2", "--tool", "memcheck,synccheck")} == {"clean"}


def test_a_finding_belongs_to_its_case_and_the_exit_code_is_1(fake, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    fake(OVERRUN, only={"dtype": "bf16"}, code=86)
    rows = run_json("softmax", "--backend", "triton", code=1)
    bad = [row for row in rows if row["status"] == "finding"]
    assert bad and all("dtype=bf16" in row["case"] and row["count"] == 2 for row in bad)
    assert all(row["status"] == "clean" for row in rows if "dtype=bf16" not in row["case"])
    said = run("softmax", "--backend", "triton", code=1)
    assert "triton_kernels.py:41" in said and f"{len(bad)} findings in 1 kernels" in said.splitlines()[-1]
    assert all(len(line) <= 80 for line in said.splitlines())


def test_the_tools_own_findings_are_shown_with_their_reason_and_pass(fake):
    fake(UNINITIALIZED, code=86)
    said = run("matmul", "--backend", "cuda.hopper", "--tool", "initcheck", "--cases", "2")
    assert "does not see what TMA writes" in " ".join(said.split()) and "1 reports are the tool's own" in said
    assert "2 cases of 1 kernels are clean" in said


def test_a_finding_that_needs_several_cases_is_not_dropped(fake, monkeypatch):
    real = sanitize.watched

    def watched(program, batch, asked):
        fake(OVERRUN, code=86) if len(batch.runs) > 1 else fake()
        return real(program, batch, asked)

    monkeypatch.setattr(sanitize, "watched", watched)
    rows = run_json("softmax", "--backend", "triton", "--jobs", "1", code=1)
    (bad,) = [row for row in rows if row["status"] == "finding"]
    assert bad["case"] == f"({len(rows) - 1} cases in one process)"


def test_several_kernels_run_in_one_process_and_a_finding_is_still_its_own(fake, monkeypatch):
    real, sizes = sanitize.watched, []

    def watched(program, batch, asked):
        sizes.append(len(batch.kernels))
        return real(program, batch, asked)

    monkeypatch.setattr(sanitize, "watched", watched)
    names = [op for op, made in REGISTRY.items() if "triton" in made.kernels][:9]
    rows = run_json(*names, "--backend", "triton", "--cases", "1")
    assert len(rows) == 9 and {row["status"] for row in rows} == {"clean"} and sorted(sizes) == [3, 3, 3]
    fake(OVERRUN, only={"dtype": "fp32"}, code=86)
    found = run_json(*names, "--backend", "triton", "--cases", "1", code=1)
    bad = {row["op"] for row in found if row["status"] == "finding"}
    assert bad == {row["op"] for row in rows if "dtype=fp32" in row["case"]} != set()
    assert {row["op"] for row in found if row["status"] == "clean"} == set(names) - bad


def test_an_interrupt_prints_what_was_examined(fake, monkeypatch):
    real, calls = sanitize.examined, []

    def examined(program, batch, asked):
        calls.append(batch)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(program, batch, asked)

    monkeypatch.setattr(sanitize, "examined", examined)
    words = ("softmax", "--backend", "triton", "--jobs", "1", "--tool", "memcheck,synccheck", "--cases", "2", "--json")
    done = CliRunner().invoke(app, ["sanitize", *words])
    assert done.exit_code == 130 and "examined 1 of 2 batches" in done.stderr
    assert {(row["tool"], row["status"]) for row in json.loads(done.stdout)["rows"]} == {(calls[0].tool, "clean")}


def test_nothing_is_started_after_an_interrupt(fake, monkeypatch, tmp_path):
    """A child that was ended is no reason to examine its cases one by one."""
    real, calls = sanitize.watched, []
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)

    def watched(program, batch, asked):
        calls.append(batch)
        return real(sleeper if batch.tool == "synccheck" else program, batch, asked)

    def interrupt(done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(sanitize, "watched", watched)
    asked = sanitize.Asked(("memcheck", "synccheck"), ("triton",), jobs=2, timeout_s=5)
    with pytest.raises(KeyboardInterrupt):
        list(sanitize.rows([REGISTRY["softmax"]], asked, interrupt))
    assert len(calls) <= 2 and not sanitize._alive
    (row,) = sanitize.examined(sanitize.sanitizer(), batch(), asked)  # the next one is not stopped
    assert row.status == "clean"


def test_a_kernel_that_a_tool_cannot_examine_is_not_run(fake):
    tools = ("--tool", "memcheck,synccheck", "--cases", "1")
    rows = run_json("grouped_matmul", "--backend", "cutile", *tools)
    found = {row["tool"]: row for row in rows}
    assert found["memcheck"]["status"] == "tool" and "descriptors" in found["memcheck"]["reason"]
    assert found["synccheck"]["status"] == "clean" and found["synccheck"]["case"]
    assert "the tool's own: its slices" in " ".join(run("grouped_matmul", "--backend", "cutile", *tools).split())


def test_an_exit_code_alone_is_a_finding(fake):
    fake(only={"dtype": "bf16"}, code=86)
    bad = [r for r in run_json("softmax", "--backend", "triton", code=1) if r["status"] == "finding"]
    assert bad and "found something that it does not name" in bad[0]["what"]


@pytest.mark.parametrize(("log", "code"), [(CLEAN, 1), ("", 0)])
def test_a_case_that_cannot_be_examined_fails(fake, log, code):
    """It raised, or the tool ended before its summary."""
    fake(log, only={"dtype": "fp32"}, status="failed" if code else "ran", code=code)
    rows = run_json("softmax", "--backend", "triton", code=1)
    failed = [row for row in rows if row["status"] == "failed"]
    assert failed and all("dtype=fp32" in row["case"] for row in failed)
    assert "could not be examined" in run("softmax", "--backend", "triton", code=1)


def test_a_refusal_is_skipped_with_its_reason(fake):
    fake(only={"dtype": "fp32"}, status="refused")
    rows = run_json("softmax", "--backend", "triton")
    assert {row["what"] for row in rows if row["status"] == "skipped"} == {"so it is"}
    (row,) = run_json("softmax", "--backend", "numba")
    assert row["status"] == "skipped" and row["what"] == "it runs on the CPU"


def test_a_child_that_hangs_is_ended_and_its_case_failed(fake, tmp_path):
    (tmp_path / "compute-sanitizer").write_text("#!/bin/sh\nexec sleep 600\n")
    (row,) = sanitize.examined(sanitize.sanitizer(), batch(), sanitize.Asked(timeout_s=0.1))
    assert row.status == "failed" and "--timeout" in row.what


@pytest.mark.parametrize("log", [NO_DEVICE, NOTHING_SEEN])
def test_a_machine_that_forbids_it_is_named(fake, log):
    fake(log, code=255)
    with pytest.raises(ToolMissing, match=r"does not see the kernels .*Virtual machines"):
        list(sanitize.rows([REGISTRY["softmax"]], sanitize.Asked(backends=["triton"])))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("softmax", "--tool", "valgrind"), "--tool must be some of memcheck, racecheck"),
        (("softmax", "--cases", "none"), "--cases must be a number from 1 on, or all, got 'none'"),
        (("softmax", "--backend", "fortran"), "--backend must be one of"),
    ],
)
def test_bad_usage_is_named(fake, monkeypatch, capsys, words, says):
    monkeypatch.setattr(sys, "argv", ["tilery", "sanitize", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_without_the_tool_it_says_what_to_install(fake, monkeypatch, capsys, tmp_path):
    (tmp_path / "compute-sanitizer").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    monkeypatch.setattr(sys, "argv", ["tilery", "sanitize", "softmax"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "comes with a CUDA toolkit" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(without_a_gpu):
    with pytest.raises(ToolMissing, match="needs an NVIDIA GPU"):
        list(sanitize.rows([REGISTRY["softmax"]], sanitize.Asked()))


def test_the_child_says_which_case_failed(tmp_path):
    request, done = tmp_path / "request", tmp_path / "done"
    cases = [{"m": 3, "n": 5, "dtype": "int4"}, {"m": 3, "n": 5, "dtype": "fp32"}]
    request.write_text(json.dumps([{"op": "softmax", "kernel": "triton", "case": each} for each in cases]))
    with pytest.raises(SystemExit) as ended:
        sanitize_child.main(request, done)
    lines = [json.loads(line) for line in done.read_text().splitlines()]
    assert ended.value.code == 1 and [line["status"] for line in lines] == ["started", "failed"]
    assert lines[1]["reason"].startswith("BadInput") and "int4" in lines[1]["reason"]
