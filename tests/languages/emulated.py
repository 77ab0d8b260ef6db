"""What tests of the emulator of CUDA C++ share: kernels of a few lines, and launches that should go wrong."""

import pytest
import torch

from tilery import languages

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.base.errors import CompileFailed
from tilery.base.launch import Argument, Launch
from tilery.base.spec import TensorSpec
from tilery.languages import cuda_emulator, cuda_glue
from tilery.languages.cuda_source import Source
from tilery.languages.tensor_maps import of_matrix

if why := cuda_emulator.refusal():
    pytest.skip(why, allow_module_level=True)
WITHOUT_A_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels run on the GPU that is here, not emulated"
)

CPU = torch.device("cpu")
_TIMES = 12  # launches: each has another order of threads


class Kernel:
    """A kernel `x` of this text, whose parameters are its tensors by name."""

    def __init__(self, folder, text):
        path = folder / "x.cu"
        path.write_text(text, encoding="utf-8")
        self.source = Source(path, "x")

    def __call__(self, *, grid=1, threads=128, shared=0, cluster=1, maps=None, **given):
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        args = {name: Argument.at_slot(TensorSpec.of(t), slot) for slot, (name, t) in enumerate(tensors.items())}
        for name, rows in (maps or {}).items():
            args[name] = of_matrix(args[name], rows)
        args = {name: args.get(name, value) for name, value in given.items()}
        launch = Launch(self.source, grid, args, options={"threads": threads, "shared": shared}, cluster=cluster)
        cuda_glue.bind(launch, CPU)(tuple(tensors.values()))


def wrong(run, is_right):
    """Whether some of several launches gave a wrong result, or an error."""
    for _ in range(_TIMES):
        try:
            run()
        except CompileFailed:
            raise
        except RuntimeError:
            return True
        if not is_right():
            return True
    return False
