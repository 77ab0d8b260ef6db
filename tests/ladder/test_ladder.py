"""The HGEMM ladder: every rung builds with the instructions it is about; what it refuses, launches, prints, draws."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from tilery import languages
from tilery.base import settings
from tilery.base.spec import case
from tilery.cli import app
from tilery.cli import ladder as verb
from tilery.core.cases import specs_for
from tilery.hardware import device
from tilery.hardware.gpu import KNOWN
from tilery.measure import ceilings
from tilery.measure.ceilings import Ceilings
from tilery.measure.result import BASE, Row
from tilery.measure.timing import Depth

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.hardware import toolkit
from tilery.ladder import measure, plot, rungs
from tilery.ladder.rungs import RUNGS, Rung, product
from tilery.languages import cuda_glue, tensor_maps
from tilery.measure.source_hash import source_hash

FILES = [rung for rung in RUNGS.values() if isinstance(rung, Rung)]
# What the idea of a rung looks like in SASS; with "!" what it is rid of.
SEEN = {
    "naive": "LDG.E.U16 !LDS",
    "shared_tiles": "LDS BAR.SYNC",
    "register_tiles": "LDS FFMA !LDG.E.128",
    "wide_access": "LDG.E.128 STS.128 LDS.64 !LDGSTS",
    "async_copies": "LDGSTS.E.BYPASS.128 LDS.64 FFMA !LDG.E !STS",
    "tensor_cores": "HMMA.16816.F32.BF16 LDSM.16.M88.4 LDGSTS !FFMA",
    "wgmma": "HGMMA.64x128x16.F32.BF16 LDGSTS !HMMA !LDSM",
    "tma": "HGMMA.64x128x16.F32.BF16 UTMALDG.2D SYNCS !LDGSTS",
    "warp_roles": "HGMMA.64x256x16.F32.BF16 UTMALDG.2D USETMAXREG !MULTICAST",
    "clusters": "HGMMA.64x256x16.F32.BF16 UTMALDG.2D.MULTICAST UCGABAR_WAIT",
}


def specs(m=256, n=256, k=128, **more):
    a, b, _ = specs_for(product(), case(m=m, n=n, k=k, **{"dtype": "bf16", **more}), "cuda:0")
    return a, b


def test_rungs_are_numbered_and_every_file_is_one():
    assert [rung.number for rung in RUNGS.values()] == list(range(1, 12)) and list(RUNGS)[-1] == "shipped"
    assert sorted(FILES[0].source.parent.glob("*.cu")) == [rung.source for rung in FILES]
    assert set(SEEN) == {rung.name for rung in FILES}


@pytest.mark.parametrize("rung", FILES, ids=lambda rung: rung.name)
def test_every_rung_builds_without_spills_for_what_it_needs(rung, record_property):
    for arch in ("sm_80", "sm_90"):
        if arch not in rung.archs:
            assert rung.needs == "sm_90"
            continue
        made = rung.compile(*specs(), arch)
        record_property("resources", (f"ladder {rung.name} {arch}", [made.registers, made.spills, made.shared]))
        blocks = 1 if rung.persistent else 2  # that run at once on an SM
        assert made.spills == 0 and made.registers * rung.threads * blocks <= 65536
        assert rung.archs == ("sm_90",) or made.shared <= KNOWN["a100"].shared_per_block
        sass = toolkit.sass(made.cubin)
        assert "LDL" not in sass and "STL" not in sass
    for word in SEEN[rung.name].split():
        there = re.search(rf"\b{re.escape(word.removeprefix('!'))}", sass)
        assert bool(there) != word.startswith("!"), word


@pytest.mark.parametrize("name", ["warp_roles", "clusters"])
def test_no_fence_of_the_whole_gpu_stands_between_products(name):
    sass = toolkit.sass(RUNGS[name].compile(*specs(), "sm_90").cubin)
    products = [found.start() for found in re.finditer("HGMMA", sass)]
    assert not re.search(r"MEMBAR|FENCE", sass[products[0] : products[-1]])


@pytest.mark.parametrize(
    ("name", "problem", "said"),
    [
        ("naive", {"m": 5, "n": 7, "k": 3}, None),
        ("naive", {"m": 0}, "takes M, N and K from 1 on, got M=0, N=256, K=128"),
        ("shared_tiles", {"k": 100}, "K a multiple of 32, got M=256, N=256, K=100"),
        ("tma", {"m": 192}, "takes M a multiple of 128, N a multiple of 128, K a multiple of 64, got M=192"),
        ("tma", {"k": 0}, "got M=256, N=256, K=0"),
        ("warp_roles", {"m": 128}, None),
        ("warp_roles", {"n": 128}, "N a multiple of 256"),
        ("clusters", {"m": 128}, "takes M a multiple of 256"),
        ("clusters", {"dtype": "fp16"}, "takes bf16, got fp16"),
        ("wgmma", {"layout_b": "contiguous"}, "b [K, N] of contiguous columns"),
        ("wgmma", {"layout": "padded"}, "a [M, K] of contiguous rows"),
        ("shipped", {"m": 5, "n": 7, "k": 24}, None),
        ("shipped", {"m": 5, "n": 7, "k": 3}, None),  # lines that TMA cannot address are copied first
    ],
)
def test_says_what_it_cannot_take(name, problem, said):
    with device.pretend("sm_90"):
        why = RUNGS[name].refusal(*specs(**problem))
    assert why is None if said is None else said in why


@pytest.fixture(autouse=True)
def no_emulator():
    """What is said and launched is what a GPU would be."""
    with settings.override(emulate=False):
        yield


def test_says_what_card_it_needs():
    with device.pretend("sm_80"):
        assert RUNGS["tensor_cores"].refusal(*specs()) is None
        assert "builds for sm_90, and cuda:0 is sm_80" in RUNGS["wgmma"].refusal(*specs())
    assert "needs a CUDA tensor" in RUNGS["wgmma"].refusal(*(s._replace(device=torch.device("cpu")) for s in specs()))


@pytest.mark.parametrize(
    ("name", "blocks", "boxes"),
    [
        ("naive", 1024 // 8 * 768 // 32, None),
        ("tensor_cores", 8 * 6, None),
        ("tma", 8 * 6, [128, 128]),
        ("warp_roles", 8 * 3, [128, 256]),
        ("clusters", 8 * 3, [128, 128]),
    ],
)
@pytest.mark.parametrize("resident", [132, 7])
def test_launches_a_block_for_every_tile_or_as_many_as_run(name, blocks, boxes, resident, monkeypatch):
    launched, asked = [], []
    rungs._bound.cache_clear()  # it asked how many blocks are resident
    monkeypatch.setattr(cuda_glue.Kernel, "launch", lambda self, *given: launched.append(given))
    monkeypatch.setattr(cuda_glue.Kernel, "resident", lambda self: resident)
    monkeypatch.setattr(tensor_maps, "_made", lambda *how: asked.append(how) or len(asked))
    a, w, c = (torch.empty(s, dtype=torch.bfloat16) for s in ((1024, 128), (768, 128), (1024, 768)))
    rung = RUNGS[name]
    rung.run(a, w.t(), c)
    most = resident // rung.cluster * rung.cluster if rung.persistent else blocks
    operands = (1, 2) if boxes else (a.data_ptr(), w.data_ptr())
    assert launched == [(min(blocks, most), *operands, c.data_ptr(), 1024, 768, 128)]
    sizes = [(x.data_ptr(), (128, len(x)), (128,), (rows,), 2) for x, rows in zip((a, w), boxes or ())]
    assert asked == sizes
    rungs._bound.cache_clear()


# Measured with rungs that a CPU can run.


class Fake:
    """As a rung: computes by torch, times `factor`."""

    source_hash = "0123456789ab"

    def __init__(self, factor=1.0, why=None, raises=None):
        self.factor, self.why, self.raises = factor, why, raises

    def refusal(self, a, b):
        return self.why

    def run(self, a, b, c):
        if self.raises:
            raise self.raises
        torch.matmul(a, b, out=c).mul_(self.factor)


def test_rows_are_checked_timed_and_held_against_torch(monkeypatch):
    fakes = {
        "naive": Fake(),
        "shared_tiles": Fake(1.1),
        "tma": Fake(why="takes more"),
        "wgmma": Fake(raises=RuntimeError("broken")),
    }
    monkeypatch.setattr(measure, "RUNGS", fakes)
    nothing_faster = Ceilings(read=1e15, copy=1e15, write=1e15, flops={"bf16": 1e18}, launch_us=1.0)
    monkeypatch.setattr(ceilings, "ceilings", lambda where: nothing_faster)
    unit = measure.unit(case(m=64, n=96, k=32, dtype="bf16"), fakes, Depth(rounds=6, turn_ms=1.0, warm_s=0.0))
    unit = unit.__class__(**{**vars(unit), "device": "cpu"})
    rows = {row.kernel: row for row in measure.measure(unit)}
    assert {name: row.status for name, row in rows.items()} == {
        "shared_tiles": "fail", "tma": "refused", "wgmma": "fail", BASE: "pass", "naive": "pass",
    }  # fmt: skip
    assert "allowed 4e-03" in rows["shared_tiles"].reason and rows["shared_tiles"].ms is None
    assert rows["wgmma"].reason == "RuntimeError: broken" and rows["tma"].reason == "takes more"
    naive = rows["naive"]
    assert naive.tflops == pytest.approx(2 * 64 * 96 * 32 / naive.ms / 1e9) and naive.ratio_low <= naive.ratio
    assert 0 < naive.error < 4e-3 and rows[BASE].ratio == 1.0 and naive.op == "ladder"
    assert (naive.source, rows[BASE].source) == (Fake.source_hash, "")


def test_rungs_have_the_hash_of_their_file_and_the_last_that_of_the_kernel_that_ships():
    hashes = [rung.source_hash for rung in RUNGS.values()]
    assert len(set(hashes)) == len(hashes) and hashes[-1] == source_hash(product(), "cuda.hopper")


def timed(kernel, ms, ratio):
    cube = "m=4096,n=4096,k=4096,dtype=bf16"
    flops = 2 * 4096**3
    return Row(
        "ladder",
        kernel,
        cube,
        "pass",
        device="a GPU",
        ms=ms,
        ms_low=ms,
        ms_high=ms,
        tflops=flops / ms / 1e9,
        ratio=ratio,
    )


ROWS = [timed("clusters", 0.2, 0.95), timed(BASE, 0.19, 1.0), timed("naive", 200.0, 0.00095)]


def test_the_table_goes_up_from_the_first(capsys):
    from rich.console import Console

    Console(width=220).print(verb._table(verb._in_order(ROWS)))
    _, _, head, _, *lines = (re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.strip().splitlines())
    at = {name: i for i, name in enumerate(head)}
    assert [line[:2] for line in lines[1:]] == [["1", "naive"], ["10", "clusters"]] and BASE in lines[0]
    assert lines[2][at["% of torch"] + 1] == "95.0%" and lines[2][at["× first"] + 1] == "1000.0"
    assert lines[2][at["TFLOP/s"] + 1] == "687.2" and lines[1][at["× first"] + 1] == "1.0"


def test_the_picture_has_a_bar_for_every_rung():
    pytest.importorskip("matplotlib", reason="pip install 'tilery[plot]'")
    drawn = plot.picture(verb._in_order(ROWS), "svg").decode()
    assert all(word in drawn for word in ("naive", "clusters", "687", "95.0% of torch", "a GPU"))


# As a user runs it.


def test_without_a_gpu_rungs_are_compiled(without_a_gpu):
    done = CliRunner().invoke(app, ["ladder", "tma", "1", "--case", "m=129,n=128,k=64", "--json"])
    assert done.exit_code == 0, done.output
    found = [(row["kernel"], row["arch"], row["status"]) for row in json.loads(done.stdout)["rows"]]
    assert found == [("naive", "sm_80", "compiled"), ("naive", "sm_90", "compiled"), ("tma", "sm_90", "refused")]
    done = CliRunner().invoke(app, ["ladder", "naive"])
    assert done.exit_code == 0 and "no GPU here: the rungs were compiled, not run" in done.stderr
    assert (
        "all rows: status compiled" in done.stdout
        and "sm_80" in done.stdout
        and "everything from global memory" in done.stdout
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["12"], "RUNG must be a name or a number of 1 naive, .*11 shipped, got '12'"),
        (["--size", "4k"], "--size must be whole numbers from 1 on, separated by commas, got '4k'"),
        (["--plot", "x.pdf"], "--plot must end in .png or .svg, got 'x.pdf'"),
        (["--case", "m=4"], "--case for matmul needs n, k"),
    ],
)
def test_bad_usage_is_named(words, said):
    error = CliRunner().invoke(app, ["ladder", *words]).exception
    assert re.search(said, str(error))
