"""Tables on terminals of 80 and 120 columns: nothing is cut, no figure is lost, and what is left out is named."""

import contextlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from rich.console import Console

import terminal
from processes import HANG_S
from tilery.base import settings
from tilery.base.spec import Case
from tilery.cli import bench, cache, check, compare, configs, doctor, ladder, ops, plan, runs, sanitize, tables, tune
from tilery.cli import common as cli
from tilery.cli.tables import Command, Paragraph, Reason, Reasons, Table, fact, figure, heading, key, long
from tilery.measure import ceilings
from tilery.measure.result import BASE, CONTROL, Row
from tilery.measure.store import Store, import_runs
from tilery.tuning.data import Candidate, Measured, Problem
from tilery.tuning.search import Gain, Outcome
from tilery.tuning.tuner import Tuned, TuneResult
from tilery.workbench.sanitize import Row as Finding

H200 = Path(__file__).parents[1] / "pages" / "data" / "h200.json"
WIDTHS = (80, 120)
PAGED = "m=16,keys=4096,heads=32,kv_heads=8,n=128,block_size=16,layout=misaligned,dtype=bf16"
CONFIG = {"kernel": "large_m", "block_m": 128, "block_n": 256, "block_k": 64, "stages": 4, "split_k": 1, "group_m": 8,
          "tma_store": True, "multicast": "b", "num_warps": 8}  # fmt: skip


@pytest.fixture
def store(tmp_path):
    """The runs of an H200."""
    with settings.override(data_dir=tmp_path):
        found = Store()
        import_runs(found, H200)
        yield found


def timed(op, kernel, case, ms, ratio=None, status="pass", **more):
    low, high = (None, None) if ratio is None else (0.999 * ratio, 1.001 * ratio)
    return Row(
        op, kernel, case, status, ms=ms, ms_low=0.99 * ms, ms_high=1.01 * ms, gbps=1234.5, tflops=123.45, roof=0.71,
        ratio=ratio, ratio_low=low, ratio_high=high, error=1.25e-3, **more,
    )  # fmt: skip


def refused(*kernels):
    why = (
        "takes K as a multiple of 128, and strides that are multiples of 16 bytes, got K=100 and a stride of 200 bytes"
    )
    return [Row("matmul", kernel, PAGED, "refused", why) for kernel in kernels]


def bench_rows(store):
    rows = [row for run in store.runs() for row in store.rows(run.id)]
    rows += [timed("attention_decode", "cuda.hopper", PAGED, 1234.5678, 0.473, registers=168, spills=0, shared=198720)]
    rows += [timed("attention_decode", "triton", PAGED, 0.00123, 1.7, "fail", reason="right before, not after")]
    rows += [Row("softmax", "cutile", PAGED, "compiled", arch="sm_90", registers=40, spills=8, shared=1056)]
    return rows + refused("gluon", "cupy")


def ladder_rows():
    case = "m=8192,n=8192,k=8192,dtype=bf16"
    rows = [timed("ladder", kernel, case, 1234.5678, 0.0123, registers=168, spills=0, shared=198720)
            for kernel in (BASE, "naive", "register_tiles", "async_copies")]  # fmt: skip
    rows[2].status, rows[2].reason = "fail", "output 0 has error 1.00e+00, allowed 4e-03"
    return rows + [Row("ladder", "tma", case, "refused", "takes M a multiple of 128, got M=100")]


def check_rows():
    rows = [
        Row("softmax", "numba", f"m={m},n=8,dtype=fp32", "pass", error=1.2e-7, allowed=1e-6, device="CPU x2", seed=m)
        for m in range(3)
    ]
    for m in range(12):
        case, seed = f"m={m},n=4096,dtype=fp32,layout=misaligned", 2**31 - 1 - m
        where = f"attention_decode cuda.hopper {case} seed={seed}"
        rows.append(
            Row(
                "attention_decode",
                "cuda.hopper",
                case,
                "fail",
                f"{where}: output 0 has error inf, allowed 4e-03",
                error=float("inf"),
                allowed=4e-3,
                device="NVIDIA H200 NVL 141GB",
                seed=seed,
            )
        )
    for status in ("refused", "compiled", "skipped"):
        rows.append(Row("softmax", "numba", "m=9", status, "cupy is not installed: pip install 'tilery[cupy]'"))
    return rows


