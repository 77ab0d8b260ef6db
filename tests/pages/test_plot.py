"""Pictures of runs: what is drawn is what was measured."""

import json
import math
import re
import sys

import pytest
from made_runs import CPU, GPU, cell, gpu_rows, put, put_cpu, put_gpu, put_tune, tune_rows
from typer.testing import CliRunner

from tilery.base.errors import BadInput, ToolMissing
from tilery.cli import app, main
from tilery.measure.result import Row
from tilery.pages import plot, summary

pytest.importorskip("matplotlib", reason="pip install 'tilery[plot]'")


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is written, to look at what is on it."""
    from matplotlib.figure import Figure

    written, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (written.append(self), save(self, *a, **k))[1])
    return written


def picture(store, kind, form="svg", op=None, names=None):
    return plot.picture(summary.collect(store, names), kind, form, op)


def marks(axes, colour):
    """The points of all lines of one colour: whiskers have no marker."""
    lines = [line for line in axes.lines if line.get_color() == colour and line.get_marker() not in ("None", "|")]
    return sorted((float(x), float(y)) for line in lines for x, y in zip(*line.get_data()))


TRITON = summary.COLOURS["triton"][0]


@pytest.mark.parametrize("kind", [kind for kind in plot.KINDS if kind != "landscape"])
def test_every_kind_is_drawn_for_several_devices(store, kind):
    put_gpu(store), put_cpu(store)
    names = ["20260101", "20260102"]
    assert picture(store, kind, "png", names=names).startswith(b"\x89PNG")
    drawn = picture(store, kind, names=names).decode()
    assert drawn.startswith("<?xml") and GPU in drawn
    assert picture(store, kind, names=names).decode() == drawn  # the same run, the same file


def test_ratios_stand_at_their_places_with_whiskers(store, figures):
    put_gpu(store)
    picture(store, "ratio")
    (axes,) = figures[0].axes
    assert [x for x, _ in marks(axes, TRITON)] == pytest.approx([0.8, 2.0, 2.0, 2.0])
    widths = [path[1][0] - path[0][0] for bar in axes.collections for path in bar.get_segments()]
    assert min(widths) == pytest.approx(0.02 * 0.02) and max(widths) == pytest.approx(0.02 * 2.0)
    assert [label.get_text() for label in axes.get_yticklabels()][-1] == "matmul  m 64 · n 4096 · k 4096 · bf16"
    assert axes.get_title("left") == GPU


def test_devices_have_panels_of_their_own(store, figures):
    put_gpu(store), put_cpu(store)
    picture(store, "ratio", names=["20260101", "20260102"])
    gpu, cpu = figures[0].axes
    assert (gpu.get_title("left"), cpu.get_title("left")) == (GPU, CPU)
    assert marks(cpu, TRITON) == [] and marks(cpu, summary.COLOURS["numba"][0])[0][0] == pytest.approx(4.0)


def test_the_roof_is_as_measured_and_absent_where_it_was_not(store, figures):
    put_gpu(store), put_cpu(store)
    picture(store, "roofline", names=["20260101", "20260102"])
    gpu, cpu = figures[0].axes
    assert {text.get_text() for text in gpu.texts} == {"bf16 800", "fp32 50"}
    assert [text.get_text() for text in gpu.get_legend().get_texts()] == ["read 4.40 TB/s", "copy 4.20 TB/s"]
    assert not cpu.texts and "no measured ceilings were kept" in cpu.get_title("left")
    row = next(row for row in gpu_rows() if row.kernel == "triton")
    assert (pytest.approx(1.25), pytest.approx(row.tflops)) in marks(gpu, TRITON)


def test_a_line_goes_through_its_times(store, figures):
    put_gpu(store)
    picture(store, "time")
    (axes,) = figures[0].axes
    assert marks(axes, TRITON) == [(16, pytest.approx(0.002)), (1024, pytest.approx(0.01)), (8192, pytest.approx(0.05))]
    assert axes.get_xlabel() == "m" and axes.get_title("left") == "softmax  n 4096 · bf16"


def test_the_heat_map_says_its_numbers(store, figures):
    put_gpu(store)
    picture(store, "heat")
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["2.00×", "1.25×", "0.80×", "0.020×"]


def test_a_landscape_has_every_candidate_in_order_and_marks_winner_and_defaults(store, figures):
    put_gpu(store), put_tune(store)
    drawn = picture(store, "landscape", names=["20260101", "20260103"]).decode()
    (axes,) = figures[0].axes
    timed = [place for place in marks(axes, TRITON) if place[1] < 0.09]
    assert timed == [(1, 0.04), (2, 0.05), (4, 0.06)]  # 3 is cuda's
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [line.get_ydata()[0] for line in crosses] == pytest.approx([1.25 * 0.08] * 4)
    assert [text.get_text() for text in axes.texts] == ["winner", "default", "default"]
    assert axes.get_title("left") == "matmul  m 64 · n 4096 · k 4096 · bf16"
    assert picture(store, "landscape", names=["20260103"], op="matmul").decode() == drawn
    with pytest.raises(BadInput, match=r"--op must be one that was tuned \(matmul\), got 'softmax'"):
        picture(store, "landscape", names=["20260101", "20260103"], op="softmax")


def test_candidates_are_in_no_other_picture(store):
    put_tune(store, rows=tune_rows())
    for kind in ("ratio", "roofline", "time", "heat"):
        with pytest.raises(BadInput, match="must hold timed rows"):
            picture(store, kind)


def test_one_op_alone(store, figures):
    put_gpu(store)
    picture(store, "heat", op="matmul")
    assert [label.get_text() for label in figures[0].axes[0].get_yticklabels()] == ["matmul"]
    with pytest.raises(BadInput, match=r"--op must be one that was timed \(softmax, matmul\), got 'conv'"):
        picture(store, "heat", op="conv")


@pytest.mark.parametrize("kind", plot.KINDS)
def test_rows_without_times_make_no_picture(store, kind):
    put(store, [Row("softmax", "triton", "m=16,n=4096,dtype=bf16", "compiled")])
    with pytest.raises(BadInput, match=f"must hold (timed rows|candidates of a tune) for a picture of kind {kind}"):
        picture(store, kind)


@pytest.mark.parametrize("kind", ["ratio", "roofline", "heat"])
def test_what_is_no_number_is_left_out(store, figures, kind):
    rows = cell("softmax", "m=16,n=4096,dtype=bf16", 1.0, {"triton": 2.0, "cuda": 3.0})
    rows[2].ms, rows[2].samples = math.nan, ()
    rows[3].flops = rows[3].gbps = None
    rows[3].tflops = math.inf
    put(store, rows)
    assert picture(store, kind) and marks(figures[0].axes[0], TRITON) == []


def test_the_verb_writes_a_file_and_says_so(store, tmp_path):
    put_gpu(store)
    file = tmp_path / "x.svg"
    done = CliRunner().invoke(app, ["plot", "-o", str(file), "--kind", "heat", "--op", "softmax"])
    assert done.exit_code == 0 and done.stdout == f"heat in {file}\n" and "2.00×" in file.read_text()
    done = CliRunner().invoke(app, ["plot", "-o", str(tmp_path / "x.png"), "--json"])
    said = json.loads(done.stdout)
    assert said["schema"] == 1 and said["file"] == str(tmp_path / "x.png") and len(said["rows"]) == len(gpu_rows())
    assert said["summary"][GPU]["cases"] == 4 and (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-o", "x.jpeg"), r"--out must end in \.png or \.svg, got 'x\.jpeg'"),
        (("-o", "x"), r"--out must end in \.png or \.svg, got 'x'"),
        (("--kind", "pie"), "--kind must be one of ratio, roofline, time, heat, landscape, got 'pie'"),
        (("-o", "/no/such/folder/x.png"), "must lie in a folder that is there"),
        (("--op", "conv"), "--op must be one that was timed"),
    ],
)
def test_bad_usage_exits_2(store, words, message, capsys, monkeypatch, tmp_path):
    put_gpu(store)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tilery", "plot", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and re.search(message, capsys.readouterr().err)


def test_without_matplotlib_the_command_that_adds_it_is_said(store, monkeypatch):
    put_gpu(store)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ToolMissing, match=re.escape("pip install 'tilery[plot]'")):
        picture(store, "ratio")


def test_a_broken_matplotlib_is_not_a_missing_one(store, monkeypatch):
    put_gpu(store)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"matplotlib\.figure"):
        picture(store, "ratio")
