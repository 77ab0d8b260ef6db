"""A plan leaves nothing out and adds nothing: held against published counts of parameters and numbers made by hand."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tilery import models
from tilery.base.errors import BadInput
from tilery.base.spec import Cost
from tilery.cli import app
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.measure.ceilings import Ceilings
from tilery.models import plan, roofs
from tilery.models.steps import DECODE, PREFILL, Pass, steps
from tilery.workbench.shapes import PRODUCT_ROWS

H200 = roofs.find("h200")
# As the checkpoints count them, and of these the ones that a single token meets; DeepSeek-V3 without its extra layer.
PARAMETERS = {
    "llama-8b": (8_030_261_248, 8_030_261_248),
    "llama-70b": (70_553_706_496, 70_553_706_496),
    "qwen3-4b": (4_022_468_096 + 151936 * 2560, 4_022_468_096 + 151936 * 2560),  # its head is its embedding
    "qwen3-8b": (8_190_735_360, 8_190_735_360),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208),
    "deepseek-v3": (671_026_419_200, 37_552_297_472),
}


def weights(step):
    """Values of the matrices and vectors that a step has of its own."""
    p = step.case.params
    if step.name == "embedding":
        return p["n"] * p["v"]
    if step.op == "fused_moe":
        return 3 * p["n"] * p["k"] * p["experts"]
    op = step.op.removeprefix("fp8_").removesuffix("_fp8")
    if op in ("matmul", "bmm", "grouped_matmul"):
        return p["n"] * p["k"] * p.get("batch", 1) * p.get("experts", 1)
    return {"rms_norm": 1, "add_rms_norm": 1, "grouped_topk": 1, "qk_norm_rope_": 2}.get(op, 0) * p.get("n", 0)


def total(found, what):
    return sum(step.count * what(step) for step in found)


def by_name(found):
    assert len({step.name for step in found}) == len(found)
    return {step.name: step for step in found}


def llama(tp=1, **more):
    config = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return models.from_config({"model_type": "llama", "vocab_size": 100, **config, **more}, "small", tp)


def test_every_known_model_is_here():
    assert sorted(PARAMETERS) == models.known()


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_plan_has_every_parameter_of_the_model(name, kind, phase):
    model = models.load(name, weights=kind)
    if model.intermediate_size % 128 and kind == "fp8":
        with pytest.raises(BadInput, match="got 10944 of down with tp of 1"):
            steps(model, Pass(phase, 2, 3))
    else:
        assert total(steps(model, Pass(phase, 2, 3)), weights) == PARAMETERS[name][0]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_decode_of_one_token_reads_what_it_meets_but_for_the_embedding(name):
    model = models.load(name, weights="bf16")
    made = plan.plan(model, Pass(DECODE, 1, 1), H200)
    least = 2 * (PARAMETERS[name][1] - model.vocab_size * model.hidden_size)
    assert least <= made.cost.reads < 1.005 * least


def test_llama_8b_reads_15_gb_of_weights_and_its_cache():
    short, long = (plan.plan(models.load("llama-8b"), Pass(DECODE, 4, length), H200).cost for length in (1, 4096))
    assert short.reads == pytest.approx(16.06e9 - 1.05e9, rel=2e-3)
    assert long.reads - short.reads == 4 * 4095 * 32 * 2 * 8 * 128 * 2  # layers, keys and values, heads, size, bytes
    assert long.flops - short.flops == 4 * 4095 * 32 * 32 * 128 * 4  # layers, heads, size, two products


def test_llama_8b_prefill_is_two_flops_a_parameter_and_token():
    found = steps(models.load("llama-8b"), Pass(PREFILL, 4, 512))
    block = 4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096
    products = [step for step in found if step.op == "matmul"]
    assert total(products, lambda step: step.cost.flops) == 2 * (4 * 512 * 32 * block + 4 * 4096 * 128256)
    attention = by_name(found)["attention"]
    assert attention.cost.flops == 4 * (512 * 513 // 2) * 32 * 128 * 4 and attention.count == 32
    assert total(found, lambda step: step.cost.flops) == pytest.approx(2 * 6.98e9 * 4 * 512, rel=0.02)


def test_llama_8b_step_by_step():
    found = steps(models.load("llama-8b"), Pass(PREFILL, 2, 8))
    assert [(step.name, step.op, step.count) for step in found] == [
        ("embedding", "embedding", 1), ("first_norm", "rms_norm", 1), ("attention_norm", "add_rms_norm", 31),
        ("qkv", "matmul", 32), ("rope_cache_write", "rope_cache_write_", 32), ("attention", "attention", 32),
        ("o", "matmul", 32), ("mlp_norm", "add_rms_norm", 32), ("gate_up", "matmul", 32), ("silu_mul", "silu_mul", 32),
        ("down", "matmul", 32), ("final_norm", "add_rms_norm", 1), ("last_tokens", "embedding", 1),
        ("lm_head", "matmul", 1), ("sample", "sample", 1),
    ]  # fmt: skip
    assert str(by_name(found)["down"].case) == "m=16,n=4096,k=14336,dtype=bf16"
    assert by_name(found)["lm_head"].case.params["m"] == 2  # the last token of each prompt


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("name", PARAMETERS)
def test_every_known_model_plans(name, tp, phase):
    made = plan.plan(models.load(name, tp), Pass(phase, 3, 40), H200)
    assert sum(made.shares) == pytest.approx(1) and all(ms > 0 for ms in made.step_ms)
    for step in by_name(made.steps).values():
        takes = "e4m3" if step.op.startswith("fp8_") else "bf16"
        assert step.exists == (step.op in REGISTRY) and step.count > 0 and step.case.params["dtype"] == takes
        if step.exists:  # from the contract, not from here
            op = REGISTRY[step.op]
            assert step.cost == op.cost(call_for(op, step.case))
    assert {"all_reduce", "all_gather"} & {step.op for step in made.steps} == (
        {"all_reduce", "all_gather"} if tp > 1 else set()
    )


def test_ranks_share_the_matrices():
    whole, part = (steps(models.load("llama-70b", tp), Pass(DECODE, 1, 1)) for tp in (1, 8))

    def product(step):
        return weights(step) if step.op == "matmul" else 0

    assert total(whole, product) == 8 * total(part, product)
    assert (
        by_name(part)["attention"].case.params | {"heads": 8, "kv_heads": 1} == by_name(part)["attention"].case.params
    )
    assert by_name(part)["attention_sum"].case.params == {"m": 1, "n": 8192, "ranks": 8, "dtype": "bf16"}


def test_ranks_that_cannot_share_are_refused():
    with pytest.raises(BadInput, match=r"Llama-3.1-8B: attention heads of 32 cannot be shared by 5 ranks"):
        steps(models.load("llama-8b", 5), Pass(DECODE, 1, 1))
    with pytest.raises(BadInput, match="small: intermediate size of 90 cannot be shared by 4 ranks"):
        steps(llama(4, intermediate_size=90), Pass(DECODE, 1, 1))
    with pytest.raises(BadInput, match="small: vocabulary of 99 cannot be shared by 4 ranks"):
        steps(llama(4, vocab_size=99), Pass(DECODE, 1, 1))


# What differs from model to model


def test_deepseek_v3_has_dense_layers_shared_experts_and_a_latent_cache():
    found = by_name(steps(models.load("deepseek-v3", weights="bf16"), Pass(DECODE, 1, 100)))
    assert (found["gate_up"].count, found["gate_up"].case.params["n"]) == (3, 2 * 18432)
    assert (found["shared_gate_up"].count, found["shared_gate_up"].case.params["n"]) == (58, 2 * 2048)
    experts = found["experts"]
    assert experts.case.params | {"n": 2048, "k": 7168, "experts": 256, "topk": 8, "add": True} == experts.case.params
    # The token, what its shared experts made, eight experts' matrices, their weights and ids.
    assert experts.cost.reads == 2 * (2 * 7168 + 8 * 3 * 2048 * 7168) + 8 * (4 + 4)
    assert experts.cost.writes == 2 * 7168 and not {"expert_sort", "expert_down", "expert_sum"} & set(found)
    assert found["attention"].cost.reads == 2 * (128 * 576 + 100 * 576)
    assert found["attention"].cost.flops == 2 * 100 * 128 * (576 + 512)
    assert found["route"].op == "grouped_topk" and "kv_a" not in found and "qkv_a" in found


def test_deepseek_v2_lite_differs_in_queries_and_router():
    found = by_name(steps(models.load("deepseek-v2-lite"), Pass(PREFILL, 1, 100)))
    assert {"q", "kv_a", "kv_b"} <= set(found) and not {"qkv_a", "q_b", "q_norm"} & set(found)
    assert found["route"].op == "topk_softmax" and found["route"].case.params["renormalize"] is False
    assert found["shared_down"].case.params["k"] == 2 * 1408
    assert found["attention"].cost.flops == 2 * (100 * 101 // 2) * 16 * (192 + 128)


def test_mixtral_has_experts_in_every_layer_and_no_other_mlp():
    found = by_name(steps(models.load("mixtral"), Pass(DECODE, 4, 10)))
    experts = found["experts"]
    assert experts.count == 32 and not {"gate_up", "shared_gate_up"} & set(found)
    assert experts.case.params["m"] == 4 and experts.case.params["n"] == 14336 and experts.case.params["add"] is False
    assert found["route"].case.params["renormalize"] is True


def test_qwen_norms_its_heads_or_adds_a_bias():
    qwen3 = by_name(steps(models.load("qwen3-8b"), Pass(DECODE, 4, 10)))
    assert {"qk_norm_rope", "cache_write"} <= set(qwen3) and "rope_cache_write" not in qwen3
    qwen2 = by_name(steps(llama(model_type="qwen2"), Pass(DECODE, 4, 10)))
    assert qwen2["qkv_bias"].cost == Cost(4 * 192, 2 * (4 * 192 + 192), 2 * 4 * 192)


def test_a_window_bounds_what_attention_sees():
    model = llama(model_type="mistral", sliding_window=16)
    seen, bound = (by_name(steps(model, Pass(DECODE, 1, n)))["attention"].cost for n in (16, 1000))
    assert seen == bound
    assert by_name(steps(model, Pass(PREFILL, 1, 20)))["attention"].cost.flops == 4 * (136 + 4 * 16) * 64
    assert "window" not in by_name(steps(llama(sliding_window=16), Pass(DECODE, 1, 9)))["attention"].case.params


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model_type": "gpt2"}, "a plan needs a model_type that it knows, one of llama, .*, got 'gpt2'"),
        ({"model_type": None}, "a plan needs a model_type that it knows, .*, got a config without model_type"),
        ({"hidden_act": "gelu"}, "a plan needs hidden_act to be 'silu', got 'gelu'"),
        ({"attention_bias": True}, "a plan needs attention_bias to be False, got True"),
        ({"use_sliding_window": True}, "a plan needs use_sliding_window to be False, got True"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5}, "k must be 1 to 4, .*, got 5"),
    ],
)
def test_what_is_not_planned_is_refused(more, message):
    with pytest.raises(BadInput, match=message):
        steps(llama(**more), Pass(DECODE, 1, 1))


@pytest.mark.parametrize(("phase", "batch", "length"), [("train", 1, 1), (PREFILL, 0, 1), (DECODE, 1, -1)])
def test_a_pass_is_of_something(phase, batch, length):
    with pytest.raises(BadInput, match=r"must be .*, got"):
        Pass(phase, batch, length)


# Weights in fp8


def test_llama_8b_in_fp8_step_by_step():
    found = steps(models.load("llama-8b", weights="fp8"), Pass(DECODE, 16, 8))
    assert [(step.name, step.op, step.count) for step in found] == [
        ("embedding", "embedding", 1), ("first_norm", "rms_norm_fp8", 1), ("attention_norm", "add_rms_norm_fp8", 31),
        ("qkv", "fp8_matmul", 32), ("rope_cache_write", "rope_cache_write_", 32),
        ("attention", "attention_decode", 32), ("o_quantize", "quantize_fp8", 32), ("o", "fp8_matmul", 32),
        ("mlp_norm", "add_rms_norm_fp8", 32), ("gate_up", "fp8_matmul", 32), ("silu_mul", "silu_mul_fp8", 32),
        ("down", "fp8_matmul", 32), ("final_norm", "add_rms_norm", 1), ("lm_head", "matmul", 1),
        ("sample", "sample", 1),
    ]  # fmt: skip
    down, o_quantize = by_name(found)["down"], by_name(found)["o_quantize"]
    assert str(down.case) == "m=16,n=4096,k=14336,dtype=e4m3"
    assert down.cost.reads == 4096 * 14336 + 4 * 32 * 112 + 16 * 14336 + 4 * 16 * 112 and down.cost.writes == 2**17
    assert str(o_quantize.case) == "m=16,n=4096,per=group,scales=column,dtype=bf16"


def test_what_the_router_takes_too_is_quantised_by_itself():
    found = by_name(steps(models.load("deepseek-v3"), Pass(PREFILL, 1, 64)))
    names = ("mlp_norm", "mlp_quantize", "router", "kv_b_quantize", "kv_b", "expert_gate_up", "expert_silu_mul")
    ops = ("add_rms_norm", "quantize_fp8", "matmul", "quantize_fp8", "fp8_matmul", "fp8_grouped_matmul", "silu_mul_fp8")
    assert tuple(found[name].op for name in names) == ops


def test_a_config_says_what_its_weights_are():
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert llama().weights == "bf16" and llama(quantization_config=block).weights == "fp8"
    assert models.load("deepseek-v3").weights == "fp8" and models.load("qwen3-4b").weights == "bf16"
    for name in ("Qwen3-4B-FP8", "qwen/qwen3-4b-fp8"):
        assert models.load(name) == models.load("qwen3-4b", weights="fp8")
    assert models.load("Qwen3-4B-FP8", weights="bf16") == models.load("Qwen3-4B")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"quant_method": "awq"}, "needs weights in bf16 or fp8 in blocks of 128 × 128, its config says awq; name"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"its config says fp8 in blocks of \[64, 64\]; name "),
        ("fp8", "small: quantization_config must be an object, got 'fp8'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]},
         "small: fp8 weights need rows of a multiple of 128 on each rank, got 64 of qkv with tp of 1; plan it in bf16"),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_planned_are_named(more, message):
    with pytest.raises(BadInput, match=message):
        steps(llama(quantization_config=more), Pass(DECODE, 1, 1))
    with pytest.raises(BadInput, match="weights must be one of bf16, fp8, got 'int4'"):
        models.load("llama-8b", weights="int4")


def test_an_fp8_products_cases_are_those_of_every_layer_at_all_rows():
    found = plan.cases_of("fp8_matmul", "Qwen3-4B")
    layers = {(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)}
    assert {tuple(w.case.params.values()) for w in found} == {
        (m, *layer, "e4m3") for m in PRODUCT_ROWS for layer in layers
    }
    assert len(found) == 18 * 4 and [w.ms for w in found] == sorted((w.ms for w in found), reverse=True)
    assert {w.case.params["m"] for w in plan.cases_of("fp8_matmul", "qwen3-4b", rows=(3, 5))} == {3, 5}
    kv_b = {"n": 32768, "k": 512, "dtype": "e4m3"}
    assert [w.case.params for w in plan.cases_of("fp8_matmul", "deepseek-v3", rows=(7,))].count({"m": 7, **kv_b}) == 1


def test_other_ops_are_of_the_models_own_weights_or_of_those_that_have_them():
    assert {w.case.params["m"] for w in plan.cases_of("matmul", "qwen3-4b")} == {1, 16, 64, 512, 8192, 32768}
    assert {w.case.params["n"] for w in plan.cases_of("matmul", "deepseek-v3")} == {256, 129280}  # router and head
    assert {(w.case.params["m"], w.case.params["n"]) for w in plan.cases_of("matmul", "qwen3-4b", rows=(9,))} >= {
        (9, 151936)
    }
    assert plan.cases_of("quantize_fp8", "qwen3-4b") and not plan.cases_of("dropout", "qwen3-4b")
    with pytest.raises(BadInput, match="rows are those of matmul and fp8_matmul, got them for rms_norm"):
        plan.cases_of("rms_norm", "qwen3-4b", rows=(1,))


# Ops that come


class Appearing:
    """An op of which a plan asks no more than its contract: what it draws, and what that costs."""

    name, names, runtime = "cache_write_", ("length",), ()

    def inputs(self, m, kv_heads, n, dtype, device, seed):
        return {"length": m}

    def complete(self, args, kwargs):
        return tuple(kwargs.values())

    def call(self, specs):
        return SimpleNamespace(length=specs[0])

    def cost(self, call):
        return Cost(1, 2, call.length)


def test_an_op_that_appears_is_taken(monkeypatch):
    model = models.load("qwen3-8b")
    assert not by_name(steps(model, Pass(DECODE, 3, 77)))["cache_write"].exists
    monkeypatch.setitem(REGISTRY, "cache_write_", Appearing())
    found = by_name(steps(model, Pass(DECODE, 3, 77)))["cache_write"]
    assert found.exists and found.cost == Cost(1, 2, 3)
    monkeypatch.setattr(Appearing, "inputs", lambda self, sequences, device, seed: {})
    with pytest.raises(AssertionError, match=r"models/steps.py must name the cases of cache_write_ by sequences"):
        steps(model, Pass(DECODE, 4, 77))


# Times


def test_times_are_those_of_the_roof():
    flat = roofs.Roof("a machine", Ceilings(read=1e12, copy=1e12, write=1e12, flops={"bf16": 1e15}, launch_us=1.0))
    made = plan.plan(models.load("llama-8b"), Pass(DECODE, 1, 1), flat)
    assert made.ms == pytest.approx(1e3 * made.cost.bytes / 1e12)  # all are bound by memory
    assert made.tokens_per_s == pytest.approx(1e12 / made.cost.bytes)
    slow = roofs.Roof("another", Ceilings(read=1e15, copy=1e15, write=1e15, flops={"bf16": 1e12}, launch_us=1.0))
    made = plan.plan(models.load("llama-8b"), Pass(PREFILL, 1, 512), slow)
    assert made.tokens_per_s == pytest.approx(512 * 1e12 / made.cost.flops, rel=1e-3)


def test_cases_are_distinct_exist_and_come_most_valuable_first():
    found = plan.cases("llama-8b", 1, (1, 16), 512, 4096, "h200")
    assert [(w.op, str(w.case)) for w in found[:2]] == [
        ("matmul", "m=8192,n=28672,k=4096,dtype=bf16"), ("matmul", "m=8192,n=4096,k=14336,dtype=bf16"),
    ]  # fmt: skip
    assert len({(w.op, str(w.case)) for w in found}) == len(found)
    assert [w.ms for w in found] == sorted((w.ms for w in found), reverse=True)
    made = plan.plans(models.load("llama-8b"), H200, (1, 16), 512, 4096)
    known = [ms for each in made for step, ms in zip(each.steps, each.step_ms) if step.op in REGISTRY]
    assert sum(w.ms for w in found) == pytest.approx(sum(known)) and all(w.op in REGISTRY for w in found)
    assert {w.case.params["n"] for w in plan.cases("llama-8b", 8, (1,)) if w.op == "silu_mul"} == {14336 // 8}


# Whose ceilings


def test_the_ceilings_kept_of_an_h200_were_measured():
    runs = json.loads((Path(__file__).parents[1] / "pages" / "data" / "h200.json").read_text())["runs"]
    measured = [Ceilings(**run["machine"]["ceilings"]["NVIDIA H200"]) for run in runs]
    assert H200.device == "NVIDIA H200" and H200.ceilings in measured


def test_a_device_is_found_by_name_or_is_this_one(monkeypatch):
    here = Ceilings(1.0, 2.0, 3.0, {"bf16": 4.0}, 5.0)
    monkeypatch.setattr(roofs, "ceilings", lambda where: here)
    monkeypatch.setattr(roofs.device, "default", lambda: torch.device("cpu"))
    assert roofs.find() == roofs.find("NVIDIA_H200") == H200 and roofs.find("here").ceilings == here
    monkeypatch.setattr(roofs.device, "default", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(roofs.device, "name", lambda where: "a GPU")
    assert roofs.find() == roofs.find("here") == ("a GPU", here) and roofs.find("h200") == H200
    with pytest.raises(BadInput, match="--device must be here or one of nvidia_h200, got 'abacus'"):
        roofs.find("abacus")


def test_the_readme_shows_what_is_printed():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = readme.split("## Plan")[1].split("```")[1].splitlines()[2:]
    printed = CliRunner().invoke(app, ["plan", "llama-8b", "--batch", "16", "--device", "h200"]).stdout
    lines = {line.rstrip() for line in printed.splitlines()}
    assert len(shown) > 5 and not [line for line in shown if line and line != "…" and line not in lines]
