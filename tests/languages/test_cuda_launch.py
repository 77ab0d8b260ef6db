"""How CUDA C++ kernels are launched: what is handed to the driver, without one."""

import ctypes
import threading
from pathlib import Path

import pytest
import torch
from launches import EPS, GPU, STREAM, X, Y, values

from tilery import languages

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.base.errors import CompileFailed
from tilery.base.launch import Launch, Persistent
from tilery.hardware import toolkit
from tilery.languages import cuda_glue, tensor_maps
from tilery.languages.cuda_glue import Kernel, Source

_IDS = cuda_glue.driver.CUlaunchAttributeID
_CLUSTER = _IDS.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PDL = _IDS.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


# One kernel


@pytest.fixture
def launched(monkeypatch):
    """(how, sizes): the configuration, or None of a plain launch; blocks, threads, shared bytes and stream."""
    found = []

    def plain(function, blocks, y, z, threads, ty, tz, shared, stream, arguments, extra):
        found.append((None, (blocks, threads, shared, stream)))
        return (0,)

    def configured(how, function, arguments, extra):
        assert (how.gridDimY, how.gridDimZ, how.blockDimY, how.blockDimZ) == (1, 1, 1, 1)
        found.append((how, (how.gridDimX, how.blockDimX, how.sharedMemBytes, int(how.hStream))))
        return (0,)

    monkeypatch.setattr(cuda_glue.device, "arch", lambda where: ("sm_80", "sm_90")[where.index])
    monkeypatch.setattr(cuda_glue.driver, "cuLaunchKernel", plain)
    monkeypatch.setattr(cuda_glue.driver, "cuLaunchKernelEx", configured)
    return found


def kernel(**more):
    return Kernel(Path("x.cu"), "x", (ctypes.c_void_p,), threads=96, shared=2048, **more)


def test_a_kernel_alone_is_launched_plainly(launched):
    kernel()._submit(None, 1, 7, 5, (0,))
    assert launched == [(None, (7, 96, 2048, 5))]


@pytest.mark.parametrize(
    ("more", "wanted"),
    [({"cluster": 4}, [_CLUSTER]), ({"pdl": True}, [_PDL]), ({"cluster": 2, "pdl": True}, [_CLUSTER, _PDL])],
)
def test_clusters_and_dependent_launches_are_said(launched, more, wanted):
    kernel(**more)._submit(None, 1, 8, 5, (0,))
    ((how, sizes),) = launched
    assert sizes == (8, 96, 2048, 5) and how.numAttrs == len(wanted)
    attributes = {attribute.id: attribute.value for attribute in how.attrs}
    assert list(attributes) == wanted
    if _CLUSTER in attributes:
        size = attributes[_CLUSTER].clusterDim
        assert (size.x, size.y, size.z) == (more["cluster"], 1, 1)
    if _PDL in attributes:
        assert attributes[_PDL].programmaticStreamSerializationAllowed == 1


def test_an_older_device_starts_nothing_early(launched):
    one = kernel(pdl=True)
    for index in (0, 1, 0):
        one._submit(None, index, 8, 5, (0,))
    assert [how.numAttrs for how, _ in launched] == [0, 1, 0]


def test_one_with_pdl_that_does_not_wait_does_not_compile(monkeypatch):
    used = toolkit.Resources(8, 0, 0)
    monkeypatch.setattr(Kernel, "build", lambda self, arch: cuda_glue.Built(b"", "ret;", {}))
    monkeypatch.setattr(toolkit, "resources", lambda code: used)
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "")
    with pytest.raises(CompileFailed, match=r"x has pdl=True, so it must call pdl_wait\(\) before it touches memory"):
        kernel(pdl=True).compile("sm_90")
    assert kernel(pdl=True).compile("sm_80").registers == kernel().compile("sm_90").registers == 8


def test_the_next_launch_has_its_own_grid_and_stream_and_a_thread_its_own_configuration(launched):
    one = kernel(cluster=2)
    one._submit(None, 1, 8, 5, (0,))
    one._submit(None, 1, 16, 6, (0,))
    other = threading.Thread(target=one._submit, args=(None, 1, 4, 7, (0,)))
    other.start()
    other.join()
    assert [sizes for _, sizes in launched] == [(8, 96, 2048, 5), (16, 96, 2048, 6), (4, 96, 2048, 7)]
    first, second, elsewhere = (how for how, _ in launched)
    assert first is second and elsewhere is not first


# A launch