def tune_result():
    problem = Problem("attention_decode", "cuda:0", Case({"m": 16, "keys": 4096, "dtype": "bf16"}))
    won = Measured(Candidate("cuda.hopper", CONFIG, "NVIDIA H100"), samples=(0.123456,) * 7, error=1.2e-3)
    bad = Measured(Candidate("triton", CONFIG), "wrong", "output 0 has error 1.00e+00, allowed 4e-03")
    entry = SimpleNamespace(kernel="cuda.hopper", config=CONFIG, roof=0.71)
    outcome = Outcome((won, bad), (won,), Gain(1.234, 1.221, 1.245), cut_short=True)
    none = Tuned(problem, "another", Outcome((bad,)), [])
    return TuneResult(
        [Tuned(problem, PAGED, outcome, [], [entry]), none], [problem], "20261115-062544-d06b2a", 1.0, 2.0
    )


def verified():
    rows = [timed("matmul", "cuda.hopper", f"m={m},n=28672,k=4096,dtype=bf16", 0.123456 * m, config=str(CONFIG))
            for m in (1, 16)]  # fmt: skip
    rows[1].status, rows[1].reason = "fail", "slower: 1.975 ms, said 1.2 (1.65 times)"
    return [SimpleNamespace(rows=lambda: rows)]


def findings():
    what = "Invalid __global__ read of size 2 bytes " * 3
    return [
        Finding("fused_linear_cross_entropy_backward", "cuda.hopper", PAGED, "racecheck", "finding", what, "a/b.cu:12"),
        Finding("softmax", "triton", "m=3", "memcheck", "clean"),
    ]


def doctored(store):
    """In a data folder that is new, where it would measure this machine's ceilings."""
    ceilings.keep(torch.device("cpu"), ceilings.Ceilings(1e10, 1e10, 1e10, {"fp32": 1e11, "bf16": 1e11}, 1.0))
    doctor.doctor(False, False)


def listed_runs(store):
    runs.listed(SimpleNamespace(invoked_subcommand=None), False)


