"""The README says what is so."""

import csv
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from tilery.cli import app
from tilery.core.op import REGISTRY

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_test_command_of_the_readme():
    first, second = re.findall(r"```bash\n(.+)\n```", README)
    assert "tilery bench " in first and second in (ROOT / ".ci" / "run").read_text().splitlines()


def test_pictures_and_links_are_there():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_op_is_in_the_document_as_its_contract_has_it():
    from typer.testing import CliRunner

    made = CliRunner().invoke(app, ["ops", "--markdown"]).stdout
    assert (ROOT / "docs" / "ops.md").read_text() == made, "tilery ops --markdown > docs/ops.md"
    forwards = [name for name in REGISTRY if not name.endswith("_backward")]
    assert not [name for name in forwards if f"`{name}`" not in README], "the README names every op"


def test_every_verb_is_listed():
    verbs = {command.name for command in [*app.registered_commands, *app.registered_groups]}
    assert verbs == set(re.findall(r"^tilery (\w+)", README, re.MULTILINE))


def test_the_program_in_the_readme_runs():
    (code,) = re.findall(r"```python\n(.+?)```", README, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code.replace("8192", "64")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the example runs its kernel, which builds with nvcc")
def test_the_example_prints_its_source_without_a_gpu():
    pytest.importorskip("tilelang", reason="pip install 'tilery[tilelang]'")
    done = subprocess.run([sys.executable, str(ROOT / "examples" / "gemm.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "__global__" in done.stdout and "There is no CUDA GPU here" in done.stdout


def test_the_small_transformer_trains_as_torchs_does(tmp_path):
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(ROOT / "examples" / "train_small.py"), "--steps", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "right" in done.stdout, done.stdout + done.stderr
    with open(tmp_path / "train_small.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    first, last = rows[0], rows[-1]
    assert [row["step"] for row in rows] == ["1", "2", "3"] and float(last["Tilery"]) < float(first["Tilery"]) - 0.5
    assert "<svg" in (tmp_path / "train_small.svg").read_text()


def test_a_patched_model_trains_as_it_does_in_torch(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    command = [sys.executable, str(ROOT / "examples" / "finetune.py"), "--steps", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "right" in done.stdout, done.stdout + done.stderr
    with open(tmp_path / "finetune.csv", newline="") as file:
        first, _, last = csv.DictReader(file)
    assert float(last["Tilery"]) < float(first["Tilery"]) - 0.5
    assert float(first["Tilery MiB"]) < float(first["torch MiB"])
    assert "<svg" in (tmp_path / "finetune.svg").read_text()
