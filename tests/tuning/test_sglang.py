"""SGLang's files: written from what was tuned, brought back as candidates; what is no such file is named."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from fakes import FakePool, FakeWorker
from typer.testing import CliRunner

import plant
from tilery import languages
from tilery.base import settings
from tilery.base.errors import BadInput, BadTunedFile, NotWritten
from tilery.base.spec import Case
from tilery.cli import app
from tilery.core import policy, tuned
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.core.tuned import Entry
from tilery.hardware import device, gpu
from tilery.hardware.gpu import KNOWN
from tilery.measure import ceilings
from tilery.measure.store import Store
from tilery.models.steps import PRODUCT_ROWS
from tilery.ops import fp8_matmul
from tilery.tuning import candidates as candidates_of
from tilery.tuning import exchange, request, sglang
from tilery.tuning.record import Recorded
from tilery.tuning.tuner import Tuner
from tilery.workbench import shapes

FILE = "N=4096,K=8192,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
TRITON = {"block_m": 64, "block_n": 128, "num_warps": 4, "num_stages": 4, "split_k": 1, "group_m": 8, "block_k": 128}
TILELANG = {
    "kernel_type": "splitK_swapAB", "block_m": 64, "block_n": 16, "block_k": 128, "num_stages": 4, "threads": 128,
    "split_k": 4, "c_scale_local": True, "a_scale_shm": False, "b_scale_shm": True,
}  # fmt: skip
BASE = TILELANG | {"kernel_type": "base", "block_n": 128, "split_k": 1, "a_scale_shm": True, "b_scale_shm": False}
ALL_BUT_2 = "1,2,4,8,24,32,48,64,96,128,256,1024,1536,2048,3072,4096"
IN_TRITON = {
    "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 4,
}  # fmt: skip
IN_TILELANG = {
    "kernel_type": "splitK_swapAB", "block_M": 64, "block_N": 16, "block_K": 128, "num_stages": 4, "threads": 128,
    "split_k": 4, "c_scale_local": True, "b_scale_shm": True, "latency_ms": 0.5, "tflops": 2 * 16 * 4096 * 8192 / 5e8,
}  # fmt: skip


def entry(config, m=16, rank=0, scales="column", **more):
    params = {"m": m, "n": 4096, "k": 8192, "dtype": "e4m3", "scales": scales, **more}
    bucket = fp8_matmul.bucket(call_for(fp8_matmul, Case(params)))
    return Entry(
        kernel="tilelang" if "kernel_type" in config else "triton", exact=bucket.exact, scaled=bucket.scaled,
        config=config, ms=0.5, interval=[0.4, 0.6], error=1e-3, bit_identical=True, registers=128, spills=0, roof=0.5,
        versions={}, device="NVIDIA H200", when="2026-01-01T00:00:00+00:00", rank=rank, case=params,
    )  # fmt: skip


class FakeTilelang(plant.ByTorch):
    """A TileLang kernel that needs no TileLang."""

    archs = ("sm_90",)
    Config = dataclasses.make_dataclass(
        "Config", [(name, type(value)) for name, value in TILELANG.items()], frozen=True
    )  # fmt: skip

    def refusal(self, call, config=None):
        return "too many threads" if config is not None and config.threads > 512 else None


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch, ship):
    """Folders of this test's own."""
    plant.add(monkeypatch, fp8_matmul, "tilelang", FakeTilelang(None))
    monkeypatch.chdir(tmp_path)
    with settings.override(sglang_dir=None):
        yield tmp_path


@pytest.fixture
def h100(monkeypatch):
    """This machine has one."""
    monkeypatch.setattr(exchange, "here", lambda: [torch.device("cpu"), torch.device("cuda", 0)])
    monkeypatch.setattr(policy, "environment_refusal", lambda *_: None)
    with device.pretend(dataclasses.replace(KNOWN["h200"], name="NVIDIA H100")):
        yield


def tune(*entries):
    tuned.write(fp8_matmul, "nvidia_h200", entries)


