"""The report: what it sums, what it says before a figure is believed, and a page that holds it all safely."""

import base64
import json
import math
import re
import zlib
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
from made_runs import CPU, GPU, NASTY, SASS, candidate, cell, gpu_rows, put, put_cpu, put_gpu, put_tune, tune_rows
from typer.testing import CliRunner

from tilery.base.errors import BadStore
from tilery.cli import app, main
from tilery.measure.result import Row
from tilery.measure.store import Store, export, import_runs
from tilery.pages import landscape, report, summary

DATA = Path(__file__).parent / "data"
BASE, LIGER = "baseline:torch", "baseline:liger"


class Page(HTMLParser):
    """As a browser parses it: scripts by id, and every address that an element names."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.addresses, self.tags, self._open = {}, [], [], None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "data")]
        self._open = given.get("id", "code") if tag == "script" else None

    def handle_endtag(self, tag):
        self._open = None if tag == "script" else self._open

    def handle_data(self, text):
        if self._open:
            self.scripts[self._open] = self.scripts.get(self._open, "") + text

    @property
    def data(self):
        return strict(self.scripts["data"])


def strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def collected(store, *names):
    return summary.collect(store, list(names) or None)


def page(store, *names):
    return Page(report.render(store, collected(store, *names)))


def notices(store, *names):
    return [notice["text"] for notice in report.page_data(store, collected(store, *names))["notices"]]


# What is said first


def test_notices_say_what_lowers_a_figure(store):
    put_gpu(store, finished=None)
    rows = cell("softmax", "m=16,n=4096,dtype=bf16", 1.0, {"numba": 4.0}, CPU)
    rows[1].ratio, rows[1].ratio_low, rows[1].ratio_high = 1.02, 1.01, 1.03
    put(store, rows, "20260102-120000-bbbbbb")
    said = "\n".join(notices(store, "20260101", "20260102"))
    assert "2 devices: each is shown by itself" in said and "1 run stopped in the middle" in said
    assert "1 row failed" in said and "off by more than 1% in 1 case:" in said
    assert "kept no measured ceilings" in said
    items = [i for n in report.page_data(store, collected(store, "20260102"))["notices"] for i in n["items"]]
    assert f"softmax m=16,n=4096,dtype=bf16 on {CPU}: 1.020×" in items


def test_a_good_run_needs_no_notice(store):
    put(
        store,
        cell("softmax", "m=16,n=4096,dtype=bf16", 1.0, {"triton": 2.0}),
        ceilings={GPU: {"flops": {"bf16": 1e14}}},
    )
    assert notices(store) == []


def test_rows_without_times_make_a_page_that_says_so(store):
    put(store, [Row("softmax", "triton", "m=16,n=4096,dtype=bf16", "compiled", arch="sm_90", registers=32)])
    assert notices(store) == [
        "Nothing was timed: there are no charts, only the table of what was compiled, refused or skipped."
    ]
    assert page(store).data["devices"] == []


# The page


def test_the_page_needs_nothing_but_itself(store):
    put_gpu(store)
    found = page(store)
    assert all(address.startswith(("data:", "#")) for address in found.addresses), found.addresses
    text = report.render(store, collected(store))
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(", text)
    assert set(re.findall(r"https?://[^\s\"'`)]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text and found.scripts.keys() == {"data", "code"}


def test_what_a_compiler_said_is_text_and_ends_no_script(store):
    put_gpu(store)
    found = page(store)
    (failed,) = [row for row in found.data["rows"] if row["status"] == "fail"]
    assert failed["reason"] == NASTY and "img" not in found.tags
    assert "<" not in found.scripts["data"]  # parsers differ in what ends a script; nothing here can
    titled = Page(report.render(store, collected(store), title="<b>%%data%% & more"))
    assert titled.data["title"] == "<b>%%data%% & more" and "b" not in titled.tags


def test_every_file_of_the_page_is_in_it(store):
    put_gpu(store)
    text = report.render(store, collected(store))
    folder = resources.files("tilery.pages") / "report_page"
    names = {file.name for file in folder.iterdir()} - {"page.html"}
    assert {"page.css", "main.js"} <= names
    for name in names:
        content = (folder / name).read_text(encoding="utf-8")
        assert content in text, name
        assert not re.search("</(script|style)|<!--", content), name


def test_code_is_there_once_and_compressed(store):
    put_gpu(store)
    data = page(store).data
    keys = {row["code"] for row in data["rows"] if "code" in row}
    assert len(keys) == 1 == len(data["code"])
    assert zlib.decompress(base64.b64decode(data["code"][keys.pop()]["sass"])).decode() == SASS


def test_what_is_no_number_is_a_word_in_the_page_and_not_in_json(store, tmp_path):
    rows = cell("softmax", "m=16,n=4096,dtype=bf16", 1.0, {"triton": 2.0, "cuda": 3.0, LIGER: 1.5})
    rows[2].error, rows[2].roof, rows[2].ratio = math.inf, -math.inf, math.nan
    rows[3].ms, rows[3].samples = math.nan, (math.nan,) * 6
    put(store, rows)
    data = page(store).data
    triton = next(row for row in data["rows"] if row["kernel"] == "triton")
    assert (triton["error"], triton["roof"]) == ("Infinity", "-Infinity")
    assert triton["ratios"][BASE][0] == 2.0  # from the rounds
    assert not next(row for row in data["rows"] if row["kernel"] == "cuda")["timed"]
    said = strict(CliRunner().invoke(app, ["report", "-o", str(tmp_path / "x.html"), "--json"]).stdout)
    assert "error" not in said["rows"][2] and said["rows"][2]["ms"] == 0.5


def test_a_page_of_every_export_that_is_kept_here(store, tmp_path):
    made = put_gpu(Store(tmp_path / "made.sqlite3"))
    export(Store(tmp_path / "made.sqlite3"), [made], tmp_path / "made.json", "json")
    assert (DATA / "h200.json").stat().st_size < 1e6
    for file in (tmp_path / "made.json", *sorted(DATA.glob("*.json"))):
        import_runs(store, file)
        runs = [run["id"] for run in json.loads(file.read_text())["runs"]]
        data = page(store, *runs).data
        assert data["devices"] and data["peers"][0] == BASE and data["sizes"], file
        assert len(data["rows"]) == sum(len(store.rows(run)) for run in runs)
        assert all(row["intensity"] > 0 for row in data["rows"] if row["timed"]), file


# What was tuned


def test_a_tune_is_a_landscape_and_in_nothing_else(store, tmp_path):
    put_gpu(store), put_tune(store)
    data, alone = page(store, "20260101", "20260103").data, page(store, "20260101").data
    for part in ("rows", "devices", "sizes", "peers", "code"):
        assert data[part] == alone[part], part
    (tune,) = data["tunes"]
    assert alone["tunes"] == [] and (tune["op"], tune["device"], tune["run"]) == ("matmul", GPU, 1)
    assert [row["ms"] for row in tune["rows"] if row["timed"]] == [0.04, 0.05, 0.055, 0.06, 0.08]
    assert len(tune["rows"]) == 9 and tune["fields"] == ["block_m", "warps", "stages"]
    first, last = tune["rows"][0], tune["rows"][-1]
    assert first["rank"] == 0 and first["gain"][0] == 1.5 and first["fields"] == {"block_m": 128, "warps": 8}
    assert last["status"] == "refused" and last["gain"] is None and last["fields"] == {}
    assert notices(store, "20260101", "20260103") == notices(store, "20260101")  # a wrong candidate is no failure
    both = summary.document(collected(store, "20260101", "20260103"))["summary"]
    assert both == summary.document(collected(store, "20260101"))["summary"]
    assert [row.stage for row in summary.all_rows(collected(store, "20260103"))] == ["tune"] * 9


def test_a_page_of_a_tune_alone(store, tmp_path):
    put_tune(store)
    data = page(store).data
    assert notices(store) == [] and data["title"] == f"Tilery on {GPU}" and data["rows"] == []
    assert [one["name"] for one in data["languages"]] == ["triton", "gluon", "cuda"]
    done = CliRunner().invoke(app, ["report", "-o", str(tmp_path / "x.html")])
    assert done.exit_code == 0 and "9 rows of 1 run in" in done.stdout


def test_problems_and_runs_have_landscapes_of_their_own_and_the_last_timing_counts(store):
    again = candidate("triton", "Config(block_m=64, warps=4)", 0.058, default=True)
    other = candidate("triton", "Config(block_m=64, warps=4)", 0.1, case="m=1,n=4096,k=4096,dtype=bf16", rank=0)
    put_tune(store, rows=[*tune_rows(), other, again]), put_tune(store, "20260104-120000-dddddd")
    found = landscape.landscapes(collected(store, "20260103", "20260104").tunes)
    assert [(one.run.id[:8], one.case[:4], len(one.found)) for one in found] == [
        ("20260103", "m=64", 9), ("20260103", "m=1,", 1), ("20260104", "m=64", 9)
    ]  # fmt: skip
    default = next(one for one in found[0].timed if one.row.kernel == "triton" and one.row.default)
    assert (default.row.ms, found[0].winner.row.ms) == (pytest.approx(0.058), 0.04)


def test_times_of_another_job_are_brought_to_the_winners(store):
    """The machine was twice as fast in the second job: its candidate lost by its ratio, whatever its time."""
    rows = [
        candidate("triton", "Config(warps=1)", 0.04, rank=0),
        candidate("triton", "Config(warps=2)", 0.025, reference_ms=0.03),
        candidate("triton", "Config(warps=4)", 0.07),
    ]
    put_tune(store, rows=rows)
    (tune,) = page(store).data["tunes"]
    assert [(row["fields"]["warps"], row["ms"]) for row in tune["rows"]] == [(1, 0.04), (2, 0.05), (4, 0.07)]
    assert tune["rows"][1]["ms_low"] == pytest.approx(0.99 * 0.05) and tune["rows"][1]["gain"][0] == 1.2
    assert [row.ms for row in summary.all_rows(collected(store))] == [0.04, 0.025, 0.07]  # as it was measured


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("Config(block_m=64, how='split', fast=True)", {"block_m": 64, "how": "split", "fast": "True"}),
        ("block_m=64,stages=-1", {"block_m": 64, "stages": -1}),
        ('{"block_m": 64}', {"block_m": 64}),
        ("Config()", {}),
        ("", {}),
    ],
)
def test_the_fields_of_a_config(words, fields):
    assert landscape.config(Row("matmul", "triton", "", "pass", config=words)) == fields


# The verb


def test_the_verb_writes_the_last_run_and_says_so(store, tmp_path):
    put_gpu(store), put_cpu(store)
    file = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", "-o", str(file), "--title", "Mine"])
    assert done.exit_code == 0 and "3 rows of 1 run in" in done.stdout
    assert Page(file.read_text()).data["title"] == "Mine"
    done = CliRunner().invoke(app, ["report", "20260101", "last", "-o", str(file), "--json"])
    said = strict(done.stdout)
    assert said["schema"] == 1 and said["machine"] and len(said["rows"]) == len(gpu_rows()) + 3
    assert said["file"] == str(file) and len(said["runs"]) == 2 and said["summary"][CPU]["mean"] == pytest.approx(4.0)


def refused(capsys, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["tilery", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("verb", ["report", "plot"])
def test_without_a_run_the_verb_says_what_makes_one(store, verb, capsys, monkeypatch):
    assert "`tilery bench` makes one" in refused(capsys, monkeypatch, verb)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("report", "nothing"), "RUN must be an id, .*, got 'nothing'"),
        (("report", "-o", "/no/such/folder/x.html"), "must lie in a folder that is there, got /no/such/folder"),
        (("report", "-o", "/"), "/ cannot be written: Is a directory"),
        (("plot", "nothing"), "RUN must be an id, .*, got 'nothing'"),
    ],
)
def test_bad_usage_exits_2(store, words, message, capsys, monkeypatch):
    put_gpu(store)
    assert re.search(message, refused(capsys, monkeypatch, *words))


def test_a_store_that_cannot_be_read_is_named_and_left(store, capsys, monkeypatch):
    store.path.write_bytes(b"SQLite format 3\x00" + b"x" * 5000)
    assert "cannot be read" in refused(capsys, monkeypatch, "report")
    assert store.path.read_bytes().endswith(b"x" * 5000)


def test_a_row_that_cannot_be_read_is_an_error(store):
    run = put_gpu(store)
    with store._open() as db:
        db.execute("UPDATE rows SET data = '{\"op\": ' WHERE n = 2")
    with pytest.raises(BadStore, match=f"a row of run {run.id} cannot be read"):
        collected(store)


def test_code_that_is_gone_or_broken_is_an_error(store):
    put_gpu(store)
    with store._open() as db:
        db.execute("UPDATE code SET data = ?", (b"no zlib",))
    with pytest.raises(BadStore, match=r"code .* cannot be read"):
        page(store)
    with store._open() as db:
        db.execute("DELETE FROM code")
    with pytest.raises(BadStore, match="has no code"):
        page(store)
