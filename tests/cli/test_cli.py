"""Every verb as a user runs it: tables, --json, exit codes, errors."""

import csv
import json
import re
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import plant
from tilery.base import settings
from tilery.base.errors import BadInput
from tilery.cli import app, main
from tilery.cli.common import parsed_case
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.measure import check as workbench_check
from tilery.measure.store import Store
from tilery.workbench import bench, isolate
from tilery.workbench import run as workbench


def run(*words, code=0):
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done.stdout


def run_json(*words, code=0):
    found = json.loads(run(*words, "--json", code=code))
    assert found["schema"] == 1 and found["machine"]["torch"] == torch.__version__
    for row in found["rows"]:
        assert {"op", "kernel", "case", "status", "reason"} <= set(row)
        assert row["status"] in ("pass", "fail", "refused", "compiled", "skipped")
    return found


@pytest.fixture
def at_hand(monkeypatch, compiler):
    """What `tilery bench` starts processes for is done in this one, and by the compiler that all tests share."""
    monkeypatch.setattr(isolate, "measured", lambda units, progress: (bench.measure(unit) for unit in units))
    monkeypatch.setattr(device, "cores", lambda: 1)
    kept = SimpleNamespace(compile=compiler.compile, close=lambda: None)
    monkeypatch.setattr(workbench, "Compiler", lambda: kept)


def test_doctor():
    found = run_json("doctor")
    assert {x["language"] for x in found["languages"]} >= {"triton", "numba", "cuda"}
    assert found["ceilings"]["read"] > 0 and {p["peer"] for p in found["peers"]} >= {"torch", "liger"}
    said = run("doctor")
    assert "Languages" in said and "C compiler" in said and "GB/s" in said


def test_ops_lists_every_kernel():
    rows = run_json("ops")["rows"]
    assert {(r["op"], r["kernel"]) for r in rows} == {(op.name, k) for op in REGISTRY.values() for k in op.kernels}
    assert "runs here" in run("ops", "softmax")


def test_plan_prints_every_step_of_prefill_and_decode():
    words = ("plan", "qwen3-8b", "--tp", "2", "--batch", "1,4", "--prompt", "32", "--context", "64", "--device", "h200")
    found = run_json(*words)
    assert found["model"] == "Qwen3-8B" and found["tp"] == 2 and found["ceilings"]["device"] == "NVIDIA H200"
    passes = [(made["phase"], made["batch"], made["length"]) for made in found["plans"]]
    assert passes == [("prefill", 1, 32), ("decode", 1, 64), ("prefill", 4, 32), ("decode", 4, 64)]
    decode = found["plans"][3]
    (qkv,) = [step for step in decode["steps"] if step["step"] == "qkv"]
    assert (qkv["op"], qkv["case"], qkv["count"]) == ("matmul", "m=4,n=3072,k=4096,dtype=bf16", 36) and qkv["exists"]
    assert qkv["flops"] == 2 * 4 * 3072 * 4096 and qkv["reads"] == 2 * (4 * 4096 + 3072 * 4096)
    assert decode["total"]["ms"] == pytest.approx(sum(step["count"] * step["ms"] for step in decode["steps"]))
    assert decode["total"]["tokens_per_s"] == pytest.approx(4e3 / decode["total"]["ms"])
    said = run(*words)
    ideal = f"ideal: {decode['total']['tokens_per_s']:,.0f} tokens/s"
    for text in (
        "Qwen3-8B in bf16 on one of 2 GPUs, at the ceilings measured on NVIDIA H200", "prefill: 1 prompt of 32 tokens",
        "decode: 4 sequences with a context of 64 tokens", "all_reduce *", "m=4,n=3072,k=4096", ideal,
        "* not yet an op", "links between GPUs",
    ):  # fmt: skip
        assert text in said, text


def test_plan_takes_a_config_of_ones_own(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 100}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = run_json("plan", str(tmp_path), "--batch", "1", "--device", "h200")["plans"]
    assert {step["case"] for step in made[1]["steps"] if step["step"] == "down"} == {"m=1,n=64,k=96,dtype=bf16"}


def test_plan_takes_weights_in_fp8():
    words = ("plan", "qwen3-8b", "--weights", "fp8", "--batch", "1", "--device", "h200")
    found = run_json(*words)
    qkv = next(step for step in found["plans"][1]["steps"] if step["step"] == "qkv")
    assert found["weights"] == "fp8" and qkv["case"] == "m=1,n=6144,k=4096,dtype=e4m3" and qkv["op"] == "fp8_matmul"
    said = run(*words)
    assert "Qwen3-8B in bf16 with fp8 weights on one GPU" in said and "m=1,n=6144,k=4096,dtype=e4m3" in said
    wide = run_json(*words[:2], *words[4:])
    assert wide["weights"] == "bf16" and wide["plans"][1]["total"]["ms"] > 1.5 * found["plans"][1]["total"]["ms"]