def run(*words):
    done = CliRunner().invoke(app, ["configs", *map(str, words)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def fails(error, match, *words):
    done = CliRunner().invoke(app, ["configs", *map(str, words)])
    with pytest.raises(error, match=match):
        raise done.exception


def read(path):
    return json.loads(path.read_text())


# Export


def test_every_kernel_has_its_own_file_whoever_won(place):
    tune(
        entry(TRITON), entry(TILELANG, rank=1), entry(BASE, m=512), entry(TRITON, m=4096, out="fp16"),
        entry(TRITON, m=1, dtype_b="e5m2"),
    )  # fmt: skip
    said = run("export", "--format", "sglang", "--partial", "--to", place / "out")
    assert (
        said.count("\n") == 2
        and f"tilelang, M of 16,512, without {ALL_BUT_2}: {place / 'out' / 'tilelang' / FILE}" in said
    )
    assert read(place / "out" / "triton" / FILE) == {"16": IN_TRITON}
    found = read(place / "out" / "tilelang" / FILE)
    assert found["16"] == IN_TILELANG and list(found) == ["16", "512"]
    assert found["512"]["a_scale_shm"] is True and not {"split_k", "b_scale_shm"} & set(found["512"])


def test_what_sglangs_triton_cannot_is_left_out_and_said(place):
    split = TRITON | {"split_k": 4}
    tune(entry(split), entry(split, m=32), entry(TRITON, m=32, rank=1), entry(TRITON, m=64))
    said = run("export", "--format", "sglang", "--partial", "fp8_matmul")
    assert list(read(place / "sglang" / "triton" / FILE)) == ["32", "64"]
    assert "left out: M=16, N=4096, K=8192: triton cuts K in 4 parts, which that of SGLang and vLLM cannot\n" in said
    assert "M=32, N" not in said and not (place / "sglang" / "tilelang").exists()


def test_scales_in_rows_as_sglang_has_them_go_first(place):
    tune(entry(TRITON), entry(TRITON | {"block_m": 16}, rank=3, scales="row"), entry(TRITON, m=8))
    run("export", "--format", "sglang", "--partial")
    found = read(place / "sglang" / "triton" / FILE)
    assert found["16"]["BLOCK_SIZE_M"] == 16 and found["8"]["BLOCK_SIZE_M"] == 64


def test_sglangs_folder_is_taken_for_tilelang(place):
    tune(entry(TRITON), entry(TILELANG, rank=1))
    with settings.override(sglang_dir=place / "theirs"):
        run("export", "--format", "sglang", "--partial")
        assert read(place / "theirs" / FILE) == {"16": IN_TILELANG} and (place / "sglang" / "triton" / FILE).exists()
        run("export", "--format", "sglang", "--partial", "--to", "mine")
        assert (place / "mine" / "tilelang" / FILE).exists()


def test_other_rows_of_a_file_stay_and_a_bad_file_stays_whole(place):
    tune(entry(TRITON), entry(TILELANG, rank=1))
    path = place / "sglang" / "triton" / FILE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"16": IN_TRITON | {"num_warps": 8}, "8": IN_TRITON}))
    assert "M of 16, 1 others as they were, without 1,2,4,24," in run("export", "--format", "sglang", "--partial")
    assert read(path) == {"8": IN_TRITON, "16": IN_TRITON} and list(read(path)) == ["8", "16"]
    path.write_text("{")
    (place / "sglang" / "tilelang" / FILE).unlink()
    fails(BadTunedFile, r"block_shape=\[128, 128\].json:1: ", "export", "--format", "sglang", "--partial")
    assert path.read_text() == "{" and not (place / "sglang" / "tilelang" / FILE).exists()
    path.write_text(json.dumps({"16": IN_TILELANG}))
    fails(
        BadTunedFile,
        "M=16 for triton: lacks .*BLOCK_SIZE_K.*, has unknown",
        "export",
        "--format",
        "sglang",
        "--partial",
    )


def test_bad_exports_are_named(place):
    fails(
        BadInput,
        "nothing that SGLang reads is tuned: fp8_matmul by tilelang or tri",
        "export",
        "--format",
        "sglang",
        "--partial",
    )
    tune(entry(TRITON | {"split_k": 2}))
    fails(BadInput, "to bf16: M=16, .* triton cuts K in 2 parts", "export", "--format", "sglang", "--partial")
    fails(BadInput, "is tuned on nvidia_h100", "export", "--format", "sglang", "--partial", "--device", "nvidia_h100")
    fails(
        BadInput, "--format sglang is for fp8_matmul, got matmul", "export", "matmul", "--format", "sglang", "--partial"
    )
    fails(BadInput, "--format must be tilery, sglang or vllm, got 'vlm'", "export", "--format", "vlm")
    fails(BadInput, "--partial is of --format sglang and vllm", "export", "--partial")
    tune(entry(TRITON))
    (place / "file").write_text("kept")
    fails(NotWritten, "cannot be written: ", "export", "--format", "sglang", "--partial", "--to", place / "file")
    assert (place / "file").read_text() == "kept"


