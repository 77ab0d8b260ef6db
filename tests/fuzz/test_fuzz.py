"""Random calls of every op and kernel that runs here: `--fuzz-calls=1000` for more, `--fuzz-seed` for the same."""

import pytest

from fuzz.child import Child
from fuzz.fuzz import fuzz
from fuzz.run import BAD_INPUT, NOT_DRAWN
from tilery.core.op import REGISTRY
from tilery.languages import language
from tilery.measure.place import place

GPU_ALONE = ("gluon", "tilelang", "cutile", "cupy", "numba_cuda")
KERNELS = [
    pytest.param(
        op, kernel, id=f"{op.name}-{kernel}", marks=pytest.mark.gpu if language(kernel).name in GPU_ALONE else ()
    )
    for op in REGISTRY.values()
    for kernel in op.kernels
]
ENOUGH = 20  # calls, from which on it is told how many of them were refused


@pytest.fixture(scope="session")
def child():
    with Child() as started:
        yield started


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_random_calls(op, kernel, child, request):
    if (where := place(op, kernel)).device is None:
        pytest.skip(where.reason)  # a language that is not installed, an architecture that it does not build for
    seed, calls = (request.config.getoption(name) for name in ("--fuzz-seed", "--fuzz-calls"))
    report = fuzz(op, kernel, seed, calls, child)
    again = (
        f"all of it again: PYTHONPATH=tests python -m fuzz {op.name} --kernel {kernel} --seed {seed} --calls {calls}"
    )
    assert not report.failures, f"{report.told}\n{again}"
    ran = sum(report.kinds.values())
    drawn_badly = sum(count for why, count in report.reasons.items() if why.startswith((NOT_DRAWN, BAD_INPUT)))
    assert ran < ENOUGH or drawn_badly <= ran / 2, f"most calls are refused: {report.reasons.most_common(3)}\n{again}"
