"""Patched models on a GPU give what they gave before, in fp32 and bf16, compiled and in a CUDA graph."""

import copy

import pytest
import torch
import transformers
from tiny import ARCHITECTURES, PADDING, PROMPT, both, make, same

import tilery
from cases import home

pytestmark = pytest.mark.gpu
WHERE = home("triton")
GREEDY = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_and_greedy_tokens_stay(name):
    """Prefill, decode with a cache, windows, padding on the left."""
    model, prompt, mask = make(name).to(WHERE), PROMPT.to(WHERE), PADDING["left"].to(WHERE)

    def run():
        return model(prompt).logits, model.generate(prompt, attention_mask=mask, **GREEDY)

    before, after, _ = both(model, run)
    same(after[0], before[0])
    assert after[1].sequences.tolist() == before[1].sequences.tolist()
    same(torch.stack(after[1].logits), torch.stack(before[1].logits))


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_bf16_is_no_farther_from_fp32_than_before(name):
    exact, prompt = make(name).to(WHERE), PROMPT.to(WHERE)
    model = copy.deepcopy(exact).to(torch.bfloat16)
    right = exact(prompt).logits

    def error():
        logits = model(prompt).logits.float()
        return ((logits - right).norm() / right.norm()).item()

    before, after, _ = both(model, error)
    assert 0 < after < 1.3 * before


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_decode_in_a_cuda_graph(name):
    """By generate's own option, with a static cache."""
    model, prompt = make(name).to(WHERE), PROMPT.to(WHERE)
    how = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    before = model.generate(prompt, disable_compile=True, **how)
    tilery.patch(model)
    compiled = transformers.CompileConfig(fullgraph=True, mode="reduce-overhead")
    assert model.generate(prompt, compile_config=compiled, **how).tolist() == before.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3"])
def test_a_training_step(name):
    """Gradients of every weight, against those of the model in torch."""
    model, prompt = make(name).to(WHERE).train(), PROMPT.to(WHERE)

    def gradients():
        model.zero_grad()
        model(prompt, labels=prompt).loss.backward()
        return {weight: p.grad.clone() for weight, p in model.named_parameters()}

    before = gradients()
    tilery.patch(model)
    after = gradients()
    assert after.keys() == before.keys()
    for weight, found in after.items():
        scale = before[weight].abs().max().item()
        torch.testing.assert_close(found, before[weight], atol=2e-4 * scale, rtol=2e-4)
