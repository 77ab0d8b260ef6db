"""One forward pass of a model as a list of ops with their cases, in the model's order, as one rank runs it.

All is bf16; of a model with fp8 weights, linear layers take fp8 but for the router and the head, and what feeds them is
quantised by the step before where an op does both.
"""

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tilery.ops  # noqa: F401  fills the registry
from tilery.base.errors import BadInput, require
from tilery.base.spec import Case, Cost
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY, Op
from tilery.models.estimates import estimated
from tilery.models.model import BF16, FP8, WEIGHTS, Linear, Model

DTYPE = "bf16"
TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
PRODUCT_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)  # M that are tuned
PREFILL, DECODE = "prefill", "decode"
PRODUCTS = {BF16: "matmul", FP8: "fp8_matmul"}
_STAY_WIDE = ("router", "lm_head")
_SCALES = {"per": "group", "scales": "column"}  # as fp8_matmul is best given them


@dataclass(frozen=True)
class Pass:
    """One pass over `batch` sequences: prefill takes `length` tokens of each, decode one token that sees `length`."""

    phase: str
    batch: int
    length: int

    def __post_init__(self) -> None:
        require(self.phase in (PREFILL, DECODE), f"phase must be {PREFILL} or {DECODE}, got {self.phase!r}")
        for name in ("batch", "length"):
            value = getattr(self, name)
            require(value >= 1, f"{name} of a {self.phase} must be 1 or more, got {value}")

    @property
    def tokens(self) -> int:
        return self.batch * self.length if self.phase == PREFILL else self.batch

    def __str__(self) -> str:
        what, each = ("prompt", "of") if self.phase == PREFILL else ("sequence", "with a context of")
        return f"{self.phase}: {self.batch} {what}{'' if self.batch == 1 else 's'} {each} {self.length} tokens"


@dataclass(frozen=True)
class Step:
    name: str  # in the model
    op: str
    case: Case
    count: int  # calls in one pass
    cost: Cost  # of one call
    exists: bool  # its cost is what the op's contract says; else there is no such op yet, and it is an estimate


@dataclass(frozen=True)
class _Call:
    name: str
    op: str
    count: int
    params: dict[str, Any]


def steps(model: Model, forward: Pass) -> list[Step]:
    _require_planned(model)
    calls = [
        *_start(model, forward),
        *(_mla(model, forward) if model.kv_lora_rank else _gqa(model, forward)),
        *_reduced(model, forward, "attention_sum"),
        *_mlps(model, forward),
        *_reduced(model, forward, "mlp_sum"),
        *_end(model, forward),
    ]
    return [_step(call) for call in calls if call.count]


def _require_planned(model: Model) -> None:
    if model.model_type not in TYPES:
        came = "a config without model_type" if model.model_type is None else repr(model.model_type)
        raise BadInput(f"{model.name}: a plan needs a model_type that it knows, one of {', '.join(TYPES)}, got {came}")
    for name, only in _ONLY.items():
        value = getattr(model, name)
        require(value == only, f"{model.name}: a plan needs {name} to be {only!r}, got {value!r}")
    known = f"{' or '.join(WEIGHTS)} in blocks of 128 × 128"
    require(
        model.weights in WEIGHTS,
        f"{model.name}: a plan needs weights in {known}, its config says {model.weights}; name the one to plan "
        "(tilery plan --weights)",
    )


def _step(call: _Call) -> Step:
    params = {**call.params, "dtype": call.params.get("dtype", DTYPE)}
    op = REGISTRY.get(call.op)
    cost = estimated(call.op, params) if op is None else _contract_cost(op, tuple(params.items()))
    return Step(call.name, call.op, Case(params), call.count, cost, op is not None)


@functools.lru_cache(maxsize=4096)
def _contract_cost(op: Op, params: tuple[tuple[str, Any], ...]) -> Cost:
    known = inspect.signature(op.inputs).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    strange = [name for name, _ in params if name not in known and not takes_any]
    assert not strange, f"models/steps.py must name the cases of {op.name} by {', '.join(known)}, it says {strange}"
    return op.cost(call_for(op, Case(dict(params))))


def _product(model: Model, linear: Linear, m: int, count: int, name: str | None = None) -> _Call:
    sizes = {"m": m, "n": linear.n, "k": linear.k}
    if model.weights == BF16 or linear.name in _STAY_WIDE:
        return _Call(name or linear.name, PRODUCTS[BF16], count, sizes)
    _require_groups(model, linear)
    return _Call(name or linear.name, PRODUCTS[FP8], count, {**sizes, "dtype": "e4m3"})


