"""Every measured figure of README and docs is one of results/, or the text says that it is none."""

import pytest

import figures
import measured
import write_figures
from tilery.core.op import REGISTRY
from tilery.measure.source_hash import source_hash


@pytest.mark.parametrize("document", figures.DOCUMENTS, ids=lambda path: path.name)
def test_figures_are_those_of_the_results(document):
    wrong = figures.wrong(document.read_text(encoding="utf-8"))
    assert not wrong, f"{document.name}: CONTRIBUTING.md, Figures in docs, says how figures are written\n" + "\n".join(
        wrong
    )


def test_every_file_of_results_is_described():
    text = (measured.RESULTS / "README.md").read_text(encoding="utf-8")
    assert not [path.name for path in measured.RESULTS.glob("*.csv") if f"| {path.name} |" not in text]


def test_a_table_without_a_source_is_said_to_be_not_yet_re_measured():
    text = (measured.RESULTS / "README.md").read_text(encoding="utf-8")
    for path in measured.RESULTS.glob("*.csv"):
        current = all(one.is_current for one in measured.results(path.name))
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {path.name} |")]
        assert current or line.endswith(("not by the protocol |", "no `source` |", "a screen |")), line


def test_a_row_that_was_not_timed_has_no_kernel_to_be_current():
    refused = {"op": "softmax", "kernel": "triton", "status": "refused", "ms": "", "source": ""}
    assert measured.Result("x.csv", refused).is_current
    assert not measured.Result("x.csv", refused | {"status": "pass", "ms": 0.1}).is_current


# What is found, on a results file of two rows.

ROWS = """\
op,kernel,case,status,reason,device,error,ms,gbps,tflops,ratio,ratio_low,ratio_high,source
softmax,baseline:torch,"m=16,n=64",pass,,GPU,0.1,0.004,1,1,1,1,1,
softmax,triton,"m=16,n=64",pass,,GPU,0.1,0.002,1,1,2.0,1.9,2.1,HASH
softmax,baseline:torch,"m=32,n=64",pass,,GPU,0.1,0.005,1,1,1,1,1,
softmax,triton,"m=32,n=64",pass,,GPU,0.1,0.01,1,1,0.5,0.4,0.6,HASH
"""
TABLE = """
<!-- from: x.csv op=softmax
row: {m}, {n}
column: ours = us; kernel=triton; name kernel
column: torch = us ratio; kernel=baseline:torch
column: × = ratio; kernel=triton; bold ratio_high<0.98 -->

| M, N | ours | × |
|---|---|---|
| 16, 64 | 2.0 triton | 2.00 |
| 32, 64 | 10.0 triton | **0.50** |
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Writes x.csv, with the kernel's own hash if none is given."""
    monkeypatch.setattr(measured, "RESULTS", tmp_path)

    def write(source=None, name="x.csv"):
        now = source_hash(REGISTRY["softmax"], "triton")
        (tmp_path / name).write_text(ROWS.replace("HASH", now if source is None else source))
        measured.results.cache_clear()

    write()
    yield write
    measured.results.cache_clear()