def test_check_counts_cases():
    rows = run_json("check", "softmax", "--backend", "numba")["rows"]
    assert len(rows) == len(REGISTRY["softmax"].cases["test"]) and all(r["status"] == "pass" for r in rows)
    assert "numba" in run("check", "softmax", "-b", "numba")


def test_check_takes_a_case_by_its_numbers():
    (row,) = run_json("check", "matmul", "-b", "numba", "--case", "m=5,n=6,k=7,dtype=fp32")["rows"]
    assert row["case"] == "m=5,n=6,k=7,dtype=fp32" and row["error"] < 2e-6


def test_a_failed_check_exits_1(monkeypatch):
    plant.after(monkeypatch, REGISTRY["softmax"], "numba", torch.Tensor.zero_)
    said = run("check", "softmax", "-b", "numba", "--case", "m=2,n=8,dtype=fp32", code=1)
    assert "output 0 has error 1.00e+00" in said


def test_check_says_the_worst_error_beside_what_is_allowed_and_each_reason_once(monkeypatch):
    plant.after(monkeypatch, REGISTRY["softmax"], "numba", lambda y: y.mul_(1.5))
    said = run("check", "softmax", "-b", "numba", code=1)
    row = next(line.split() for line in said.splitlines() if line.startswith("softmax  numba"))
    assert row[1:6] == ["numba", "2", "16", "5.0e-01", "1.0e-06"], "the failures, not the empty case that passes"
    assert said.count("has error 5.00e-01, allowed 1e-06") == 1, "one reason, seven cases"
    assert len(re.findall(r"m=\d+,n=\d+,dtype=fp32\S* seed=\d+", said)) == 7


def test_a_failure_is_repeated_by_the_command_that_it_names(monkeypatch):
    """Wrong for some inputs only: the seed decides."""
    seen = []

    def wrong_if_positive(x, y):
        seen.append(x.clone())
        y.add_(1.0 if x[0, 0] > 0 else 0.0)

    plant.after(monkeypatch, REGISTRY["softmax"], "numba", wrong_if_positive, "x", "y")
    words = ("check", "softmax", "-b", "numba", "--case", "m=2,n=8,dtype=fp32")
    found = {seed: CliRunner().invoke(app, [*words, "--seed", str(seed)]) for seed in range(8)}
    failed = [seed for seed, done in found.items() if done.exit_code == 1]
    assert 0 < len(failed) < 8
    monkeypatch.setattr(workbench_check, "fresh_seed", lambda: failed[0])
    seen.clear()
    said = " ".join(run(*words, code=1).replace("\\\n", " ").split())
    command = re.search(r"tilery (check softmax .* --seed \d+)", said).group(1)
    run(*command.split(), code=1)
    assert torch.equal(*seen)


def test_json_of_a_failed_check_has_error_allowed_and_seed(monkeypatch):
    plant.after(monkeypatch, REGISTRY["softmax"], "numba", lambda y: y.fill_(float("nan")))
    words = ("check", "softmax", "-b", "numba", "--case", "m=2,n=8,dtype=fp32", "--seed", "7")
    (row,) = run_json(*words, code=1)["rows"]
    assert row["seed"] == 7 and row["allowed"] == 1e-6 and "error" not in row, "JSON has no infinity"
    assert "inf  1.0e-06" in run(*words, code=1)


def test_check_takes_a_set_by_its_name():
    rows = run_json("check", "rms_norm", "-b", "numba", "--shapes", "quick")["rows"]
    assert [r["case"] for r in rows] == ["m=16,n=4096,dtype=bf16", "m=4096,n=4096,dtype=bf16"]


def test_a_random_set_is_said_with_its_seed(at_hand):
    checked = run_json("check", "topk_softmax", "-b", "numba", "--shapes", "random:2")
    name = checked["shapes"]
    assert re.fullmatch(r"random:2:\d+", name) and len(checked["rows"]) == 2
    assert f"--shapes {name}" in " ".join(run("check", "topk_softmax", "-b", "numba", "--shapes", name).split())
    words = ("bench", "topk_softmax", "-b", "numba", "--peers", "torch", "--screen", "--shapes")
    again = run_json(*words, name)
    assert again["shapes"] == name
    assert {r["case"] for r in again["rows"]} == {r["case"] for r in checked["rows"]}  # the same cases
    fresh = re.search(r"--shapes (random:3:\d+)", " ".join(run(*words, "random:3").split()))[1]
    kept = [each for each in run_json("runs")["runs"] if each["machine"].get("shapes") in (name, fresh)]
    assert [each["machine"]["shapes"] for each in kept] == [name, fresh]
    assert f"({fresh})" in run("runs")  # the command does not say it


