"""`tilery tune` as a user runs it, with real workers on kernels that were planted: in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from typer.testing import CliRunner

import tilery
from tilery.base import settings
from tilery.cli import app, main
from tilery.core import tuned
from tilery.core.op import REGISTRY
from tilery.measure.store import Store

KERNEL = """
import os, time
from dataclasses import dataclass
import torch
import tilery.measure.timing

archs = ("cpu",)
tilery.measure.timing._CPU_FLUSH_BYTES = 4096  # what is timed here only sleeps

@dataclass(frozen=True)
class Config:
    tile: int
    kind: str = "right"

def refusal(x, config=None): return None
def default(x): return Config(0)
def compile(specs, config, arch): raise AssertionError("on a CPU nothing is compiled ahead")

def configs(x):
    found = [Config(tile) for tile in range(12)]
    found += [Config(tile, kind) for tile, kind in enumerate(os.environ.get("PLANTED", "").split())]
    return found

def run(outs, args, config):
    with open(os.environ["PLANTED_LOG"], "a") as log:
        log.write(f"{os.getppid()} {config.kind} {config.tile}\\n")
    if config.kind == "hangs":
        time.sleep(3600)
    if config.kind == "dies":
        os._exit(3)
    torch.softmax(args[0], -1, out=outs[0])
    if config.kind == "other_bits":
        outs[0].mul_(1 + 2**-22)
    if config.kind == "wrong":
        outs[0].mul_(2)
    if config.kind == "right":
        time.sleep(0.001 if config.tile == 9 else 0.003 + 0.0006 * abs(config.tile - 9))
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """`tilery` in a process, with a kernel that sleeps: tile 9 is the fastest that is right."""
    (tmp_path / "planted.py").write_text(KERNEL)
    info = tmp_path / "planted-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tilery.kernels]\nsoftmax/numba.planted = planted\n")
    (tmp_path / "log").touch()
    monkeypatch.setenv("PLANTED_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("TILERY_CONFIG_DIR", str(tmp_path / "tuned"))

    def start(*more, case="m=8,n=16,dtype=fp32"):
        words = ["tune", "softmax", "--backend", "numba.planted", "--case", case, "--json", "--timeout", "6", *more]
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-m", "tilery", *words], stdout=pipe, stderr=pipe, text=True)

    return start


def ended(process, code=0):
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return json.loads(out) if code == 0 else err


def winner(found):
    (row,) = found["rows"]
    assert row["status"] == "pass" and row["rank"] == 0 and row["stage"] == "tune"
    return row["config"]


def journal(tmp_path):
    (path,) = (tmp_path / "tuned" / ".journal").glob("softmax-*.jsonl")
    return [line for line in path.read_text().splitlines() if '"job"' in line]


def wait_for(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_wrong_a_hanging_and_a_dying_candidate_never_win(planted, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED", "wrong hangs dies")
    found = ended(planted())
    assert winner(found) == "Config(tile=9, kind='right')"
    (entry,) = found["entries"]
    assert entry["config"] == {"tile": 9, "kind": "right"} and entry["error"] < 1e-6 and entry["bit_identical"]
    (gain,) = found["gains"]
    assert gain["ratio"] > 2 and gain["low"] > 1.5, "over the default, which sleeps eight times as long"
    rows = Store().rows(found["run"])
    said = {row.config: row.reason for row in rows if row.status == "fail"}
    assert "wrong: " in said["Config(tile=0, kind='wrong')"] and "error" in said["Config(tile=0, kind='wrong')"]
    assert said["Config(tile=1, kind='hangs')"].startswith("hung: no answer within 6 s")
    assert said["Config(tile=2, kind='dies')"].startswith("crashed: its process ended with code 3")
    assert len(rows) == 12 + 3 and len(said) == 3
    calls = Counter(line.split()[1] for line in (tmp_path / "log").read_text().splitlines())
    assert calls["hangs"] == 2 and calls["dies"] == 2, "each is tried once more, and never again"


@pytest.mark.slow
def test_stable_bits_are_chosen_if_asked_for(planted, monkeypatch):
    monkeypatch.setenv("PLANTED", "other_bits")
    found = ended(planted("--bits", "stable"))
    assert winner(found) == "Config(tile=9, kind='right')"
    times = {row.config: row.ms for row in Store().rows(found["run"])}
    assert times["Config(tile=0, kind='other_bits')"] < times["Config(tile=9, kind='right')"], "though it is slower"


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_what_was_stopped_goes_on_where_it_was(planted, tmp_path, how):
    first = planted()
    wait_for(lambda: list((tmp_path / "tuned" / ".journal").glob("softmax-*.jsonl")) and len(journal(tmp_path)) >= 2)
    first.send_signal(how)
    said = ended(first, code=-9 if how == signal.SIGKILL else 130)
    if how == signal.SIGINT:
        assert "stopped; what was measured is kept, and the same command goes on from there" in said
    kept = journal(tmp_path)
    (tmp_path / "log").write_text("")
    found = ended(planted())
    after = journal(tmp_path)
    assert winner(found) == "Config(tile=9, kind='right')"
    assert after[: len(kept)] == kept and len({json.loads(line)["job"] for line in after}) == len(after) > len(kept)
    called = {int(line.split()[2]) for line in (tmp_path / "log").read_text().splitlines()}
    assert called and not called & {1, 2, 3}, "the slowest were measured before the end of the first run"


@pytest.mark.slow
def test_two_tuners_on_one_file_and_a_program_uses_what_both_found(planted, tmp_path):
    both = [planted(case=f"m=8,n={n},dtype=fp32") for n in (16, 32)]
    for process in both:
        assert winner(ended(process)) == "Config(tile=9, kind='right')"
    (path,) = (tmp_path / "tuned" / "softmax").glob("*.json")
    assert [entry["exact"] for entry in json.loads(path.read_text())["entries"]] == ["n=16,fp32", "n=32,fp32"]
    code = "import torch, tilery; tilery.explain_dispatch(); tilery.softmax(torch.randn(8, 32))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "runs numba.planted with Config(tile=9, kind='right'), tuned" in done.stderr


def test_the_table_says_who_won_and_how_long_it_took(tmp_path):
    words = ["tune", "softmax", "-b", "numba", "--case", "m=4,n=64,dtype=fp32", "--config-dir", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "m=4,n=64,dtype=fp32" in done.stdout and "numba" in done.stdout and "parallel=" in done.stdout
    assert "times the longer of the two" in done.stderr and "tilery report" in done.stderr
    assert (tmp_path / "softmax").is_dir()


def test_a_product_is_tuned_at_the_rows_that_were_named(tmp_path):
    words = [
        "tune",
        "fp8_matmul",
        "-b",
        "numba",
        "--N",
        "128",
        "--K",
        "128",
        "--M",
        "1,2",
        "--config-dir",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    (file,) = (tmp_path / "fp8_matmul").glob("*.json")
    entries = json.loads(file.read_text())["entries"]
    assert {(e["scaled"]["m"], e["exact"]) for e in entries} == {
        (m, "n=128,k=128,e4m3,e4m3,bf16,column") for m in (1, 2)
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["softmax", "--budget", "0"], "budget must be a time above zero"),
        (["softmax", "--budget", "soon"], "budget must be a time above zero"),
        (["nothing"], "OP must be one of"),
        ([], "an op or a model must be named"),
        (["softmax", "argmax", "--case", "m=4"], "--case is of one OP, got 2"),
        (["matmul", "fp8_matmul", "--N", "64", "--K", "64"], "--N and --K are of one OP, got 2"),
        (
            ["softmax", "--N", "64", "--K", "64"],
            "--N and --K are for ops whose cases are m, n and k, softmax needs m, n",
        ),
        (["matmul", "--N", "64", "--K", "64", "--model", "llama-8b"], "cases, shapes and model exclude each other"),
        (
            ["softmax", "--model", "llama-8b", "--M", "1"],
            "rows are those of matmul and fp8_matmul, got them for softmax",
        ),
        (["--model", "llama-8b", "--M", "1"], "rows are those of products that are named, got no op"),
        (["softmax", "--gpus", "a"], "--gpus must be numbers of GPUs"),
        (["softmax", "--search", "luck"], "search must be one of halving, exhaustive, got 'luck'"),
        (["--model", "gpt-9"], "gpt-9"),
    ],
)
def test_bad_usage_is_named(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tilery", "tune", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_inside_tuning_a_bucket_is_tuned_at_its_first_call(tmp_path):
    x = torch.randn(4, 96)
    with settings.override(config_dir=tmp_path):
        assert REGISTRY["softmax"].plan(REGISTRY["softmax"].specs((x,))).source == "default"
        tilery.softmax(x)
        with tilery.tuning(budget="60s", timeout=60):
            assert torch.allclose(tilery.softmax(x), x.softmax(-1))
            (path,) = (tmp_path / "softmax").glob("*.json")
            (entry,) = json.loads(path.read_text())["entries"]
            assert (entry["exact"], entry["scaled"], entry["case"]) == ("n=96,fp32", {"m": 4}, None)
            when = path.stat().st_mtime_ns
            tilery.softmax(x)
            tilery.softmax(x, backend="numba")
            assert path.stat().st_mtime_ns == when, "once"
            torch.ops.tilery.softmax(torch.randn(4, 80))
            assert len(json.loads(path.read_text())["entries"]) == 2, "torch's way is another way to the same"
            with pytest.raises(tilery.base.errors.BadInput, match="one inside another"), tilery.tuning():
                pass
        assert REGISTRY["softmax"].plan(REGISTRY["softmax"].specs((x,))).source == "tuned"
        tilery.softmax(torch.randn(5, 96))
        assert len(json.loads(path.read_text())["entries"]) == 2, "after the block nothing is tuned"
    tuned.reload()


def test_a_spent_budget_is_said_and_the_call_runs(tmp_path):
    with settings.override(config_dir=tmp_path), tilery.tuning(budget=0.001):
        time.sleep(0.01)
        with pytest.warns(UserWarning, match="softmax: the budget of tilery.tuning is spent"):
            tilery.softmax(torch.randn(3, 40))
    assert not (tmp_path / "softmax").exists()
