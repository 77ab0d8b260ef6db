"""Importing is quick and brings nothing heavy."""

import subprocess
import sys
import time

import pytest

HEAVY = ("triton", "tilelang", "cupy", "numba", "cuda.tile", "transformers", "matplotlib")


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_tilery_imports_no_language():
    code = f"import tilery, sys; tilery.rms_norm; print([m for m in {HEAVY} if m in sys.modules])"
    assert run(code).strip() == "[]"


def test_tilery_costs_little_beyond_torch():
    code = "import time, torch; s = time.perf_counter(); import tilery; tilery.rms_norm; print(time.perf_counter() - s)"
    assert min(float(run(code)) for _ in range(2)) < 2.0


def test_help_is_quick():
    def seconds():
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "tilery", "--help"], check=True, capture_output=True)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(8)) < 1.0  # 0.4 on an idle machine; importing torch alone takes 3


def test_help_does_not_import_torch():
    assert run("import sys, tilery.cli; print('torch' in sys.modules)").strip() == "False"


def test_an_unknown_name_is_an_attribute_error():
    import tilery

    with pytest.raises(AttributeError, match="module 'tilery' has no attribute 'warp_drive'"):
        _ = tilery.warp_drive
    assert (
        "rms_norm" in dir(tilery)
        and run("import tilery; print(tilery.base.errors.BadInput.__name__)").strip() == "BadInput"
    )
