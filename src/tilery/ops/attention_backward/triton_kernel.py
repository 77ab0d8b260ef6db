"""Three launches: what all weights of a row are shifted by, then dk and dv by blocks of keys, then dq by queries."""

from dataclasses import dataclass

import torch
import triton

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.hardware import device
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.ops.attention_backward import Problem, outputs, problem, problem_of_run
from tilery.parts.triton_attention_backward import clear, key_gradients, query_gradients, shifts
from tilery.parts.triton_tiles import far

archs = ARCHS

_ROWS = 32  # tokens of a program that only reads
_MOST_SEQUENCES = 65535  # along a grid's third axis


@dataclass(frozen=True)
class Config:
    rows: int  # keys that a program keeps, or queries
    step: int  # queries at a time, of the pass over keys: it has two sums to keep
    key_step: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def refusal(*specs, config: Config | None = None) -> str | None:
    p = problem(outputs(*specs), specs)
    if p.batch > _MOST_SEQUENCES:
        return f"takes up to {_MOST_SEQUENCES} sequences, got {p.batch}"
    if config is None:
        return None
    limit = device.shared_limit(device.arch(p.q.device))
    width = (_block(p.size) + _block(p.value)) * p.q.dtype.itemsize
    need = (config.rows + config.num_stages * max(config.step, config.key_step)) * width
    if need > limit:
        return f"{config} needs {need} bytes of shared memory, a block has {limit}"
    return None


def default(*specs) -> Config:
    p = problem(outputs(*specs), specs)
    size, short = _block(p.size), device.shared_limit(device.arch(p.q.device)) < 128 * 1024
    if p.q.dtype == torch.float32:
        return Config(32, 16, 16, num_warps=8 if size > 64 else 4, num_stages=1)
    if short:
        return Config(32, 32, 32, 4, 1) if size > 128 else Config(64, 32, 32, 4, 2)
    if size > 128 or not _even(p):
        return Config(64, 32, 32, num_warps=8, num_stages=2)
    return Config(128, 32 if size > 64 else 64, 64, num_warps=8, num_stages=2)  # 64 queries of 128 would spill


def _even(p: Problem) -> bool:
    """Whether rows start on 16 bytes; where not, values pass through registers on their way."""
    steps, size = p.strides("q", "k", "v", "dout"), p.q.dtype.itemsize
    return all(x.aligned for x in (p.q, p.k, p.v, p.dout)) and all(step * size % 16 == 0 for step in steps)


def configs(*specs) -> list[Config]:
    sizes = (
        (32, 16, 16, 4), (32, 32, 32, 4), (64, 32, 32, 4), (64, 64, 64, 4), (64, 32, 64, 8), (128, 32, 64, 8),
        (128, 64, 64, 8), (128, 64, 128, 8),
    )  # fmt: skip
    found = [Config(*size, stages) for size in sizes for stages in (1, 2, 3)]
    if specs[2].dtype == torch.float32:
        found = [c for c in found if c.rows * c.step <= 32 * 32]
    return [c for c in found if refusal(*specs, config=c) is None]


def estimate(*specs, config: Config) -> Work:
    """Of the pass over keys: it does four of the products."""
    p = problem(outputs(*specs), specs)
    seen = p.queries * p.heads // max(p.kv_heads, 1) // (2 if p.causal else 1)
    width = p.size + p.value
    blocks = p.batch * p.kv_heads * triton.cdiv(p.keys, config.rows)
    return Work(blocks, 4 * config.rows * seen * width, (2 * config.rows + seen) * width * p.q.dtype.itemsize)


def workspace(*specs, config: Config) -> tuple[TensorSpec, ...]:
    """A shift for every row."""
    lse = specs[6]
    return (TensorSpec.contiguous(lse.shape, torch.float32, lse.device),)


def _block(size: int) -> int:
    return max(triton.next_power_of_2(size), 16)


def _launches(p: Problem, config: Config, shift):
    """Kernel, grid, arguments, constants and options of each launch; of tensors, or of specs for a compile."""
    sequence, token, head = p.lse_strides
    every, rows = 1 if p.cu_q is not None else p.batch, p.strides("dout", "out")
    constants = {"VALUE": p.value, "BLOCK": _block(p.value), "ROWS": _ROWS}
    arguments = p.dout, p.out, p.dlse, shift, p.tokens, *rows, sequence, token, head
    yield shifts, (triton.cdiv(p.tokens, _ROWS), p.heads, every), arguments, constants, {"num_warps": 4}
    inputs = p.q, p.k, p.v, p.dout, p.lse, shift
    shapes = p.cu_q, p.cu_k, p.queries, p.keys, p.tokens, p.key_tokens, p.scale
    strides = p.strides("q", "k", "v", "dout")
    kept = {
        "PER": p.heads // p.kv_heads, "SIZE": p.size, "VALUE": p.value, "BLOCK_D": _block(p.size),
        "BLOCK_E": _block(p.value), "ROWS": config.rows, "CAUSAL": p.causal, "FAR": far(*strides[1::3]),
    }  # fmt: skip
    grid = triton.cdiv(p.keys, config.rows), p.kv_heads, p.batch
    arguments = *inputs, p.dk, p.dv, *shapes, *strides, *p.strides("dk", "dv"), sequence, head
    yield key_gradients, grid, arguments, kept | {"STEP": config.step}, config.options()
    grid = triton.cdiv(p.queries, config.rows), p.heads, p.batch
    arguments = *inputs, p.dq, *shapes, *strides, *p.strides("dq"), sequence, head
    yield query_gradients, grid, arguments, kept | {"STEP": config.key_step}, config.options()
    if p.cu_q is not None:
        for x, ends in ((p.dq, p.cu_q), (p.dk, p.cu_k), (p.dv, p.cu_k)):
            tokens, width = x.shape[0], x.shape[1] * x.shape[2]
            constants = {"ROWS": _ROWS, "BLOCK": 128}
            yield clear, (triton.cdiv(tokens, _ROWS),), (x, ends, p.batch, tokens, width), constants, {"num_warps": 4}


def compile(specs, config: Config, arch: str) -> Artifact:
    launches = _launches(problem(outputs(*specs), specs), config, *workspace(*specs, config=config))
    return triton_glue.greediest([triton_glue.legacy_compile(k, a, c, o, arch) for k, _, a, c, o in launches])


def run(outs, args, config: Config, shift) -> None:
    for kernel, grid, arguments, constants, options in _launches(problem_of_run(outs, args), config, shift):
        if all(grid):
            kernel[grid](*arguments, **constants, **options)
