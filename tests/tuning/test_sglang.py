"""SGLang's files: written from what was tuned, brought back as candidates; what is no such file is named."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import plant
from tilery import languages
from tilery.base import settings
from tilery.base.errors import BadInput, BadTunedFile, NotWritten
from tilery.base.spec import Case
from tilery.cli import app
from tilery.core import policy, tuned
from tilery.core.cases import call_for
from tilery.core.tuned import Entry
from tilery.hardware import device
from tilery.hardware.gpu import KNOWN
from tilery.ops import fp8_matmul
from tilery.tuning import exchange, sglang

FILE = "N=4096,K=8192,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
TRITON = {"block_m": 64, "block_n": 128, "num_warps": 4, "num_stages": 4, "split_k": 1, "group_m": 8, "block_k": 128}
TILELANG = {
    "kernel_type": "splitK_swapAB", "block_m": 64, "block_n": 16, "block_k": 128, "num_stages": 4, "threads": 128,
    "split_k": 4, "c_scale_local": True, "a_scale_shm": False, "b_scale_shm": True,
}  # fmt: skip
BASE = TILELANG | {"kernel_type": "base", "block_n": 128, "split_k": 1, "a_scale_shm": True, "b_scale_shm": False}
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
    said = run("export", "--format", "sglang", "--to", place / "out")
    assert said.count("\n") == 2 and f"tilelang, M of 16,512: {place / 'out' / 'tilelang' / FILE}" in said
    assert read(place / "out" / "triton" / FILE) == {"16": IN_TRITON}
    found = read(place / "out" / "tilelang" / FILE)
    assert found["16"] == IN_TILELANG and list(found) == ["16", "512"]
    assert found["512"]["a_scale_shm"] is True and not {"split_k", "b_scale_shm"} & set(found["512"])


def test_what_sglangs_triton_cannot_is_left_out_and_said(place):
    split = TRITON | {"split_k": 4}
    tune(entry(split), entry(split, m=32), entry(TRITON, m=32, rank=1), entry(TRITON, m=64))
    said = run("export", "--format", "sglang", "fp8_matmul")
    assert list(read(place / "sglang" / "triton" / FILE)) == ["32", "64"]
    assert "left out: M=16, N=4096, K=8192: triton cuts K in 4 parts, which SGLang's Triton kernel cannot\n" in said
    assert "M=32, N" not in said and not (place / "sglang" / "tilelang").exists()


def test_scales_in_rows_as_sglang_has_them_go_first(place):
    tune(entry(TRITON), entry(TRITON | {"block_m": 16}, rank=3, scales="row"), entry(TRITON, m=8))
    run("export", "--format", "sglang")
    found = read(place / "sglang" / "triton" / FILE)
    assert found["16"]["BLOCK_SIZE_M"] == 16 and found["8"]["BLOCK_SIZE_M"] == 64


def test_sglangs_folder_is_taken_for_tilelang(place):
    tune(entry(TRITON), entry(TILELANG, rank=1))
    with settings.override(sglang_dir=place / "theirs"):
        run("export", "--format", "sglang")
        assert read(place / "theirs" / FILE) == {"16": IN_TILELANG} and (place / "sglang" / "triton" / FILE).exists()
        run("export", "--format", "sglang", "--to", "mine")
        assert (place / "mine" / "tilelang" / FILE).exists()


def test_other_rows_of_a_file_stay_and_a_bad_file_stays_whole(place):
    tune(entry(TRITON), entry(TILELANG, rank=1))
    path = place / "sglang" / "triton" / FILE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"16": IN_TRITON | {"num_warps": 8}, "8": IN_TRITON}))
    assert "M of 16, 1 others as they were" in run("export", "--format", "sglang")
    assert read(path) == {"8": IN_TRITON, "16": IN_TRITON} and list(read(path)) == ["8", "16"]
    path.write_text("{")
    (place / "sglang" / "tilelang" / FILE).unlink()
    fails(BadTunedFile, r"block_shape=\[128, 128\].json:1: ", "export", "--format", "sglang")
    assert path.read_text() == "{" and not (place / "sglang" / "tilelang" / FILE).exists()
    path.write_text(json.dumps({"16": IN_TILELANG}))
    fails(BadTunedFile, "M=16 for triton: lacks .*BLOCK_SIZE_K.*, has unknown", "export", "--format", "sglang")


def test_bad_exports_are_named(place):
    fails(BadInput, "nothing that SGLang reads is tuned: fp8_matmul by tilelang or tri", "export", "--format", "sglang")
    tune(entry(TRITON | {"split_k": 2}))
    fails(BadInput, "to bf16: M=16, .* triton cuts K in 2 parts", "export", "--format", "sglang")
    fails(BadInput, "is tuned on nvidia_h100", "export", "--format", "sglang", "--device", "nvidia_h100")
    fails(BadInput, "--format sglang is for fp8_matmul, got matmul", "export", "matmul", "--format", "sglang")
    fails(BadInput, "--format must be tilery or sglang, got 'vllm'", "export", "--format", "vllm")
    tune(entry(TRITON))
    (place / "file").write_text("kept")
    fails(NotWritten, "cannot be written: ", "export", "--format", "sglang", "--to", place / "file")
    assert (place / "file").read_text() == "kept"


# Import


def test_an_export_comes_back_as_candidates(place, h100):
    tune(entry(TRITON), entry(TILELANG, rank=1), entry(BASE, m=512))
    run("export", "--format", "sglang", "--to", "out")
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
