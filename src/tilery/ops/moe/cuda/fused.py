"""fused_moe of few tokens in CUDA C++: weights of each expert are streamed once past the tokens that chose it.

Two launches: gate and up with SwiGLU, then down with the sum over a token's experts. No assignment is sorted, and
the second launch loads weights before the first ends.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilery.base.integers import ceil_div, next_power_of_2
from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, TMA, gpu
from tilery.languages.cuda_source import Source, vector_width
from tilery.ops.moe.call import FusedMoeCall, limit_of

_PATH = Path(__file__).with_name("fused.cu")
_MAX_ASSIGNMENTS = 128  # each has a thread that looks for others of its expert; as in expert_groups.cuh
_MAX_ROWS = 2**22  # of an expert: lines of all groups are numbered in 32 bits
_MAX_SHARE = 8
_GROUPS = 6 * 1024  # bytes, at most, of what a block knows of the assignments
_PARTS = 16 * 1024  # bytes of sums that a block of the second launch keeps
_IN_FLIGHT = 96 * 1024  # bytes of weights on an SM


@dataclass(frozen=True)
class Config:
    rows: int  # of weights that a warp multiplies at once
    vectors: int  # of 16 bytes of each row, for each lane
    stages: int  # times that many bytes are in flight
    warps: int  # of a block
    share: int  # tokens of an expert, at most, for which its weights are read once
    blocks: int = 1  # on each SM
    bulk: bool = False  # copied by TMA (from sm_90 on), else by cp.async


class FusedMoe(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: FusedMoeCall, config: Config | None = None) -> str | None:
        if call.assignments > _MAX_ASSIGNMENTS:
            got = f"{call.tokens} × {call.topk}"
            return f"takes up to {_MAX_ASSIGNMENTS} assignments, which it does not sort, got {got}"
        if call.hidden and (why := _alignment_refusal(call)):
            return why
        if max(call.hidden, call.size) >= _MAX_ROWS:
            return f"H and I must be below {_MAX_ROWS}, got {call.hidden} and {call.size}"
        return None if config is None else self._config_refusal(call, config)

    def _config_refusal(self, call: FusedMoeCall, config: Config) -> str | None:
        if config.rows not in (2, 4) or config.vectors not in (1, 2, 4) or config.share not in (1, 2, 4, 8):
            got = f"{config.rows}, {config.vectors} and {config.share}"
            return f"rows must be 2 or 4, vectors 1, 2 or 4 and share 1, 2, 4 or 8, got {got}"
        if config.warps not in (4, 8, 16):
            return f"warps must be 4, 8 or 16, got {config.warps}"
        if config.bulk and gpu(call.x.device).number < TMA:
            return f"bulk copies need sm_{TMA}, got {gpu(call.x.device).arch}"
        room = gpu(call.x.device).shared_per_block
        if (needed := _stage_bytes(config) * config.stages + _GROUPS + _PARTS) > room:
            return f"needs {needed} bytes of shared memory, and a block may have {room}"
        return None

    def default(self, call: FusedMoeCall) -> Config:
        """A block of each launch on every SM at once, so that the second has weights in flight as the first ends."""
        return self._config(call, rows=2, vectors=2, warps=8)

    def configs(self, call: FusedMoeCall) -> list[Config]:
        shapes = ((2, 2, 8), (2, 4, 8), (2, 1, 8), (4, 1, 8), (4, 2, 8), (2, 1, 16))
        first, wide, *others = (self._config(call, *shape) for shape in shapes)
        half, double = replace(first, stages=max(first.stages // 2, 1)), replace(first, stages=first.stages * 2)
        found = [first, wide, *others, half, replace(half, blocks=2), double]
        found += [replace(config, bulk=True) for config in (first, wide, double)]
        found += [replace(first, share=share) for share in (1, 2) if share < first.share]
        pipelined = (config for config in dict.fromkeys(found) if config.stages > 1)
        return [config for config in pipelined if self.refusal(call, config) is None]

    def _config(self, call: FusedMoeCall, rows: int, vectors: int, warps: int) -> Config:
        """With stages for half of an SM's shared memory, or for what memory needs in flight."""
        device, share = gpu(call.x.device), min(next_power_of_2(max(call.tokens, 1)), _MAX_SHARE)
        half = device.shared_per_sm // 2 - device.reserved_shared - _GROUPS - _PARTS // 4
        config = Config(rows, vectors, 1, warps, share)
        return replace(config, stages=max(min(half, _IN_FLIGHT) // _stage_bytes(config), 1))

    def workspace(self, call: FusedMoeCall, config: Config) -> dict[str, TensorSpec]:
        return {"h": TensorSpec.contiguous((call.assignments, call.size), call.x.dtype, call.x.device)}

    def launches(self, call: FusedMoeCall, config: Config) -> list[Launch]:
        routing = {
            "ids": call.ids, "expert_map": _or_null(call.expert_map), "assignments": call.assignments,
            "topk": call.topk, "experts": call.experts,
            "known": 0 if call.expert_map is None else call.expert_map.shape[0],
        }  # fmt: skip
        if not call.assignments or not call.hidden:
            return []
        blocks = gpu(call.x.device).sms * config.blocks
        return [_gate_up(call, config, routing, blocks), _down(call, config, routing, blocks)]


def _gate_up(call: FusedMoeCall, config: Config, routing: dict[str, Any], blocks: int) -> Launch:
    tokens = {
        "x": call.x, "h": call.h, "x_stride": call.x.stride(0), "size": call.size, "limit": call.limit.then(limit_of),
        "alpha": call.alpha, "up_offset": call.up_offset,
    }  # fmt: skip
    args = routing | _weights(call.w_gate_up, call.b_gate_up) | tokens
    constants, options = _stream(call, config, call.hidden)
    lines = call.assignments * call.size // (config.rows // 2)
    constants |= {"INTERLEAVED": call.interleaved}
    return Launch(Source(_PATH, "moe_gate_up"), min(blocks, lines), args, constants, options, pdl=True)


def _down(call: FusedMoeCall, config: Config, routing: dict[str, Any], blocks: int) -> Launch:
    lines = call.hidden // config.rows
    most = max(_PARTS // (4 * call.assignments * config.rows), 1)  # lines of a block whose sums have room
    blocks = min(max(blocks, ceil_div(lines, most)), lines)
    max_rows = ceil_div(lines, blocks) * config.rows
    combined = {
        "choice_weights": call.weights, "h": call.h, "add": _or_null(call.add), "y": call.y,
        "add_stride": call.add_stride, "tokens": call.tokens, "max_rows": max_rows,
    }  # fmt: skip
    args = routing | _weights(call.w_down, call.b_down) | combined
    constants, options = _stream(call, config, call.size)
    options["shared"] += 4 * call.assignments * max_rows
    return Launch(Source(_PATH, "moe_down"), blocks, args, constants, options, pdl=True)


def _weights(w: Any, bias: Any) -> dict[str, Any]:
    by_expert, by_row, _ = w.strides
    args = {"w": w, "bias": _or_null(bias), "w_expert_stride": by_expert, "w_row_stride": by_row}
    return args | {"rows": w.shape[1], "k": w.shape[2]}


def _stream(call: FusedMoeCall, config: Config, k: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants and options of a launch. Tiles that rows of k do not fill are narrower, and there are more of them."""
    vectors, values = config.vectors, 32 * 16 // call.x.dtype.itemsize
    while vectors > 1 and k % (vectors * values):
        vectors //= 2
    constants = {
        "T": call.x.dtype, "SHARE": config.share, "ROWS": config.rows, "VECS": vectors,
        "STAGES": config.stages * config.vectors // vectors, "WARPS": config.warps,
        "EVEN_K": k % (vectors * values) == 0, "BULK": config.bulk,
    }  # fmt: skip
    return constants, {"threads": 32 * config.warps, "shared": config.stages * _stage_bytes(config)}


def _stage_bytes(config: Config) -> int:
    """With barriers for bulk copies, of which there are as many as there are vectors at most."""
    return config.warps * config.vectors * (config.rows * 512 + 8 * config.bulk)


def _alignment_refusal(call: FusedMoeCall) -> str | None:
    tensors = {"x": call.x, "w_gate_up": call.w_gate_up, "w_down": call.w_down}
    for name, x in tensors.items():
        steps = [stride for size, stride in zip(x.shape[:-1], x.strides[:-1]) if size > 1]
        inside = x.strides[-1] == 1 or x.shape[-1] <= 1
        if not inside or vector_width((x,), x.shape[-1], *steps) == 1:
            return f"rows of {name} must be contiguous, and start and end at multiples of 16 bytes, got {x}"
    return None


def _or_null(x: Any) -> Any:
    """A tensor as an argument of a kernel, or a null pointer for None."""
    return 0 if x is None else x


fused_moe = FusedMoe()
