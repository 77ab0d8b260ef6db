"""Importing brings nothing heavy, and names that are not there are said to be none."""

import subprocess
import sys

import pytest

import tilery

HEAVY = ("triton", "tilelang", "cupy", "numba", "cuda.tile", "transformers", "matplotlib")


def imported(code, *modules):
    """Which of the modules are there after the code has run, in a process of its own."""
    code = f"{code}\nimport sys; print([name for name in {modules!r} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stderr.strip()


def test_tilery_imports_no_language_and_an_op_none_either():
    assert imported("import tilery; tilery.softmax; tilery.errors.BadInput", *HEAVY) == "[]"


def test_help_imports_no_torch():
    """Which takes seconds; the command line is there at once."""
    code = """
import sys
sys.argv = ["tilery", "--help"]
from tilery.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
"""
    assert imported(code, "torch", "numpy", *HEAVY) == "[]"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tilery' has no attribute 'warp_drive'"):
        _ = tilery.warp_drive
    assert {"rms_norm", "errors", "tune"} <= set(dir(tilery))
