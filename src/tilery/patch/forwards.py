"""The forwards of patched modules. Each takes what the module's own forward takes; its state says how it computes."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tilery.ops as ops
from tilery.patch.architectures import Heads, Layer
from tilery.patch.joined import Joined
from tilery.patch.swap import STATE, hooked, original_class


@dataclass
class State:
    """What a patched forward needs besides its module."""

    backends: Mapping[str, str]  # op -> the kernel that was asked for
    eps: float = 0.0
    offset: float = 0.0
    joined: Joined | None = None
    act: str = ""  # of an MLP: silu, tanh or none
    layer: Layer = field(default_factory=Layer)
    heads: Heads = field(default_factory=Heads)
    sizes: tuple[int, ...] = ()  # columns of q, k and v in their product
    rotates: bool = False
    output: Any = None  # the class of a model's output


def run(module: nn.Module, op: str, *args: Any) -> Any:
    """An op, by the kernel that was asked for when the module was patched."""
    backend = getattr(module, STATE).backends.get(op) if hasattr(module, STATE) else None
    function = getattr(ops, op)
    return function(*args) if backend is None else function(*args, backend=backend)


# Norms


def norm(self: Any, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
    """The norm; with a residual, (the norm of their sum, the sum)."""
    state = self.tilery_patch
    if hidden_states.ndim == 4 and hidden_states.stride(1) < hidden_states.stride(2):  # [B, heads, S, D], a view
        return norm(self, hidden_states.transpose(1, 2)).transpose(1, 2)
    if residual is None:
        return run(self, "rms_norm", hidden_states, self.weight, state.eps, state.offset)
    return run(self, "add_rms_norm", hidden_states, residual, self.weight, state.eps, state.offset)


# MLP


def mlp(self: Any, hidden_states: Tensor) -> Tensor:
    state = self.tilery_patch
    made = state.joined.parts(self)
    if made is None:
        return self.down_proj(_gated(self, *_by_layer(self, state.joined.names, hidden_states)))
    weight, bias = made
    if state.act == "silu" and bias is None:
        return self.down_proj(run(self, "linear_silu_mul", hidden_states, weight))
    return self.down_proj(_gated(self, run(self, "linear", hidden_states, weight, bias)))


def _gated(self: Any, gate: Tensor, up: Tensor | None = None) -> Tensor:
    act = self.tilery_patch.act
    made: Tensor = run(self, "silu_mul", gate, up) if act == "silu" else run(self, "gelu_mul", gate, up, act)
    return made


def _by_layer(self: Any, names: tuple[str, ...], hidden_states: Tensor) -> list[Tensor]:
    return [getattr(self, name)(hidden_states) for name in names]


# Decoder layers


def decoder_layer(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    how: Layer = self.tilery_patch.layer
    residual = hidden_states
    hidden_states, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden_states = _through(self, hidden_states, how.after_attention, how.attention_dropout)
    hidden_states, residual = getattr(self, how.joining)(hidden_states, residual)
    hidden_states = self.mlp(hidden_states)
    if isinstance(hidden_states, tuple):  # of experts, with the router's scores
        hidden_states = hidden_states[0]
    return residual + _through(self, hidden_states, how.after_mlp, how.mlp_dropout)


def _through(self: Any, x: Tensor, *names: str) -> Tensor:
    return reduce(lambda made, name: getattr(self, name)(made) if name else made, names, x)


# Attention


def attention(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    assert position_embeddings is not None, "the models that are patched make them"
    state = self.tilery_patch
    (q, k, v), own = _projected(self, hidden_states)
    q, k = _rotated(self, q, k, *position_embeddings, own)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    eager = sys.modules[original_class(self).__module__].eager_attention_forward  # type: ignore[attr-defined]
    function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    told = {argument: _attribute(self, path) for argument, path in state.heads.tells.items()}
    dropout = self.attention_dropout if self.training else 0.0
    made, weights = function(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **told, **kwargs)
    return self.o_proj(made.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


def _attribute(self: Any, path: str) -> Any:
    return reduce(lambda of, name: getattr(of, name, None), path.split("."), self)


def _projected(self: Any, hidden_states: Tensor) -> tuple[list[Tensor], bool]:
    """q, k and v [B, S, heads, D], and whether nobody else has seen q and k: a hook may keep what a module gave."""
    state = self.tilery_patch
    made = state.joined and state.joined.parts(self)
    if made is not None:
        found = list(run(self, "linear", hidden_states, *made).split(state.sizes, -1))
    else:
        found = _by_layer(self, state.heads.projections, hidden_states)
        if len(found) == 1:
            found = list(found[0].split(state.sizes, -1))
    if state.heads.norms == "row":
        found[:2] = self.q_norm(found[0]), self.k_norm(found[1])
    bound = self.config.clip_qkv if state.heads.clips else None
    if bound is not None:
        found = [x.clamp(-bound, bound) for x in found]
    return [x.unflatten(-1, (-1, self.head_dim)) for x in found], made is not None and state.heads.norms != "row"


def _rotated(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, own: bool) -> tuple[Tensor, Tensor]:
    """q and k [B, S, heads, D], their heads' norms taken and rotated: in place if they are `own`, without gradients."""
    state = self.tilery_patch
    norms: tuple[Any, ...] = (self.q_norm, self.k_norm) if state.heads.norms == "head" else ()
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, *(norm.weight for norm in norms)))
    in_place = own and not trained and state.rotates and all(hasattr(n, STATE) and not hooked(n) for n in norms)
    fused = norms and in_place
    if norms and not fused:
        q, k = (of(x) for of, x in zip(norms, (q, k)))
    if not state.rotates:
        apply = sys.modules[original_class(self).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
        q, k = apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)
    angles = _angles(cos, sin, state.heads.half_angles)
    shape = q.shape[:2]
    if len(cos) > 1:  # sequences have positions of their own: their tokens as one sequence, a row of cos for each
        q, k = (x.view(1, -1, *x.shape[2:]) for x in (q, k))
    if fused:
        how = getattr(norms[0], STATE)
        run(self, "qk_norm_rope_", q, k, norms[0].weight, norms[1].weight, *angles, None, how.eps, how.offset)
    elif in_place:
        run(self, "rope_", q, k, *angles)
    else:
        q, k = run(self, "rope", q, k, *angles)
    return q.view(*shape, *q.shape[2:]), k.view(*shape, *k.shape[2:])


def _angles(cos: Tensor, sin: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """Tables [tokens, R / 2]: transformers' hold every column twice, but for `half`, and are transposed in 5.17."""
    columns = cos.shape[-1] if half else cos.shape[-1] // 2
    cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (cos, sin))
    return cos.flatten(0, 1)[:, :columns], sin.flatten(0, 1)[:, :columns]
