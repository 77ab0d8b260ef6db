"""`tilery infer` generates what the model generates, and says how far the two arms are apart."""

import json

import pytest
import torch
from tiny import SMALL, make
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from tilery.base.errors import BadInput
from tilery.cli import app
from tilery.patch import forwards, infer
from tilery.patch.infer import Request, _compare, _Run

FEW = ("--new-tokens", "4", "--warmup", "0", "--runs", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with weights and a tokenizer of words."""
    path = tmp_path_factory.mktemp("model")
    make("qwen3").save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(path)
    return path


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SMALL, "name": "Tiny"}))
    return path


def run(*words, code=0):
    done = CliRunner().invoke(app, ["infer", *map(str, words)])
    assert done.exit_code == code, done.output
    return done.stdout


def test_both_arms_and_what_is_said(folder, tmp_path):
    summary = tmp_path / "summary.json"
    words = ("--model", folder, "--compare", "--prompt", "w1 w2 w3", "--batch-size", 2, *FEW)
    found = json.loads(run(*words, "--json", "--summary", summary))
    assert found == json.loads(summary.read_text())
    model = make("qwen3")
    ids = torch.tensor([[1, 2, 3]])
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False)[0, 3:].tolist()
    text = " ".join(f"w{token}" for token in tokens)
    assert found["outputs"] == {"patched": [text] * 2, "torch": [text] * 2}
    assert (found["prompt_tokens"], found["batch_size"], found["new_tokens"]) == (3, 2, 4)
    assert [arm["name"] for arm in found["arms"]] == ["patched", "torch"]
    for arm in found["arms"]:
        assert 0 < arm["first_token_ms"] < arm["total_ms"] and arm["peak_mib"] is None
        later = (arm["total_ms"] - arm["first_token_ms"]) / 1e3
        assert arm["tokens_per_s"] == pytest.approx(2 * 3 / later)
    compared = found["comparison"]
    assert (compared["tokens"], compared["equal"], compared["steps"]) == (8, 8, 4)
    assert compared["first_difference"] is None and 0 < compared["logits_max"] < 1e-4 > compared["logits_error"]
    weights = sum(weight.nbytes for weight in model.parameters()) / 2**20
    assert found["weights_mib"] == pytest.approx(weights)
    assert {row["op"] for row in found["audit"]["ran"]} >= {"linear", "attention_decode"}
    said = run(*words, "--show-outputs")
    for part in ("first token ms", "All 8 tokens agree", f"  {text}", "model.layers.*.mlp", "in torch"):
        assert part in said


def test_random_weights_for_a_config_and_a_profile(config):
    found = json.loads(run("--model", config, "--random-weights", "--mock-input-len", 9, "--profile", "--json", *FEW))
    assert found["model"] == "Tiny" and found["prompt_tokens"] == 9 and found["dtype"] == "fp32"
    assert [arm["name"] for arm in found["arms"]] == ["patched"] and found["comparison"] is None
    assert len(found["profile"]) == 15 and found["patch"]["architecture"] == "llama"
    said = run("--model", config, "--random-weights", "--mock-input-len", 9, "--profile", "--no-patch", *FEW)
    trace = said.split("trace: ")[1].split()[0]
    with open(trace) as file:
        assert json.load(file)["traceEvents"]
    assert "torch: the first token after" in said and "audit" not in said
    one = run("--model", config, "--random-weights", "--mock-input-len", 9, *FEW, "--new-tokens", 1)
    assert "tokens/s" not in one.split("audit")[1]


def test_a_prompt_from_a_file(folder, tmp_path):
    text = tmp_path / "prompt.txt"
    text.write_text("w5 w6\nw7 w8")
    assert json.loads(run("--model", folder, "--prompt-file", text, "--json", *FEW))["prompt_tokens"] == 4


def test_tokens_and_logits_that_differ():
    logits = torch.randn(4, 2, 8)
    other = logits.clone()
    other[1, 0, 3] += 0.25
    other[3] += 100  # after a token that differs, the two arms see different texts
    ours, theirs = (_Run(torch.tensor(tokens), of, [0.0], None) for tokens, of in (
        ([[1, 2, 3, 4], [5, 6, 7, 8]], other), ([[1, 2, 9, 4], [5, 6, 7, 9]], logits)
    ))  # fmt: skip
    found = _compare(ours, theirs)
    assert (found.tokens, found.equal, found.first_difference, found.steps) == (8, 6, 2, 3)
    assert found.logits_max == pytest.approx(0.25)
    assert found.logits_error == pytest.approx(0.25 / float(logits[:3].norm()))


def test_a_patch_that_computes_something_else_shows(config, monkeypatch):
    plain = forwards.mlp
    monkeypatch.setattr(forwards, "mlp", lambda self, x: 1.5 * plain(self, x))
    request = Request(str(config), True, ("patched", "torch"), mock_input_len=9, new_tokens=2, device="cpu")
    assert infer.infer(request).comparison.logits_error > 1e-3


def test_an_architecture_that_transformers_does_not_know(config):
    config.write_text('{"model_type": "no_such_model"}')
    with pytest.raises(BadInput, match=r"transformers 5\..* cannot read .*no_such_model"):
        infer.infer(Request(str(config), True, device="cpu"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prompt", "w1", "--mock-input-len", "4"), "exclude each other"),
        (("--prompt-file", "nowhere.txt"), "--prompt-file must be a file of text, got 'nowhere.txt'"),
        (("--dtype", "int8"), "the dtype must be one of bf16, fp16, fp32, got 'int8'"),
        (("--device", "meta", "--random-weights"), "the device must be here, got 'meta'"),
        ((), "must be a folder with \\*.safetensors, got .*; --random-weights makes"),
        (("--prompt", "w1", "--random-weights"), "holds no tokenizer_config.json; --mock-input-len takes random"),
    ],
)
def test_what_is_refused(config, words, said):
    with pytest.raises(BadInput, match=said):
        CliRunner().invoke(app, ["infer", "--model", str(config.parent), *words], catch_exceptions=False)
