"""docs/models.md: what is patched in each architecture, from the table alone."""

from tilery.patch.architectures import ARCHITECTURES, Architecture, Experts, Heads

_HEAD = """# Models

Made by `tilery ops --models`. What `tilery.patch(model)` replaces in each architecture of `transformers`, by the model
type that its config names ([huggingface.md](huggingface.md)). An empty cell stays in torch. The ops of the MLP are
`linear_silu_mul` for SiLU without biases, else `linear` with `silu_mul` or `gelu_mul`. Those of attention are
`attention` and `attention_decode`. Those of experts are `moe_route` for routers and `fused_moe` for experts.

| model type | norms | q, k, v | rotation | MLP | experts | attention | stays in torch |
|---|---|---|---|---|---|---|---|
"""
_STAYS = {"Attention": "MLA's projections and rotation"}
_SCORES = {"softmax": "softmax", "sigmoid": "sigmoid", "softmax_topk": "softmax after top-k"}
_TELLS = {"sliding_window": "windows", "softcap": "soft cap", "s_aux": "sinks"}


def markdown() -> str:
    return _HEAD + "".join(f"| {' | '.join(_cells(name, known))} |\n" for name, known in ARCHITECTURES.items())


def _cells(name: str, known: Architecture) -> tuple[str, ...]:
    return (
        f"`{name}`", _norms(known), "`linear`" if known.heads else "", _rotation(known.heads),
        "gate, up" if known.mlp else "", _experts(known.experts), _attention(known.heads),
        ", ".join(_STAYS[suffix] for suffix in known.stays),
    )  # fmt: skip


def _norms(known: Architecture) -> str:
    ops = "`rms_norm`, `add_rms_norm`" if known.layer else "`rms_norm`"
    return f"{ops}, offset {known.offset:g}" if known.offset else ops


def _rotation(heads: Heads | None) -> str:
    if heads is None:
        return ""
    in_place = {"head": "`qk_norm_rope_`; ", "row": "", "": "`rope_`; "}
    return in_place[heads.norms] + "`rope`"


def _attention(heads: Heads | None) -> str:
    told = [_TELLS[name] for name in heads.tells] if heads else []
    return ", ".join(["yes", *told])


def _experts(known: Experts | None) -> str:
    if known is None:
        return ""
    what = ["experts"] + ["shared experts"] * bool(known.adds) + ["biases, limit and alpha"] * known.interleaved
    how = [f"router by {_SCORES[known.scoring]}"] + ["bias"] * bool(known.bias) + ["groups"] * bool(known.groups)
    how += [f"where `{known.only[0]}` is `{known.only[1]}`"] if known.only else []
    return "; ".join(", ".join(part) for part in (what, how))
