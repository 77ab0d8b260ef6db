"""Shapes come from config numbers; what comes out is what the papers and engines know."""

import json

import pytest

import tilery.ops  # noqa: F401  fills the registry
from tilery import models
from tilery.base.errors import BadInput
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.workbench import shapes

SMALL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "vocab_size": 100, "rope_theta": 1e4}  # fmt: skip


def linears(name, tp=1):
    return {layer.name: (layer.n, layer.k) for layer in models.load(name, tp).linears()}


def test_llama_8b():
    assert linears("llama-8b") == {
        "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
        "lm_head": (128256, 4096),
    }  # fmt: skip


def test_llama_70b_on_eight_ranks():
    assert linears("llama-70b", 8) == {
        "qkv": (1280, 8192), "o": (8192, 1024), "gate_up": (7168, 8192), "down": (8192, 3584), "lm_head": (16032, 8192),
    }  # fmt: skip


def test_qwen3_8b():
    found = linears("qwen3-8b")
    assert found["gate_up"] == (24576, 4096) and found["down"] == (4096, 12288)


def test_deepseek_v3():
    found = linears("deepseek-v3")
    assert found == {
        "qkv_a": (2112, 7168), "kv_a": (576, 7168), "q_b": (24576, 1536), "kv_b": (32768, 512), "o": (7168, 16384),
        "gate_up": (4096, 7168), "down": (7168, 2048), "lm_head": (129280, 7168),
    }  # fmt: skip


def test_deepseek_v2_lite_makes_its_queries_in_one_step():
    assert linears("deepseek-v2-lite", 8) == {
        "q": (2 * 192, 2048), "kv_a": (576, 2048), "kv_b": (2 * 256, 512), "o": (2048, 256),
        "gate_up": (352, 2048), "down": (2048, 176), "lm_head": (12800, 2048),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama-8b", 0), ("mixtral", 32), ("qwen3-30b-a3b", 48), ("deepseek-v2-lite", 26), ("deepseek-v3", 58)],
)
def test_which_layers_have_experts(name, layers):
    assert models.load(name).expert_layers == layers


def test_layers_may_have_experts_here_and_there():
    config = SMALL | {"num_hidden_layers": 12, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}
    assert models.from_config(config, "every second").expert_layers == 6
    assert models.from_config(config | {"mlp_only_layers": [1, 2, 3]}, "but two").expert_layers == 4
    every_third = SMALL | {
        "num_hidden_layers": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_layer_freq": 3,
    }
    assert models.from_config(every_third | {"first_k_dense_replace": 4}, "6 and 9").expert_layers == 2


def test_keys_are_copied_where_there_are_more_ranks_than_heads():
    assert linears("llama-8b", 16)["qkv"] == ((2 + 2 * 1) * 128, 4096)


def test_a_config_of_ones_own(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    for where in (tmp_path, tmp_path / "config.json"):
        found = models.load(str(where))
        assert [layer.n for layer in found.linears()] == [192, 64, 192, 64, 100]  # every head has its own keys


@pytest.mark.parametrize(
    ("config", "tp", "message"),
    [
        ({"hidden_size": 64}, 1, r"the config lacks intermediate_size \(needed for the width of the MLP\), num_hidden"),
        (None, 3, "attention heads of 32 cannot be shared by 3 ranks"),
        (None, 0, "tp must be 1 or more, got 0"),
        ("nonsense", 1, "is not a config.json: Expecting value: line 1"),
        ("", 1, "is not a config.json: it is empty"),
        ("[1]", 1, "is not a config.json: it must hold an object, got list"),
        (SMALL | {"hidden_size": "64"}, 1, "hidden_size must be a whole number from 1 on, got '64'"),
        (SMALL | {"num_hidden_layers": True}, 1, "num_hidden_layers must be a whole number from 1 on, got True"),
        (SMALL | {"num_attention_heads": 0}, 1, "num_attention_heads must be a whole number from 1 on, got 0"),
        (SMALL | {"hidden_act": 3}, 1, "hidden_act must be a text, got 3"),
        (SMALL | {"attention_bias": "no"}, 1, "attention_bias must be true or false, got 'no'"),
        (SMALL | {"mlp_only_layers": ["a"]}, 1, "mlp_only_layers must be a list of whole numbers"),
        (SMALL | {"num_attention_heads": 5}, 1, "must say head_dim where hidden_size of 64 is no multiple of 5 heads"),
        (SMALL | {"num_key_value_heads": 3}, 1, "4 heads must be a multiple of 3 key-value heads"),
        (SMALL | {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8}, 4, "6 key-value heads can neit"),
        (SMALL | {"kv_lora_rank": 8}, 1, r"lacks qk_nope_head_dim \(needed for .*\), qk_rope_head_dim .*, v_head_dim"),
        (SMALL | {"num_local_experts": 8}, 1, r"lacks num_experts_per_tok \(needed for the rows that experts get\)"),
        (SMALL | {"model_type": "qwen3"}, 1, r"lacks head_dim \(needed for the width of q, k and v"),
        (SMALL | {"model_type": "mixtral"}, 1, r"lacks num_local_experts \(needed for the number of experts\)"),
        (SMALL | {"model_type": "deepseek_v3"}, 1, "lacks q_lora_rank .* n_shared_experts .* first_k_dense_replace"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_model_is_named(tmp_path, config, tp, message):
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config or {}))
    with pytest.raises(BadInput, match=message):
        models.load("llama-8b" if config is None else str(path), tp).linears()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps(SMALL | {"vocab_size": None}), b"\xff\xfe"])
