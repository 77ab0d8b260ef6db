"""What the signatures of ops do not say: which of their parameters go together, and what may be planted in tensors.

A rule keeps a call legal, or keeps it to what the reference has an answer for; it says why where that is not plain.
"""

import dataclasses
import itertools
import random
from typing import Any

import torch

from fuzz.call import NUMBERS, Call
from fuzz.guards import LAYOUTS
from tilery.core.op import Op

ATTENTION = ("attention", "attention_lse", "attention_backward", "mla")  # of whole sequences, packed or not
CACHED = ("attention_decode", "attention_chunked", "attention_cascade", "mla_decode")
MERGES = ("merge_attention", "merge_attention_backward")
ROTARY = ("rope", "rope_", "rope_backward", "qk_norm_rope_", "rope_cache_write_")
EXPERTS = ("moe_align", "fused_moe")
# Parameters that are one of a few sizes: those of the op's own cases.
FIXED = {(op, "n") for op in (*ATTENTION, *CACHED, *ROTARY, "attention_sinks_backward")} | {
    ("fp8_matmul", "k"),
    ("fp8_matmul_rowwise", "k"),
}
_NEEDED = {  # sizes that may not be 0
    "n": ("argmax", "sample", "cross_entropy", "cross_entropy_backward", "fused_linear_cross_entropy",
          "fused_linear_cross_entropy_backward", "topk_softmax", "moe_route"),
    "k": ("fused_linear_cross_entropy", "fused_linear_cross_entropy_backward"),
    "batch": (*ROTARY, "attention_backward", "attention_sinks_backward", "mla"),
}  # fmt: skip
# Backwards that are given what the forward made of the other arguments: only gradients may be anything.
_HELD = (
    "cross_entropy_backward", "fused_linear_cross_entropy_backward", "attention_backward", "merge_attention_backward",
    "attention_sinks_backward",
)  # fmt: skip
_NO_BACKWARD = ("bias", "slopes", "padding", "strength")
_NOT_SPECIAL = (*_NO_BACKWARD, "sinks", "softcap", "window", "scale")  # with these a key may count for nothing
_GRADIENTS = ("dloss", "dlse", "dout")
_MAKE_LOGITS = ("q", "k", "q_rope", "k_rope", "k_cache")
_INDEX_NAMES = (
    "targets", "ids", "expert_map", "positions", "slots", "offsets", "cu_seqlens_q", "cu_seqlens_k", "lengths",
    "block_table", "prefix_lengths", "prefix_table", "cu_prefix_q",
)  # fmt: skip
# Only to numbers that lead outside: two tokens in one slot race, and what is behind the last key may be NaN.
_CACHE_INDICES = ("slots", "block_table", "lengths", "prefix_lengths", "prefix_table")
_WILD = (-1, 0, 1, 2**30, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
_SHAPES = ("", "", "", "row:", "row:", "all:")
_FACTORS = ("by:1e3", "by:1e-3", "by:1e10", "by:1e-10", "by:30")


def mended(op: Op, params: dict[str, Any], r: random.Random) -> dict[str, Any]:
    """The parameters, those that contradict others replaced."""
    p = {name: value for name, value in params.items() if name != "wrong"}  # indices() spoils them instead
    for name, ops in _NEEDED.items():
        if op.name in ops and name in p:
            p[name] = max(p[name], 1)
    if p.get("layout") == "far":  # memory that nobody touches, but one row alone is not far
        p["m"] = min(max(p.get("m", 3), 2), 9)
    if p.get("scales") == "column" and p.get("per", "group") != "group":
        p["scales"] = "row"
    if "kv_heads" in p and op.name not in ROTARY:
        p["heads"] = p["kv_heads"] * max(p.get("heads", 4) // p["kv_heads"], 1)
    if p.get("heads") and "norm" in op.name and op.name not in ROTARY:  # heads of packed qkv are not batched too
        p["batch"] = 0
    if op.name in ATTENTION:
        _attention(op, p, r)
    elif op.name in CACHED:
        _cached(op, p, r)
    elif op.name in ROTARY:
        _rotary(p)
    elif op.name in MERGES:
        _merged(op, p)
    elif op.name == "attention_sinks_backward":
        packed = p.get("order") == "thd"
        p["lengths"] = "+".join(str(r.choice((0, 1, 17, 33))) for _ in range(3)) if packed else ""
    elif op.name in ("grouped_matmul", "grouped_matmul_backward"):
        p["sizes"] = _split(p["m"], p["experts"], r) if p.get("sizes") and p["experts"] else ""
    elif op.name == "topk_softmax":
        p["n"] = min(p["n"], 1024)
        p["k"] = min(max(p["k"], 1), p["n"])
    elif op.name == "moe_route":
        _route(p)
    elif op.name in EXPERTS:
        p["experts"] = max(p["experts"], 1)
        p["topk"] = min(p["topk"], p["experts"] + p.get("away", 0))
    elif op.name in ("embedding", "embedding_backward"):
        p["outside"] = bool(p.get("outside")) and p["m"] > 0
    return p


def _route(p: dict[str, Any]) -> None:
    groups = p.get("groups", 1)
    size = max(p["n"] // groups, 2 if groups > 1 else 1)
    p["n"] = min(size, 1024 // groups) * groups
    p["top_groups"] = min(p.get("top_groups", 1), groups)
    p["k"] = min(max(p["k"], 1), p["n"] // groups * p["top_groups"])
    if p.get("scoring") == "softmax_topk":
        p["renormalize"] = True


def _attention(op: Op, p: dict[str, Any], r: random.Random) -> None:
    packed = p.get("order") == "thd"
    p["value"] = 0 if op.name != "mla" and p.get("value", 0) > p["n"] else p.get("value", 0)
    if op.name == "mla":
        p["value"] = min(p["value"] or 32, p.get("nope", 128))
    sizes = [r.choice((0, 1, 3, 17, 33, 70)) for _ in range(r.randrange(1, 5))]
    p["lengths"] = "+".join(map(str, sizes)) if packed else ""
    if packed:
        p["m"] = max(*sizes, 1)
        keys = [r.choice((0, 1, 5, 31, 64, 80)) for _ in sizes]
        if op.name == "mla":
            p["keys"] = -1
        elif op.name == "attention_backward":
            p["lengths"] = "+".join(f"{a}:{b}" for a, b in zip(sizes, keys)) if any(sizes) and any(keys) else "3:5+2:2"
        else:
            p["keys"], p["key_lengths"] = max(*keys, 1), "+".join(map(str, keys))
    elif "key_lengths" in p:
        p["key_lengths"] = ""
    if op.name in ("attention", "attention_lse"):
        if packed:
            p |= {"padding": False, "bias": "none", "batch": 1}
        else:
            p["spare"] = 0
        if p.get("bias", "none") not in ("none", "shared"):
            p["bias"] = p["dtype"] if p["dtype"] in ("fp32", "fp16", "bf16") else "shared"
        if p["dtype"] in ("e4m3", "e5m2"):
            p["n"], p["value"] = max(p["n"], 32) // 32 * 32, 0
            p["layout"] = "contiguous"
    if p.get("special", "none") != "none":
        # All queries must see it, with weights that no dtype rounds to 0: 0 · NaN and 0 · inf are NaN.
        p["causal"], p["m"] = False, max(p["m"], 1)
        p["keys"] = 1 if p.get("keys", -1) == 0 else p.get("keys", -1)
        for name in _NOT_SPECIAL:
            p.pop(name, None)


def _cached(op: Op, p: dict[str, Any], r: random.Random) -> None:
    if op.name == "mla_decode":
        p["context"] = max(p["context"], p.get("queries", 1)) if p.get("lengths") == "ragged" else p["context"]
        return
    if op.name == "attention_cascade":
        _cascade(p, r)
        return
    if op.name == "attention_chunked":
        p["chunks"] = _split(p["m"], r.randrange(1, 4), r, whole=True)
        p["keys"] = max(p["keys"], 1)
        count = len(p["chunks"].split("+"))
    else:
        count = p["m"]
        if not p.get("block_size", 0) and p.get("layout") == "together":
            p["layout"] = "padded"
    p["lengths"] = "+".join(str(r.choice((0, 1, p["keys"], r.randrange(p["keys"] + 1)))) for _ in range(min(count, 64)))
    p["lengths"] = "" if count > 64 or r.random() < 0.3 else _within(p["lengths"], p["keys"])
    if p.get("layout") == "far":
        p["keys"] = min(max(p["keys"], 2), 5)
        p["lengths"], p["block_size"], p["m"] = "", 0, 1
        p["format"] = "none"


def _cascade(p: dict[str, Any], r: random.Random) -> None:
    """Some sequences share one of up to three prefixes, the last ones none."""
    p["m"], p["prefix"] = min(p["m"], 20), r.choice((0, 1, 16, 70, 300))
    p["groups"] = _split(p["m"], r.randrange(1, 4), r)
    p["prefix_lengths"] = "+".join(str(r.randrange(p["prefix"] + 1)) for _ in p["groups"].split("+"))
    p["lengths"] = "+".join(str(r.randrange(p["keys"] + 1)) for _ in range(p["m"]))
    p["layout"] = "padded" if p.get("layout") == "far" else p.get("layout", "contiguous")


def _merged(op: Op, p: dict[str, Any]) -> None:
    p["n"] = min(max(p["n"], 1), 1024)
    if op.name == "merge_attention_backward":
        p["parts"] = max(p["parts"], 1)
    if p.get("empty") not in (None, "", "some"):
        p["empty"] = "+".join(part for part in p["empty"].split("+") if int(part) < p["parts"])


def _within(lengths: str, most: int) -> str:
    return "+".join(str(min(int(length), most)) for length in lengths.split("+")) if lengths else ""


def _rotary(p: dict[str, Any]) -> None:
    p["n"] = max(p["n"] // 2 * 2, 2)
    p["rotary"] = min(p.get("rotary", 0), p["n"]) // 2 * 2
    if p["m"] == 0 and "batch" in p:
        p["batch"] = 1
    p["m"] = min(p["m"], 300)


def _split(total: int, parts: int, r: random.Random, whole: bool = False) -> str:
    """`total` in so many parts, some of them empty; not all of it unless `whole`."""
    cuts = sorted(r.randrange(total + 1) for _ in range(parts - (1 if whole else 0)))
    ends = [0, *cuts, *([total] if whole else [])]
    return "+".join(str(b - a) for a, b in itertools.pairwise(ends))


def graded(call: Call) -> Call:
    """As a gradient is compared: in fp32, of plain values that all have one."""
    params = {name: value for name, value in call.params.items() if name not in ("special", "outside", "masked")}
    scalars = {name: value for name, value in call.scalars.items() if name not in ("ignore_index", "eps")}
    if call.op in ATTENTION:
        params = {name: value for name, value in params.items() if name not in _NO_BACKWARD}
        scalars = {}
    if call.op in MERGES:  # autograd through the reference gives NaN for an empty part
        params = {name: value for name, value in params.items() if name not in ("empty", "out", "strength")}
        scalars = {}
    if "norm" in call.op:  # the gradient of rows of a few values is what cancellation leaves
        params["n"] = max(params["n"], 16)
    return dataclasses.replace(call, params=params | {"dtype": "fp32"}, scalars=scalars, gradient=True)


def free_scalar(op: Op, name: str, params: dict[str, Any]) -> bool:
    """Whether the number may be anything. A special value must be seen by all; a backward's lse is of one scale."""
    special = params.get("special", "none") != "none"
    if name.startswith("max_seqlen") and params.get("order", "thd") != "thd":
        return False
    return not (op.name in ATTENTION and (special or op.name == "attention_backward"))


def layouts(op: Op, params: dict[str, Any], r: random.Random) -> dict[str, str]:
    """Mostly one argument is laid out anew, or all in one way; often none."""
    names, chance = op.names[: op.signature._tensors], r.random()
    if params.get("layout") == "far" or chance < 0.4:
        return {}
    usual = [layout for layout in LAYOUTS if layout != "transposed"] if r.random() < 0.8 else LAYOUTS
    layout = r.choice(usual)
    return dict.fromkeys(names if chance < 0.6 else (r.choice(names),), layout)


def plants(op: Op, params: dict[str, Any], r: random.Random) -> list[list[Any]]:
    """One to three numbers somewhere in the tensors; often none."""
    if op.name in ATTENTION and params.get("special", "none") != "none":
        return []
    names = [name for name in op.names[: op.signature._tensors] if name not in _INDEX_NAMES]
    if op.name == "moe_align":  # it has integers alone
        return []
    if op.name in _HELD:
        names = [name for name in names if name in _GRADIENTS]
    if op.name in ("add_rms_norm", "add_rms_norm_fp8") and params["dtype"] != "fp32":
        names = ["weight"]  # their sum is rounded first, and drawn so that it is exact
    summed = op.name == "moe_route" and (params.get("bias") or params.get("groups", 1) > 1)
    drawn = [[r.choice(names), round(r.random(), 6), _planted(r)] for _ in range(r.randrange(1, 4)) if r.random() < 0.3]
    # Sums that rounding makes equal come in another order than those of float64.
    drawn = [plant for plant in drawn if not summed or plant[2].endswith(("nan", "inf"))]
    return [plant for plant in drawn if _answered(op, plant[0], plant[2])]


def _planted(r: random.Random) -> str:
    return r.choice(_FACTORS) if r.random() < 0.3 else r.choice(_SHAPES) + r.choice(list(NUMBERS))


def _answered(op: Op, name: str, what: str) -> bool:
    """Whether the reference has the answer: of a masked key, kernels read no value, and it has 0 · NaN there."""
    if op.name in ("gelu_mul_backward", "gelu_mul_packed_backward", "activation_backward"):
        # Beyond 7e12 the cube in GELU's tanh overflows, and far below 0 its slope is 0 in fp32: 0 · inf.
        return not what.endswith(("huge", "1e10", "inf"))
    if op.name == "fused_linear_cross_entropy_backward":
        return not what.endswith(("huge", "large", "1e10", "1e3"))  # gradients of logits are rounded, to fp16 at times
    if op.name == "moe_route":
        return not what.endswith(("by:30", "1e3", "1e10"))  # of sigmoids that are 0 in fp32 alone, divided by their sum
    if op.name == "fused_moe":  # h is rounded, to fp16 at times
        return not what.endswith(("huge", "large", "1e10", "1e3", "by:30", "inf"))
    if op.name == "merge_attention" and name == "outs":
        return not what.endswith(("inf", "huge", "1e10"))  # of a part that is 0 in fp32 and not in float64: 0 · inf
    if op.name.startswith("fp8_matmul") and "scale" in name:
        return not what.endswith(("inf", "huge"))  # of a sum that is 0 in one order and not in another: 0 · inf
    if torch.cuda.is_available() and op.name in (*ATTENTION, *CACHED) and what.endswith("1e10"):
        return name not in _MAKE_LOGITS  # beyond 2**31, where compiled kernels overflow: docs/verification.md
    if op.name not in (*ATTENTION, *CACHED) or not what.endswith(("nan", "inf")):
        return True
    return what.endswith("nan") and name in ("q", "q_rope", "k", "dlse")


def indices(op: Op, params: dict[str, Any], r: random.Random) -> list[list[Any]]:
    """Now and then an entry of a tensor of indices that leads outside, or to its edge."""
    names = [name for name in op.names[: op.signature._tensors] if name in _INDEX_NAMES]
    if not names or r.random() < 0.7:
        return []
    name, where = r.choice(names), r.choice((0.0, 0.999999, r.random()))
    if name in _CACHE_INDICES:
        return [[name, where, r.choice((-1, -2, "+0", "+1", *_WILD[3:]))]]
    edges = [size + more for size in params.values() if type(size) is int for more in (0, 1)]
    return [[name, where, r.choice([*_WILD, *edges])]]
