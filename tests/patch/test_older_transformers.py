"""The tests of patched models pass with older versions of transformers too, installed beside this environment."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.17.0", "5.22.0"])
def test_patches_are_right_with(version, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(tmp_path)]
    subprocess.run([*install, "--no-deps", f"transformers=={version}"], check=True)
    (metadata,) = tmp_path.glob("transformers-*.dist-info/METADATA")
    hub = re.search(r"^Requires-Dist: (huggingface-hub[^\n;]*)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    subprocess.run([*install, hub[1].strip()], check=True)  # the one requirement whose versions exclude each other
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")} | {"PYTHONPATH": paths}
    found = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    assert subprocess.run(found, env=env, capture_output=True, text=True, check=True).stdout.strip() == version
    tests = [sys.executable, "-m", "pytest", str(HERE), "-p", "no:cacheprovider"]
    run = subprocess.run(tests, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
    assert re.search(r"\b\d{3} passed", run.stdout), run.stdout[-400:]