# Whole files


def whole(config, but=(), **more):
    return [entry(config, m=m, **more) for m in PRODUCT_ROWS if m not in but]


def test_only_whole_files_are_written_and_what_is_missing_is_said(place):
    tune(*whole(TRITON), *whole(BASE, but=(2, 4096), rank=1))
    said = run("export", "--format", "sglang", "--to", "out")
    assert list(read(place / "out" / "triton" / FILE)) == [str(m) for m in PRODUCT_ROWS]
    assert not (place / "out" / "tilelang").exists()
    assert f"not written, lacks M of 2,4096: out/tilelang/{FILE}\n" in said
    command = "tilery tune fp8_matmul --for sglang --backend tilelang --N 4096 --K 8192 --M 2,4096"
    assert f"\n  {command}\n" in said and "--partial writes those that lack some too" in said
    path = place / "out" / "tilelang" / FILE
    path.parent.mkdir()
    path.write_text(json.dumps({"2": IN_TILELANG, "4096": IN_TILELANG}))  # with what is there it is whole
    assert "not written" not in run("export", "--format", "sglang", "--to", "out")
    assert len(read(path)) == 18


def test_nothing_whole_is_exit_code_1_and_no_file(place):
    tune(entry(TRITON))
    done = CliRunner().invoke(app, ["configs", "export", "--format", "sglang"])
    assert done.exit_code == 1 and "not written, lacks M of 1,2,4,8,24" in done.stdout
    assert not (place / "sglang").exists()
    done = CliRunner().invoke(app, ["configs", "export", "--format", "sglang", "--json"])
    (found,) = json.loads(done.stdout)["partial"]
    assert (found["kernel"], found["rows"], len(found["missing"])) == ("triton", [16], 17)


def test_vllms_files_are_tritons_under_its_name(place, h100):
    tune(*whole(TRITON), *whole(BASE, rank=1))
    run("export", "--format", "vllm")
    (path,) = (place / "vllm").iterdir()
    assert path.name == FILE.replace("[128, 128]", "[128,128]") and read(path)["16"] == IN_TRITON
    assert "18 candidates" in run("import", path)
    assert {origin for *_, origin in candidates()} == {"NVIDIA H200 (vLLM, triton)"}


def test_what_was_tuned_for_sglang_goes_before_what_dispatch_uses(place):
    tune(*whole(TRITON | {"split_k": 4}, scales="row"))
    with pytest.raises(BadInput, match="cuts K in 4 parts"):
        sglang.export(None)
    faster = [entry(TRITON | {"num_warps": 8}, m=m, scales="row") for m in PRODUCT_ROWS]
    tuned.write(fp8_matmul, "nvidia_h200", faster, sglang.folder())
    run("export", "--format", "sglang")
    assert {row["num_warps"] for row in read(place / "sglang" / "triton" / FILE).values()} == {8}
    bucket = fp8_matmul.bucket(call_for(fp8_matmul, Case(faster[4].case)))
    (used,) = [e for e, _ in tuned.found(fp8_matmul, bucket, ("triton",), "nvidia_h200")]
    assert used.config["split_k"] == 4  # dispatch is as it was


def test_files_shipped_for_sglang_stand_behind_the_users(place, ship):
    shipped = fp8_matmul.folder / "tuned" / "sglang" / "nvidia_h200.json"
    shipped.parent.mkdir(parents=True)
    tuned.write(fp8_matmul, "nvidia_h200", [entry(TRITON, m=m) for m in (8, 16)], place / "made").rename(shipped)
    tuned.write(fp8_matmul, "nvidia_h200", [entry(TRITON | {"num_warps": 8})], sglang.folder())
    run("export", "--format", "sglang", "--partial")
    found = read(place / "sglang" / "triton" / FILE)
    assert {m: row["num_warps"] for m, row in found.items()} == {"8": 4, "16": 8}


# Tuning for it


def asked(backend=None, cases=None, **more):
    given = cases or shapes.products(fp8_matmul, 4096, 8192)
    return request.request([(fp8_matmul, given, [])], backend, "1h", use="sglang", **more)


