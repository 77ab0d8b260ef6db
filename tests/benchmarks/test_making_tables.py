"""The script that makes the tables of results/ anew."""

import csv
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = """
```
tilery bench softmax -b numba --peers torch --screen --case m=8,n=64,dtype=fp32 --csv results/x.csv
tilery bench softmax -b numba --peers torch --screen --case m=9,n=64,dtype=fp32 --csv results/x.csv   # beside it
tilery bench softmax   # writes nothing
python benchmarks/tables.py --list --csv results/list.csv
```
"""


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_commands_are_those_of_the_page_that_write_a_file(tables):
    found = tables.tables(PAGE)
    assert [table.file for table in found] == ["x.csv", "x.csv", "list.csv"]
    assert [table.continues for table in found] == [True, True, False]
    assert found[0].command(Path("/made"), 2.5)[-5:] == ["--csv", "/made/x.csv", "--add", "--minutes", "2.50"]
    assert found[1].command(Path("/made"), None)[-3:] == ["--csv", "/made/x.csv", "--add"]
    assert found[2].command(Path("/made"), 2.5)[-3:] == ["--list", "--csv", "/made/list.csv"]


def test_every_table_of_an_h200_has_a_command(tables):
    made = {table.file for table in tables.tables(tables.PAGE.read_text(encoding="utf-8"))}
    there = {path.name for path in (ROOT / "results").glob("*-h200.csv")}
    otherwise = {"before-after-h200.csv", "product-configs-h200.csv", "rows-scan-h200.csv", "control-h200.csv"}
    assert there - otherwise <= made


@pytest.mark.slow
def test_tables_are_joined_and_what_is_there_is_not_made_again(tables, tmp_path, capfd):
    chosen = tables.tables(PAGE)[:2]
    assert tables.make(chosen, tmp_path, minutes=0) == 0 and not (tmp_path / "x.csv").exists()
    assert capfd.readouterr().out.count("no time is left for: tilery bench softmax") == 2
    assert tables.make(chosen, tmp_path, minutes=None) == 0
    text = (tmp_path / "x.csv").read_text()
    cases = [line["case"] for line in csv.DictReader(text.splitlines()) if line["kernel"] == "numba"]
    assert cases == ["m=8,n=64,dtype=fp32", "m=9,n=64,dtype=fp32"]
    assert tables.make(chosen[:1], tmp_path, minutes=5.0) == 0
    assert (tmp_path / "x.csv").read_text() == text
    log = (tmp_path / "made.md").read_text().splitlines()
    assert len(log) == 3 and all("minutes, exit code 0: `tilery bench" in line for line in log)


def test_a_command_that_fails_is_counted_and_the_next_one_runs(tables, tmp_path):
    wrong = tables.tables(PAGE.replace("softmax -b numba", "softmaxx", 1))[:2]
    assert tables.make(wrong, tmp_path, minutes=None) == 1
    assert "m=9" in (tmp_path / "x.csv").read_text()
    assert "exit code 2" in (tmp_path / "made.md").read_text()