def test_check_compiles_what_cannot_run(without_a_gpu):
    with settings.override(emulate=False):
        rows = run_json("check", "softmax", "-b", "cuda")["rows"]
    assert [r["status"] for r in rows] == ["compiled"] * 3 and all(r["registers"] > 0 for r in rows)


def test_torch_takes_part_whichever_peers_are_named(at_hand):
    words = ("bench", "softmax", "-b", "numba", "--case", "m=64,n=128,dtype=fp32", "--screen")
    for peers, there in (("liger", True), ("none", False)):
        kernels = {row["kernel"] for row in run_json(*words, "--peers", peers)["rows"]}
        assert {"baseline:torch", "control:torch"} <= kernels if there else "baseline:torch" not in kernels


def test_rounds_and_turns_are_as_asked_for_and_kept(at_hand):
    words = ("bench", "softmax", "-b", "numba", "--case", "m=64,n=128,dtype=fp32", "--peers", "none")
    found = run_json(*words, "--rounds", "7", "--turn-ms", "1.5")
    assert found["protocol"] == "7 rounds of 1.5 ms turns" and found["minutes"] >= 0
    run_of = next(run for run in Store().runs() if run.id == found["run"])
    assert run_of.machine["protocol"] == found["protocol"]
    assert [len(row.samples) for row in Store().rows(run_of.id) if row.kernel == "numba"] == [7]
    assert run_json(*words, "--screen")["protocol"] == "6 rounds of 2 ms turns"


def test_bench_prints_and_writes(tmp_path):
    file, picture = tmp_path / "rows.csv", tmp_path / "table.svg"
    words = ("bench", "softmax", "-b", "numba", "--case", "m=64,n=128,dtype=fp32", "--screen", "--peers", "torch")
    said = run(*words, "--csv", str(file), "--svg", str(picture))
    assert "baseline:torch" in said and "GB/s" in said
    with file.open() as opened:
        lines = list(csv.DictReader(opened))
    assert [x["kernel"] for x in lines] == ["baseline:torch", "numba", "control:torch", "control:copy"]
    assert all(float(x["ms"]) > 0 for x in lines)
    assert [x["control"] for x in lines] == [lines[2]["ratio"]] * 4, "torch against itself stands in every line"
    assert [len(x["source"]) for x in lines] == [0, 12, 0, 0], "a kernel of ours says which source was measured"
    assert "<svg" in picture.read_text() and "url(http" not in picture.read_text()


def test_bench_adds_to_a_file_what_is_not_in_it(tmp_path, at_hand):
    file = tmp_path / "rows.csv"
    words = ("bench", "softmax", "-b", "numba", "--screen", "--peers", "torch", "--csv", str(file), "--add")
    one, two = ("m=64,n=128,dtype=fp32", "m=65,n=128,dtype=fp32")
    for case in (one, two, one):
        before = file.read_text() if file.exists() else ""
        run(*words, "--case", case)
        assert file.read_text().startswith(before)
    with file.open() as opened:
        assert [x["case"] for x in csv.DictReader(opened) if x["kernel"] == "numba"] == [one, two]
    file.write_text(before.replace("control", "noise", 1))
    with pytest.raises(BadInput, match=r"rows.csv has other columns than what would be added \(control, noise\)"):
        app(("bench", "softmax", "--csv", str(file), "--add"), standalone_mode=False)


def test_bench_begins_no_case_after_its_minutes(tmp_path, at_hand):
    file = tmp_path / "rows.csv"
    sizes = ("--N", "64", "--K", "64", "--M", "1,2,3", "--csv-form", "rows")
    words = ("bench", "matmul", "-b", "numba", "--screen", "--peers", "none", *sizes, "--csv", str(file))
    rows = run_json(*words, "--minutes", "0")["rows"]
    left = [row for row in rows if row["status"] == "skipped"]
    assert [row["kernel"] for row in rows[:1]] == ["numba"] and len(left) == 2
    assert {row["reason"] for row in left} == {"not begun: the 0 minutes of --minutes were over"}
    run(*words, "--add")
    again = CliRunner().invoke(app, [*words, "--add"])
    assert again.exit_code == 0 and f"nothing was measured: {file} has all of these cases" in again.stderr
    with file.open() as opened:
        lines = [x for x in csv.DictReader(opened) if x["kernel"] != "control:copy"]
    assert len({x["case"] for x in lines}) == 3 and {x["status"] for x in lines} == {"pass"}


