"""Patches a model by the table of its architecture, and takes the patch back."""

import copy
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from tilery.base.errors import BadInput, ToolMissing, require
from tilery.base.spec import dtype_name
from tilery.core.op import REGISTRY
from tilery.patch import forwards, joined, register_attention, swap, verify
from tilery.patch.architectures import ARCHITECTURES, PIECES, Architecture
from tilery.patch.attention import BACKENDS
from tilery.patch.forwards import State
from tilery.patch.joined import Joined
from tilery.patch.report import Left, PatchReport, Replaced

RECORD = "tilery_patched"  # the attribute of a patched model that says how to take the patch back
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ACTS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "tanh", "GELUActivation": "none", "GELU": "none"}
_PAGED = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")
_OPS = {
    "norms": ("rms_norm", "add_rms_norm"),
    "rope": ("rope_", "rope"),
    "qkv": ("linear",),
    "attention": ("attention", "attention_decode"),
}


@dataclass
class Record:
    """A patch that is in place."""

    report: PatchReport
    strict: bool
    pieces: tuple[str, ...]
    modules: dict[str, tuple[Any, tuple[str, ...]]] = field(default_factory=dict)  # name -> pieces it computes
    attention: str | None = None  # the attention implementation before


def patch(
    model: PreTrainedModel, ops: str | Iterable[str] | None, backend: str | Mapping[str, str] | None,
    strict: bool, proven: bool,
) -> PatchReport:  # fmt: skip
    known = _architecture(model)
    pieces = _pieces(ops)
    _require_patchable(model)
    record = Record(PatchReport(model.config.model_type), strict, pieces)
    made = _Application(model, known, record, _backends(backend))
    targets = made.targets() if proven else {}
    truths = verify.truths(model, targets) if proven else []
    vars(model)[RECORD] = record
    try:
        made.run()
        left = [e for e in record.report.left if e.piece]
        if strict and left:
            said = "\n".join(f"  {e.piece} of {e.count} {e.module}: {e.why}" for e in left)
            raise BadInput(f"strict=True, and of what was asked for this cannot be patched:\n{said}")
        if proven:
            record.report.errors = verify.errors(model, targets, truths)
    except BaseException:
        unpatch(model)
        raise
    return record.report


def unpatch(model: PreTrainedModel) -> None:
    """Bit for bit what it was; its config stays a copy of the one that it came with."""
    require(RECORD in vars(model), f"the model is not patched: {type(model).__name__}; tilery.patch(model) does that")
    record: Record = vars(model)[RECORD]
    for module, _ in reversed(record.modules.values()):
        if module.tilery_patch.joined is not None:
            module.tilery_patch.joined.split(module)
        swap.restore_forward(module)
    for module in model.modules():
        vars(module).pop(BACKENDS, None)
    if record.attention is not None:
        model.set_attn_implementation(record.attention)
    for name in _PAGED:
        vars(model).pop(name, None)
    del vars(model)[RECORD]


# What is asked for


def _architecture(model: Any) -> Architecture:
    require(isinstance(model, PreTrainedModel), f"model must be a model of transformers, got {type(model).__name__}")
    require(RECORD not in vars(model), "the model is patched already; tilery.unpatch(model) takes the patch back")
    name = model.config.model_type
    if name not in ARCHITECTURES:
        raise BadInput(
            f"the architecture {name!r} is not known; known are {', '.join(ARCHITECTURES)}. Its attention may still "
            "run: tilery.register_attention(), then model.set_attn_implementation('tilery')"
        )
    return ARCHITECTURES[name]


def _pieces(ops: str | Iterable[str] | None) -> tuple[str, ...]:
    asked = PIECES if ops is None else (ops,) if isinstance(ops, str) else tuple(ops)
    for name in asked:
        require(name in PIECES, f"ops must be some of {', '.join(PIECES)}, got {name!r}")
    return asked


