"""Patched models train as they did before, and are traced and compiled as one graph."""

import copy

import pytest
import torch
import transformers
from tiny import PROMPT, both, make, same

import tilery
from tilery.base.errors import BadInput, NoBackward

EXPERTS = ("deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen3_moe")


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "olmo2", "qwen2", *EXPERTS])
def test_a_training_step(name, checkpointing):
    """Gradients are as close to those in float64 as torch's own, to a factor."""
    model, tokens = make(name, attention="eager" if name == "gpt_oss" else "sdpa"), PROMPT[:, :18]

    def gradients(of):
        of.train()
        if checkpointing:
            of.gradient_checkpointing_enable()
        of.zero_grad()
        of(tokens, labels=tokens, use_cache=False).loss.backward()
        return {which: weight.grad.clone() for which, weight in of.named_parameters()}

    wide = copy.deepcopy(model).double()
    if name in EXPERTS:
        wide.set_experts_implementation("eager")  # the others take no float64
    exact = gradients(wide)
    theirs = gradients(model)
    tilery.patch(model)
    ours = gradients(model)
    for of, grad in exact.items():
        size = grad.norm()
        assert (ours[of] - grad).norm() <= 3 * (theirs[of] - grad).norm() + 2e-6 * size, of
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    with torch.no_grad():
        stepped = model(tokens).logits
        tilery.unpatch(model)
        same(model(tokens).logits, stepped)


def test_checkpointing_computes_layers_twice(made):
    model, calls = make("llama"), []
    tilery.patch(model)
    model.gradient_checkpointing_enable()
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.train()(PROMPT, labels=PROMPT, use_cache=False).loss.backward()
    assert len(calls) == 2


def test_train_and_eval_switch():
    model = make("phi3", resid_pdrop=0.5)
    tilery.patch(model)
    with torch.no_grad():
        first = model(PROMPT).logits
        model.train()
        assert not model(PROMPT).logits.equal(first)
        assert model.eval()(PROMPT).logits.equal(first)


def test_gradients_that_attention_does_not_have_are_refused(made):
    """And with attention left in torch, a model trains on padded sequences."""
    model, mask = made("mistral"), torch.ones_like(PROMPT)
    mask[0, :3] = 0
    tilery.patch(model)
    with pytest.raises(NoBackward, match="mask"):
        model(PROMPT, attention_mask=mask, labels=PROMPT)
    tilery.unpatch(model)
    tilery.patch(model, ops=("norms", "rope", "mlp", "qkv"))
    model(PROMPT, attention_mask=mask, labels=PROMPT).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.any()


def test_traced_as_one_graph(made):
    model = made("llama")
    tilery.patch(model)
    with torch.no_grad():
        ours = model(PROMPT, use_cache=False).logits
        traced = torch.compile(model, backend="eager", fullgraph=True)
        same(traced(PROMPT, use_cache=False).logits, ours)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_generates_own_option_compiles_one_graph(made, name):
    """Decode with a static cache."""
    model = made(name)
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    compiled = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    compiled._compile_all_devices = True  # otherwise it compiles on a GPU alone
    before = model.generate(PROMPT, disable_compile=True, **how)
    tilery.patch(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert model.generate(PROMPT, compile_config=compiled, **how).tolist() == before.tolist()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_dropout_of_attention_is_for_training():
    model = make("llama", attention_dropout=0.5)
    before, after, _ = both(model, model, PROMPT)
    same(after.logits, before.logits)
    with pytest.raises(BadInput, match=r"has no dropout, got 0\.5"):
        model.train()(PROMPT)
