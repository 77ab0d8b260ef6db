"""Patched experts and routers choose, weigh and compute as transformers' own do; what they cannot, they leave."""

import copy
import types

import pytest
import torch
import transformers
from tiny import PROMPT, both, make, same

import tilery
from tilery.base.errors import BadInput, Wrong
from tilery.patch import experts, swap

# Every rule by which routers choose and weigh, beyond what tiny.py has.
RULES = {
    "deepseek_v2": {"routed_scaling_factor": 3.0},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "deepseek_v3 without groups": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "gpt_oss": {"swiglu_limit": 1.5, "swiglu_alpha": 1.3},
    "gpt_oss with experts as wide as tokens": {"intermediate_size": 32},
    "mixtral": {"num_experts_per_tok": 3},
    "olmoe": {"norm_topk_prob": True},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_moe with one expert a token": {"num_experts_per_tok": 1},
}
KINDS = ("deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen3_moe")


def block_of(model):
    """The first that has experts."""
    return next(layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts"))


def router_of(model):
    block = block_of(model)
    return getattr(block, "gate", None) or block.router


def drawn(rule, **more):
    """A model of a rule; the bias of DeepSeek-V3's router, a buffer, is drawn so that it decides."""
    model = make(rule.split()[0], **(RULES.get(rule, {}) | more))
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(torch.linspace(-0.5, 0.5, len(buffer)))
    return model


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_the_same_experts_with_the_same_weights(rule):
    """Logits are torch's bit for bit; of a prefill, and of one token."""
    model = drawn(rule)
    router, tokens = router_of(model), torch.randn(40, 64)
    logits, weights, ids = router(tokens)
    before = [model(prompt).logits for prompt in (PROMPT, PROMPT[:1, :1])]
    report = tilery.patch(model, ops="experts", strict=True)
    assert {op for row in report.replaced for op in row.ops} == {"moe_route", "fused_moe"}
    ours = router(tokens)
    assert ours[0].equal(logits) and (ours[1].dtype, ours[2].dtype) == (torch.float32, torch.int32)
    dense = [torch.zeros(40, logits.shape[1]).scatter(1, i.long(), w) for i, w in ((ids, weights), (ours[2], ours[1]))]
    torch.testing.assert_close(dense[1], dense[0])
    for prompt, theirs in zip((PROMPT, PROMPT[:1, :1]), before):
        same(model(prompt).logits, theirs)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_experts_alone_give_what_they_gave(name):
    """Also where ids and weights come as transformers' routers give them."""
    model = make(name)
    of, tokens = block_of(model).experts, 3 * torch.randn(9, 64)
    ids, weights = torch.rand(9, 4).topk(2).indices, torch.rand(9, 2)
    before = of(tokens, ids, weights)
    tilery.patch(model, ops="experts")
    torch.testing.assert_close(of(tokens, ids, weights), before, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(of(tokens, ids.int(), weights), before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_router_logits_are_given_out(name):
    """And the loss that balances experts, which is made of them."""
    model = make(name)
    how = {"labels": PROMPT, "output_router_logits": True}
    before, after, _ = both(model, model, PROMPT, **how)
    if not hasattr(before, "router_logits"):
        assert name.startswith("deepseek")
        pytest.skip("this version of transformers gives out none of DeepSeek's")
    assert len(after.router_logits) == len(before.router_logits) > 0
    for ours, theirs in zip(after.router_logits, before.router_logits):
        same(ours, theirs)
    same(after.loss, before.loss)
    if getattr(before, "aux_loss", None) is not None:
        same(after.aux_loss, before.aux_loss)
        assert name.startswith("deepseek") or after.aux_loss > 0


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_not_copied(name, monkeypatch):
    model, given = make(name), []
    tilery.patch(model)
    run = experts.run
    monkeypatch.setattr(experts, "run", lambda self, op, *args: given.append((self, op, args)) or run(self, op, *args))
    with torch.no_grad():
        model(PROMPT)
    of = [(self, args) for self, op, args in given if op == "fused_moe"]
    assert of
    for self, (_, w_gate_up, w_down, *_) in of:
        assert w_gate_up.data_ptr() == self.gate_up_proj.data_ptr() and w_down.data_ptr() == self.down_proj.data_ptr()


@torch.no_grad()
def test_routers_of_deepseek_compute_in_float32():
    model = make("deepseek_v3").bfloat16()
    router, tokens = router_of(model), torch.randn(40, 64, dtype=torch.bfloat16)
    logits, weights, ids = router(tokens)
    assert logits.dtype == torch.float32
    tilery.patch(model, ops="experts")
    ours = router(tokens)
    assert ours[0].equal(logits) and ours[2].sort().values.tolist() == ids.sort().values.tolist()
    torch.testing.assert_close(ours[1].sort().values, weights.sort().values)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_a_copy_has_experts_of_its_own(name):
    model = make(name)
    tilery.patch(model)
    before, copied = model(PROMPT).logits, copy.deepcopy(model)
    assert copied(PROMPT).logits.equal(before)
    block_of(copied).experts.down_proj.zero_()
    assert not copied(PROMPT).logits.equal(before) and model(PROMPT).logits.equal(before)
    model.load_state_dict(copied.state_dict())
    assert model(PROMPT).logits.equal(copied(PROMPT).logits)


@torch.no_grad()
def test_hooks_see_experts_and_routers():
    model, seen = make("deepseek_v3"), []
    block = block_of(model)
    watched = [block, block.gate, block.experts, block.shared_experts]

    def look(module, args, output):
        seen.append((module, tuple(args[0].shape)))

    for module in watched:
        module.register_forward_hook(look)
    before, after, _ = both(model, model, PROMPT)
    same(after.logits, before.logits)
    assert len(seen) == 8 and set(seen[:4]) == set(seen[4:])


# Training


def test_in_training_torch_routes_and_the_audit_says_so():
    model = make("qwen3_moe")
    tilery.patch(model, strict=True)
    for needed in (True, False):
        model.requires_grad_(needed)
        with tilery.audit() as found:  # strict: a router that steps aside is not missed
            model(PROMPT)
        ops = {row.op for row in found.ran}
        stayed = {row.layer: row.why for row in found.stayed}
        assert "fused_moe" in ops and ("moe_route" in ops) is not needed
        assert stayed.get("model.layers.0.mlp.gate", "") == (experts.ASIDE if needed else "")
        assert "model.layers.0.mlp.experts" not in stayed


def test_frozen_experts_hand_gradients_on():
    """As adapters train: no weight of the experts or the router has a gradient."""
    model = make("gpt_oss")
    for name, weight in model.named_parameters():
        weight.requires_grad_("embed" in name)

    def gradient():
        model.zero_grad()
        model(PROMPT, labels=PROMPT, use_cache=False).loss.backward()
        return model.model.embed_tokens.weight.grad.clone()

    before = gradient()
    tilery.patch(model)
    after = gradient()
    torch.testing.assert_close(after, before, atol=1e-4 * before.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@torch.no_grad()
def test_traced_as_one_graph(name):
    model = make(name)
    tilery.patch(model)
    torch._dynamo.reset()
    traced = torch.compile(model, backend="eager", fullgraph=True)
    same(traced(PROMPT, use_cache=False).logits, model(PROMPT, use_cache=False).logits)


# What stays


def left(report):
    return {row.module: row.why for row in report.left if row.piece == "experts"}


def test_groups_by_their_best_expert_stay_with_transformers():
    """DeepSeek-V2's; its experts are patched all the same."""
    model = make(
        "deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2, n_routed_experts=8,
    )  # fmt: skip
    before, after, report = both(model, model, PROMPT)
    same(after.logits, before.logits)
    assert set(left(report)) == {"DeepseekV2TopkRouter"}
    assert "ranks groups by their best expert" in left(report)["DeepseekV2TopkRouter"]
    assert {row.module for row in report.replaced if row.piece == "experts"} == {"DeepseekV2Experts", "DeepseekV2Moe"}


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_another_activation_stays(name):
    model = make(name, hidden_act="gelu")
    before, after, report = both(model, model, PROMPT)
    same(after.logits, before.logits)
    found = left(report)
    prefix = type(model).__name__.removesuffix("ForCausalLM")
    assert "its activation has no op, fused_moe takes SiLU; transformers runs them (" in found[f"{prefix}Experts"]
    assert all(f"its experts, {prefix}Experts, are not patched" in why for of, why in found.items() if "Exp" not in of)
    assert len(found) == (3 if name == "deepseek_v3" else 2)
    tilery.unpatch(model)
    with pytest.raises(BadInput, match=r"(?s)strict=True, .*experts of \d MixtralExperts|experts of 1 DeepseekV3"):
        tilery.patch(model, ops=("norms", "experts"), strict=True)


def test_experts_that_are_not_as_expected_stay():
    def spread(model):
        model._is_expert_parallel = True

    def turned(model):
        model.is_transposed = True

    def widened(model):
        model.down_proj.data = model.down_proj.double().float().half()

    def cut(model):
        model.down_proj.data = model.down_proj.data[..., :-1].contiguous()

    def replaced(model):
        model.forward = lambda *args: args[0]

    def unlimited(model):
        model.limit = 0

    for change, why in (
        (spread, "its experts are spread over several processes"),
        (turned, "its weights lie otherwise: is_transposed=True, has_bias=False"),
        (widened, "its weight is fp16 in a model of fp32"),
        (cut, "fused_moe: w_gate_up must be [4, 126, 64] as w_down is [E, H, I], got [4, 128, 64]"),
        (replaced, "another tool has replaced its forward"),
        (unlimited, "its limit is 0, fused_moe takes one above 0"),
    ):
        name = "GptOss" if change is unlimited else "Mixtral"
        model = make("gpt_oss" if change is unlimited else "mixtral")
        change(model.model.layers[1].mlp.experts)
        report = tilery.patch(model)
        assert why in left(report)[f"{name}Experts"], why
        done = {row.module: row.count for row in report.replaced if row.piece == "experts"}
        assert done == {f"{name}Experts": 1, f"{name}TopKRouter": 1}


def test_a_block_that_another_tool_computes_stays():
    """Its experts would not be called."""
    model = make("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(swap.original_class(layer.mlp).forward, layer.mlp)
    report = tilery.patch(model)
    assert "another tool has replaced its forward" in left(report)["GptOssExperts"]
    assert "its experts, GptOssExperts, are not patched" in left(report)["GptOssTopKRouter"]


def test_routers_of_other_versions(monkeypatch):
    """Experts are patched without them."""
    modeling = transformers.models.deepseek_v2.modeling_deepseek_v2
    model, kept = make("deepseek_v2"), modeling.DeepseekV2TopkRouter
    with monkeypatch.context() as older:
        older.delattr(modeling, "DeepseekV2TopkRouter")
        before, after, report = both(model, model, PROMPT)
    same(after.logits, before.logits)
    assert f"transformers {transformers.__version__} has no such class" in left(report)["DeepseekV2TopkRouter"]
    assert "its gate is a DeepseekV2TopkRouter" in left(report)["DeepseekV2Moe"]
    tilery.unpatch(model)
    forward = kept.forward
    monkeypatch.setattr(kept, "forward", lambda self, x: forward(self, x)[0])
    assert "does not return logits, weights and ids" in left(tilery.patch(model))["DeepseekV2TopkRouter"]
    tilery.unpatch(model)
    del model.model.layers[1].mlp.gate.top_k
    assert "it has no top_k" in left(tilery.patch(model))["DeepseekV2TopkRouter"]


def test_a_patch_that_does_not_run_is_noticed():
    model = make("deepseek_v3")
    tilery.patch(model)
    block = block_of(model)
    for module, name in ((block.experts, "experts"), (block.gate, "gate")):
        kept = module.__class__
        module.__class__ = swap.original_class(module)
        if name == "experts":
            module.__class__ = type("Other", (module.__class__,), {"forward": lambda self, x, *_, add: x + add})
        with (
            pytest.raises(Wrong, match=rf"mlp.{name}: experts, by fused_moe or moe_route"),
            torch.no_grad(),
            tilery.audit(strict=True),
        ):
            model(PROMPT)
        module.__class__ = kept