def _require_patchable(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        require(not weight.is_meta, f"the model must have its weights, {name} is on the meta device")
        floats = weight.is_floating_point() and weight.dtype.itemsize > 1  # narrower ones are of quantised layers
        kinds = ", ".join(map(dtype_name, _DTYPES))
        require(not floats or weight.dtype in _DTYPES, f"weights must be {kinds}, {name} is {weight.dtype}")


def _backends(backend: str | Mapping[str, str] | None) -> dict[str, str]:
    """By op; one name is of all ops that a patch may call, each of which must have that kernel."""
    called = dict.fromkeys([*sum(_OPS.values(), ()), "qk_norm_rope_", "linear_silu_mul", "silu_mul", "gelu_mul"])
    if backend is None:
        return {}
    given = dict.fromkeys(called, backend) if isinstance(backend, str) else dict(backend)
    for op, name in given.items():
        require(op in called, f"backend= names ops that a patch calls, {', '.join(called)}; got {op!r}")
        kernels = REGISTRY[op].kernels
        require(
            name in kernels,
            f"backend for {op} must be one of {', '.join(kernels)}, got {name!r}; "
            "backend={'" + op + "': …} names one for each op",
        )
    return given


# What is done


class _Application:
    """One patch of one model."""

    def __init__(self, model: PreTrainedModel, known: Architecture, record: Record, backends: dict[str, str]) -> None:
        self.model, self.known, self.record, self.backends = model, known, record, backends
        self.pieces, self.report = record.pieces, record.report
        name = known.module or model.config.model_type
        self.modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        self.done: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
        self.left: Counter[tuple[str, str, str]] = Counter()
        self._own_config()

    def targets(self) -> dict[str, verify.Target]:
        """What a proof compares: decoder layers, and norms outside of them."""
        layer, experts = self._class("DecoderLayer"), getattr(self.modeling, self.known.prefix + "Experts", ())
        found: dict[str, verify.Target] = {}
        name: str
        module: nn.Module
        for name, module in self.model.named_modules():
            inside = any(name.startswith(f"{other}.") for other in found)
            if type(module) is layer:
                routed = any(isinstance(each, experts) for each in module.modules())
                found[name] = verify.Target(module, adds=True, routed=routed)
            elif type(module) is self._class("RMSNorm") and not inside:
                found[name] = verify.Target(module, adds=False, routed=False)
        return found

    def run(self) -> None:
        by_class = self._by_class()
        for suffix, act in self._actions().items():
            for name, module in by_class.get(self._class(suffix), ()):
                act(name, module)
        for suffix, why in self.known.stays.items():
            count = len(by_class.get(self._class(suffix), ()))
            if suffix == "Experts":
                why += f" ({getattr(self.model.config, '_experts_implementation', None) or 'eager'})"
            pieces = [piece for piece in ("qkv", "rope") if piece in self.pieces] if suffix == "Attention" else []
            self.left.update({(", ".join(pieces), self.known.prefix + suffix, why): count})
        if "attention" in self.pieces:
            self._set_attention()
        self._refuse_paged()
        self.report.replaced = [Replaced(*of[:2], count, of[2]) for of, count in self.done.items()]
        self.report.left += [Left(piece, kind, count, why) for (piece, kind, why), count in self.left.items() if count]
        require(bool(self.done), f"nothing of the model could be replaced:\n{self.report}")

    def _actions(self) -> dict[str, Callable[[str, nn.Module], None]]:
        """By the suffix of a class. Layers come last: they need their norms patched."""
        wanted: dict[str, Callable[[str, nn.Module], None]] = {}
        if "norms" in self.pieces:
            wanted["RMSNorm"] = self._norm
        if "mlp" in self.pieces and self.known.mlp:
            wanted["MLP"] = self._mlp
        if self.known.heads and {"rope", "qkv"} & set(self.pieces):
            wanted["Attention"] = self._heads
        if "norms" in self.pieces and self.known.layer:
            wanted["DecoderLayer"] = self._layer
        return wanted

    def _class(self, suffix: str) -> type:
        name = self.known.prefix + suffix
        found = getattr(self.modeling, name, None)
        if found is None:
            raise ToolMissing(
                f"transformers {transformers.__version__} has no {self.modeling.__name__}.{name}, which this version "
                "of tilery patches; pip install 'tilery[hf]'"
            )
        return found  # type: ignore[no-any-return]

    def _by_class(self) -> dict[type, list[tuple[str, nn.Module]]]:
        found: dict[type, list[tuple[str, nn.Module]]] = {}
        for name, module in self.model.named_modules():
            found.setdefault(type(module), []).append((name, module))
        return found

    def _own_config(self) -> None:
        """A config of its own: another model may share this one, and would be switched to other masks."""
        shared, own = self.model.config, copy.deepcopy(self.model.config)
        for module in self.model.modules():
            if vars(module).get("config") is shared:
                module.config = own  # type: ignore[assignment]

    # Pieces

    def _norm(self, name: str, module: Any) -> None:
        eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        missing = _missing(module, "weight") or ("it has no eps" if eps is None else None)
        if self._fits("norms", module, missing):
            state = State(self.backends, eps=eps, offset=self.known.offset)
            self._replace(name, module, forwards.norm, state, {"norms": ("rms_norm",)})

    def _mlp(self, name: str, module: Any) -> None:
        names, act = self.known.gate_up, _act(module)
        missing = _missing(module, *names, "down_proj")
        why = missing or joined.refusal([getattr(module, n) for n in names])
        if why is None and act is None:
            why = "its activation has no gated op"
        if self._fits("mlp", module, why):
            bias = getattr(module, names[0]).bias is not None
            gated = "silu_mul" if act == "silu" else "gelu_mul"
            ops = ("linear_silu_mul",) if act == "silu" and not bias else ("linear", gated)
            state = State(self.backends, joined=Joined(*names), act=act or "")
            self._replace(name, module, forwards.mlp, state, {"mlp": ops})
            state.joined.parts(module)  # type: ignore[union-attr]

    def _heads(self, name: str, module: Any) -> None:
        heads = self.known.heads
        assert heads is not None, "asked for attention alone"
        norms = ("q_norm", "k_norm") if heads.norms else ()
        missing = _missing(module, *heads.projections, *norms, "o_proj", "head_dim", "scaling", "layer_idx")
        asked: list[str] = [piece for piece in ("qkv", "rope") if piece in self.pieces]
        asked = [piece for piece in asked if self._fits(piece, module, missing)]
        why = joined.refusal([getattr(module, n) for n in heads.projections]) if "qkv" in asked else None
        if why is not None:
            self.left["qkv", type(module).__name__, why] += 1
            asked.remove("qkv")
        config = module.config
        sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        state = State(
            self.backends, heads=heads, sizes=tuple(module.head_dim * n for n in sizes), rotates="rope" in asked,
            joined=Joined(*heads.projections) if "qkv" in asked else None,
        )  # fmt: skip
        if asked:
            ops = {piece: _OPS[piece] for piece in asked}
            if "rope" in asked and heads.norms == "head" and "norms" in self.pieces:
                ops["rope"] = ("qk_norm_rope_", "rope")
            self._replace(name, module, forwards.attention, state, ops)
            if state.joined is not None:
                state.joined.parts(module)

    def _layer(self, name: str, module: Any) -> None:
        how = self.known.layer
        assert how is not None, "asked for a layer"
        named = filter(None, (how.after_attention, how.after_mlp, how.attention_dropout, how.mlp_dropout))
        why = _missing(module, "self_attn", "mlp", "input_layernorm", how.joining, *named)
        if why is None and not hasattr(getattr(module, how.joining), swap.STATE):
            why = "its norm is not patched"
        if self._fits("norms", module, why):
            state = State(self.backends, layer=how)
            self._replace(name, module, forwards.decoder_layer, state, {"norms": ("add_rms_norm",)})

    def _set_attention(self) -> None:
        register_attention()
        self.record.attention = self.model.config._attn_implementation
        self.model.set_attn_implementation("tilery")
        count = 0
        for module in self.model.modules():
            if vars(module).get("layer_idx") is not None and type(module).__name__.endswith("Attention"):
                vars(module)[BACKENDS] = self.backends
                count += 1
        if self.model.config._attn_implementation == "tilery":
            self.done["attention", self.known.prefix + "Attention", _OPS["attention"]] += count
        else:
            self.left["attention", self.known.prefix + "Attention", "transformers does not let it be set"] += count

    def _refuse_paged(self) -> None:
        for name in _PAGED:
            if hasattr(self.model, name):
                vars(self.model)[name] = refuse_paged

    # Keeping count

    def _fits(self, piece: str, module: nn.Module, why: str | None) -> bool:
        why = why or swap.refusal(module)
        if why is not None:
            self.left[piece, type(module).__name__, why] += 1
        return why is None

    def _replace(
        self, name: str, module: nn.Module, forward: Callable[..., Any], state: State, ops: dict[str, tuple[str, ...]]
    ) -> None:
        for piece, called in ops.items():
            self.done[piece, type(module).__name__, called] += 1
        swap.replace_forward(module, forward, state)
        self.record.modules[name] = module, tuple(ops)


def refuse_paged(*args: Any, **kwargs: Any) -> Any:
    raise BadInput(
        "a patched model does not generate by continuous batching: its paged cache hands keys and values to attention "
        "in pages that tilery's function for transformers does not read; use generate, or tilery.unpatch(model) first"
    )


def _missing(module: nn.Module, *names: str) -> str | None:
    lacking = [name for name in names if not hasattr(module, name)]
    return f"in transformers {transformers.__version__} it has no {', '.join(lacking)}" if lacking else None


def _act(module: Any) -> str | None:
    found = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    return _ACTS.get(type(found).__name__)
