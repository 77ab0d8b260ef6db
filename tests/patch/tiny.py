"""Tiny random models of every architecture that is patched, and prompts for them."""

import torch
import transformers
from transformers import AutoModelForCausalLM

import tilery

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
_TWO_KINDS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 1, **_EXPERTS,
}  # fmt: skip
# What each adds to plain causal attention; windows are shorter than prompts.
ARCHITECTURES = {
    "deepseek_v2": {**_LATENT, "n_group": None, "topk_group": None},
    "deepseek_v3": {**_LATENT, "n_group": 2, "topk_group": 1},
    "gemma": {},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 7},
    "gemma3_text": _TWO_KINDS,
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {},
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "olmo3": _TWO_KINDS,
    "olmoe": {"num_experts": 4, "clip_qkv": 0.5, **_EXPERTS},
    "phi3": {"sliding_window": 5, "partial_rotary_factor": 0.5},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "mlp_only_layers": [1], **_EXPERTS},
}
PROMPT = torch.randint(1, 64, (2, 20), generator=torch.Generator().manual_seed(1))  # more than a step of decoding takes
PADDING = {
    "none": None,
    "left": torch.tensor([[0] * 7 + [1] * 13, [1] * 20]),
    "right": torch.tensor([[1] * 20, [1] * 11 + [0] * 9]),
}


@torch.no_grad()
def make(name, of=AutoModelForCausalLM, attention="eager", **more):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **(SMALL | ARCHITECTURES.get(name, {}) | more))
    model = of.from_config(config, attn_implementation=attention).eval()
    for weight in model.parameters():  # as drawn, they are so small that no query prefers a key
        weight.mul_(8) if weight.ndim > 1 else weight.normal_(1.0, 0.5)
    return model


@torch.no_grad()
def both(model, what, *args, **kwargs):
    """Before a patch and with it, which stays."""
    before = what(*args, **kwargs)
    report = tilery.patch(model)
    return before, what(*args, **kwargs), report


def same(ours, theirs, mask=None):
    if mask is not None:  # of what is padding nothing is asked
        ours, theirs = (x[mask.bool()] for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
