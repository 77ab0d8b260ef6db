"""Results that Numba kernels move past the caches, as large ones are: small ones are made to go the same way here."""

import pytest

from tilery import languages
from tilery.base.spec import case
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.measure.check import check, poisoned

if why := languages.missing("numba"):
    pytest.skip(why, allow_module_level=True)

from tilery.languages import numba_stream
from tilery.languages.numba_elements import STORAGE
from tilery.languages.numba_stream import BLOCK, LINE
from tilery.ops.rows.numba_rows import Config

ROWS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward", "cast", "transpose")
SPECIAL = ("softmax", "log_softmax", "cast", "transpose")  # whose inputs may be asked to hold NaN and infinities


def streamed(op, problem):
    """Whether the kernel would move the result of this case past the caches."""
    (out,) = op.output_specs(call_for(op, problem, "cpu"))
    rows = out.nbytes // out.dtype.itemsize // out.shape[-1]
    address = poisoned(out).data_ptr()
    return numba_stream.too_large(address, rows, out.shape[-1], numba_stream.LEAST, STORAGE[out.dtype])


def problem_of(name, line, dtype, **more):
    """`line` elements of the result's last dimension, which is the first one of what is transposed."""
    sizes = {"m": line, "n": 37} if name == "transpose" else {"m": 7, "n": line}
    return case(**sizes, dtype=dtype, **more)


def require_right(name, problem, config=None, moved=True):
    """The result is right, and goes past the caches or not as it should."""
    op = REGISTRY[name]
    assert streamed(op, problem) == moved
    assert check(op, "numba", problem, "cpu", config=config).errors


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(numba_stream, "LEAST", 0)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("columns", [64, BLOCK, BLOCK + 32, 3 * BLOCK - 32])
@pytest.mark.parametrize("name", ROWS)
def test_whole_lines_are_moved(always, name, columns, dtype, parallel):
    """Shorter than a block, one block, and blocks of which the last is not full."""
    require_right(name, problem_of(name, columns, dtype), Config(parallel))


@pytest.mark.parametrize("layout", ["padded", "misaligned", "far"])
@pytest.mark.parametrize("name", ROWS)
def test_inputs_may_lie_anywhere(always, name, layout):
    require_right(name, problem_of(name, BLOCK + 32, "fp16", layout=layout))


@pytest.mark.parametrize("special", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", SPECIAL)
def test_nan_and_infinities_come_through(always, name, special):
    require_right(name, problem_of(name, BLOCK + 32, "fp32", special=special))


@pytest.mark.parametrize(("dtype", "to"), [("fp32", "e4m3"), ("e5m2", "fp32"), ("bf16", "fp32")])
def test_casts_between_sizes_of_elements(always, dtype, to):
    require_right("cast", case(m=5, n=BLOCK + 64, dtype=dtype, to=to))


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_do_not_begin_on_lines_are_not_moved(always, name):
    require_right(name, problem_of(name, LINE + 1, "fp32"), moved=False)


@pytest.mark.parametrize("name", ROWS)
def test_a_large_result_is_moved(name):
    """33 MiB, with the limit as it is shipped; the number of rows is odd."""
    sizes = {"m": 4096, "n": 2113} if name == "transpose" else {"m": 2113, "n": 4096}
    op, problem = REGISTRY[name], case(**sizes, dtype="fp32")
    assert streamed(op, problem) and not streamed(op, problem_of(name, BLOCK, "fp32"))
    assert check(op, "numba", problem, "cpu").errors
