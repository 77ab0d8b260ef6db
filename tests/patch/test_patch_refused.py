"""What tilery.patch refuses or leaves in torch, and how it says so."""

import pytest
import torch
import transformers
from tiny import PROMPT, both, make, same

import tilery
from tilery.base.errors import BadInput, ToolMissing


def test_what_is_refused(made):
    model = made("llama")
    with pytest.raises(
        BadInput, match="ops must be some of norms, rope, mlp, qkv, experts, attention, loss, got 'norm'"
    ):
        tilery.patch(model, ops="norm")
    with pytest.raises(BadInput, match="the model is not patched"):
        tilery.unpatch(model)
    with pytest.raises(BadInput, match="must be a model of transformers, got Linear"):
        tilery.patch(torch.nn.Linear(2, 2))
    tilery.patch(model)
    with pytest.raises(BadInput, match="patched already"):
        tilery.patch(model)
    with pytest.raises(BadInput, match="continuous batching: its paged cache"):
        model.generate_batch([[1, 2]])
    with pytest.raises(BadInput, match=r"weights must be fp32, fp16, bf16, .* is torch.float64"):
        tilery.patch(make("llama").double())
    with pytest.raises(BadInput, match=r"'bert' is not known; known are .*llama, .*register_attention"):
        tilery.patch(make("bert", transformers.AutoModel))
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(model.config)
    with pytest.raises(BadInput, match="on the meta device"):
        tilery.patch(empty)


def test_an_activation_without_an_op_stays():
    model = make("llama", hidden_act="relu")
    report = tilery.patch(model)
    assert [(row.piece, row.module, row.count) for row in report.left] == [("mlp", "LlamaMLP", 2)]
    tilery.unpatch(model)
    with pytest.raises(BadInput, match=r"(?s)strict=True, .*mlp of 2 LlamaMLP: its activation has no gated op"):
        tilery.patch(model, strict=True)
    assert type(model.model.norm) is transformers.models.llama.modeling_llama.LlamaRMSNorm
    with pytest.raises(BadInput, match="qkv, rope of 2 DeepseekV3Attention: latent attention"):
        tilery.patch(make("deepseek_v3"), strict=True)
    tilery.patch(make("deepseek_v3"), ops=("norms", "mlp"), strict=True)


def test_what_a_version_lacks_is_named(monkeypatch):
    model = make("llama")
    monkeypatch.delattr(transformers.models.llama.modeling_llama, "LlamaRMSNorm")
    with pytest.raises(ToolMissing, match=r"transformers 5\..* has no .*modeling_llama\.LlamaRMSNorm"):
        tilery.patch(model)


def test_biases_of_an_mlp():
    for act in ("silu", "gelu", "gelu_pytorch_tanh"):
        model = make("llama", mlp_bias=True, attention_bias=True, hidden_act=act)
        before, after, report = both(model, model, PROMPT)
        same(after.logits, before.logits)
        assert not report.left


def test_head_sizes_and_dtypes_without_an_op_stay():
    model = make("llama", head_dim=24)
    before, after, report = both(model, model, PROMPT)
    same(after.logits, before.logits)
    (left,) = report.left
    assert (left.piece, left.count) == ("attention", 2) and "heads of 24, tilery's attention takes 16, 32" in left.why
    model = make("llama").bfloat16()
    model.model.norm.float()
    report = tilery.patch(model)
    assert [(row.piece, row.why) for row in report.left] == [("norms", "its weight is fp32 in a model of bf16")]
