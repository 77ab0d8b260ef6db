"""Published models by the few numbers that decide shapes: what random cases are drawn from."""

import functools
from dataclasses import replace
from typing import Any

from tilery.models.configs import known, load
from tilery.models.model import Model

# name: hidden, MLP, layers, heads, key-value heads, head size, vocabulary
_DENSE = {
    "Command-R-Plus": (12288, 33792, 64, 96, 8, 128, 256000),
    "Falcon-7B": (4544, 18176, 32, 71, 1, 64, 65024),
    "Falcon-40B": (8192, 32768, 60, 128, 8, 64, 65024),
    "Falcon3-10B": (3072, 23040, 40, 12, 4, 256, 131072),
    "Gemma-2-2B": (2304, 9216, 26, 8, 4, 256, 256000),
    "Gemma-2-9B": (3584, 14336, 42, 16, 8, 256, 256000),
    "Gemma-2-27B": (4608, 36864, 46, 32, 16, 128, 256000),
    "Gemma-3-1B": (1152, 6912, 26, 4, 1, 256, 262144),
    "Gemma-3-4B": (2560, 10240, 34, 8, 4, 256, 262208),
    "Gemma-3-12B": (3840, 15360, 48, 16, 8, 256, 262208),
    "Gemma-3-27B": (5376, 21504, 62, 32, 16, 128, 262208),
    "GLM-4-9B": (4096, 13696, 40, 32, 2, 128, 151552),
    "GPT-2": (768, 3072, 12, 12, 12, 64, 50257),
    "GPT-2-XL": (1600, 6400, 48, 25, 25, 64, 50257),
    "Llama-2-7B": (4096, 11008, 32, 32, 32, 128, 32000),
    "Llama-2-13B": (5120, 13824, 40, 40, 40, 128, 32000),
    "Llama-2-70B": (8192, 28672, 80, 64, 8, 128, 32000),
    "Llama-3.1-405B": (16384, 53248, 126, 128, 8, 128, 128256),
    "Llama-3.2-1B": (2048, 8192, 16, 32, 8, 64, 128256),
    "Llama-3.2-3B": (3072, 8192, 28, 24, 8, 128, 128256),
    "Mistral-7B-v0.3": (4096, 14336, 32, 32, 8, 128, 32768),
    "Mistral-Nemo-12B": (5120, 14336, 40, 32, 8, 128, 131072),
    "Mistral-Small-24B": (5120, 32768, 40, 32, 8, 128, 131072),
    "Mistral-Large-2": (12288, 28672, 88, 96, 8, 128, 32768),
    "OLMo-2-7B": (4096, 11008, 32, 32, 32, 128, 100352),
    "OLMo-2-13B": (5120, 13824, 40, 40, 40, 128, 100352),
    "OLMo-2-32B": (5120, 27648, 64, 40, 8, 128, 100352),
    "Phi-3-mini": (3072, 8192, 32, 32, 32, 96, 32064),
    "Phi-3-medium": (5120, 17920, 40, 40, 10, 128, 32064),
    "Phi-4": (5120, 17920, 40, 40, 10, 128, 100352),
    "Phi-4-mini": (3072, 8192, 32, 24, 8, 128, 200064),
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 64, 151936),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 128, 151936),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 128, 151936),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 128, 152064),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 128, 152064),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, 128, 152064),
    "Qwen2.5-72B": (8192, 29568, 80, 64, 8, 128, 152064),
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 128, 151936),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, 128, 151936),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, 128, 151936),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, 128, 151936),
    "SmolLM2-135M": (576, 1536, 30, 9, 3, 64, 49152),
    "SmolLM2-360M": (960, 2560, 32, 15, 5, 64, 49152),
    "StarCoder": (6144, 24576, 40, 48, 1, 128, 49152),
    "StarCoder2-3B": (3072, 12288, 30, 24, 2, 128, 49152),
    "StarCoder2-7B": (4608, 18432, 32, 36, 4, 128, 49152),
    "StarCoder2-15B": (6144, 24576, 40, 48, 4, 128, 49152),
    "Yi-6B": (4096, 11008, 32, 32, 4, 128, 64000),
    "Yi-34B": (7168, 20480, 60, 56, 8, 128, 64000),
}

# the same numbers, then: experts, experts of a token, width of an expert, shared experts
_EXPERTS = {
    "DeepSeek-V2": ((5120, 12288, 60, 128, 128, 128, 102400), (160, 6, 1536, 2)),
    "GPT-OSS-20B": ((2880, 2880, 24, 64, 8, 64, 201088), (32, 4, 2880, 0)),
    "GPT-OSS-120B": ((2880, 2880, 36, 64, 8, 64, 201088), (128, 4, 2880, 0)),
    "Kimi-K2": ((7168, 18432, 61, 64, 64, 128, 163840), (384, 8, 2048, 1)),
    "Llama-4-Scout": ((5120, 16384, 48, 40, 8, 128, 202048), (16, 1, 8192, 1)),
    "Mixtral-8x22B": ((6144, 16384, 56, 48, 8, 128, 32768), (8, 2, 16384, 0)),
    "OLMoE-1B-7B": ((2048, 1024, 16, 16, 16, 128, 50304), (64, 8, 1024, 0)),
    "Qwen3-235B-A22B": ((4096, 12288, 94, 64, 4, 128, 151936), (128, 8, 1536, 0)),
}

_DEEPSEEK = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_LATENT: dict[str, dict[str, Any]] = {"DeepSeek-V2": _DEEPSEEK, "Kimi-K2": _DEEPSEEK}  # those with latent attention


@functools.cache
def published() -> tuple[Model, ...]:
    """All of them, those of known/ among them, on one rank. They are sorted: draws depend on the order."""
    models = [load(name) for name in known()] + [_dense(name, numbers) for name, numbers in _DENSE.items()]
    for name, (numbers, (experts, taken, width, shared)) in _EXPERTS.items():
        more: dict[str, Any] = {
            "n_routed_experts": experts,
            "num_experts_per_tok": taken,
            "moe_intermediate_size": width,
        }
        models.append(replace(_dense(name, numbers), **more, n_shared_experts=shared, **_LATENT.get(name, {})))
    return tuple(sorted(models, key=lambda model: model.name))


def _dense(name: str, numbers: tuple[int, ...]) -> Model:
    hidden, mlp, layers, heads, kv_heads, head, vocabulary = numbers
    return Model(name, hidden, mlp, layers, heads, kv_heads, vocabulary, head_dim=head)