def test_check_takes_a_product_by_its_sizes():
    rows = run_json("check", "fp8_matmul", "-b", "numba", "--N", "130", "--K", "128", "--M", "1,3")["rows"]
    assert [r["case"] for r in rows] == [f"m={m},n=130,k=128,dtype=e4m3" for m in (1, 3)]
    assert all(r["status"] == "pass" for r in rows)


def test_bench_of_a_product_writes_pairs(tmp_path, at_hand):
    file = tmp_path / "results.csv"
    words = ("bench", "matmul", "-b", "numba", "--N", "64", "--K", "32", "--M", "1,4", "--peers", "torch,cublaslt")
    run(*words, "--screen", "--csv", str(file))
    with file.open() as opened:
        lines = list(csv.DictReader(opened))
    assert [(x["M"], x["N"], x["K"], x["peer"], x["kernel"]) for x in lines] == [
        (m, "64", "32", "torch", "numba") for m in ("1", "4")
    ]
    for line in lines:
        assert line["acc_pass"] == "True" and 0 < float(line["max_diff"]) < 1
        assert float(line["speedup_low"]) <= float(line["speedup"]) <= float(line["speedup_high"])
        assert float(line["control"]) > 0 and len(line["source"]) == 12
    run(*words[:-2], "--peers", "none", "--screen", "--csv", str(file), "--csv-form", "rows")
    assert file.read_text().startswith("op,kernel,case,status,reason,device,error,ms,")


def test_every_bench_is_kept_and_compared(tmp_path, at_hand):
    words = ("bench", "softmax", "-b", "numba", "--case", "m=64,n=128,dtype=fp32", "--screen", "--peers", "torch")
    one, two = (run_json(*words)["run"] for _ in range(2))
    assert {one, two} <= {run["id"] for run in run_json("runs")["runs"]}
    assert one in run("runs")
    found = run_json("compare", one, two, "--threshold", "1")
    assert [c["kernel"] for c in found["changes"]] == ["numba"] and "B over A" in run(
        "compare", one, two, "--threshold", "1"
    )
    file = tmp_path / "runs.json"
    assert "4 rows of 1 runs" in run("runs", "export", one, "-o", str(file))
    assert "0 new runs, 1 already here" in run("runs", "import", str(file))
    assert run_json("runs", "export", two, "-o", str(file))["row_count"] == 4
    assert run_json("runs", "import", str(file))["known"] == 1


def test_show_prints_a_stage():
    said = run("show", "softmax", "--backend", "cuda", "--stage", "source")
    assert "class Softmax" in said and "# softmax.cu" in said and "__global__" in said  # what it launches, too
    found = run_json(
        "show", "softmax", "-b", "triton", "--stage", "ptx", "--arch", "sm_80", "--case", "m=2,n=64,dtype=fp16"
    )
    assert ".target sm_80" in found["text"] and found["rows"][0]["registers"] > 0


