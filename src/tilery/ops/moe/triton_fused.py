"""fused_moe in Triton: a product for each assignment where tokens are few, else tiles of each expert's rows."""

from dataclasses import dataclass
from math import prod
from typing import Any

import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.triton_glue import pdl_wait
from tilery.ops.matmul.triton import tiles
from tilery.ops.matmul.triton.tiles import GROUP_M, Matrices, Tiles, grouped_tile
from tilery.ops.moe.call import FusedMoeCall, limit_of
from tilery.ops.moe.triton_align import align_config, align_launch, local_expert

_COMBINED = 1024  # columns of a program that sums over a token's experts


@triton.jit
def _gated(gate, up, limit, alpha, up_offset):
    gate = tl.where(gate > limit, limit, gate)  # tl.minimum would drop NaN
    up = tl.where(up > limit, limit, up)
    up = tl.where(up < -limit, -limit, up)
    return gate / (1 + tl.exp(-alpha * gate)) * (up + up_offset)


@triton.jit
def _gate_rows(columns, half, N, INTERLEAVED: tl.constexpr):
    """Rows of an expert's w_gate_up: gate's (half 0) or up's (half 1)."""
    return columns * 2 + half if INTERLEAVED else columns + half * N


# Few tokens: weights are read once for each assignment, by dot products. Nothing is sorted.


@triton.jit
def _dots(
    a_ptr, b_ptr, rows, inside, K, b_row, b_column, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INT64: tl.constexpr
):
    """Products of a [K] with rows of b."""
    k = tl.arange(0, BLOCK_K)
    wide = tl.full((), 1, tl.int64)  # row * stride overflows int32 past 2**31 elements
    if INT64:
        rows, k = rows * wide, k * wide
    offsets = rows[:, None] * b_row + k[None, :] * b_column
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + start + k, mask=k < K - start, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + offsets, mask=inside[:, None] & (k[None, :] < K - start), other=0.0)
        acc += a[None, :] * b.to(tl.float32)
        b_ptr += wide * BLOCK_K * b_column
    return tl.sum(acc, axis=1)