def test_what_cannot_be_read_is_said_with_its_file(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadInput) as error:
        models.load(str(path))
    assert str(path) in str(error.value)


def test_an_unknown_model_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"a model must be one of deepseek-v2-lite, .*, or a config.json, got 'gpt-17'"):
        models.load("gpt-17")
    with pytest.raises(BadInput, match=r"a model's folder must hold a config.json, got '.*' without one"):
        models.load(str(tmp_path))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("llama-8b", "Llama-3.1-8B"), ("Llama-3.1-8B", "Llama-3.1-8B"), ("LLAMA3-8B", "Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-70B-Instruct", "Llama-3.1-70B"), ("qwen/qwen3-4b", "Qwen3-4B"),
        ("qwen3-30b", "Qwen3-30B-A3B"), ("DeepSeek-V2-Lite", "DeepSeek-V2-Lite"), ("deepseek-R1", "DeepSeek-V3"),
        ("Mixtral", "Mixtral-8x7B"),
    ],
)  # fmt: skip
def test_a_known_model_has_several_names_in_any_case(written, name):
    assert models.load(written).name == name


def test_a_config_without_a_name_is_called_as_its_folder_or_file(tmp_path, monkeypatch):
    folder = tmp_path / "My-Model"
    folder.mkdir()
    for file in ("config.json", "other.json"):
        (folder / file).write_text(json.dumps(SMALL))
    assert models.load(str(folder)).name == "My-Model" and models.load(str(folder / "other.json")).name == "other"
    monkeypatch.chdir(folder)
    assert models.load("config.json").name == "My-Model"


@pytest.mark.parametrize("op", list(REGISTRY.values()), ids=lambda op: op.name)
def test_sets_give_cases_that_the_op_takes(op):
    """Not every model has every op: a dense one routes no tokens to experts."""
    found = {name: shapes.cases(op, name) for name in shapes.SETS}
    assert any(found.values()), f"{op.name} has no model_sizes"
    for cases in found.values():
        assert len({str(c) for c in cases}) == len(cases)
        for case in cases[:1]:
            call_for(op, case)


def test_sets_are_as_large_as_they_say():
    matmul = REGISTRY["matmul"]
    assert len(shapes.cases(matmul, "llama-8b")) == 5 * 5
    assert [str(c) for c in shapes.cases(matmul, "quick")] == [
        f"m={m},n={n},k=4096,dtype=bf16" for m in (16, 4096) for n in (6144, 4096)
    ]


def test_several_sets_are_one_behind_the_other_with_no_case_twice():
    matmul = REGISTRY["matmul"]
    both = shapes.cases(matmul, "quick,llama-8b")
    assert both[:4] == shapes.cases(matmul, "quick") and len(both) == 5 * 5
    with pytest.raises(BadInput, match=r"--shapes must be one of llama-8b, .*, got 'llama'"):
        shapes.cases(matmul, "quick,llama")


def test_the_sweep_is_rows_by_lengths_within_reason():
    found = [case.params for case in shapes.cases(REGISTRY["rms_norm"], "sweep")]
    assert {"m": 1, "n": 131072, "dtype": "bf16"} in found and {"m": 32768, "n": 8192, "dtype": "bf16"} in found
    assert all(params["m"] * params["n"] <= 2**28 for params in found)
    with pytest.raises(BadInput, match=r"sweep is for ops whose cases are rows m of length n, matmul needs"):
        shapes.cases(REGISTRY["matmul"], "sweep")