def test_a_problem_is_one_kernels_with_its_scales_for_each_of_18_m():
    problems = asked().problems
    assert [(p.kernels, p.case.params["scales"]) for p in problems[::18]] == [
        (("triton",), "row"), (("tilelang",), "column")
    ]  # fmt: skip
    assert [p.case.params["m"] for p in problems] == [*PRODUCT_ROWS] * 2 and {p.use for p in problems} == {"sglang"}
    assert {p.kernels for p in asked(["triton"]).problems} == {("triton",)}


def test_the_most_valuable_file_is_whole_first():
    small, large = (shapes.products(fp8_matmul, n, 512) for n in (128, 256))
    work = [(fp8_matmul, [*small, *large], [*[1.0] * 18, *[2.0] * 18])]
    found = request.request(work, ["triton"], "1h", use="sglang").problems
    assert [p.case.params["n"] for p in found] == [256] * 18 + [128] * 18


def test_what_sglang_cannot_is_not_tuned_for_it():
    case = {"m": 16, "n": 256, "k": 512}
    for work, backend, said in (
        ((fp8_matmul, [Case(case | {"dtype": "e4m3", "out": "fp16"})], []), None, "e4m3 by e4m3 to bf16, got m=16"),
        ((REGISTRY["matmul"], [Case(case | {"dtype": "bf16"})], []), None, "only fp8_matmul is tuned, got matmul"),
        ((fp8_matmul, [Case(case | {"dtype": "e4m3"})], []), ["cuda"], "kernels in triton and tilelang, got cuda"),
    ):
        with pytest.raises(BadInput, match=said):
            request.request([work], backend, "1h", use="sglang")
    with pytest.raises(BadInput, match="use must be sglang, for SGLang's files and vLLM's, got 'trt'"):
        request.request([(fp8_matmul, [Case(case | {"dtype": "e4m3"})], [])], None, "1h", use="trt")
    done = CliRunner().invoke(app, ["tune", "fp8_matmul", "--for", "sglang"])
    assert isinstance(done.exception, BadInput) and "--for sglang tunes a weight" in str(done.exception)


