"""The rungs: what each adds, where it builds, what it takes, how it is launched."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import tilery.ops  # noqa: F401  fills the registry
from tilery import languages
from tilery.base.launch import Launch, Persistent, Values
from tilery.base.spec import Artifact, TensorSpec, dtype_name
from tilery.core import policy
from tilery.core.op import REGISTRY, Op
from tilery.hardware import device
from tilery.hardware.device import ARCHS
from tilery.measure.source_hash import hash_of, source_hash

HOPPER = ("sm_90",)
SHIPPED = "cuda.hopper"  # the kernel of matmul that the ladder leads to
_ALIGNMENT = 1024  # bytes to start the tiles at a multiple of the swizzle's pattern
_BARRIERS = 16  # bytes a stage


class Step(Protocol):
    """What the table needs of a rung."""

    name: str
    idea: str
    needs: str  # the least architecture; empty where any will do

    @property
    def archs(self) -> tuple[str, ...]: ...
    @property
    def source_hash(self) -> str: ...
    def refusal(self, a: TensorSpec, b: TensorSpec) -> str | None:
        """Why it cannot take this problem on the specs' device, in a sentence."""

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        """c = a · b, launched on the current stream."""

    def compile(self, a: TensorSpec, b: TensorSpec, arch: str) -> Artifact: ...


def product() -> Op:
    """The contract that all rungs keep."""
    return REGISTRY["matmul"]


def complete(a: Any, b: Any) -> tuple[Any, ...]:
    """The contract's arguments, of tensors or of specs: rungs have no say in the rest."""
    return product().complete((a, b), {})


