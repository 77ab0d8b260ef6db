"""One patch of one model: what the table of its architecture says, done to its modules, and kept count of."""

import copy
import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from tilery.base.errors import BadInput, ToolMissing, require
from tilery.base.spec import dtype_name
from tilery.ops.attention.checks import HEAD_DIMS
from tilery.patch import experts, forwards, joined, loss, register_attention, swap, verify
from tilery.patch.architectures import Architecture, Experts, Heads
from tilery.patch.attention import BACKENDS
from tilery.patch.forwards import State
from tilery.patch.joined import Joined
from tilery.patch.report import Left, PatchReport, Replaced

RECORD = "tilery_patched"  # the attribute of a patched model that says how to take the patch back
_ACTS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "tanh", "GELUActivation": "none", "GELU": "none"}
PAGED = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")
_SIZES = ("head_dim", "qk_head_dim", "v_head_dim")  # attributes of an attention module that say how wide a head is
OPS = {
    "norms": ("rms_norm", "add_rms_norm"),
    "rope": ("rope_", "rope"),
    "qkv": ("linear",),
    "experts": ("moe_route", "fused_moe"),
    "attention": ("attention", "attention_decode"),
    "loss": ("fused_linear_cross_entropy",),
}


@dataclass
class Record:
    """A patch that is in place."""

    report: PatchReport
    strict: bool
    pieces: tuple[str, ...]
    modules: dict[str, tuple[Any, tuple[str, ...]]] = field(default_factory=dict)  # name -> pieces it computes
    attention: str | None = None  # the attention implementation before