@triton.jit
def _gate_up_each(
    x_ptr, w, bias_ptr, ids_ptr, map_ptr, h_ptr, x_stride, E, G, N, H, limit, alpha, up_offset,
    TOPK: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """w is `Matrices`. A program has some columns of h of one assignment."""
    pdl_wait()
    blocks = tl.cdiv(N, BLOCK_N)
    index = (tl.program_id(0) // blocks).to(tl.int64)  # int64: index * N may pass 2**31
    columns = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = local_expert(ids_ptr, map_ptr, index, index >= 0, E, G).to(tl.int64)
    if expert == E:
        return
    inside, x_ptr, w_ptr = columns < N, x_ptr + index // TOPK * x_stride, w.ptr + expert * w.batch
    gate_rows, up_rows = _gate_rows(columns, 0, N, INTERLEAVED), _gate_rows(columns, 1, N, INTERLEAVED)
    gate = _dots(x_ptr, w_ptr, gate_rows, inside, H, w.row, w.column, BLOCK_N, BLOCK_K, INT64)
    up = _dots(x_ptr, w_ptr, up_rows, inside, H, w.row, w.column, BLOCK_N, BLOCK_K, INT64)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + expert * 2 * N + gate_rows, mask=inside, other=0.0)
        up += tl.load(bias_ptr + expert * 2 * N + up_rows, mask=inside, other=0.0)
    tl.store(h_ptr + index * N + columns, _gated(gate, up, limit, alpha, up_offset), mask=inside)


@triton.jit
def _down_each(
    h_ptr, w, bias_ptr, weights_ptr, ids_ptr, map_ptr, add_ptr, y_ptr, add_stride, E, G, N, H,
    TOPK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """A program has some columns of one token's y, and sums over its experts."""
    pdl_wait()
    blocks = tl.cdiv(H, BLOCK_N)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, total = columns < H, tl.zeros((BLOCK_N,), tl.float32)
    if add_ptr is not None:
        total += tl.load(add_ptr + token * add_stride + columns, mask=inside, other=0.0).to(tl.float32)
    for j in range(TOPK):
        index = token * TOPK + j
        expert = local_expert(ids_ptr, map_ptr, index, index >= 0, E, G).to(tl.int64)
        if expert < E:
            w_ptr = w.ptr + expert * w.batch
            part = _dots(h_ptr + index * N, w_ptr, columns, inside, N, w.row, w.column, BLOCK_N, BLOCK_K, INT64)
            if bias_ptr is not None:
                part += tl.load(bias_ptr + expert * H + columns, mask=inside, other=0.0)
            total += part * tl.load(weights_ptr + index)
    tl.store(y_ptr + token * H + columns, total, mask=inside)


# Groups: assignments are sorted by expert, padded to blocks of BLOCK_M. Rows are gathered as they are multiplied.


@triton.jit
def _product(
    a_ptr, a_rows, a_inside, b_ptr, b_rows, b_inside, K, a_stride, b_row, b_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Rows of a times rows of b, in fp32."""
    k = tl.arange(0, BLOCK_K)
    wide = tl.full((), 1, tl.int64)  # row * stride overflows int32 past 2**31 elements
    if INT64:
        a_rows, b_rows, k = a_rows * wide, b_rows * wide, k * wide
    a_tile = a_rows[:, None] * a_stride + k[None, :]
    b_tile = k[:, None] * b_column + b_rows[None, :] * b_row
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a_mask = a_inside[:, None] if EVEN_K else a_inside[:, None] & (k[None, :] < K - start)
        b_mask = b_inside[None, :] if EVEN_K else b_inside[None, :] & (k[:, None] < K - start)
        a = tl.load(a_ptr + a_tile, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + b_tile, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")  # fp32 stays fp32: tf32 would lose 13 bits
        a_ptr += BLOCK_K
        b_ptr += wide * BLOCK_K * b_column
    return acc


@triton.jit(do_not_specialize=["A", "blocks"])
def _gate_up(
    x_ptr, w, bias_ptr, order_ptr, blocks_ptr, h_ptr, x_stride, A, blocks, N, H, limit, alpha, up_offset,
    TOPK: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """A tile's columns are gate and up in turns, so that both lie in one thread: BLOCK_N / 2 columns of h."""
    pdl_wait()
    HALF: tl.constexpr = BLOCK_N // 2
    i, j = grouped_tile(tl.program_id(0), blocks, tl.cdiv(N, HALF), GROUP_M)
    expert = tl.load(blocks_ptr + i).to(tl.int64)
    if expert < 0:
        return
    index = tl.load(order_ptr + i * BLOCK_M + tl.arange(0, BLOCK_M))
    both = tl.arange(0, BLOCK_N)
    rows, inside = _gate_rows(j * HALF + both // 2, both % 2, N, INTERLEAVED), j * HALF + both // 2 < N
    acc = _product(
        x_ptr, index // TOPK, index < A, w.ptr + expert * w.batch, rows, inside, H, x_stride, w.row, w.column,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, INT64,
    )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * 2 * N + rows, mask=inside, other=0.0).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, HALF, 2)))
    columns = j * HALF + tl.arange(0, HALF)
    here = index.to(tl.int64)[:, None] * N + columns[None, :]
    mask = (index < A)[:, None] & (columns < N)[None, :]
    tl.store(h_ptr + here, _gated(gate, up, limit, alpha, up_offset), mask=mask)


