"""The shapes of a model, from the numbers of its config.json. No weights, no transformers."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from tilery.errors import BadInput

_KNOWN = Path(__file__).parent / "known"


class Linear(NamedTuple):
    """y [M, n] = x [M, k] · wᵀ, as one rank of tensor parallelism sees it."""

    name: str
    n: int
    k: int


@dataclass(frozen=True)
class Model:
    """Fields as Hugging Face's config.json names them; those of MLA and MoE are None for models without."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    tp: int = 1  # ranks that share each layer

    @property
    def mlp_size(self) -> int:
        """Columns of gate and of up on one rank; of one expert where there are experts."""
        return _share(self, "intermediate size", self.moe_intermediate_size or self.intermediate_size)

    def linears(self) -> list[Linear]:
        """Every linear layer of a block, and the head that makes logits."""
        hidden, mlp = self.hidden_size, self.mlp_size
        attention = self._mla() if self.kv_lora_rank else self._attention()
        return [
            *attention,
            Linear("gate_up", 2 * mlp, hidden),
            Linear("down", hidden, mlp),
            Linear("lm_head", _share(self, "vocabulary", self.vocab_size), hidden),
        ]

    def _attention(self) -> list[Linear]:
        head = self.head_dim or self.hidden_size // self.num_attention_heads
        queries = _share(self, "attention heads", self.num_attention_heads)
        keys = max(self.num_key_value_heads // self.tp, 1)  # fewer heads than ranks are copied
        return [
            Linear("qkv", (queries + 2 * keys) * head, self.hidden_size),
            Linear("o", self.hidden_size, queries * head),
        ]

    def _mla(self) -> list[Linear]:
        """Multi-head latent attention: queries and keys pass through narrow layers, which every rank has whole."""
        heads = _share(self, "attention heads", self.num_attention_heads)
        q, kv, nope, rope, value = (
            _needed(self, name)
            for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        return [
            Linear("qkv_a", q + kv + rope, self.hidden_size),
            Linear("kv_a", kv + rope, self.hidden_size),
            Linear("q_b", heads * (nope + rope), q),
            Linear("kv_b", heads * (nope + value), kv),
            Linear("o", self.hidden_size, heads * value),
        ]


def _share(model: Model, what: str, size: int) -> int:
    if size % model.tp:
        raise BadInput(f"{model.name}: {what} of {size} cannot be shared by {model.tp} ranks")
    return size // model.tp


def _needed(model: Model, name: str) -> int:
    value: int | None = getattr(model, name)
    if value is None:
        raise BadInput(f"{model.name}: a config with kv_lora_rank must have {name} too")
    return value


def known() -> list[str]:
    return sorted(path.stem for path in _KNOWN.glob("*.json"))


def load(name_or_path: str, tp: int = 1) -> Model:
    """A known model by its name, any other by its config.json or the folder that holds it."""
    path = Path(name_or_path)
    if name_or_path in known():
        path = _KNOWN / f"{name_or_path}.json"
    elif path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise BadInput(f"a model must be one of {', '.join(known())}, or a config.json, got {name_or_path!r}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path} is not a config.json: {error}") from None
    return from_config(config, path.parent.name, tp)


def from_config(config: dict[str, Any], name: str, tp: int = 1) -> Model:
    """Takes what it knows of a config.json and leaves the rest."""
    names = {f.name: f for f in fields(Model)}
    taken: dict[str, Any] = {"name": name, "num_key_value_heads": config.get("num_attention_heads")}
    taken |= {key: value for key, value in config.items() if key in names and key != "tp"}
    missing = [n for n, f in names.items() if taken.get(n) is None and f.default is not None and n != "tp"]
    if missing:
        raise BadInput(f"{name}: the config lacks {', '.join(missing)}")
    return Model(**taken, tp=tp)