def test_cache_shows_and_clears(monkeypatch, tmp_path):
    ours, other = tmp_path / "cuda" / "old.cubin", tmp_path / "thesis.txt"
    ours.parent.mkdir()
    for file in (ours, other):
        file.write_text("x" * 100)
    with settings.override(cache_dir=tmp_path):
        assert run_json("cache")["folders"]["cache"]["bytes"] == 200
        assert "freed" in run("cache", "--clear")
        assert not ours.exists() and other.exists()
        run("cache", "--clear")  # nothing there: nothing to say


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("check", "warp"), "OP must be one of .*rms_norm, .*, got 'warp'"),
        (("check", "-b", "cobol"), "--backend must be one of numba, .*, got 'cobol'"),
        (("check", "softmax", "--case", "rows=3"), "--case for softmax takes m, n, dtype, .*, got 'rows=3'"),
        (("check", "softmax", "--case", "m=x,n=3"), "m must be a whole number, got 'x'"),
        (("check", "matmul", "--case", "m=3"), "needs n, k, got 'm=3'"),
        (("check", "silu_mul", "--case", "m=3,n=8,packed=yes"), "packed must be True or False, got 'yes'"),
        (("check", "--shapes", "llama-9000b"), "--shapes must be one of llama-8b, .*, got 'llama-9000b'"),
        (("plan", "gpt-17"), "a model must be one of deepseek-v2-lite, .*, or a config.json, got 'gpt-17'"),
        (("plan", "llama-8b", "--tp", "7"), "Llama-3.1-8B: attention heads of 32 cannot be shared by 7 ranks"),
        (("plan", "llama-8b", "--batch", "1,x"), "--batch must be whole numbers from 1 on, .*, got '1,x'"),
        (("plan", "llama-8b", "--batch", "0"), "--batch must be whole numbers from 1 on, .*, got '0'"),
        (("plan", "llama-8b", "--device", "abacus"), "--device must be here or one of nvidia_h200, got 'abacus'"),
        (("bench", "--shapes", "quick", "--case", "m=3,n=4"), "--case and --shapes exclude each other"),
        (("bench", "matmul", "--N", "64"), "--N and --K go together, got --N alone"),
        (("check", "matmul", "--K", "64"), "--N and --K go together, got --K alone"),
        (("bench", "matmul", "--M", "64"), "--M goes with --N and --K, got --M 64 without them"),
        (("bench", "matmul", "--N", "64", "--K", "64", "--M", "1,x"), "--M must be whole numbers from 1 on, .*'1,x'"),
        (("bench", "matmul", "--N", "64", "--K", "64", "--shapes", "quick"), "both exclude --N and --K"),
        (("bench", "softmax", "--N", "64", "--K", "64"), "--N and --K are for ops .* m, n and k, softmax needs m, n"),
        (("check", "softmax", "--N", "64", "--K", "64"), "--N and --K are for ops whose cases are m, n and k, softmax"),
        (("bench", "softmax", "--csv-form", "pairs"), "--csv-form pairs is for ops whose cases are m, n and k"),
        (("bench", "softmax", "--add"), "--add goes with --csv FILE"),
        (("bench", "softmax", "--defaults", "-b", "triton"), "dispatch takes, got --backend triton too; leave one out"),
        (("bench", "matmul", "--csv-form", "trios"), "--csv-form must be one of rows, pairs, got 'trios'"),
        (("check", "fp8_matmul", "-b", "numba", "--N", "64", "--K", "100"), "K must be a multiple of 128, got 100"),
        (("plan", "llama-8b", "--weights", "int3"), "weights must be one of bf16, fp8, got 'int3'"),
        (("bench", "--peers", "cublast"), "--peers must be all, none, or some of torch, .*, got 'cublast'"),
        (("bench", "--peers", "none,torch"), "--peers none stands alone, got none,torch"),
        (("runs", "export", "nothing", "-o", "x.csv"), "RUN must be an id, .*, got 'nothing'"),
        (("runs", "export", "-o", "x.doc"), "--format must be one of json, csv, parquet, got 'doc'"),
        (("compare", "nothing", "last"), "RUN must be an id, .*, got 'nothing'"),
        (("check", "--case", ""), "--case must name a case by its numbers"),
        (("check", "softmax", "-b", "numba", "--case", "m=3,n=3,special=odd"), "special must be .*, got 'odd'"),
        (("bench", "--csv", "/no/such/folder/x.csv"), "must lie in a folder that is there, got /no/such/folder"),
        (("show", "matmul", "-b", "gluon", "--case", "m=64,n=64,k=64,dtype=fp32"), "gluon refuses .*: wgmma takes"),
        (("check", "softmax", "-b", "numba", "--case", "m=3,n=3,dtype=int4"), "dtype must be .*, got 'int4'"),
        (("show", "softmax", "-b", "gluon"), "--backend must be one of numba, triton, cutile, cuda, got 'gluon'"),
        (("show", "softmax", "-b", "triton", "--stage", "wasm"), "--stage must be one of .*, got 'wasm'"),
        (("show", "softmax", "-b", "triton", "--arch", "sm_70"), "softmax triton builds for sm_80, .*, got 'sm_70'"),
    ],
)  # fmt: skip
def test_bad_usage_exits_2_and_says_what_was_expected(words, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tilery", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("op", REGISTRY.values(), ids=lambda op: op.name)
def test_every_case_can_be_named_on_the_command_line(op):
    """As tables print it, with the types that its inputs declare."""
    for one in (c for cases in op.cases.values() for c in cases):
        found = parsed_case(op, str(one)).params
        assert found == one.params and list(map(type, found.values())) == list(map(type, one.params.values())), str(one)


@pytest.mark.parametrize(
    ("text", "said"), [("m=1,n=8,eps=small", "eps must be a number"), ("m=-1,n=8", "m must be a whole number")]
)
def test_a_value_of_another_type_is_named(text, said):
    with pytest.raises(BadInput, match=said):
        parsed_case(REGISTRY["rms_norm"], text)
