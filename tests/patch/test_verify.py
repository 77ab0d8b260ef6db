"""The proof of a patch: it holds for every architecture, and notices each part that computes something else."""

from dataclasses import replace

import pytest
import torch
from tiny import ARCHITECTURES, PROMPT, make

import tilery
from tilery.base.errors import Wrong
from tilery.patch import application, architectures, forwards
from tilery.patch.architectures import Experts, Heads, Layer


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_layer_is_as_exact_as_in_torch(name):
    own = "eager" if name in ("gemma2", "gpt_oss") else "sdpa"  # they have no other
    model = make(name, attention=own).train()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    report = tilery.patch(model, verify=True)
    assert [(e.module, e.tokens) for e in report.errors] == [
        (module, tokens) for tokens in (24, 4) for module in ("model.layers.0", "model.layers.1", "model.norm")
    ]
    assert all(0 < e.patched <= e.allowed < 2e-5 for e in report.errors)
    assert max(map(len, str(report).splitlines())) <= 80 and "relative error against float32" in str(report)
    assert model.training and hooks == [len(module._forward_hooks) for module in model.modules()]
    tilery.unpatch(model)
    assert model.config._attn_implementation == own


def test_in_bfloat16_the_error_is_held_against_torchs():
    report = tilery.patch(make("gemma3_text").bfloat16(), verify=True)
    assert all(1e-4 < e.patched <= e.allowed and e.unpatched > 1e-4 for e in report.errors)
    layers = [e for e in report.errors if "layers" in e.module]
    assert all(e.patched < 1.5 * e.unpatched for e in layers)


def changed(monkeypatch, name, **fields):
    known = architectures.ARCHITECTURES
    monkeypatch.setitem(known, name, replace(known[name], **fields))


_V3 = architectures.ARCHITECTURES["deepseek_v3"].experts
WRONG = {
    "no offset": ("gemma", {"offset": 0.0}),
    "no soft cap": ("gemma2", {"heads": Heads({"sliding_window": "sliding_window"})}),
    "no sinks": ("gpt_oss", {"heads": Heads({"sliding_window": "sliding_window"}, half_angles=True)}),
    "no norms of heads": ("qwen3", {"heads": Heads({"sliding_window": "sliding_window"})}),
    "no bounds": ("olmoe", {"heads": Heads({"sliding_window": "config.sliding_window"}, norms="row")}),
    "no norm after the attention": (
        "gemma2",
        {"layer": Layer("pre_feedforward_layernorm", after_mlp="post_feedforward_layernorm")},
    ),
    "no norm after the MLP": ("gemma2", {"layer": Layer("pre_feedforward_layernorm", "post_attention_layernorm")}),
    "renormalised weights of experts": ("qwen3_moe", {"experts": Experts()}),
    "weights of experts that are not scaled": ("deepseek_v3", {"experts": replace(_V3, scaling="")}),
    "softmax before the choice": ("gpt_oss", {"experts": Experts(renormalizes=False, interleaved=True)}),
    "half of the angles": (
        "phi3",
        {"heads": Heads({"sliding_window": "config.sliding_window"}, ("qkv_proj",), half_angles=True)},
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_table_is_noticed_and_taken_back(monkeypatch, what):
    name, fields = WRONG[what]
    model = make(name)
    with torch.no_grad():
        before = model(PROMPT).logits
    changed(monkeypatch, name, **fields)
    with pytest.raises(Wrong, match=r"of 6 outputs are further from float32 .* the patch is taken back") as raised:
        tilery.patch(model, verify=True)
    assert raised.value.error > raised.value.allowed
    with torch.no_grad():
        assert model(PROMPT).logits.equal(before)
    assert "tilery_patched" not in vars(model) and not any("_tilery" in str(vars(type(m))) for m in model.modules())


def test_wrong_numbers_are_noticed(monkeypatch):
    for changes in ({"eps": 1e-3}, {"act": "tanh"}, {"joined": None}):
        model = make("llama", hidden_act="gelu" if "act" in changes else "silu")

        def state(*args, changes=changes, **kwargs):
            made = forwards.State(*args, **kwargs)
            if "eps" in changes and made.eps:
                return replace(made, **changes)
            if "act" in changes and made.act:
                return replace(made, **changes)
            if "joined" in changes and made.sizes:  # q and k change places where they are alike
                made.joined.names = ("k_proj", "q_proj", "v_proj")
                made.sizes = (made.sizes[1], made.sizes[0], made.sizes[2])
            return made

        monkeypatch.setattr(application, "State", state)
        if "joined" in changes:
            model = make("llama", num_key_value_heads=4)
        with pytest.raises(Wrong, match="further from float32"):
            tilery.patch(model, verify=True)


def test_nan_is_no_proof(monkeypatch):
    model = make("llama")
    monkeypatch.setattr(forwards, "mlp", lambda self, x: x * float("nan"))
    with pytest.raises(Wrong, match="nan, where"):
        tilery.patch(model, verify=True)
