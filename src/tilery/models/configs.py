"""Reads a model's config.json: a known one by its name, any other by its path. Errors name the file and the field."""

import functools
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tilery.base.errors import BadInput, require
from tilery.models.model import BF16, FP8, WEIGHTS, Model

_KNOWN = Path(__file__).parent / "known"
_RENAMED = {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}  # Mixtral's, Qwen's
_MAY_BE_ZERO = ("first_k_dense_replace", "n_shared_experts")
_MAY_BE_NULL = ("q_lora_rank", "n_shared_experts")  # which says that there is none: not the same as saying nothing

# field -> what it is needed for
_NEEDED = {
    "hidden_size": "the width of every layer",
    "intermediate_size": "the width of the MLP",
    "num_hidden_layers": "the number of blocks",
    "num_attention_heads": "the width of q, k and v",
    "vocab_size": "the embedding and the logits",
}
_TOPK = {"num_experts_per_tok": "the rows that experts get"}
_MLA = {
    "qk_nope_head_dim": "the part of a head that is not turned",
    "qk_rope_head_dim": "the part of a head that is turned",
    "v_head_dim": "the width of o",
}
_HEAD = {"head_dim": "the width of q, k and v, which hidden_size does not say"}
_EXPERT = {"moe_intermediate_size": "the width of an expert"}
_DEEPSEEK = {
    "q_lora_rank": "how queries are made; null where in one step",
    "kv_lora_rank": "the width of the latent cache",
    "n_routed_experts": "the number of experts",
    "n_shared_experts": "the experts that every token passes; null where none",
    "first_k_dense_replace": "the layers without experts",
    **_EXPERT,
}
_NEEDED_BY_TYPE = {
    "qwen3": _HEAD,
    "qwen3_moe": {**_HEAD, "num_experts": "the number of experts", **_EXPERT},
    "mixtral": {"num_local_experts": "the number of experts"},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}


def known() -> list[str]:
    return sorted(path.stem for path in _KNOWN.glob("*.json"))


@functools.cache
def _by_alias() -> dict[str, Path]:
    """Lower-case names: of the file, of the model, and those that the file lists."""
    found: dict[str, Path] = {}
    for path in sorted(_KNOWN.glob("*.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        for alias in {path.stem, config["name"], *config["aliases"]}:
            assert found.setdefault(alias.lower(), path) == path, f"{alias} names two models"
    return found


def load(name_or_path: str, tp: int = 1, weights: str | None = None) -> Model:
    """A known model by its name, in any case; any other by its config.json or the folder that holds it.

    `weights` says in which format to take it, if not in its config's; a known name may end with it: Qwen3-4B-FP8.
    """
    require(weights in (None, *WEIGHTS), f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    name, ending = name_or_path.lower(), f"-{FP8}"
    if name not in _by_alias() and name.removesuffix(ending) in _by_alias():
        name, weights = name.removesuffix(ending), weights or FP8
    path = _find(name, name_or_path)
    found = from_config(_read(path), _name(path), tp, str(path))
    return found if weights is None else replace(found, weights=weights)


def document(name_or_path: str) -> tuple[str, dict[str, Any]]:
    """The name of a model and its config.json as it is; `load` says what it may be."""
    path = _find(name_or_path.lower(), name_or_path)
    found = _read(path)
    return found.get("name") or _name(path), found


def _find(name: str, name_or_path: str) -> Path:
    path = _by_alias().get(name) or Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise BadInput(f"a model's folder must hold a config.json, got {name_or_path!r} without one")
    if not path.is_file():
        raise BadInput(f"a model must be one of {', '.join(known())}, or a config.json, got {name_or_path!r}")
    return path


def _name(path: Path) -> str:
    """Hugging Face calls every file alike: the folder says more."""
    return path.absolute().parent.name if path.name == "config.json" else path.stem


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        config = json.loads(text) if text.strip() else None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not a config.json: {error}") from None
    if config is None:
        raise BadInput(f"{path} is not a config.json: it is empty")
    if not isinstance(config, dict):
        raise BadInput(f"{path} is not a config.json: it must hold an object, got {type(config).__name__}")
    return config


def from_config(config: dict[str, Any], name: str, tp: int = 1, where: str | None = None) -> Model:
    """Takes what it knows of a config.json and leaves the rest; `where` is the file that errors name."""
    where = where or name
    _require_fields(config, where)
    taken: dict[str, Any] = {"name": name, "num_key_value_heads": config["num_attention_heads"]}
    kinds = {f.name: f.type for f in fields(Model) if f.name not in ("weights", "tp")}
    for key, value in config.items():
        field = _RENAMED.get(key, key)
        if field in kinds and value is not None:
            taken[field] = _checked(where, key, kinds[field], value)
    return Model(**taken, weights=_weights(config, where), tp=tp)


def _weights(config: dict[str, Any], where: str) -> str:
    """What quantization_config says: fp8 in blocks of 128 × 128 is planned, any other format is only named."""
    found = config.get("quantization_config")
    if found is None:
        return BF16
    if not isinstance(found, dict):
        raise BadInput(f"{where}: quantization_config must be an object, got {found!r}")
    method, block = found.get("quant_method"), found.get("weight_block_size")
    return FP8 if (method, block) == ("fp8", [128, 128]) else f"{method} in blocks of {block}" if block else f"{method}"


def _require_fields(config: dict[str, Any], where: str) -> None:
    needed = _NEEDED | _NEEDED_BY_TYPE.get(str(config.get("model_type")), {})
    if config.get("kv_lora_rank"):
        needed |= _MLA
    if any(config.get(name) for name in ("n_routed_experts", *_RENAMED)):
        needed |= _TOPK
    missing = [n for n in needed if n not in config or (config[n] is None and n not in _MAY_BE_NULL)]
    if missing:
        listed = ", ".join(f"{n} (needed for {needed[n]})" for n in missing)
        raise BadInput(f"{where}: the config lacks {listed}")


def _checked(where: str, key: str, kind: Any, value: Any) -> Any:
    """The value, if it is of the kind that the model's field takes."""
    if kind in (bool, str, str | None):
        plain, said = (bool, "true or false") if kind is bool else (str, "a text")
        good = isinstance(value, plain)
    elif kind == tuple[int, ...]:
        value, said = tuple(value) if isinstance(value, list) else value, "a list of whole numbers"
        good = isinstance(value, tuple) and all(type(item) is int for item in value)
    else:
        least = 0 if key in _MAY_BE_ZERO else 1
        good, said = type(value) is int and value >= least, f"a whole number from {least} on"
    if not good:
        raise BadInput(f"{where}: {key} must be {said}, got {value!r}")
    return value