VERBS = {
    "bench": lambda store: cli.say(bench._table(bench_rows(store))),
    "cache": lambda store: cache.cache(False, False),
    "check": lambda store: check._print(check_rows(), [row for row in check_rows() if row.status == "fail"]),
    "compare": lambda store: compare.compare("20261115-064817", "20261115-064817", 0.03, False),
    "configs list": lambda store: configs.listed(None, False),
    "configs show": lambda store: configs.show("softmax", None, False),
    "configs verify": lambda store: configs._print(verified(), []),
    "doctor": doctored,
    "ladder": lambda store: cli.say(ladder._table(ladder_rows())),
    "ops": lambda store: ops.ops(None, False, False),
    "plan": lambda store: plan.plan("deepseek-v3", 8, "64", 512, 4096, "h200", None, False),
    "runs": listed_runs,
    "sanitize": lambda store: sanitize._print(findings(), "1 finding"),
    "tune": lambda store: tune._print(tune_result()),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_table_fits_and_keeps_every_figure(verb, width, store, monkeypatch, capsys):
    made = []
    init = Table.__post_init__
    monkeypatch.setattr(Table, "__post_init__", lambda self: (init(self), made.append(self))[0])

    def action():
        with contextlib.suppress(typer.Exit):
            VERBS[verb](store)

    said = terminal.printed(monkeypatch, width, action)
    assert made and all(table.cells for table in made), "rows to print"
    too_long = [line for line in said.splitlines() if len(line) > width]
    assert too_long == [] and "…" not in said and "..." not in said
    together, words = "".join(said.split()), Counter(said.split())
    figures = Counter()
    for table in made:
        for i, column in enumerate(table.columns):
            cells = [row[i].plain for row in table.cells if row[i].plain]
            if column.spare and _left_out(column.name, width, said):
                continue
            # Whole, or a list that goes on in the next line, word by word.
            shown = ("".join(cell.split()) in together or not Counter(cell.split()) - words for cell in cells)
            assert all(shown), column.name
            if column.right:
                figures.update(word for cell in cells for word in cell.split())
    assert not figures - words, "each as often as the rows have it, and whole"


def _left_out(name, width, said):
    """Whether a sentence says that this column is not shown."""
    sentences = re.findall(rf"([^:]*): not shown in {width} columns", " ".join(said.split("\n")))
    return any(re.search(rf"(^|[ ,]){re.escape(name)}(,|$)", sentence) for sentence in sentences)


def test_time_interval_ratio_error_and_status_are_never_spare():
    kept = {"ms", "± 95 %", "95 %", "× torch", "% of torch", "× default", "error", "worst error", "allowed", "status",
            "B over A", "roof µs"}  # fmt: skip
    for columns in (
        bench._COLUMNS,
        check._COLUMNS,
        compare._COLUMNS,
        configs._SHOWN,
        configs._VERIFIED,
        ladder._COLUMNS,
        plan._COLUMNS,
        tune._COLUMNS,
    ):
        assert not [column.name for column in columns if column.spare and column.name in kept]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_command_asks_its_terminal_how_wide_it_is(width):
    """In a process of its own, with stderr on the terminal too."""
    reader, writer = terminal.opened(width)
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    words = [sys.executable, "-m", "tilery", "plan", "llama-8b", "--batch", "16", "--device", "h200"]
    child = subprocess.Popen(words, stdin=writer, stdout=writer, stderr=writer, env=env)
    os.close(writer)
    lines = terminal.plain(terminal.read_all(reader)).splitlines()
    assert child.wait(HANG_S) == 0
    assert 70 < max(map(len, lines)) <= width and not any("…" in line for line in lines)
    assert any("m=16,n=6144,k=4096" in line and "376.8" in line for line in lines) == (width == 120)


@pytest.mark.parametrize(("given", "wanted"), [(None, cli.PIPED_WIDTH), ("90", 90), ("wide", cli.PIPED_WIDTH)])
def test_what_is_no_terminal_is_as_wide_as_columns_says(given, wanted, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    if given is not None:
        monkeypatch.setenv("COLUMNS", given)
    assert cli.console().width == wanted == {None: 120, "90": 90, "wide": 120}[given]


# The mechanism


def lines(width, *shown):
    console = Console(width=width, highlight=False)
    with console.capture() as kept:
        for each in shown:
            console.print(each)
    return kept.get().splitlines()


COLUMNS = (
    heading("op"),
    key("kernel"),
    figure("ms"),
    figure("regs", 1),
    figure("shared", 2),
    fact("status"),
    long("idea"),
)


def test_what_all_rows_share_is_said_once_and_an_empty_column_is_not_shown():
    rows = [("a", "x", "1.5", "", "", "pass", ""), ("a", "y", "2.5", "", "", "pass", "")]
    assert lines(80, Table("T", COLUMNS, rows)) == [
        "T", "all rows: status pass", "  kernel   ms", "a", "  x       1.5", "  y       2.5",
    ]  # fmt: skip
    rows[0] = (*rows[0][:5], "fail", "")
    assert "  kernel   ms  status" in lines(80, Table("T", COLUMNS, rows))


def test_rows_of_one_heading_stand_together():
    rows = [(op, kernel, "1", "", "", "", "") for op, kernel in (("a", "x"), ("b", "x"), ("a", "y"))]
    assert lines(80, Table("T", COLUMNS, rows))[2:] == ["a", "  x        1", "  y        1", "b", "  x        1"]


def test_a_long_text_wraps_then_stands_below_then_spare_columns_go_then_rows_are_paragraphs():
    rows = [("a", "x", "1.5", "32", "1024", "", "one two three four five six seven"),
            ("a", "yy", "2.5", "40", "2048", "", "")]  # fmt: skip
    table = Table("T", COLUMNS, rows)
    assert lines(80, table)[3] == "  x       1.5    32    1024  one two three four five six seven"
    assert lines(54, table)[3:5] == ["  x       1.5    32    1024  one two three four five", " " * 29 + "six seven"]
    assert lines(40, table)[3:5] == ["  x       1.5    32    1024", "    one two three four five six seven"]
    narrow = lines(20, table)
    assert narrow[1:4] == ["  kernel   ms  regs", "a", "  x       1.5    32"]
    said = "shared: not shown in 20 columns; a wider terminal shows them, and --json has all that was measured"
    assert " ".join(narrow).endswith(said)
    paragraphs = lines(12, table)
    assert max(map(len, paragraphs)) <= 12 and "  ms 1.5," in paragraphs and "…" not in "".join(paragraphs)


def test_a_path_is_not_cut_where_a_line_of_its_own_holds_it():
    path = "/some/where/below/another/folder/softmax.json"
    found = lines(60, Table("T", (key("op"), figure("entries"), long("file")), [("softmax", "46", path)]))
    assert found[-1] == f"  {path}"


def test_an_equal_reason_is_said_once_with_all_rows_that_have_it():
    reasons = [
        Reason("skipped", "no GPU", "triton", "softmax"),
        Reason("skipped", "no GPU", "cuda"),
        Reason("skipped", "no GPU", "triton", "matmul"),
        Reason("fail", "no GPU", "triton", "matmul"),
    ]
    assert lines(80, Reasons(reasons)) == [
        "skipped: no GPU", "    cuda", "    triton: softmax; matmul", "fail: no GPU", "    triton: matmul",
    ]  # fmt: skip


def test_a_command_that_wraps_can_be_copied():
    text = f"tilery check softmax --case{tables.JOINED}m=3,n=4096,dtype=bf16 --seed{tables.JOINED}123"
    found = lines(50, Command(text, indent=2))
    assert found == ["  tilery check softmax \\", "    --case m=3,n=4096,dtype=bf16 --seed 123"]


def test_a_word_longer_than_the_line_is_cut_behind_commas():
    assert lines(20, Paragraph("see m=1024,n=4096,dtype=bf16 now")) == ["see", "m=1024,n=4096,", "dtype=bf16 now"]


# The verdict of a bench

MIXED = (("cuda.hopper", 1.25), ("triton", 3.2))


def said_of(*rows):
    return [*bench._verdicts(list(rows)), *bench._warnings(list(rows))]


def test_a_verdict_counts_rows_and_names_what_is_behind():
    case = "m=1024,n=1024,k=1024,dtype=bf16"
    rows = [timed("softmax", "numba", f"m={m}", 1.0, 1.5) for m in range(3)] + [
        timed("matmul", "numba", case, 1.0, 0.47)
    ]
    mean = "1.12 × in geometric mean, 0.47 to 1.50"
    assert said_of(*rows) == [f"numba is ahead of torch in 3 of 4 rows ({mean}); matmul {case} 0.47 × is behind."]
    rows += [timed("softmax", "numba", "m=9", 1.0, 1.0), Row("softmax", "numba", "m=8", "fail", "wrong")]
    assert said_of(*rows)[0].startswith("numba is ahead of torch in 3 of 6 rows, level in 1, failed in 1 (1.10 ×")
    both = [timed("softmax", kernel, "m=1", 1.0, 2.0) for kernel in ("numba", "triton", BASE)]
    assert said_of(*both) == ["numba, triton are ahead of torch in 1 of 1 row."]
    assert said_of(timed("softmax", "numba", "m=1", 1.0)) == [], "nothing to be held against"


def test_a_verdict_of_defaults_is_of_the_op_whatever_kernel_each_case_gets():
    rows = [timed("matmul", kernel, f"m={m}", 1.0, ratio) for m, (kernel, ratio) in enumerate(MIXED)]
    assert bench._verdicts(rows, defaults=True) == [
        "matmul's default is ahead of torch in 2 of 2 rows (2.00 × in geometric mean, 1.25 to 3.20)."
    ]
    assert bench._verdicts(rows) == ["cuda.hopper, triton are ahead of torch in 1 of 1 row."]


def test_a_mean_is_of_rows_from_memory_where_there_are_any():
    rows = [timed("matmul", "triton", f"m={m}", 1.0, ratio) for m, ratio in enumerate((2.0, 8.0, 50.0))]
    rows[2].inputs = "warm"
    assert "(4.00 × in geometric mean, 2.00 to 8.00)" in bench._verdicts(rows)[0]
    for row in rows:
        row.inputs = "warm"
    assert "2.00 to 50.00)" in bench._verdicts(rows)[0]


def test_many_rows_behind_are_counted():
    rows = [timed("softmax", "numba", f"m={m}", 1.0, 0.5 + m / 100) for m in range(5)]
    assert "softmax m=0 0.50 ×, softmax m=1 0.51 ×, softmax m=2 0.52 × and 2 more are behind." in said_of(*rows)[0]


@pytest.mark.parametrize(("ratio", "warns"), [(1.009, False), (0.991, False), (1.011, True), (0.97, True)])
def test_torch_that_differs_from_itself_is_a_warning(ratio, warns):
    said = said_of(timed("softmax", CONTROL, "m=1", 1.0, ratio), timed("softmax", CONTROL, "m=2", 1.0, 1.0))
    assert bool(said) == warns
    if warns:
        assert "in 1 of 2 cases" in said[0] and f"by {abs(ratio - 1):.1%} in softmax m=1" in said[0]


def test_a_short_time_keeps_four_digits():
    assert bench._measures(timed("softmax", "numba", "m=1", 0.00732815))[:2] == ("0.007328", "0.000073")
