"""Cases of an op as specs, on devices that need not be there: nothing is drawn."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tilery.base.spec import Case, TensorSpec
from tilery.core.op import Op


def specs_for(op: Op, case: Case, device: str = "cuda:0") -> tuple[Any, ...]:
    """The specs that the case's inputs would have on `device`."""
    with FakeTensorMode():
        args = op.complete((), op.inputs(**case.params, device="cpu", seed=0))
    where = torch.device(device)
    tensors = {id(a): TensorSpec.of(a, _aligned(a))._replace(device=where) for a in args if isinstance(a, Tensor)}
    return tuple(tensors.get(id(a), a) for a, n in zip(args, op.names) if n not in op.runtime)


def call_for(op: Op, case: Case, device: str = "cuda:0") -> Any:
    """The call of those specs."""
    return op.call(specs_for(op, case, device))


def _aligned(t: Tensor) -> bool:
    """Whether it starts on 16 bytes, as freshly allocated memory would, some elements in."""
    return int(t.storage_offset()) * t.itemsize % 16 == 0
