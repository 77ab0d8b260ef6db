"""Shapes come from config numbers; what comes out is what the papers and engines know."""

import json

import pytest

import tilery.ops  # noqa: F401  fills the registry
from tilery import models
from tilery.errors import BadInput
from tilery.op import REGISTRY
from tilery.workbench import shapes
from tilery.workbench.compile import specs_for


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


def test_keys_are_copied_where_there_are_more_ranks_than_heads():
    assert linears("llama-8b", 16)["qkv"] == ((2 + 2 * 1) * 128, 4096)


def test_a_config_of_ones_own(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 100, "rope_theta": 1e4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for where in (tmp_path, tmp_path / "config.json"):
        found = models.load(str(where))
        assert [layer.n for layer in found.linears()] == [192, 64, 192, 64, 100]  # every head has its own keys


@pytest.mark.parametrize(
    ("config", "tp", "message"),
    [
        ({"hidden_size": 64}, 1, "the config lacks intermediate_size, num_hidden_layers"),
        (None, 3, "intermediate size of 14336 cannot be shared by 3 ranks"),
        ("nonsense", 1, "is not a config.json"),
    ],
)
def test_what_cannot_be_a_model_is_named(tmp_path, config, tp, message):
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config or {}))
    with pytest.raises(BadInput, match=message):
        models.load("llama-8b" if config is None else str(path), tp).linears()


def test_an_unknown_model_is_named():
    with pytest.raises(BadInput, match=r"a model must be one of deepseek-v3, .*, or a config.json, got 'gpt-17'"):
        models.load("gpt-17")


@pytest.mark.parametrize("op", list(REGISTRY.values()), ids=lambda op: op.name)
def test_sets_give_cases_that_the_op_takes(op):
    """Not every model has every op: a dense one routes no tokens to experts."""
    found = {name: shapes.cases(op, name) for name in shapes.SETS}
    assert any(found.values()), f"{op.name} has no model_sizes"
    for cases in found.values():
        assert len({str(c) for c in cases}) == len(cases)
        for case in cases[:1]:
            op.validate(specs_for(op, case))


def test_sets_are_as_large_as_they_say():
    matmul = REGISTRY["matmul"]
    assert len(shapes.cases(matmul, "llama-8b")) == 5 * 5
    assert [str(c) for c in shapes.cases(matmul, "quick")] == [
        f"m={m},n={n},k=4096,dtype=bf16" for m in (16, 4096) for n in (6144, 4096)
    ]


def test_the_sweep_is_rows_by_lengths_within_reason():
    found = [case.params for case in shapes.cases(REGISTRY["rms_norm"], "sweep")]
    assert {"m": 1, "n": 131072, "dtype": "bf16"} in found and {"m": 32768, "n": 8192, "dtype": "bf16"} in found
    assert all(params["m"] * params["n"] <= 2**28 for params in found)
    with pytest.raises(BadInput, match=r"sweep is for ops whose cases are rows m of length n, matmul needs"):
        shapes.cases(REGISTRY["matmul"], "sweep")
