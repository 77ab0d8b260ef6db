"""What may be known before anything runs: specs of tensors, costs, buckets, cases, what compilers made. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tilery.base.errors import require

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def dtype_name(dtype: torch.dtype) -> str:
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


class TensorSpec(NamedTuple):
    """What may be known of a tensor before it runs: metadata, never data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device  # type and index: cpu, cuda:0 and cuda:1 are three devices
    aligned: bool  # data starts on 16 bytes: what vector loads need and a slice may lose

    @classmethod
    def of(cls, t: Tensor, aligned: bool | None = None) -> "TensorSpec":
        """`aligned` is given for tensors without an address (fake, meta)."""
        if aligned is None and t.numel() == 0:  # it lies nowhere: its strides, 0 if it was expanded, say nothing
            return cls.contiguous(tuple(t.shape), t.dtype, t.device)
        return cls(t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16 == 0 if aligned is None else aligned)

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> "TensorSpec":
        strides: list[int] = []
        step = 1
        for size in reversed(shape):
            strides.insert(0, step)
            step *= cast(int, torch.sym_max(size, 1))  # torch counts an empty dimension as 1; sizes may be symbolic
        return cls(tuple(shape), tuple(strides), dtype, torch.device(device), True)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def stride(self, dim: int) -> int:
        """Spelled as on a tensor, so that one function serves a launch and a compile."""
        return self.strides[dim]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        where = f"{self.device}" + ("" if self.aligned else ", not 16-byte aligned")
        return f"{dtype_name(self.dtype)}{list(self.shape)} with strides {list(self.strides)} on {where}"


def require_dense(what: str, t: Tensor) -> None:
    require(not t.is_nested, f"{what} must be a plain tensor, got a nested one")
    require(t.layout is torch.strided, f"{what} must be dense (torch.strided), got {t.layout}; call .to_dense() on it")
    require(not t.is_neg(), f"{what} must hold its values, got a lazily negated view; call .resolve_neg() on it")


class Cost(NamedTuple):
    """The least an op needs: what no kernel can do without."""

    flops: int
    reads: int  # bytes
    writes: int

    @property
    def bytes(self) -> int:
        return self.reads + self.writes


class Work(NamedTuple):
    """What a kernel does with a config, as its `estimate` says: so many blocks, and what one of them does."""

    blocks: int
    flops: int
    bytes: int  # read and written by a block, wherever they come from


class Bucket(NamedTuple):
    exact: str  # must be the same for a tuned config to carry over
    scaled: dict[str, int]  # may grow up to the next tuned value


@dataclass(frozen=True)
class Case:
    params: dict[str, Any]  # arguments of the op's `inputs`, plain data
    refused_by: dict[str, str] = field(default_factory=dict)  # kernel -> words its refusal must contain

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.params.items())


def case(refused_by: Mapping[str, str] | None = None, **params: Any) -> Case:
    return Case(params, dict(refused_by or {}))


@dataclass(frozen=True)
class Artifact:
    """What a compiler made of a kernel; plain data, so that it crosses processes."""

    arch: str
    code: dict[str, str]  # stage -> text: "ir", "cuda", "ptx", "asm"; SASS is read from the cubin when asked for
    cubin: bytes | None = None
    registers: int | None = None  # per thread; None where the language does not say
    spills: int | None = None  # bytes of stack per thread: spilled registers live there
    shared: int | None = None  # bytes per block, static and dynamic
