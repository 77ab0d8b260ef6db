"""How CUDA C++ kernels are launched: what is handed to the driver, without one."""

import threading
from pathlib import Path

import pytest

from tilery import languages

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.base.errors import CompileFailed
from tilery.languages import cuda_glue
from tilery.languages.cuda_glue import Kernel

_IDS = cuda_glue.driver.CUlaunchAttributeID
_CLUSTER = _IDS.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_EARLY = _IDS.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


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
    return Kernel(Path("x.cu"), "x", "P", threads=96, shared=2048, **more)


def test_a_kernel_alone_is_launched_plainly(launched):
    kernel()._submit(None, 1, 7, 5, (0,))
    assert launched == [(None, (7, 96, 2048, 5))]


@pytest.mark.parametrize(
    ("more", "wanted"),
    [({"cluster": 4}, [_CLUSTER]), ({"early": True}, [_EARLY]), ({"cluster": 2, "early": True}, [_CLUSTER, _EARLY])],
)
def test_clusters_and_early_starts_are_said(launched, more, wanted):
    kernel(**more)._submit(None, 1, 8, 5, (0,))
    ((how, sizes),) = launched
    assert sizes == (8, 96, 2048, 5) and how.numAttrs == len(wanted)
    attributes = {attribute.id: attribute.value for attribute in how.attrs}
    assert list(attributes) == wanted
    if _CLUSTER in attributes:
        size = attributes[_CLUSTER].clusterDim
        assert (size.x, size.y, size.z) == (more["cluster"], 1, 1)
    if _EARLY in attributes:
        assert attributes[_EARLY].programmaticStreamSerializationAllowed == 1


def test_an_older_device_starts_nothing_early(launched):
    one = kernel(early=True)
    for index in (0, 1, 0):
        one._submit(None, index, 8, 5, (0,))
    assert [how.numAttrs for how, _ in launched] == [0, 1, 0]


def test_one_that_starts_early_and_does_not_wait_does_not_compile(monkeypatch):
    used = cuda_glue.cubin.Resources(8, 0, 0)
    monkeypatch.setattr(Kernel, "build", lambda self, arch: cuda_glue.Built(b"", "ret;", {}))
    monkeypatch.setattr(cuda_glue.cubin, "resources", lambda code: used)
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "")
    with pytest.raises(CompileFailed, match=r"x starts early, so it must call pdl_wait\(\)"):
        kernel(early=True).compile("sm_90")
    assert kernel(early=True).compile("sm_80").registers == kernel().compile("sm_90").registers == 8


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