def test_files_are_not_promised_where_nothing_was_tuned(place, monkeypatch):
    plant.refusing(monkeypatch, fp8_matmul, "triton", "not today")
    words = ["tune", "fp8_matmul", "--for", "sglang", "-b", "triton", "--N", "128", "--K", "128", "--M", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and "no candidate is good" in done.stdout and "configs export" not in done.stderr


def test_split_k_in_triton_is_no_candidate_and_what_won_is_kept_for_sglang(place, h100, monkeypatch):
    monkeypatch.setattr(ceilings, "ceilings", lambda where, **_: ceilings.Ceilings(1e12, 1e12, 1e12, {}, 1.0))
    monkeypatch.setattr(ceilings.Ceilings, "peak", lambda self, dtype: 1e15)
    monkeypatch.setattr(request, "device_for", lambda op, kernels: torch.device("cuda", 0))
    monkeypatch.setattr(candidates_of, "_kernel_refusal", lambda *_: None)
    monkeypatch.setattr(
        gpu, "_present", lambda where: dataclasses.replace(KNOWN["h200"], name="NVIDIA H100")
    )  # threads
    before = entry(TRITON | {"split_k": 8}, scales="row")
    tuned.write(fp8_matmul, "nvidia_h100", [before])
    problems = asked(["triton"], shapes.products(fp8_matmul, 4096, 8192, [16]))
    field, left_out = candidates_of.collect(problems.problems[0], ("triton",))
    assert field and {c.config["split_k"] for c in field} == {1}
    assert any("cuts K in 4 parts" in m.reason for m in left_out)
    worker = FakeWorker(lambda candidate: 1.0 + candidate.config["block_n"] / 1e3)
    (done,) = Tuner(problems, FakePool([worker]), store=Store(place / "runs.sqlite3"), ahead=False).run().tuned
    assert done.path == sglang.folder() / "fp8_matmul" / "nvidia_h100.json"
    assert [(e.kernel, e.config["split_k"]) for e in done.entries] == [("triton", 1)]
    bucket = fp8_matmul.bucket(call_for(fp8_matmul, Case(before.case)))
    assert [e.config["split_k"] for e, _ in tuned.found(fp8_matmul, bucket, ("triton",), "nvidia_h100")] == [8]
    again = Tuner(problems, FakePool([worker]), store=Store(place / "more.sqlite3"), ahead=False).run().tuned[0]
    assert [e.config for e in again.entries] == [e.config for e in done.entries]


def test_sglangs_own_files_are_tried_when_it_is_tuned_for(place, h100):
    """They do not say how scales lie."""
    (place / FILE).write_text(json.dumps({"16": IN_TRITON | {"num_warps": 8}}))
    run("import", FILE)
    triton, tilelang = (p for p in asked().problems if p.case.params["m"] == 64)
    (found,) = Recorded(dataclasses.replace(triton, device="cuda:0")).imported()
    assert (found.kernel, found.config["num_warps"], found.origin) == ("triton", 8, "NVIDIA H200 (SGLang, triton)")
    assert Recorded(dataclasses.replace(tilelang, device="cuda:0")).imported() == []


# Import


def test_an_export_comes_back_as_candidates(place, h100):
    tune(entry(TRITON), entry(TILELANG, rank=1), entry(BASE, m=512))
    run("export", "--format", "sglang", "--partial", "--to", "out")
    said = run("import", "out")
    assert "0 entries, 3 candidates, 0 refused" in said and "verify --fix" in said
    found = {(scaled["m"], kernel): (config, origin) for _, scaled, kernel, config, origin in candidates()}
    assert found == {
        (16, "triton"): (TRITON, "NVIDIA H200 (SGLang, triton)"),
        (16, "tilelang"): (TILELANG, "NVIDIA H200 (SGLang, tilelang)"),
        (512, "tilelang"): (BASE, "NVIDIA H200 (SGLang, tilelang)"),
    }
    assert {exact for exact, *_ in candidates()} == {entry(TRITON).exact}
    run("import", f"out/triton/{FILE}")
    assert len(candidates()) == 3  # again: nothing twice, and TileLang's stay


def candidates():
    return tuned.candidates(fp8_matmul, "nvidia_h100")


def test_this_gpus_file_has_no_evidence_either(place, h100):
    path = place / FILE.replace("H200", "H100")
    path.write_text(json.dumps({"16": IN_TRITON}))
    assert "0 entries, 1 candidates" in run("import", path)
    shown = run("show", "fp8_matmul")
    assert "NVIDIA H100 (SGLang, triton)" in shown and "0.0e+00" not in shown


def test_what_the_kernel_refuses_is_named_and_the_rest_kept(place, h100):
    (place / FILE).write_text(json.dumps({"16": IN_TRITON | {"BLOCK_SIZE_K": 64}, "32": IN_TRITON}))
    assert "fp8_matmul triton refused: block_k must be 128, as far as a scale goes, got 64" in run("import", FILE)
    assert [scaled for _, scaled, *_ in candidates()] == [{"m": 32}]


def test_sglangs_folder_is_where_import_looks(place, h100):
    theirs = place / "theirs"
    theirs.mkdir()
    (theirs / FILE).write_text(json.dumps({"16": IN_TILELANG | {"out_dtype": "bfloat16"}}))
    fails(BadInput, "FILE must name .*SGLANG_TILELANG_GEMM_CONFIG_DIR must say .* got neither", "import")
    with settings.override(sglang_dir=theirs):
        assert "1 candidates" in run("import")
    fails(BadInput, "must hold files of SGLang, N=….json, got a folder without any", "import", place / "tuned")


def test_the_environment_names_sglangs_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_TILELANG_GEMM_CONFIG_DIR", str(tmp_path))
    assert settings.from_environment().sglang_dir == tmp_path
    monkeypatch.delenv("SGLANG_TILELANG_GEMM_CONFIG_DIR")
    assert settings.from_environment().sglang_dir is None


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("configs.json", {"16": IN_TRITON}, ":1: SGLang's file must be named as N=4096,K=8192,.*, got configs.json"),
        (FILE.replace("[128, 128]", "[64, 64]"), {"16": IN_TRITON}, "SGLang's file must be named as N=4096"),
        (FILE.replace("N=4096", "N=many"), {"16": IN_TILELANG}, "SGLang's file must be named as N=4096"),
        (FILE, "{", r":1: Expecting property name"),
        (FILE, {}, r':1: expected {"1": {…}, "16": {…}, …} by M, got {}'),
        (FILE, [1], r"by M, got \[1\]"),
        (FILE, {"schema": 1, "op": "fp8_matmul"}, ":1: a key must be M, a whole number from 1 on, got 'schema'"),
        (FILE, {"16": {"warps": 4}}, r"expected rows with kernel_type, .* \(tilelang\) or BLOCK_SIZE_M, .* \(triton\)"),
        (FILE, {"16": 3}, "M=16 must be an object of fields, got 3"),
        (FILE, {"16": IN_TRITON, "many": IN_TRITON}, "a key must be M, a whole number from 1 on, got 'many'"),
        (FILE, {"0": IN_TRITON}, "a key must be M, a whole number from 1 on, got '0'"),
        (FILE, {"16": IN_TRITON, "32": IN_TILELANG}, "M=32 for triton: lacks .*BLOCK_SIZE_M"),
        (FILE, {"16": IN_TRITON | {"waves_per_eu": 2}}, r"lacks \[\], has unknown \['waves_per_eu'\]"),
        (FILE, {"16": IN_TRITON | {"num_warps": "4"}}, "num_warps must be a whole number from 1 on, got '4'"),
        (FILE, {"16": IN_TILELANG | {"kernel_type": "warp"}}, "kernel_type must be one of base, .*, got 'warp'"),
        (FILE, {"16": IN_TILELANG | {"kernel_type": "base"}}, "split_k of 4 is of another variant, .* is 'base'"),
        (FILE, {"16": IN_TILELANG | {"kernel_type": "splitK"}}, "b_scale_shm of True is of another variant"),
        (FILE, {"16": {k: v for k, v in IN_TILELANG.items() if k != "split_k"}}, "splitK_swapAB needs split_k"),
        (FILE, {"16": IN_TILELANG | {"c_scale_local": 1}}, "c_scale_local must be true or false, got 1"),
        (FILE, {"16": IN_TILELANG | {"latency_ms": -1}}, "latency_ms must be a number above 0, got -1"),
        (FILE, {"16": IN_TILELANG | {"out_dtype": "float16"}}, "out_dtype must be 'bfloat16', got 'float16'"),
        (FILE.replace("K=8192", "K=100"), {"16": IN_TRITON}, "K must be a multiple of 128, got 100"),
    ],
)  # fmt: skip
def test_what_is_no_file_of_sglang_is_named_and_nothing_is_kept(place, h100, name, found, message):
    good, bad = place / "in" / FILE.replace("4096", "512"), place / "in" / name
    good.parent.mkdir()
    good.write_text(json.dumps({"16": IN_TRITON}))
    bad.write_text(found if isinstance(found, str) else json.dumps(found))
    before = bad.read_bytes()
    fails(BadTunedFile, message, "import", bad)
    if name.startswith("N="):
        fails(BadTunedFile, message, "import", place / "in")  # the good one beside it is not kept either
    assert candidates() == [] and bad.read_bytes() == before


