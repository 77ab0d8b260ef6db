"""`tilery tune` as a user runs it, with real workers on kernels that were planted: in processes of their own."""

import json
import signal
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import tilery
from processes import CLOCK, HANG_S, package, wait_for
from tilery.base import settings
from tilery.base.errors import BadInput
from tilery.cli import app, main
from tilery.core import tuned
from tilery.core.op import REGISTRY
from tilery.measure.store import Store
from tilery.tuning import first_calls

KERNEL = """
import os, pathlib, threading, time
from dataclasses import dataclass
import torch
from planted.clock import passes
from tilery.base.launch import Host
from tilery.core.kernel import Kernel

FOLDER = pathlib.Path(os.environ["PLANTED_FOLDER"])

@dataclass(frozen=True)
class Config:
    tile: int
    kind: str = "right"

class Planted(Kernel):
    archs, Config = ("cpu",), Config

    def default(self, call): return Config(0)
    def launches(self, call, config): return [Host(run, (call.x, call.y, config.tile, config.kind))]

    def configs(self, call):
        found = [Config(tile) for tile in range(12)]
        found += [Config(tile, kind) for tile, kind in enumerate(os.environ.get("PLANTED", "").split())]
        return found

def jobs():
    return sum(text.count('"job"') for path in FOLDER.glob("tuned/.journal/*.jsonl") for text in [path.read_text()])

def hold():
    # As if measuring went on for hours: until the tuner that this process works for has ended.
    (FOLDER / "held").touch()
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(1)

def run(x, out, tile, kind):
    with open(FOLDER / "log", "a") as log:
        log.write(f"{kind} {tile}\\n")
    if "PLANTED_HOLD" in os.environ and jobs() >= int(os.environ["PLANTED_HOLD"]):
        hold()
    if kind == "hangs":
        threading.Event().wait()
    if kind == "dies":
        os._exit(3)
    torch.softmax(x, -1, out=out)
    if kind == "other_bits":
        out.mul_(1 + 2**-22)
    if kind == "wrong":
        out.mul_(2)
    passes(50 if kind != "right" else 100 if tile == 9 else 300 + 60 * abs(tile - 9))

kernel = Planted()
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """`tilery` in a process, with a kernel that only says how long it takes: tile 9 is the fastest that is right."""
    path = package(tmp_path, "[tilery.kernels]\nsoftmax/numba.planted = planted.kernels:kernel\n",
                   planted={"clock": CLOCK, "kernels": KERNEL})  # fmt: skip
    (tmp_path / "log").touch()
    monkeypatch.setenv("PLANTED_FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("TILERY_CONFIG_DIR", str(tmp_path / "tuned"))

    def start(*more, case="m=8,n=16,dtype=fp32", timeout=HANG_S):
        words = ["tune", "softmax", "--backend", "numba.planted", "--case", case, "--json", "--timeout", str(timeout)]
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-m", "tilery", *words, *more], stdout=pipe, stderr=pipe, text=True)

    return start


def ended(process, code=0):
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == code, err
    return json.loads(out) if code == 0 else err


def winner(found):
    (row,) = found["rows"]
    assert row["status"] == "pass" and row["rank"] == 0 and row["stage"] == "tune"
    return row["config"]


def journal(tmp_path):
    (path,) = (tmp_path / "tuned" / ".journal").glob("softmax-*.jsonl")
    return [line for line in path.read_text().splitlines() if '"job"' in line]


@pytest.mark.slow
def test_a_wrong_a_hanging_and_a_dying_candidate_never_win(planted, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED", "wrong hangs dies")
    found = ended(planted(timeout=20))  # long enough for the others, also on a busy machine
    assert winner(found) == "Config(tile=9, kind='right')"
    (entry,) = found["entries"]
    assert entry["config"] == {"tile": 9, "kind": "right"} and entry["error"] < 1e-6 and entry["bit_identical"]
    (gain,) = found["gains"]
    assert gain["ratio"] == gain["low"] == pytest.approx(8.4), "over the default"
    rows = Store().rows(found["run"])
    said = {row.config: row.reason for row in rows if row.status == "fail"}
    assert "wrong: " in said["Config(tile=0, kind='wrong')"] and "error" in said["Config(tile=0, kind='wrong')"]
    assert said["Config(tile=1, kind='hangs')"].startswith("hung: no answer within 20 s")
    assert said["Config(tile=2, kind='dies')"].startswith("crashed: its process ended with code 3")
    assert len(rows) == 12 + 3 and len(said) == 3
    calls = Counter(line.split()[0] for line in (tmp_path / "log").read_text().splitlines())
    assert calls["hangs"] == 2 and calls["dies"] == 2, "each is tried once more, and never again"


@pytest.mark.slow
def test_stable_bits_are_chosen_if_asked_for(planted, monkeypatch):
    monkeypatch.setenv("PLANTED", "other_bits")
    found = ended(planted("--bits", "stable"))
    assert winner(found) == "Config(tile=9, kind='right')"
    times = {row.config: row.ms for row in Store().rows(found["run"])}
    assert times["Config(tile=0, kind='other_bits')"] < times["Config(tile=9, kind='right')"], "though it is slower"


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_what_was_stopped_goes_on_where_it_was(planted, tmp_path, how, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PLANTED_HOLD", "2")  # jobs in the journal: all candidates were measured once by then
        first = planted()
        wait_for(lambda: (tmp_path / "held").exists() or first.poll() is not None)
    first.send_signal(how)
    said = ended(first, code=-9 if how == signal.SIGKILL else 130)
    if how == signal.SIGINT:
        assert "stopped; what was measured is kept, and the same command goes on from there" in said
    kept = journal(tmp_path)
    assert len(kept) == 2 and measured(tmp_path) >= set(range(12))
    (tmp_path / "log").write_text("")
    found = ended(planted())
    after = journal(tmp_path)
    assert winner(found) == "Config(tile=9, kind='right')"
    assert after[:2] == kept and len({json.loads(line)["job"] for line in after}) == len(after) > len(kept)
    assert measured(tmp_path) and not measured(tmp_path) & {1, 2, 3}, "the slowest were out before the first run ended"


def measured(tmp_path):
    """The tiles that were called, as the kernel noted them."""
    return {int(line.split()[1]) for line in (tmp_path / "log").read_text().splitlines()}


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
    words += ["--timeout", str(HANG_S)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "m=4,n=64,dtype=fp32" in done.stdout and "numba" in done.stdout and "parallel=" in done.stdout
    assert "times the longer of the two" in done.stderr and "tilery report" in done.stderr
    assert (tmp_path / "softmax").is_dir()


def test_a_product_is_tuned_at_the_rows_that_were_named(tmp_path):
    words = ["tune", "fp8_matmul", "-b", "numba", "--N", "128", "--K", "128", "--M", "1,2"]
    done = CliRunner().invoke(app, [*words, "--config-dir", str(tmp_path), "--timeout", str(HANG_S)])
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
        (
            ["matmul", "--shapes", "random", "--budget", "0"],
            "--shapes random is what defaults are judged by, so nothing is tuned on it",
        ),
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
        with tilery.tuning(budget="1h", timeout=HANG_S):
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
            with pytest.raises(BadInput, match="one inside another"), tilery.tuning():
                pass
        assert REGISTRY["softmax"].plan(REGISTRY["softmax"].specs((x,))).source == "tuned"
        tilery.softmax(torch.randn(5, 96))
        assert len(json.loads(path.read_text())["entries"]) == 2, "after the block nothing is tuned"
    tuned.reload()


def test_a_spent_budget_is_said_and_the_call_runs(tmp_path, monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(first_calls, "time", SimpleNamespace(monotonic=lambda: now.s))
    with settings.override(config_dir=tmp_path), tilery.tuning(budget=10):
        now.s = 11.0
        with pytest.warns(UserWarning, match="softmax: the budget of tilery.tuning is spent"):
            tilery.softmax(torch.randn(3, 40))
    assert not (tmp_path / "softmax").exists()