@pytest.mark.parametrize(
    "text",
    [
        TABLE,
        "It is 1.00 ×<!-- mean x.csv kernel=triton --> torch.",
        "From 0.50<!-- least x.csv kernel=triton --> to **2.0**<!-- most x.csv kernel=triton --> times.",
        "Over 2<!-- count x.csv kernel=triton --> rows.",
        "It takes 2.0 µs<!-- value x.csv us kernel=triton m=16 -->.",
        "It takes 10 µs<!-- value x.csv ms*1000 kernel=triton m>16 -->.",
        "## A\n\n<!-- scan -->\n\nTimes of a scan: 3.7 µs.\n\n### B\n\n4 % more.",
        "In turns of 20 ms with torch 2.11.0, by more than 2 %, with a 95 % interval, at 16 × 64.",
        "Printed in code: `--turn-ms 10.5`.",
    ],
)
def test_right_figures_pass(made, text):
    assert figures.wrong(text) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TABLE.replace("| 2.0 triton", "| 2.1 triton"), "2.1 is printed, results/x.csv has us = 2"),
        (TABLE.replace("2.00", "2.01"), "2.01 is printed, results/x.csv has ratio = 2"),
        (TABLE.replace("**0.50**", "0.50"), "expected bold"),
        (TABLE.replace("2.00", "**2.00**"), "expected no bold"),
        (TABLE.replace("16, 64 |", "17, 64 |"), "expected one row of results/x.csv"),
        (TABLE.replace("| 16, 64", "| all"), "expected a row: of the from: comment to match"),
        (TABLE.replace("| × |", "| times |"), "expected a column: of the from: comment to match"),
        (TABLE.replace("| 2.0 triton", "| 2.0 (1.0) triton"), "expected 1 numbers"),
        (TABLE.replace("2.0 triton", "2.0 cuda"), "'cuda' is printed, results/x.csv has kernel = triton"),
        (TABLE.replace("x.csv", "y.csv"), "expected a file of results/, got 'y.csv'"),
        (TABLE.replace("= us; kernel=triton", "= us; kernel"), "expected a condition such as"),
        (TABLE.replace("ours = us;", "ours = ns;"), "expected a number in the column ns"),
        ("It is 1.01 ×<!-- mean x.csv kernel=triton --> torch.", "1.01 is printed, results/x.csv has 1 "),
        ("Over 3<!-- count x.csv kernel=triton --> rows.", "3 is printed, results/x.csv has 2 "),
        ("It is 2.0<!-- value x.csv kernel=triton -->.", "expected one row"),
        ("It is 2.0<!-- least x.csv kernel=cuda -->.", "expected rows for least x.csv kernel=cuda, got 0"),
        ("It is fast<!-- mean x.csv kernel=triton -->.", "expected a number right before each comment"),
        ("It is 1.19 × torch.", "expected the source of 1.19"),
        ("It takes 3 µs.", "expected the source of 3"),
        ("It is 7 % faster, at 300 TFLOP/s.", "expected the source of 300"),
        ("| M | µs |\n|---|---|\n| 1 | 3.5 |", "expected the source of 3.5"),
        ("## A\n\n<!-- scan -->\n\nIt takes 3.7 µs.", "expected the words of the mark 'scan'"),
        ("## A\n\n<!-- scan -->\n\nA scan.\n\n## B\n\nIt takes 3.7 µs.", "expected the source of 3.7"),
    ],
)
def test_wrong_figures_are_found(made, text, why):
    assert any(why in found for found in figures.wrong(text)), figures.wrong(text)


@pytest.mark.parametrize("source", ["", "0123456789ab"])
@pytest.mark.parametrize("text", [TABLE, "It is 1.00 ×<!-- mean x.csv kernel=triton --> torch."])
def test_a_row_of_another_kernel_than_there_is_now_must_be_marked(made, source, text):
    made(source)
    assert all("was measured with another softmax triton than there is now" in why for why in figures.wrong(text))
    assert figures.wrong(text)
    assert figures.wrong(f"## A\n\n<!-- not yet re-measured -->\n\nNot yet re-measured.\n\n{text}") == []
    assert "expected the words" in figures.wrong(f"## A\n\n<!-- not yet re-measured -->\n\n{text}")[0]


def test_a_row_of_a_peer_has_no_source(made):
    made("")
    assert figures.wrong("It takes 4.0 µs<!-- value x.csv us kernel=baseline:torch m=16 -->.") == []


def test_a_screen_claims_nothing(made):
    made(name="x-screen.csv")
    text = "It is 1.00 ×<!-- mean x-screen.csv kernel=triton --> torch."
    assert "is a screen, which claims nothing" in figures.wrong(text)[0]
    assert figures.wrong(f"## A\n\n<!-- scan -->\n\nIn a screen. {text}") == []


# Figures that are written.


@pytest.mark.parametrize("document", figures.DOCUMENTS, ids=lambda path: path.name)
def test_writing_changes_no_figure_that_is_right(document):
    text = document.read_text(encoding="utf-8")
    assert write_figures.written(text) == text


def test_figures_are_written_with_the_digits_and_the_bold_face_that_they_need(made):
    stale = TABLE.replace("2.0 triton | 2.00", "7.1 cuda | **9.99**")
    stale = stale.replace("10.0 triton | **0.50**", "1.0 triton | 1.11")
    assert stale != TABLE and figures.wrong(stale)
    text = "1.23 ×<!-- mean x.csv kernel=triton --> over 7<!-- count x.csv kernel=triton --> rows, 9.99."
    right = "1.00 ×<!-- mean x.csv kernel=triton --> over 2<!-- count x.csv kernel=triton --> rows, 9.99."
    assert write_figures.written(f"{stale}\n{text}") == f"{TABLE}\n{right}"


@pytest.mark.parametrize(
    ("value", "like", "said"),
    [(12.345, "9.9", "12.3"), (1234.5, "12,000", "1,234"), (0.000123, "1.0e-3", "1.2e-4"), (1e12, "1.5e3", "1.0e12")],
)
def test_a_number_keeps_its_form(value, like, said):
    assert write_figures.printed(value, like) == said