def test_the_line_of_what_is_wrong_is_said(place):
    rows = json.dumps({"16": IN_TRITON, "32": IN_TRITON | {"num_stages": 0}}, indent=4)
    (place / FILE).write_text(rows)
    line = rows[: rows.index('"32"')].count("\n") + 1
    fails(BadTunedFile, rf"\.json:{line}: M=32 for triton: num_stages must be", "import", FILE)
    (place / FILE).write_text(rows.replace('"32"', '"16"'))
    fails(BadTunedFile, "the field '16' stands twice", "import", FILE)


def test_the_command_itself_knows_the_op(place):
    """In a process that has imported nothing yet."""
    (place / FILE).write_text(json.dumps({"16": IN_TRITON, "32": IN_TRITON}))
    done = subprocess.run([sys.executable, "-m", "tilery", "configs", "import", FILE], capture_output=True, text=True)
    assert done.returncode == 0 and "0 entries, " in done.stdout, done.stderr


@pytest.mark.parametrize("kernel", ["triton", "tilelang"])
def test_the_forms_have_the_fields_of_the_configs(kernel, monkeypatch):
    """The parameters of the real kernel, in their order, with their defaults."""
    monkeypatch.undo()
    if why := languages.missing(kernel):
        pytest.skip(why)
    made = dataclasses.fields(fp8_matmul.kernel(kernel).Config)
    assert [field.name for field in made] == list(sglang._FORMS[kernel].config)
