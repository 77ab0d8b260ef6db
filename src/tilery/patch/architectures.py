"""What is patched in each architecture of transformers, as a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

USUAL = ("norms", "rope", "mlp", "qkv", "experts", "attention")
PIECES = (*USUAL, "loss")  # the last is patched where it is asked for: a training step then has no logits to hand out


@dataclass(frozen=True)
class Layer:
    """A decoder layer whose norm before the MLP also adds the attention's output to the residual stream."""

    joining: str = "post_attention_layernorm"  # the norm that adds
    after_attention: str = ""  # a norm of the attention's output, before it is added
    after_mlp: str = ""
    attention_dropout: str = ""
    mlp_dropout: str = ""


@dataclass(frozen=True)
class Heads:
    """An attention module: projections, norms of queries and keys, rotation, what it tells its attention function."""

    tells: Mapping[str, str] = field(default_factory=dict)  # argument of the attention function -> attribute
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # or one that makes all three
    norms: str = ""  # of queries and keys: "head" (of each head) or "row" (of all heads of a token)
    clips: bool = False  # whether config.clip_qkv bounds queries, keys and values
    half_angles: bool = False  # whether cos and sin have a column for each pair, not for each value


@dataclass(frozen=True)
class Experts:
    """Experts and their router. What the router knows is named by its attributes."""

    router: str = "TopKRouter"  # suffix of its class
    adds: str = ""  # suffix of the class that adds shared experts
    scoring: str = "softmax"  # as moe_route takes it
    renormalizes: bool | str = True
    scaling: str = ""
    bias: str = ""  # of scores, in the choice alone
    groups: tuple[str, ...] = ()  # their number, and how many of them a token chooses from
    wide: bool = False  # whether logits are computed in fp32
    only: tuple[str, ...] = ()  # an attribute, the value that is patched, why another is not
    interleaved: bool = False  # whether gate and up alternate in [E, H, 2I], with biases, a limit and alpha


@dataclass(frozen=True)
class Architecture:
    prefix: str  # of its classes: LlamaRMSNorm, LlamaAttention …
    module: str = ""  # transformers.models.<module>.modeling_<module>; the architecture's own name if empty
    offset: float = 0.0  # added to the weights of norms
    layer: Layer | None = field(default_factory=Layer)
    heads: Heads | None = field(default_factory=Heads)
    mlp: bool = True
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")  # or one that makes both
    experts: Experts | None = None
    stays: Mapping[str, str] = field(default_factory=dict)  # suffix of a class -> why it stays in torch


_LATENT = "latent attention (MLA) is not patched: its projections and rotation stay"
_BEST_OF_GROUP = "it ranks groups by their best expert, which moe_route does not; transformers' own router runs"
_WINDOW = {"sliding_window": "sliding_window"}
_CONFIG_WINDOW = {"sliding_window": "config.sliding_window"}
_SANDWICH = Layer("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
_NORMED = Experts(renormalizes="norm_topk_prob")
_DEEPSEEK = Experts("TopkRouter", renormalizes=False, scaling="routed_scaling_factor", wide=True)
_NO_SUM = None  # the norm comes before the sum: there is nothing to fuse

ARCHITECTURES = {
    "deepseek_v2": Architecture(
        "DeepseekV2", heads=None, stays={"Attention": _LATENT},
        experts=replace(_DEEPSEEK, adds="Moe", only=("topk_method", "greedy", _BEST_OF_GROUP)),
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3", heads=None, stays={"Attention": _LATENT},
        experts=replace(
            _DEEPSEEK, adds="MoE", scoring="sigmoid", renormalizes="norm_topk_prob", bias="e_score_correction_bias",
            groups=("num_group", "topk_group"),
        ),
    ),
    "gemma": Architecture("Gemma", offset=1.0),
    "gemma2": Architecture(
        "Gemma2", offset=1.0, layer=_SANDWICH, heads=Heads({**_WINDOW, "softcap": "attn_logit_softcapping"})
    ),
    "gemma3_text": Architecture(
        "Gemma3", "gemma3", offset=1.0, layer=_SANDWICH, heads=Heads(_WINDOW, norms="head")
    ),
    "gpt_oss": Architecture(
        "GptOss", heads=Heads({**_WINDOW, "s_aux": "sinks"}, half_angles=True), mlp=False,
        experts=Experts(scoring="softmax_topk", interleaved=True),
    ),
    "llama": Architecture("Llama"),
    "mistral": Architecture("Mistral", heads=Heads(_CONFIG_WINDOW)),
    "mixtral": Architecture("Mixtral", heads=Heads(_CONFIG_WINDOW), mlp=False, experts=Experts()),
    "olmo2": Architecture("Olmo2", layer=_NO_SUM, heads=Heads(norms="row")),
    "olmo3": Architecture("Olmo3", layer=_NO_SUM, heads=Heads(_WINDOW, norms="row")),
    "olmoe": Architecture(
        "Olmoe", heads=Heads(_CONFIG_WINDOW, norms="row", clips=True), mlp=False,
        experts=_NORMED,
    ),
    "phi3": Architecture(
        "Phi3", layer=Layer(attention_dropout="resid_attn_dropout", mlp_dropout="resid_mlp_dropout"),
        heads=Heads(_CONFIG_WINDOW, projections=("qkv_proj",)), gate_up=("gate_up_proj",),
    ),
    "qwen2": Architecture("Qwen2", heads=Heads(_WINDOW)),
    "qwen3": Architecture("Qwen3", heads=Heads(_WINDOW, norms="head")),
    "qwen3_moe": Architecture("Qwen3Moe", heads=Heads(_WINDOW, norms="head"), experts=_NORMED),
}  # fmt: skip