@triton.jit(do_not_specialize=["A", "blocks"])
def _down(
    h_ptr, w, bias_ptr, weights_ptr, order_ptr, blocks_ptr, parts_ptr, A, blocks, N, H,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """parts [A, H]: what each assignment adds to its token."""
    pdl_wait()
    i, j = grouped_tile(tl.program_id(0), blocks, tl.cdiv(H, BLOCK_N), GROUP_M)
    expert = tl.load(blocks_ptr + i).to(tl.int64)
    if expert < 0:
        return
    index = tl.load(order_ptr + i * BLOCK_M + tl.arange(0, BLOCK_M))
    columns = j * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = _product(
        h_ptr, index, index < A, w.ptr + expert * w.batch, columns, columns < H, N, N, w.row, w.column,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, INT64,
    )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * H + columns, mask=columns < H, other=0.0).to(tl.float32)[None, :]
    acc *= tl.load(weights_ptr + index, mask=index < A, other=0.0)[:, None]
    here = index.to(tl.int64)[:, None] * H + columns[None, :]
    tl.store(parts_ptr + here, acc, mask=(index < A)[:, None] & (columns < H)[None, :])


@triton.jit
def _combine(parts_ptr, inverse_ptr, add_ptr, y_ptr, add_stride, H, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """y = add + the parts of a token, in their order; one that is not here was not written."""
    pdl_wait()
    blocks = tl.cdiv(H, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if add_ptr is not None:
        total += tl.load(add_ptr + token * add_stride + columns, mask=columns < H, other=0.0).to(tl.float32)
    for j in range(TOPK):
        index = token * TOPK + j
        here = (columns < H) & (tl.load(inverse_ptr + index) >= 0)
        total += tl.load(parts_ptr + index * H + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * H + columns, total, mask=columns < H)


@dataclass(frozen=True)
class Config(Tiles):
    form: str = "grouped"  # or "each": a product for each assignment, in blocks of block_n rows of an expert's weight


_EACH = ((8, 256, 4), (16, 256, 4), (16, 512, 8), (32, 128, 4), (4, 512, 4))  # block_n, block_k, warps


def _extent(x: TensorSpec) -> int:
    """Elements from the first to the last of a matrix, or of one of several."""
    return sum((size - 1) * stride for size, stride in zip(x.shape[-2:], x.strides[-2:]))


def _int64(*given: int | TensorSpec) -> bool:
    """Whether offsets may pass 2**31 elements; those of an expert always may."""
    return max(x if isinstance(x, int) else _extent(x) for x in given) >= 2**31 - 2**16


class FusedMoe(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: FusedMoeCall, config: Config | None = None) -> str | None:
        if config is None:
            return None
        if config.form == "grouped":
            return tiles.refusal(call.x, config)
        if config.form != "each":
            return f"form must be grouped or each, got {config.form!r}"
        if any(size & (size - 1) for size in (config.block_n, config.block_k)) or config.block_n > 256:
            return f"block_n and block_k must be powers of two, block_n up to 256, got {config}"
        return None

    def default(self, call: FusedMoeCall) -> Config:
        """By tokens: each by itself while weights are then read a third more often at most."""
        if 3 * call.expected <= 4 * call.experts_hit:
            return Config(1, 16, 256, num_warps=4, num_stages=2, form="each")
        rows = call.rows_per_expert
        found = tiles.default(call.x, call.w_gate_up, rows + rows // 2)  # blocks that few experts need two of
        return Config(found.block_m, found.block_n, found.block_k, found.num_warps, found.num_stages)

    def configs(self, call: FusedMoeCall) -> list[Config]:
        each = [Config(1, n, k, warps, 2, "each") for n, k, warps in _EACH]
        return each + [
            Config(t.block_m, t.block_n, t.block_k, t.num_warps, t.num_stages) for t in tiles.configs(call.x)
        ]

    def workspace(self, call: FusedMoeCall, config: Config) -> dict[str, TensorSpec]:
        found = {"h": _like(call, call.size)}
        if config.form == "each":
            return found
        return found | {"parts": _like(call, call.hidden)} | call.aligned(config.block_m)

    def launches(self, call: FusedMoeCall, config: Config) -> list[Launch]:
        gate_up: dict[str, Any] = {
            "x_ptr": call.x, "w": Matrices(call.w_gate_up, *call.w_gate_up.strides), "bias_ptr": call.b_gate_up,
            "h_ptr": call.h, "x_stride": call.x.stride(0), "N": call.size, "H": call.hidden,
            "limit": call.limit.then(limit_of), "alpha": call.alpha, "up_offset": call.up_offset,
        }  # fmt: skip
        down: dict[str, Any] = {
            "h_ptr": call.h, "w": Matrices(call.w_down, *call.w_down.strides), "bias_ptr": call.b_down,
            "weights_ptr": call.weights, "N": call.size, "H": call.hidden,
        }  # fmt: skip
        return (_each if config.form == "each" else _grouped)(call, config, gate_up, down)


def _like(call: FusedMoeCall, columns: int) -> TensorSpec:
    return TensorSpec.contiguous((call.assignments, columns), call.x.dtype, call.x.device)


def _each(call: FusedMoeCall, config: Config, gate_up: dict[str, Any], down: dict[str, Any]) -> list[Launch]:
    known = call.expert_map.shape[0] if call.expert_map is not None else 0
    ids = {"ids_ptr": call.ids, "map_ptr": call.expert_map, "E": call.experts, "G": known}
    blocks = {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "TOPK": call.topk}
    down |= {"add_ptr": call.add, "y_ptr": call.y, "add_stride": call.add_stride}
    first = blocks | {"INTERLEAVED": call.interleaved, "INT64": _int64(call.w_gate_up)}
    second = blocks | {"INT64": _int64(call.w_down)}
    grid = call.assignments * triton.cdiv(call.size, config.block_n)
    down_grid = call.tokens * triton.cdiv(call.hidden, config.block_n)
    return [
        Launch(_gate_up_each, grid, gate_up | ids, first, config.options(), pdl=True),
        Launch(_down_each, down_grid, down | ids, second, config.options(), pdl=True),
    ]


def _grouped(call: FusedMoeCall, config: Config, gate_up: dict[str, Any], down: dict[str, Any]) -> list[Launch]:
    made, blocks = call.sorted, call.block_experts.shape[0]
    rows = {"order_ptr": made["order"], "blocks_ptr": made["block_experts"], "A": call.assignments, "blocks": blocks}
    constants = config.constants() | {"GROUP_M": GROUP_M}
    first = constants | {"TOPK": call.topk, "INTERLEAVED": call.interleaved}
    first |= {"EVEN_K": call.hidden % config.block_k == 0, "INT64": _int64(call.x, call.w_gate_up)}
    second = constants | {"EVEN_K": call.size % config.block_k == 0, "INT64": _int64(prod(call.h.shape), call.w_down)}
    combine = {"parts_ptr": call.parts, "inverse_ptr": made["inverse"], "add_ptr": call.add, "y_ptr": call.y}
    combine |= {"add_stride": call.add_stride, "H": call.hidden}
    columns = min(triton.next_power_of_2(max(call.hidden, 1)), _COMBINED)
    return [
        align_launch(call.ids, call.expert_map, made, config.block_m, align_config(call.assignments)),
        Launch(
            _gate_up, blocks * triton.cdiv(call.size, config.block_n // 2), gate_up | rows, first, config.options(),
            pdl=True,
        ),
        Launch(
            _down, blocks * triton.cdiv(call.hidden, config.block_n), down | rows | {"parts_ptr": call.parts}, second,
            config.options(), pdl=True,
        ),
        Launch(
            _combine, call.tokens * triton.cdiv(call.hidden, columns), combine, {"TOPK": call.topk, "BLOCK": columns},
            {"num_warps": 4}, pdl=True,
        ),
    ]  # fmt: skip


fused_moe = FusedMoe()