def _require_groups(model: Model, linear: Linear) -> None:
    what = f"{model.name}: fp8 weights need rows of a multiple of 128 on each rank"
    require(linear.k % 128 == 0, f"{what}, got {linear.k} of {linear.name} with tp of {model.tp}; plan it in bf16")


def _feeds(model: Model, name: str, op: str, count: int, params: dict[str, Any]) -> _Call:
    """A step whose output goes into linear layers alone."""
    return (
        _Call(name, op, count, params) if model.weights == BF16 else _Call(name, f"{op}_fp8", count, params | _SCALES)
    )


def _quantised(model: Model, name: str, m: int, n: int, count: int) -> Iterator[_Call]:
    """What a linear layer takes, where the step before has other use of it too."""
    if model.weights == FP8:
        yield _Call(name, "quantize_fp8", count, {"m": m, "n": n, **_SCALES})


def _start(model: Model, forward: Pass) -> Iterator[_Call]:
    m, n = forward.tokens, model.hidden_size
    yield _Call("embedding", "embedding", 1, {"m": m, "n": n, "v": model.vocab_size})
    yield _feeds(model, "first_norm", "rms_norm", 1, {"m": m, "n": n})
    yield _feeds(model, "attention_norm", "add_rms_norm", model.num_hidden_layers - 1, {"m": m, "n": n})


def _gqa(model: Model, forward: Pass) -> Iterator[_Call]:
    """Attention whose queries share keys and values in groups, of one head or more."""
    m, layers = forward.tokens, model.num_hidden_layers
    qkv, o = model.attention()
    heads = {"heads": model.query_heads, "kv_heads": model.key_heads, "n": model.head_size}
    yield _product(model, qkv, m, layers)
    if model.model_type == "qwen2":
        yield _Call("qkv_bias", "add_bias_", layers, {"m": m, "n": qkv.n})
    if model.model_type in ("qwen3", "qwen3_moe"):
        yield _Call("qk_norm_rope", "qk_norm_rope_", layers, {"m": m, **heads, "order": "thd", "places": "int32"})
        yield _Call("cache_write", "cache_write_", layers, {"m": m, "kv_heads": model.key_heads, "n": model.head_size})
    else:
        yield _Call("rope_cache_write", "rope_cache_write_", layers, {"m": m, **heads, "skip": False})
    windowed = model.sliding_window and model.model_type in ("mistral", "mixtral")
    window = {"window": model.sliding_window} if windowed else {}
    if forward.phase == PREFILL:
        yield _Call("attention", "attention", layers, {"batch": forward.batch, "m": forward.length, **heads, **window})
    else:
        yield _Call("attention", "attention_decode", layers, {"m": m, "keys": forward.length, **heads, **window})
    yield from _quantised(model, "o_quantize", m, o.k, layers)
    yield _product(model, o, m, layers)


def _mla(model: Model, forward: Pass) -> Iterator[_Call]:
    """Multi-head latent attention; in decode the queries absorb the keys' projection and the latent is attended to."""
    m, layers, heads = forward.tokens, model.num_hidden_layers, model.query_heads
    latent, nope, rope, value = model.mla_sizes()
    linears = {linear.name: linear for linear in model.attention()}
    if model.q_lora_rank:
        yield _product(model, linears["qkv_a"], m, layers)
        yield _feeds(model, "q_norm", "rms_norm", layers, {"m": m, "n": model.q_lora_rank})
        yield _product(model, linears["q_b"], m, layers)
    else:
        yield _product(model, linears["q"], m, layers)
        yield _product(model, linears["kv_a"], m, layers)
    yield _Call("kv_norm", "rms_norm", layers, {"m": m, "n": latent})
    turned = {"heads": heads, "kv_heads": 1, "n": rope, "order": "thd", "places": "int32", "interleaved": True}
    yield _Call("rope", "rope_", layers, {"m": m, **turned})
    yield _Call("cache_write", "mla_cache_write_", layers, {"m": m, "n": latent + rope})
    if forward.phase == PREFILL:
        sizes = {"nope": nope, "rope": rope, "value": value}
        yield from _quantised(model, "kv_b_quantize", m, latent, layers)
        yield _product(model, linears["kv_b"], m, layers)
        yield _Call("attention", "mla", layers, {"batch": forward.batch, "m": forward.length, "heads": heads, **sizes})
    else:
        sizes = {"heads": heads, "latent": latent, "rope": rope}
        yield _Call("q_absorb", "bmm", layers, {"batch": heads, "m": m, "n": latent, "k": nope})
        yield _Call("attention", "mla_decode", layers, {"m": m, "context": forward.length, **sizes})
        yield _Call("v_expand", "bmm", layers, {"batch": heads, "m": m, "n": value, "k": latent})
    yield from _quantised(model, "o_quantize", m, linears["o"].k, layers)
    yield _product(model, linears["o"], m, layers)