class Application:
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
            pieces = [piece for piece in ("qkv", "rope") if piece in self.pieces] if suffix == "Attention" else []
            self.left.update({(", ".join(pieces), self.known.prefix + suffix, why): count})
        if "attention" in self.pieces:
            self._set_attention()
        if "loss" in self.pieces:
            self._loss()
        self._refuse_paged()
        self.report.replaced = [Replaced(*of[:2], count, of[2]) for of, count in self.done.items()]
        self.report.left += [Left(piece, kind, count, why) for (piece, kind, why), count in self.left.items() if count]
        require(bool(self.done), f"nothing of the model could be replaced:\n{self.report}")

    def _actions(self) -> dict[str, Callable[[str, nn.Module], None]]:
        """By the suffix of a class. What needs others patched comes after them: routers, layers."""
        wanted: dict[str, Callable[[str, nn.Module], None]] = {}
        if "norms" in self.pieces:
            wanted["RMSNorm"] = self._norm
        if "mlp" in self.pieces and self.known.mlp:
            wanted["MLP"] = self._mlp
        if self.known.heads and {"rope", "qkv"} & set(self.pieces):
            wanted["Attention"] = self._heads
        if "experts" in self.pieces and (routed := self.known.experts):
            wanted["Experts"] = self._experts
            for suffix, act in ((routed.router, self._router), (routed.adds, self._with_shared)):
                name = self.known.prefix + suffix
                if hasattr(self.modeling, name):
                    wanted[suffix] = act
                elif suffix:
                    self.left["experts", name, f"transformers {transformers.__version__} has no such class"] += 1
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
        why = _missing(module, "weight") or ("it has no eps" if eps is None else self._weight_refusal(module))
        if self._fits("norms", module, why):
            state = State(self.backends, eps=eps, offset=self.known.offset)
            self._replace(name, module, forwards.norm, state, {"norms": ("rms_norm",)})

    def _mlp(self, name: str, module: Any) -> None:
        names, act = self.known.gate_up, _act(module)
        why = _missing(module, *names, "down_proj") or self._joined_refusal(module, names)
        if why is None and act is None:
            why = "its activation has no gated op"
        if self._fits("mlp", module, why):
            bias = getattr(module, names[0]).bias is not None
            gated = "silu_mul" if act == "silu" else "gelu_mul"
            ops = ("linear_silu_mul",) if act == "silu" and not bias else ("linear", gated)
            state = State(self.backends, joined=Joined(*names), act=act or "")
            self._replace(name, module, forwards.mlp, state, {"mlp": ops})
            state.joined.parts(module)  # type: ignore[union-attr]

    def _experts(self, name: str, module: Any) -> None:
        how = self._routed
        why = _missing(module, *experts.needed(how)) or swap.refusal(self._block(name))
        why = why or self._weight_refusal(module, "gate_up_proj", "down_proj")
        why = why or experts.refusal(module, how, _act(module))
        if why is not None:
            own = getattr(self.model.config, "_experts_implementation", None) or "eager"
            why += f"; transformers runs them ({own})"
        if self._fits("experts", module, why):
            self._replace(name, module, experts.experts, State(self.backends, routed=how), {"experts": ("fused_moe",)})

    def _router(self, name: str, module: Any) -> None:
        how = self._routed
        why = self._experts_refusal(name) or _missing(module, *experts.needed_of_router(how))
        if self._fits("experts", module, why or experts.router_refusal(module, how)):
            state = State(self.backends, routed=how, aside=experts.aside)
            self._replace(name, module, experts.router, state, {"experts": ("moe_route",)})

    def _with_shared(self, name: str, module: Any) -> None:
        why = self._experts_refusal(f"{name}.experts") or _missing(module, "gate", "experts", "shared_experts")
        router = getattr(self.modeling, self.known.prefix + self._routed.router, None)
        if why is None and (router is None or not isinstance(module.gate, router)):
            why = f"its gate is a {type(module.gate).__name__}"
        if self._fits("experts", module, why):
            self._replace(name, module, experts.with_shared, State(self.backends), {"experts": ("fused_moe",)})

    @property
    def _routed(self) -> Experts:
        found = self.known.experts
        assert found is not None, "asked for experts"
        return found

    def _block(self, name: str) -> nn.Module:
        """What the experts or the router of this name are a part of."""
        return self.model.get_submodule(name.rpartition(".")[0])

    def _experts_refusal(self, name: str) -> str | None:
        found = getattr(self._block(name), "experts", None)
        return None if hasattr(found, swap.STATE) else f"its experts, {type(found).__name__}, are not patched"

    def _heads(self, name: str, module: Any) -> None:
        heads = self.known.heads
        assert heads is not None, "asked for attention alone"
        norms = ("q_norm", "k_norm") if heads.norms else ()
        missing = _missing(module, *heads.projections, *norms, "o_proj", "head_dim", "scaling", "layer_idx")
        asked: list[str] = [piece for piece in ("qkv", "rope") if piece in self.pieces]
        asked = [piece for piece in asked if self._fits(piece, module, missing)]
        why = self._joined_refusal(module, heads.projections) if "qkv" in asked else None
        if why is not None:
            self.left["qkv", type(module).__name__, why] += 1
            asked.remove("qkv")
        config = module.config
        count = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        state = State(
            self.backends, heads=heads, sizes=tuple(module.head_dim * n for n in count), rotates="rope" in asked,
            joined=Joined(*heads.projections) if "qkv" in asked else None,
        )  # fmt: skip
        if asked:
            ops = {piece: OPS[piece] for piece in asked}
            if "rope" in asked:
                ops["rope"] = self._rotation(heads, "qkv" in asked)
            self._replace(name, module, forwards.attention, state, ops)
            if state.joined is not None:
                state.joined.parts(module)

    def _rotation(self, heads: Heads, joined: bool) -> tuple[str, ...]:
        """In place where q and k are views of a product that nobody else has seen; rope also in training."""
        if not joined or heads.norms == "row" or (heads.norms and "norms" not in self.pieces):
            return ("rope",)
        return ("qk_norm_rope_" if heads.norms else "rope_", "rope")

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
        name, modules = self.known.prefix + "Attention", []
        for module in self.model.modules():
            if vars(module).get("layer_idx") is not None and type(module).__name__ == name:
                modules.append(module)
        sizes = {getattr(module, size) for module in modules for size in _SIZES if hasattr(module, size)}
        if other := sizes - set(HEAD_DIMS):
            why = f"it has heads of {max(other)}, tilery's attention takes {', '.join(map(str, HEAD_DIMS))}"
            self.left["attention", name, why] += len(modules)
            return
        register_attention()
        self.record.attention = self.model.config._attn_implementation
        self.model.set_attn_implementation("tilery")
        if self.model.config._attn_implementation != "tilery":
            self.left["attention", name, "transformers does not let it be set"] += len(modules)
            return
        for module in modules:
            vars(module)[BACKENDS] = self.backends
        self.done["attention", name, OPS["attention"]] += len(modules)

    def _loss(self) -> None:
        if self._fits("loss", self.model, loss.refusal(self.model)):
            plain = transformers.modeling_outputs.CausalLMOutputWithPast
            state = State(self.backends, output=getattr(self.modeling, "MoeCausalLMOutputWithPast", plain))
            self._replace("", self.model, loss.causal_lm, state, {"loss": OPS["loss"]})

    def _refuse_paged(self) -> None:
        for name in PAGED:
            if hasattr(self.model, name):
                vars(self.model)[name] = refuse_paged

    # Why not

    def _joined_refusal(self, module: nn.Module, names: tuple[str, ...]) -> str | None:
        layers = [getattr(module, name) for name in names]
        return joined.refusal(layers) or next(filter(None, map(self._weight_refusal, layers)), None)

    def _weight_refusal(self, module: Any, *names: str) -> str | None:
        """Ops take weights of the dtype that they are given."""
        for weight in (getattr(module, name) for name in names or ("weight",)):
            if type(weight.data) is not Tensor:
                return f"its weight is a {type(weight.data).__name__}, not a plain tensor"
            if weight.dtype != self.model.dtype:
                return f"its weight is {dtype_name(weight.dtype)} in a model of {dtype_name(self.model.dtype)}"
        return None

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