@dataclass(frozen=True)
class Rung:
    """A .cu file of this folder with one kernel: c [m, n] = a [m, k] · b [k, n], b's columns contiguous, in bf16."""

    number: int
    name: str
    idea: str
    threads: int
    tile: tuple[int, int]  # of c, that a block makes
    multiples: tuple[int, int, int]  # m, n and k must be multiples of these
    needs: str = ""
    shared: int = 0  # dynamic bytes
    boxes: tuple[int, int] | None = None  # rows of a and of b that TMA loads at once; None: the kernel takes pointers
    cluster: int = 1
    persistent: bool = False  # as many blocks as run at once

    @property
    def archs(self) -> tuple[str, ...]:
        return HOPPER if self.needs == HOPPER[0] else ARCHS

    @property
    def source(self) -> Path:
        return Path(__file__).with_name(f"{self.number:02}_{self.name}.cu")

    @property
    def source_hash(self) -> str:
        return hash_of([self.source])

    def refusal(self, a: TensorSpec, b: TensorSpec) -> str | None:
        (m, k), n = a.shape, b.shape[1]
        if why := languages.missing("cuda") or languages.refusal("cuda", a.device, self.archs, (a, b)):
            return why
        if a.dtype != torch.bfloat16:
            return f"takes bf16, got {dtype_name(a.dtype)}"
        if not (m and n and k) or any(size % of for size, of in zip((m, n, k), self.multiples)):
            wanted = ", ".join(f"{name} a multiple of {of}" for name, of in zip("MNK", self.multiples) if of > 1)
            return f"takes {wanted or 'M, N and K from 1 on'}, got M={m}, N={n}, K={k}"
        if (*a.strides, *b.strides) != (k, 1, 1, k) or not (a.aligned and b.aligned):
            return (
                "takes a [M, K] of contiguous rows and b [K, N] of contiguous columns, both at multiples of 16 bytes, "
                f"got strides {list(a.strides)} and {list(b.strides)}"
            )
        return None

    def launch(self, call: Any) -> Launch:
        """What runs it for a call of matmul."""
        from tilery.languages.cuda_source import Source

        operands: dict[str, Any] = {"a": call.a, "b": call.b}
        if self.boxes is not None:
            from tilery.languages import tensor_maps

            columns = call.b._replace(shape=(call.n, call.k), strides=(call.k, 1))
            maps = tensor_maps.of_matrix(call.a, self.boxes[0]), tensor_maps.of_matrix(columns, self.boxes[1])
            operands = {"a_map": maps[0], "b_map": maps[1]}
        blocks = -(-call.m // self.tile[0]) * -(-call.n // self.tile[1])
        return Launch(
            Source(self.source, self.name),
            Persistent(blocks) if self.persistent else blocks,
            {**operands, "c": call.c, "m": call.m, "n": call.n, "k": call.k},
            options={"threads": self.threads, "shared": self.shared},
            cluster=self.cluster,
        )

    def compile(self, a: TensorSpec, b: TensorSpec, arch: str) -> Artifact:
        from tilery.languages import cuda_glue

        return cuda_glue.compile(self.launch(product().call(complete(a, b))), arch)

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        args = complete(a, b)
        _bound(self, product().specs(args))((*args, c))


@functools.lru_cache(maxsize=64)
def _bound(rung: Rung, specs: tuple[Any, ...]) -> Callable[[Values], None]:
    """What launches the rung for such arguments; kept, as a plan of an op is."""
    from tilery.languages import cuda_glue

    return cuda_glue.bind(rung.launch(product().call(specs)), specs[0].device)


@dataclass(frozen=True)
class Shipped:
    """What `tilery.matmul(a, b, backend="cuda.hopper")` runs: as tuned for the problem, else its default."""

    number: int
    name: str = "shipped"
    idea: str = "the op's own kernel: c stored by TMA under the next products, ragged sizes, configs for the tuner"
    needs: str = "sm_90"

    @property
    def archs(self) -> tuple[str, ...]:
        archs: tuple[str, ...] = product().kernel(SHIPPED).archs
        return archs

    @property
    def source_hash(self) -> str:
        return source_hash(product(), SHIPPED)

    def refusal(self, a: TensorSpec, b: TensorSpec) -> str | None:
        return policy.refusal(product(), SHIPPED, product().call(complete(a, b)))

    def compile(self, a: TensorSpec, b: TensorSpec, arch: str) -> Artifact:
        op = product()
        with device.pretend(arch):
            call = op.call(complete(a, b))
            return policy.compiled(op, SHIPPED, call, op.kernel(SHIPPED).default(call), arch)

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        args = complete(a, b)
        product().plan(product().specs(args), SHIPPED).launch((c,), args)


def _pipeline(stages: int, rows: int, barriers: int = 0) -> int:
    """Bytes of so many stages with so many rows of 128 bytes, of a and b together."""
    return _ALIGNMENT + stages * (rows * 128 + barriers)


_RUNGS = (
    Rung(1, "naive", "a thread for each element of c, everything from global memory",
         256, (8, 32), (1, 1, 1)),
    Rung(2, "shared_tiles", "a block's tiles of a and b in shared memory: each value is used 32 times",
         1024, (32, 32), (32, 32, 32)),
    Rung(3, "register_tiles", "8 × 8 elements of c a thread: 16 reads for 64 multiplications",
         256, (128, 128), (128, 128, 32)),
    Rung(4, "wide_access", "16 bytes an access, and a swizzle instead of bank conflicts",
         256, (128, 128), (128, 128, 32)),
    Rung(5, "async_copies", "cp.async: tiles are loaded into a pipeline while the oldest is multiplied",
         256, (128, 128), (128, 128, 32), needs="sm_80"),
    Rung(6, "tensor_cores", "mma.sync: a warp multiplies 16 × 16 by 16 × 8 at once",
         128, (128, 128), (128, 128, 64), needs="sm_80", shared=3 * 256 * 128),
    Rung(7, "wgmma", "wgmma: four warps multiply 64 × 16 by 16 × 128 at once, from shared memory",
         256, (128, 128), (128, 128, 64), needs="sm_90", shared=_pipeline(3, 256)),
    Rung(8, "tma", "TMA: one thread loads whole tiles",
         256, (128, 128), (128, 128, 64), needs="sm_90", shared=_pipeline(3, 256), boxes=(128, 128)),
    Rung(9, "warp_roles", "a producer warp and two consumer warpgroups, in persistent blocks with tiles of 128 × 256",
         384, (128, 256), (128, 256, 64), needs="sm_90", shared=_pipeline(4, 384, _BARRIERS), boxes=(128, 256),
         persistent=True),
    Rung(10, "clusters", "TMA multicast: two blocks of a cluster load halves of what both need",
         384, (128, 256), (256, 256, 64), needs="sm_90", shared=_pipeline(4, 384, _BARRIERS), boxes=(128, 128),
         cluster=2, persistent=True),
    Shipped(11),
)  # fmt: skip
RUNGS: dict[str, Rung | Shipped] = {rung.name: rung for rung in _RUNGS}
