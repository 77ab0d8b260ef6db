"""An audit says what ran in each layer and what stayed in torch, and notices what was patched and did not run."""

import copy
import threading

import pytest
import torch
from tiny import ARCHITECTURES, PROMPT, make

import tilery
from cases import home
from tilery.base.errors import Wrong
from tilery.core.plan import Plan
from tilery.patch import forwards, swap


@torch.no_grad()
def run(model, tokens=20, **how):
    with tilery.audit(**how) as found:
        model(PROMPT[:, :tokens].to(model.device))
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_that_is_patched_runs(name):
    model = make(name)
    report = tilery.patch(model, strict=not name.startswith("deepseek"))
    found, few = run(model, strict=True), run(model, tokens=4, strict=True)
    assert found.calls == 1 and {row.source for row in found.ran} == {"default"}
    for one in (found, few):
        ops = {row.op for row in one.ran}
        for row in report.replaced:
            assert ops & set(row.ops), row
    assert "attention" in {row.op for row in found.ran}
    if not name.startswith("deepseek"):  # its keys and values differ in size
        assert "attention_decode" in {row.op for row in few.ran}


def test_layers_ops_kernels_and_what_stays():
    model = make("qwen3_moe")
    tilery.patch(model)
    found = run(model)
    at = {}
    for row in found.ran:
        assert row.kernel == "numba" and row.config.startswith("Config(")
        at.setdefault(row.layer, {})[row.op] = row.calls
    attention = {"linear": 1, "qk_norm_rope_": 1, "attention": 1}
    assert at == {
        **{f"model.layers.{i}.self_attn": attention for i in (0, 1)},
        **{f"model.layers.{i}.input_layernorm": {"rms_norm": 1} for i in (0, 1)},
        **{f"model.layers.{i}.post_attention_layernorm": {"add_rms_norm": 1} for i in (0, 1)},
        "model.layers.1.mlp": {"linear_silu_mul": 1},
        "model.norm": {"rms_norm": 1},
    }
    stayed = {row.layer: row for row in found.stayed}
    assert set(stayed) == {
        "model.embed_tokens", "lm_head", "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj",
        "model.layers.0.mlp.experts", "model.layers.0.mlp.gate", "model.layers.1.mlp.down_proj",
    }  # fmt: skip
    assert "experts are not patched; " in stayed["model.layers.0.mlp.experts"].why
    assert "no piece of a patch" in stayed["lm_head"].why and stayed["lm_head"].calls == 1
    times = sum(row.ms for row in found.ran) + sum(row.ms for row in found.stayed)
    assert 0 < times < found.ms
    text = str(found)
    assert "model.layers.*.self_attn" in text and "layers.1" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_kernel_that_was_asked_for():
    where = home("triton")  # where Triton's kernels run
    model = make("llama", num_hidden_layers=1).to(where)
    asked = {"rms_norm": "triton", "rope_": "triton", "attention": "triton", "attention_decode": "triton"}
    tilery.patch(model, backend=asked)
    for tokens in (20, 2):
        kernels = {row.op: row.kernel for row in run(model, tokens).ran}
        assert len(set(kernels) & set(asked)) == 3 and {kernels[op] for op in set(kernels) & set(asked)} == {"triton"}
        if where.type == "cpu":
            assert {kernels[op] for op in set(kernels) - set(asked)} == {"numba"}


def test_pieces_that_are_left_out_are_in_torch():
    model = make("llama")
    tilery.patch(model, ops="norms")
    found = run(model, strict=True)
    why = {row.layer: row.why for row in found.stayed}
    assert "model.layers.0.mlp.gate_proj" in why
    assert {row.op for row in found.ran} == {"rms_norm", "add_rms_norm"}
    assert "attn_implementation is 'eager'" in why["model.layers.1.self_attn"]
    tilery.unpatch(model)
    tilery.patch(model)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    found = run(model, strict=True)
    why = {row.layer: row.why for row in found.stayed}
    assert why["model.layers.0.mlp.gate_proj"] == "a hook watches it" and "model.layers.1.mlp.gate_proj" not in why


def test_what_did_not_run_raises(monkeypatch):
    model = make("llama")
    tilery.patch(model, strict=True)
    model.set_attn_implementation("sdpa")
    with pytest.raises(Wrong, match=r"2 parts of a patch did not run:\n  model.layers.0.self_attn: attention, by att"):
        run(model)
    assert run(model, strict=False).ran
    model.set_attn_implementation("tilery")
    run(model)
    layer = model.model.layers[0]
    for module, piece in (
        (layer.mlp, "mlp: mlp, by gelu_mul or linear_silu_mul or silu_mul"),
        (layer.input_layernorm, "input_layernorm: norms, by add_rms_norm or rms_norm"),
        (layer, "layers.0: norms, by add_rms_norm"),
        (layer.self_attn, r"(?s)self_attn: qkv, by linear.*self_attn: rope, by qk_norm_rope_ or rope"),
    ):
        kept = module.__class__
        module.__class__ = swap.original_class(module)  # behind the patch's back
        with pytest.raises(Wrong, match=piece):
            run(model)
        module.__class__ = kept
    run(model)
    with tilery.audit() as nothing:
        pass
    assert not nothing.ran and str(nothing) == "no patched model was called"


def test_copies_threads_and_backward():
    model = make("llama")
    tilery.patch(model)
    with tilery.audit() as found, torch.no_grad():
        threads = [threading.Thread(target=lambda: run_plain(copy.deepcopy(model))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found.calls == 2 and {row.calls for row in found.ran} == {2}
    with tilery.audit() as found:
        model(PROMPT, labels=PROMPT).loss.backward()
    assert "rms_norm_backward" in {row.op for row in found.ran if row.layer == "(outside of a layer)"}


def run_plain(model):
    with torch.no_grad():
        model(PROMPT)


def test_nothing_is_left_when_it_ends():
    model, before = make("llama"), Plan.__call__
    tilery.patch(model)
    with pytest.raises(ZeroDivisionError), tilery.audit() as outer, tilery.audit() as inner:  # noqa: PT012
        run_plain(model)
        raise ZeroDivisionError
    assert Plan.__call__ is before and outer.calls == inner.calls == 1
    assert not torch.nn.modules.module._global_forward_hooks and not torch.nn.modules.module._global_forward_pre_hooks
    assert [row.calls for row in outer.ran] == [row.calls for row in inner.ran]


def test_an_error_in_a_layer_is_not_counted_for_the_next(monkeypatch):
    model = make("llama")
    tilery.patch(model)
    run_plain(model)
    handle = model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with tilery.audit() as found:
        with pytest.raises(ZeroDivisionError):
            run_plain(model)
        handle.remove()
        forwards.ops.rms_norm(torch.ones(2, 4), torch.ones(4))
    assert [row.op for row in found.ran if row.layer == "(outside of a layer)"] == ["rms_norm"]
