"""Which of an op's cases a test takes that is not about cases, and where a kernel's tensors lie."""

import math

import torch

from tilery.base.spec import TensorSpec
from tilery.core.cases import specs_for


def home(language):
    """Where a kernel of this language is tested: Triton's on a GPU where there is one, else interpreted on the CPU."""
    return torch.device("cuda:0" if language != "numba" and torch.cuda.is_available() else "cpu")


def size(op, case):
    """Elements of all its tensors."""
    return sum(math.prod(s.shape) for s in specs_for(op, case) if isinstance(s, TensorSpec))


def plain_case(op, dtype="fp32", kernel=None):
    """The first that is neither empty nor special nor laid out in an odd way, and that the kernel takes.

    `dtype` is that of its tensors, or of its output where the case says that too; of several names the first counts of
    which there is such a case.
    """
    first, *others = [dtype] if isinstance(dtype, str) else dtype
    for case in op.cases["test"]:
        params = case.params
        odd = params.get("layout", "contiguous") != "contiguous" or params.get("special", "none") != "none"
        empty = any(value == 0 for name, value in params.items() if name in ("m", "n", "k"))
        found = params.get("out", params.get("dtype", first))
        if found == first and not odd and not empty and kernel not in case.refused_by:
            return case
    if others:
        return plain_case(op, others, kernel)
    raise LookupError(f"{op.name} has no plain {dtype} case for {kernel}")
