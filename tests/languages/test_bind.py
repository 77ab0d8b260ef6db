"""How CuPy, Numba-CUDA, cuTile and TileLang are given a call's values: on stubs, without a GPU."""

import importlib
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from launches import EPS, GPU, STREAM, X, Y, values

from tilery import languages
from tilery.base.launch import Launch


def glue(language):
    """The language's glue; the test is skipped where the language is not installed."""
    if why := languages.missing(language):
        pytest.skip(why)
    return importlib.import_module(f"tilery.languages.{language}_glue")


ARGS = {"n": 32, "eps": EPS.then(lambda eps: 2 * eps), "y": Y.at(4), "x": X}  # not in the kernel's order


class CuPy:
    SOURCE = "template <typename T, int WIDTH> __global__ void scale(const T *x, T *y, float eps, i64 n) {}"

    def __init__(self, monkeypatch):
        self.glue, self.log = glue("cupy"), []
        monkeypatch.setattr(self.glue, "_stream", lambda handle: f"stream {handle}")
        monkeypatch.setattr(self.glue, "_function", self.function)
        self.kernel, self.constants, self.options = (
            self.glue.Template(self.SOURCE, "scale"), {"WIDTH": 4, "T": torch.float16}, {"threads": 64},
        )  # fmt: skip

    def function(self, source, name, index):
        assert (source, name) == (self.SOURCE, "scale<__half, 4>")

        def launch(grid, threads, arguments, stream):
            assert (grid, threads) == ((3,), (64,))
            self.log.append((index, stream, arguments))

        return launch


class NumbaCuda:
    constants, options = {}, {}

    def __init__(self, monkeypatch):
        self.glue, self.log = glue("numba_cuda"), []
        monkeypatch.setattr(self.glue, "_stream", lambda handle: f"stream {handle}")
        monkeypatch.setattr(self.glue, "_loaded", lambda kernel, index: (kernel, index))
        monkeypatch.setattr(self.glue, "core_launch", self.launch)

        def scale(x, y, eps, n):
            pass

        function = SimpleNamespace(py_func=scale, __name__="scale")
        self.kernel = self.glue.Kernel(function, None, threads=64)

    def launch(self, stream, shape, loaded, *arguments):
        kernel, index = loaded
        assert kernel is self.kernel and (shape.grid, shape.block) == ((3, 1, 1), (64, 1, 1))
        self.log.append((index, stream, arguments))


class CuTile:
    constants, options = {"TILE": 16}, {"occupancy": 2}

    def __init__(self, monkeypatch):
        self.glue, self.log = glue("cutile"), []
        monkeypatch.setattr(self.glue.ct, "launch", self.launch)

        def scale(x, y, eps, n, TILE):
            pass

        self.hinted = SimpleNamespace()
        self.kernel = Hinted(scale, self.hinted)

    def launch(self, stream, grid, kernel, arguments):
        assert grid == (3,) and kernel is self.hinted and arguments[-1] == 16
        self.log.append((stream - STREAM, f"stream {stream}", arguments[:-1]))


class Hinted:
    """A kernel that knows one combination of hints."""

    def __init__(self, function, hinted):
        self._pyfunc, self._hinted = function, hinted

    def replace_hints(self, **hints):
        assert hints == {"occupancy": 2}
        return self._hinted


@pytest.fixture(params=[CuPy, NumbaCuda, CuTile], ids=["cupy", "numba_cuda", "cutile"])
def language(request, monkeypatch, current):
    return request.param(monkeypatch)


def launch(language, **more):
    given = {"grid": 3, "args": ARGS, "constants": language.constants, "options": language.options}
    return Launch(language.kernel, **given | more)


def plain(argument):
    """A tensor by its address, as most languages are given it."""
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def test_arguments_are_given_in_the_kernels_order_on_the_current_stream(language, current):
    run = language.glue.bind(launch(language), GPU)
    assert language.log == []
    for index, eps in ((0, 0.5), (1, 2.0)):
        current.index = index
        storage = torch.randn(36)
        x, y, _ = call = values(eps)[0], storage[:32].view(4, 8), eps  # y is seen from its fifth element on
        run(call)
        where, stream, arguments = language.log[-1]
        assert (where, stream) == (index, f"stream {STREAM + index}")
        assert tuple(map(plain, arguments)) == (x.data_ptr(), y.data_ptr() + 16, 2 * eps, 32)


def test_a_launch_that_does_not_fit_its_kernel_is_named(language):
    wrong = {"size" if name == "n" else name: value for name, value in ARGS.items()}
    with pytest.raises(AssertionError, match=r"scale takes x, y, eps, n.*size"):
        language.glue.bind(launch(language, args=wrong), GPU)


@pytest.mark.parametrize("kind", [NumbaCuda, CuTile], ids=["numba_cuda", "cutile"])
def test_a_grid_is_one_number(kind, monkeypatch, current):
    language = kind(monkeypatch)
    with pytest.raises(AssertionError, match="is one number"):
        language.glue.bind(launch(language, grid=(3, 1)), GPU)


# TileLang builds a function of tensors for its constants, and checks shapes and strides itself.


@pytest.fixture
def tilelang(monkeypatch):
    """The glue, whose compiler makes of a prim_func something that writes down what it is given."""
    made = SimpleNamespace(glue=glue("tilelang"), built=[], log=[])

    def compile(function, target, execution_backend):
        made.built.append((function.constants, target))
        run = lambda *arguments: made.log.append(arguments)  # noqa: E731
        return SimpleNamespace(adapter=SimpleNamespace(get_exportable_executable=lambda: {"main": run}))

    monkeypatch.setattr(made.glue.tilelang, "compile", compile)
    monkeypatch.setattr(made.glue, "_target", lambda arch: arch)
    monkeypatch.setattr(made.glue, "_present", lambda index: "sm_90")
    made.glue._loaded.cache_clear()
    yield made
    made.glue._loaded.cache_clear()


class Var(NamedTuple):
    name: str


class Prim:
    """As a prim_func: parameters by name, of which tensors have buffers."""

    def __init__(self, **constants):
        self.constants, self.params = constants, [Var("x_handle"), Var("y_handle"), Var("n")]
        self.buffer_map = {Var("x_handle"): Var("x"), Var("y_handle"): Var("y")}


def test_tilelang_is_given_tensors_and_builds_once_for_its_constants(tilelang):
    def scale(block, dtype):
        return Prim(block=block, dtype=dtype)

    def bound(**constants):
        args = {"x": X, "y": Y.view((8,), (1,), 8), "n": 32}
        return tilelang.glue.bind(Launch(scale, 1, args, constants=constants), GPU)

    runs = [bound(block=8, dtype="float32"), bound(block=8, dtype="float32"), bound(block=16, dtype="float32")]
    assert tilelang.built == []
    for run in runs:
        x, y, _ = call = values()
        run(call)
        given = tilelang.log[-1]
        assert given[0] is x and torch.equal(given[1], y[1]) and given[2] == 32
    assert [constants["block"] for constants, _ in tilelang.built] == [8, 16]
    assert {arch for _, arch in tilelang.built} == {"sm_90"}


def test_tilelang_takes_arguments_in_the_order_of_its_function(tilelang):
    run = tilelang.glue.bind(Launch(lambda: Prim(), 1, {"y": Y, "x": X, "n": 32}), GPU)
    with pytest.raises(AssertionError, match="takes x, y, n, the launch has y, x, n"):
        run(values())