def _mlps(model: Model, forward: Pass) -> Iterator[_Call]:
    m, layers, with_experts = forward.tokens, model.num_hidden_layers, model.expert_layers
    sizes = {"m": m, "n": model.hidden_size}
    if with_experts:  # the router takes it too
        yield _Call("mlp_norm", "add_rms_norm", layers, sizes)
        yield from _quantised(model, "mlp_quantize", m, model.hidden_size, layers)
    else:
        yield _feeds(model, "mlp_norm", "add_rms_norm", layers, sizes)
    if layers > with_experts:
        yield from _mlp(model, "", model.dense_size, m, layers - with_experts)
    if with_experts:
        yield from _experts(model, m, with_experts)


def _mlp(model: Model, prefix: str, size: int, m: int, count: int) -> Iterator[_Call]:
    gate_up, down = model.mlp(size)
    yield _product(model, gate_up, m, count, f"{prefix}gate_up")
    yield _feeds(model, f"{prefix}silu_mul", "silu_mul", count, {"m": m, "n": size, "packed": True})
    yield _product(model, down, m, count, f"{prefix}down")


def _experts(model: Model, m: int, count: int) -> Iterator[_Call]:
    """The router, the experts it picks, and those that every token passes."""
    experts, topk, size = model.n_routed_experts, model.num_experts_per_tok, model.mlp_size
    require(
        topk is not None, f"{model.name}: the config lacks num_experts_per_tok (needed for the rows that experts get)"
    )
    assert experts is not None and topk is not None
    yield _product(model, Linear("router", experts, model.hidden_size), m, count)
    if model.model_type == "deepseek_v3" or model.topk_method not in (None, "greedy"):
        yield _Call("route", "grouped_topk", count, {"m": m, "n": experts, "k": topk})
    else:
        # Mixtral's config does not say that it renormalises, and it does.
        yield _Call(
            "route", "topk_softmax", count, {"m": m, "n": experts, "k": topk, "renormalize": model.norm_topk_prob}
        )
    if model.shared_size:
        yield from _mlp(model, "shared_", model.shared_size, m, count)
    if model.weights == BF16:
        sizes = {"m": m, "n": size, "k": model.hidden_size, "experts": experts, "topk": topk}
        yield _Call("experts", "fused_moe", count, sizes | {"add": bool(model.shared_size)})
        return
    rows = m * topk
    gate_up, down = model.mlp(size)
    yield _Call("expert_sort", "expert_sort", count, {"m": rows, "experts": experts})
    yield _grouped(model, gate_up, rows, count, gathered=True)
    yield _feeds(model, "expert_silu_mul", "silu_mul", count, {"m": rows, "n": size, "packed": True})
    yield _grouped(model, down, rows, count, gathered=False)
    summed = {"m": m, "n": model.hidden_size, "topk": topk, "shared": bool(model.shared_size)}
    yield _Call("expert_sum", "expert_sum", count, summed)


def _grouped(model: Model, linear: Linear, rows: int, count: int, gathered: bool) -> _Call:
    """A product of each expert's rows in fp8, which finds the rows of its tokens by itself if `gathered`."""
    _require_groups(model, linear)
    sizes = {"m": rows, "n": linear.n, "k": linear.k, "experts": model.n_routed_experts}
    tokens = {"topk": model.num_experts_per_tok, "gathered": gathered, "dtype": "e4m3"}
    return _Call(f"expert_{linear.name}", "fp8_grouped_matmul", count, {**sizes, **tokens})


def _reduced(model: Model, forward: Pass, name: str) -> Iterator[_Call]:
    """Where ranks share a layer, each has a part of the sum."""
    if model.tp > 1:
        params = {"m": forward.tokens, "n": model.hidden_size, "ranks": model.tp}
        yield _Call(name, "all_reduce", model.num_hidden_layers, params)


def _end(model: Model, forward: Pass) -> Iterator[_Call]:
    """What comes after the last layer; in prefill only the last token of a sequence goes on to the head."""
    m, n, last, head = forward.tokens, model.hidden_size, forward.batch, model.head()
    yield _Call("final_norm", "add_rms_norm", 1, {"m": m, "n": n})
    if last != m:
        yield _Call("last_tokens", "embedding", 1, {"m": last, "n": n, "v": m})
    yield _product(model, head, last, 1)
    if model.tp > 1:
        yield _Call("logits", "all_gather", 1, {"m": last, "n": head.n, "ranks": model.tp})
    yield _Call("sample", "sample", 1, {"m": last, "n": model.vocab_size})