SOURCE = """
struct Rows { const float *x; i64 stride; float eps; };
template <typename T, int WIDTH>
__global__ void scale(const T *x, T *y, float eps, int n) {}
__global__ void grouped(Rows rows, float *y) {}
__global__ void mapped(const __grid_constant__ TensorMap a, float *y) {}
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "scale.cu").write_text(SOURCE)
    return lambda name: Source(tmp_path / "scale.cu", name)


@pytest.fixture
def given(monkeypatch):
    """What reaches the kernels: each with its blocks and arguments. An SM less than two clusters of 4 are free."""
    found = []
    monkeypatch.setattr(Kernel, "launch", lambda self, *what: found.append((self, what)))
    monkeypatch.setattr(Kernel, "resident", lambda self: 7)
    return found


def scaled(source, **more):
    args = {"n": 32, "eps": EPS.then(lambda eps: 2 * eps), "y": Y.at(4), "x": X}
    plain = {"constants": {"WIDTH": 4, "T": torch.float16}, "options": {"threads": 64, "shared": 128}}
    return Launch(source("scale"), **{"grid": 3, "args": args} | plain | more)


def test_arguments_are_given_in_the_kernels_order(source, given):
    run = cuda_glue.bind(scaled(source, pdl=True), GPU)
    assert given == []
    for eps in (0.5, 2.0):
        (x, y, _), _ = (call := values(eps)), run(call)
        made, what = given[-1]
        assert what == (3, x.data_ptr(), y.data_ptr() + 16, 2 * eps, 32)
    assert made.name == "scale<__half, 4>" and made._types == (*[ctypes.c_void_p] * 2, ctypes.c_float, ctypes.c_int)
    assert (made.threads, made.shared, made.cluster, made.pdl) == (64, 128, 1, True)


def test_one_kernel_serves_all_launches_that_are_alike(source, given):
    for more in ({}, {"grid": 9}, {"options": {"threads": 32}}):
        cuda_glue.bind(scaled(source, **more), GPU)(values())
    first, second, other = (made for made, _ in given)
    assert first is second and other is not first and other.shared == 0


@pytest.mark.parametrize(("most", "cluster", "blocks"), [(100, 1, 7), (100, 4, 4), (5, 1, 5), (4, 4, 4)])
def test_a_persistent_grid_has_as_many_blocks_as_run_at_once_in_whole_clusters(source, given, most, cluster, blocks):
    cuda_glue.bind(scaled(source, grid=Persistent(most), cluster=cluster), GPU)(values())
    ((made, what),) = given
    assert what[0] == blocks and made.cluster == cluster


def test_a_struct_is_packed_from_its_fields(source, given):
    args = {"x": X, "stride": 2**40, "eps": EPS, "y": Y}
    run = cuda_glue.bind(Launch(source("grouped"), 1, args, options={"threads": 1}), GPU)
    x, y, _ = call = values(0.25)
    run(call)
    ((made, (blocks, rows, end)),) = given
    layout = cuda_glue.signature_of(source("grouped")).parameters[0].type.layout
    held = layout.from_address(rows.getPtr())
    assert (blocks, held.x, held.stride, held.eps, end) == (1, x.data_ptr(), 2**40, 0.25, y.data_ptr())
    assert made._types == (None, ctypes.c_void_p), "cuda.bindings takes what it does not know by its address"


def test_a_tensor_map_is_made_of_the_tensor_that_comes(source, given, monkeypatch):
    maps = []
    monkeypatch.setattr(tensor_maps, "_made", lambda *how: maps.append(how) or len(maps))
    args = {"a": tensor_maps.of_matrix(X, 2), "y": Y}
    run = cuda_glue.bind(Launch(source("mapped"), 1, args, options={"threads": 1}), GPU)
    calls = [values(), values()]
    for call in calls:
        run(call)
    assert [what for _, what in given] == [(1, i + 1, call[1].data_ptr()) for i, call in enumerate(calls)]
    assert maps == [(call[0].data_ptr(), (8, 4), (8,), (2,), 4) for call in calls]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"args": {"x": X, "y": Y, "eps": EPS, "size": 3}}, "scale takes x, y, eps, n; .* lacks n and names size"),
        ({"constants": {"T": torch.float32}}, "scale has the template parameters T, WIDTH, got T"),
        ({"grid": (2, 3)}, "a grid of CUDA kernels here is one number"),
    ],
)
def test_a_launch_that_does_not_fit_its_kernel_is_named(source, more, message):
    with pytest.raises(AssertionError, match=message):
        cuda_glue.bind(scaled(source, **more), GPU)


def test_a_bound_launch_goes_to_the_current_stream(source, launched, current, monkeypatch):
    monkeypatch.setattr(Kernel, "_load", lambda self, index: None)
    run = cuda_glue.bind(scaled(source), GPU)
    run(values())
    current.index = 1
    run(values())
    assert launched == [(None, (3, 64, 128, STREAM)), (None, (3, 64, 128, STREAM + 1))]
