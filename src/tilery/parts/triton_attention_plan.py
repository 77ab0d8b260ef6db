"""Attention in Triton, forward: which tiles, what they cost, and how the kernel is compiled and launched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from tilery.base.spec import Artifact, TensorSpec, Work, dtype_name
from tilery.hardware import device
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.parts import triton_fp8
from tilery.parts.attention import FP8, Problem, pairs, problem, problem_of_run
from tilery.parts.fp8 import power
from tilery.parts.kernels import Functions, functions
from tilery.parts.triton_attention_forward import forward
from tilery.parts.triton_tiles import far

archs = ARCHS

L2 = 2**25  # bytes of keys and values that programs running together may share: about half of an H200's


@dataclass(frozen=True)
class Config:
    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int
    tma: bool = False  # keys and values come by TMA, which takes no registers

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def _refusal(p: Problem, config: Config | None) -> str | None:
    if config is None:
        return None
    blocks = config.block_m, config.block_n
    if any(size < 16 or size & (size - 1) for size in blocks):
        return f"blocks must be powers of two from 16 on, got {config}"
    if config.tma and (why := _tma_refusal(p)):
        return why
    need, limit = _shared(p, config), device.shared_limit(device.arch(p.q.device))
    if need > limit:
        return f"{config} needs {need} bytes of shared memory, a block has {limit}"
    return None


def _tma_refusal(p: Problem) -> str | None:
    """The interpreter takes it too."""
    arch = device.arch(p.q.device)
    if arch != "cpu" and int(arch.removeprefix("sm_")) < 90:
        return f"TMA is there from sm_90 on, this is {arch}"
    if not all(p.k.shape):
        return "TMA takes no empty tensors"
    sides = ((p.q, p.q_strides), (p.k, p.k_strides), (p.v, p.v_strides))
    steps = [step for x, strides in sides for step in _matrices(x, p, strides)[1]]
    if not all(steps):
        return "TMA takes no heads or sequences that are one in memory"
    if any(step * p.k.dtype.itemsize % 16 for step in steps) or not all(x.aligned for x, _ in sides):
        return "TMA takes queries, keys and values that begin at multiples of 16 bytes"
    return None


def _matrices(x: Any, p: Problem, strides: tuple[int, int, int]) -> tuple[tuple[int, ...], list[int]]:
    """Sequences, heads and tokens of a tensor, and the strides along them; of one alone any will do."""
    of_keys = x is p.k or x is p.v
    tokens = x.shape[0] if p.cu_q is not None else p.keys if of_keys else p.queries
    shape = 1 if p.cu_q is not None else p.batch, p.kv_heads if of_keys else p.heads, tokens
    return shape, [x.shape[-1] if n == 1 else step for n, step in zip(shape, (strides[0], strides[2], strides[1]))]


def _shared(p: Problem, config: Config) -> int:
    """The tile of queries, and what comes in stages: keys, values, the bias."""
    size, value = power(p.size), power(p.value)
    streamed = config.num_stages * config.block_n * (size + value) * p.q.dtype.itemsize
    if p.bias is not None:
        streamed += config.num_stages * config.block_m * config.block_n * p.bias.dtype.itemsize
    return int(config.block_m * size * p.q.dtype.itemsize + streamed)


def _default(p: Problem) -> Config:
    return next(c for c in _preferred(p) if _refusal(p, c) is None)


def _preferred(p: Problem) -> list[Config]:
    """Best first; where shared memory is short, later ones fit. What is usual spills no registers."""
    large = p.size > 128
    if p.q.dtype == torch.float32:
        return [Config(16 if p.size > 64 else 32, 32, 4, 2), Config(16, 16, 4, 1)]
    if p.q.dtype in FP8 and not triton_fp8.native(p.q.device):
        return [Config(128, 32, 8, 2), Config(64, 32, 8, 1)]  # widening takes registers
    queries, warps = (64, 4) if p.queries <= 64 else (128, 8)
    keys = 64 if large or p.bias is not None else 128
    extras = p.bias, p.slopes, p.key_mask, p.cu_q
    plain = p.q.dtype not in FP8 and p.softcap == 0 and all(x is None for x in extras)
    # Two of them fit a processor; what is more than plain would spill.
    small = [Config(*((64, 128) if p.size <= 64 else (128, 64)), 4, 2, tma=True)] if plain and not large else []
    return [
        *(small if p.queries > 64 else []),
        *(Config(queries, keys, warps, stages, tma=True) for stages in (3, 2)),
        Config(64, 64, 8, 2) if large else Config(queries, 64, warps, 2),
        Config(64, 32, 8, 2),
        Config(32, 32, 4, 1),
    ]


def _configs(p: Problem) -> list[Config]:
    if p.q.dtype == torch.float32:
        sizes = [(16, 32, 4), (32, 16, 4), (32, 32, 4), (32, 32, 8)]
        found = [Config(*size, 2) for size in sizes]
    else:
        sizes = [(64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8)]
        sizes += [(128, 64, 4)] if p.value <= 128 else []  # larger ones spill
        sizes += [(128, 128, 4)] if p.value <= 64 else []
        found = [Config(*size, stages, tma=True) for size in sizes for stages in (2, 3, 4)]
        found += [Config(*size, stages) for size in ((64, 32, 4), (64, 64, 4), (128, 64, 8)) for stages in (2, 3)]
    return [c for c in found if _refusal(p, c) is None]


def _estimate(p: Problem, config: Config) -> Work:
    """Of a tile in the middle of its sequence: causal ones see half of the keys, about."""
    tiles = p.batch * p.heads * triton.cdiv(p.queries, config.block_m)
    there = pairs(p.queries, p.keys, p.causal, p.window)
    keys = min(p.keys, triton.cdiv(there, max(p.queries, 1)) + config.block_n)
    width = p.size + p.value
    moved = (config.block_m + keys) * width * p.q.dtype.itemsize
    return Work(tiles, 2 * config.block_m * keys * width, moved)


# Launches


def _strides(x: Any, *dims: int) -> list[int]:
    """Along these dimensions, 0 where there is one alone or no tensor."""
    return [0 if x is None or x.shape[dim] == 1 else x.stride(dim) for dim in dims]


def _known(x: Any) -> Any:
    """The tensor, as bytes where it is fp8 and Triton does not know that."""
    return triton_fp8.as_bytes(x) if x.dtype in FP8 and not triton_fp8.native(x.device) else x


def _descriptor(x: Any, p: Problem, strides: tuple[int, int, int], tokens: int) -> Any:
    """Of [sequence, head, token, value]: blocks of so many tokens and all values, with zeros behind them."""
    shape, steps = _matrices(x, p, strides)
    raw, tile = _known(x), (1, 1, tokens, power(x.shape[-1]))
    if isinstance(x, TensorSpec):
        return triton_glue.Descriptor(raw, tile, None)
    return TensorDescriptor(raw, [*shape, x.shape[-1]], [*steps, 1], list(tile))


def _tensors(p: Problem, config: Config) -> list[Any]:
    """q, k, v and out: pointers, or descriptors for TMA. It cannot write a part of a tile."""
    if not config.tma:
        return [_known(p.q), _known(p.k), _known(p.v), p.out]
    return [
        _descriptor(p.q, p, p.q_strides, config.block_m),
        _descriptor(p.k, p, p.k_strides, config.block_n),
        _descriptor(p.v, p, p.v_strides, config.block_n),
        _descriptor(p.out, p, p.out_strides, config.block_m) if p.cu_q is None else p.out,
    ]


def _tiles(p: Problem, config: Config) -> int:
    return int(triton.cdiv(p.queries, config.block_m))


def _pairs(p: Problem) -> int:
    """Of a sequence and a head; packed tokens that are left are a sequence too."""
    return (p.batch + (p.cu_q is not None)) * p.heads


def _arguments(p: Problem, config: Config):  # type: ignore[no-untyped-def]
    """The launch arguments and constants, of tensors for `run` and of specs for `compile`."""
    packed = p.cu_q is not None
    mask = p.key_mask if p.key_mask is None else triton_fp8.as_bytes(p.key_mask)
    group, shared = p.heads // p.kv_heads, max(p.keys, 1) * (p.size + p.value) * p.q.dtype.itemsize
    band = min(group * max(L2 // shared, 1), _pairs(p))
    inputs = *_tensors(p, config), p.lse, p.cu_q, p.cu_k, mask, p.bias, p.slopes, p.sinks
    tokens = (p.q.shape[0], p.k.shape[0]) if packed else (p.queries, p.keys)
    shapes = p.batch, p.heads, *tokens, p.queries, p.keys, _tiles(p, config), band
    strides = *p.q_strides, *p.k_strides, *p.v_strides, *p.out_strides
    lse = (0, p.lse.stride(0)) if packed and p.lse is not None else _strides(p.lse, 0, 1)
    more = *lse, *_strides(mask, 0, 1), *_strides(p.bias, 0, 1, 2, 3)
    scalars = float(p.scale), p.window, float(p.softcap)
    # Otherwise the kernel scales as it takes exponentials: the largest score must be that of the largest logit.
    bent = p.softcap != 0 or not p.scale > 0 or any(x is not None for x in (p.q_scale, p.bias, p.slopes))
    constants = {
        "GROUP": group, "SIZE": p.size, "VALUE": p.value, "D": power(p.size), "E": power(p.value),
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "FORMAT": dtype_name(p.q.dtype) if p.q.dtype in FP8 else "none",
        "NATIVE": p.q.dtype in FP8 and triton_fp8.native(p.q.device),
        "CAUSAL": p.causal, "WINDOW": p.window > 0, "SOFTCAP": p.softcap != 0, "BENT": bent,
        "TMA": config.tma, "FAR": far(p.k_strides[1], p.v_strides[1]),
    }  # fmt: skip
    return (*inputs, p.q_scale, p.k_scale, p.v_scale, *shapes, *strides, *more, *scalars), constants


def _compile(p: Problem, config: Config, arch: str) -> Artifact:
    arguments, constants = _arguments(p, config)
    return triton_glue.legacy_compile(forward, arguments, constants, config.options, arch)


def _run(p: Problem, config: Config) -> None:
    arguments, constants = _arguments(p, config)
    forward[(_pairs(p) * _tiles(p, config),)](*arguments, **constants, **config.options)


def kernel(outputs: Callable[..., Any]) -> Functions:
    """The module of an op with these outputs."""
    mine = _refusal, _default, _configs, _estimate, _compile, _run
    return functions(lambda specs: problem(outputs(*specs), specs), problem_of_run, *mine)
