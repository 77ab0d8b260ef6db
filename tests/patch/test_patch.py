"""Patched models give what they gave before, and are bit for bit what they were when the patch is taken back."""

import copy
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from tiny import ARCHITECTURES, PADDING, PROMPT, make
from typer.testing import CliRunner

import tilery
from tilery.base.errors import BadInput, NoBackward, ToolMissing
from tilery.cli import app
from tilery.patch import architectures
from tilery.patch.architectures import PIECES

ROOT = Path(__file__).parents[2]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(scope="module")
def made():
    """Models by name, made once; each is unpatched when it is given out."""
    kept = {}

    def get(name):
        kept[name] = kept.get(name) or make(name)
        if "tilery_patched" in vars(kept[name]):
            tilery.unpatch(kept[name])
        return kept[name].eval()

    return get


@torch.no_grad()
def both(model, what, *args, **kwargs):
    """Before a patch and with it, which stays."""
    before = what(*args, **kwargs)
    report = tilery.patch(model)
    return before, what(*args, **kwargs), report


def same(ours, theirs, mask=None):
    if mask is not None:  # of what is padding nothing is asked
        ours, theirs = (x[mask.bool()] for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_every_architecture_of_the_table_is_tested():
    assert set(ARCHITECTURES) == set(architectures.ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_and_greedy_tokens_stay(made, name):
    """Prefill, decode with a cache, windows, padding on the left."""
    model = made(name)

    def run():
        mask = PADDING["left"]
        logits = model(PROMPT).logits, model(PROMPT, attention_mask=mask).logits
        return (*logits, *(model.generate(PROMPT, attention_mask=m, **GREEDY) for m in (mask, torch.ones_like(mask))))

    before, after, _ = both(model, run)
    same(after[0], before[0])
    same(after[1], before[1], PADDING["left"])
    for ours, theirs in zip(after[2:], before[2:]):
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        same(torch.stack(ours.logits), torch.stack(theirs.logits))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_unpatched_bit_for_bit(made, name):
    model = made(name)
    weights = {of: (w, w.detach().clone(), w.stride()) for of, w in model.named_parameters()}
    classes = {of: type(module) for of, module in model.named_modules()}
    attributes = {of: set(vars(module)) for of, module in model.named_modules()}
    config, state = model.config.to_dict(), list(model.state_dict())
    before, _, _ = both(model, model, PROMPT)
    assert list(model.state_dict()) == state
    assert all(w is weights[of][0] and w.equal(weights[of][1]) for of, w in model.named_parameters())
    assert {type(m) for m in model.modules()} != set(classes.values())
    tilery.unpatch(model)
    for of, w in model.named_parameters():
        assert w is weights[of][0] and w.equal(weights[of][1]) and w.stride() == weights[of][2]
        assert w.untyped_storage().nbytes() == w.nbytes
    assert {of: type(module) for of, module in model.named_modules()} == classes
    assert {of: set(vars(module)) for of, module in model.named_modules()} == attributes
    assert model.config.to_dict() == config
    with torch.no_grad():
        assert model(PROMPT).logits.equal(before.logits)


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3_text"])
def test_gemmas_offset_is_added_in_float32(name):
    """Beside a weight of 2⁻⁹, 1 rounds it away in bfloat16; one of 300 has no bits below 2."""
    model = make(name).bfloat16()
    for of, weight in model.named_parameters():
        if "norm" in of:
            weight.data.copy_(torch.tensor([2.0**-9, 300.0]).repeat(len(weight) // 2))
    norm = model.model.norm
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    tilery.patch(model, ops="norms")
    exact = torch.nn.functional.rms_norm(x.double(), (64,), norm.weight.double() + 1, 1e-6)
    assert norm(x).equal(exact.bfloat16())


# Pieces


@pytest.mark.parametrize("piece", architectures.PIECES)
@pytest.mark.parametrize("name", ["gemma3_text", "phi3", "olmoe"])
def test_each_piece_alone(made, name, piece):
    model = made(name)
    with torch.no_grad():
        before = model(PROMPT).logits
        if piece == "mlp" and name == "olmoe":
            with pytest.raises(BadInput, match="nothing of the model could be replaced"):
                tilery.patch(model, ops=piece)
            return
        report = tilery.patch(model, ops=[piece])
        same(model(PROMPT).logits, before)
    assert {row.piece for row in report.replaced} == {piece}


def test_the_report(made):
    report = tilery.patch(made("qwen3_moe"))
    rows = {(row.piece, row.module): (row.count, row.ops) for row in report.replaced}
    assert rows == {
        ("norms", "Qwen3MoeRMSNorm"): (9, ("rms_norm",)),
        ("norms", "Qwen3MoeDecoderLayer"): (2, ("add_rms_norm",)),
        ("mlp", "Qwen3MoeMLP"): (1, ("linear_silu_mul",)),
        ("qkv", "Qwen3MoeAttention"): (2, ("linear",)),
        ("rope", "Qwen3MoeAttention"): (2, ("qk_norm_rope_", "rope")),
        ("attention", "Qwen3MoeAttention"): (2, ("attention", "attention_decode")),
    }
    assert [(row.module, row.count) for row in report.left] == [("Qwen3MoeExperts", 1), ("Qwen3MoeTopKRouter", 1)]
    text = str(report)
    assert "experts are not patched" in text and max(map(len, text.splitlines())) <= 80


def test_a_backend_of_all_ops_or_of_some(made):
    model = made("qwen3")
    before, _, _ = both(model, model, PROMPT)
    tilery.unpatch(model)
    for backend in ("numba", {"rms_norm": "triton"}):
        tilery.patch(model, backend=backend)
        with torch.no_grad():
            same(model(PROMPT).logits, before.logits)
        tilery.unpatch(model)
    with pytest.raises(BadInput, match=r"backend for rope_ must be one of numba, triton, got 'cuda'"):
        tilery.patch(model, backend={"rms_norm": "cuda", "rope_": "cuda"})
    with pytest.raises(BadInput, match=r"names ops that a patch calls, .*; got 'softmax'"):
        tilery.patch(model, backend={"softmax": "numba"})


# Weights in one buffer


def test_joined_weights_take_no_more_memory(made):
    model = made("qwen2")

    def size():
        return sum({w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in model.parameters()}.values())

    before = size()
    tilery.patch(model)
    attention = model.model.layers[0].self_attn
    kept = [getattr(attention, name).bias.untyped_storage().data_ptr() for name in ("q_proj", "k_proj", "v_proj")]
    assert size() == before and len(set(kept)) == 1


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_saved_and_loaded(made, name, tmp_path):
    model = made(name)
    tilery.patch(model)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        ours = model(PROMPT).logits
        again = type(model).from_pretrained(tmp_path, attn_implementation="eager")
        assert type(again.model.norm).__mro__[1] is torch.nn.Module
        same(ours, again(PROMPT).logits)
        for weight in again.parameters():
            weight.mul_(1.5)
        model.load_state_dict(again.state_dict())
        same(model(PROMPT).logits, again(PROMPT).logits)
        for weight in again.parameters():
            weight.mul_(0.5)
        model.load_state_dict(again.state_dict(), assign=True)  # other parameters
        same(model(PROMPT).logits, again(PROMPT).logits)


def test_parameters_that_move_are_followed(made):
    model = made("llama")
    tilery.patch(model)
    with torch.no_grad():
        mlp = model.model.layers[0].mlp
        x = torch.randn(2, 64)
        for kind in (torch.float16, torch.float32):
            model.to(kind)
            made_by_hand = mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(x.to(kind))) * mlp.up_proj(x.to(kind)))
            torch.testing.assert_close(mlp(x.to(kind)), made_by_hand, atol=2e-3, rtol=2e-3)
        mlp.up_proj.weight = torch.nn.Parameter(torch.zeros_like(mlp.up_proj.weight))
        assert not mlp(x).any()


def test_a_copy_is_patched_by_itself(made):
    model = made("qwen3")
    report = tilery.patch(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert copied(PROMPT).logits.equal(model(PROMPT).logits)
            copied.model.layers[0].mlp.up_proj.weight.zero_()
            assert not copied.model.layers[0].mlp(torch.randn(2, 64)).any()
            assert model.model.layers[0].mlp(torch.randn(2, 64)).any()
        tilery.unpatch(copied)
        assert type(copied.model.norm) is type(model.model.norm).__mro__[1]
        assert tilery.patch(copied).replaced == report.replaced


# One model, not another


def test_two_models_of_a_class_do_not_touch_each_other():
    config = make("llama").config
    torch.manual_seed(0)
    one, other = transformers.LlamaForCausalLM(config).eval(), transformers.LlamaForCausalLM(config).eval()
    kept = dict(vars(transformers.models.llama.modeling_llama.LlamaAttention))
    with torch.no_grad():
        before = other(PROMPT).logits
        tilery.patch(one)
        assert other.config._attn_implementation == "eager" and one.config._attn_implementation == "tilery"
        assert type(other.model.norm) is transformers.models.llama.modeling_llama.LlamaRMSNorm
        assert other(PROMPT).logits.equal(before)
    assert dict(vars(transformers.models.llama.modeling_llama.LlamaAttention)) == kept


def test_two_threads(made):
    model = made("llama")
    before, _, _ = both(model, model, PROMPT)
    model.to(torch.float64).to(torch.float32)  # no view is left: the threads find that out together
    found = [None] * 4

    def run(i):
        with torch.no_grad():
            found[i] = model(PROMPT).logits

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for logits in found:
        same(logits, before.logits)


# Hooks


def test_hooks_stay_and_see_every_call(made):
    model, seen = made("qwen3"), []
    layer = model.model.layers[0]
    watched = [layer, layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn, layer.mlp]
    watched += [layer.self_attn.q_norm, layer.self_attn.k_norm, layer.mlp.gate_proj, layer.self_attn.q_proj]

    def look(module, args, output):
        seen.append(module)

    for when in ("before", "after"):
        if when == "after":
            tilery.patch(model)
        handles = [module.register_forward_hook(look) for module in watched]
        if when == "before":
            tilery.patch(model)
        with torch.no_grad():
            model(PROMPT)
        assert set(seen) == set(watched) and len(seen) == len(watched)
        seen.clear()
        tilery.unpatch(model)
        with torch.no_grad():
            model(PROMPT)
        assert len(seen) == len(watched)
        seen.clear()
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "phi3"])
def test_what_a_hook_keeps_is_not_overwritten(made, name):
    """Queries and keys are rotated in place only where nobody has seen them."""
    model, kept = made(name), {}
    attention = model.model.layers[1].self_attn
    watched = [getattr(attention, n, None) for n in ("q_proj", "k_proj", "qkv_proj", "q_norm", "k_norm")]
    for ops in (None, ("rope", "norms"), ("rope", "qkv")):
        handles = [
            m.register_forward_hook(lambda m, args, out: kept.update({m: out})) for m in watched if m is not None
        ]
        with torch.no_grad():
            model(PROMPT)
            theirs = {module: x.clone() for module, x in kept.items()}
            kept.clear()
            tilery.patch(model, ops=ops)
            model(PROMPT)
        assert len(kept) == len(theirs) == len(handles)
        for module, wanted in theirs.items():
            same(kept[module], wanted)
        kept.clear()
        tilery.unpatch(model)
        for handle in handles:
            handle.remove()


def add_hook(module, seen):
    """As accelerate does."""
    module._old_forward = module.forward

    def forward(*args, **kwargs):
        seen.append(module)
        return module._old_forward(*args, **kwargs)

    module.forward = forward


@pytest.mark.parametrize("first", ["hook", "patch"])
def test_hooks_as_accelerates_stay(made, first):
    model, seen = make("llama"), []
    before, _, _ = both(model, model, PROMPT)
    if first == "hook":
        tilery.unpatch(model)
    hooked = [model.model.layers[0].mlp, model.model.norm, model.model.layers[1].self_attn.k_proj]
    for module in hooked:
        add_hook(module, seen)
    if first == "hook":
        report = tilery.patch(model)
        assert ("qkv", "a hook watches one of the projections") in [(row.piece, row.why) for row in report.left]
    calls = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: calls.append(m))
    with torch.no_grad():
        same(model(PROMPT).logits, before.logits)
    handle.remove()
    assert set(seen) == set(hooked) and len(seen) == 3
    assert model.model.layers[0].mlp.gate_proj not in calls  # so below the hook the patched forward runs
    tilery.unpatch(model)
    seen.clear()
    with torch.no_grad():
        assert model(PROMPT).logits.equal(before.logits)
    assert len(seen) == 3


def test_another_tools_forward_is_left(made):
    model = make("llama")
    model.model.norm.forward = lambda x: x * 2
    report = tilery.patch(model)
    assert ("norms", "another tool has replaced its forward") in [(row.piece, row.why) for row in report.left]
    assert model.model.norm(torch.ones(1)) == 2


def test_hidden_states_are_recorded(made):
    model = made("gemma3_text")
    before, after, _ = both(model, model, PROMPT, output_hidden_states=True)
    assert len(after.hidden_states) == 3
    for ours, theirs in zip(after.hidden_states, before.hidden_states):
        same(ours, theirs)


# Training


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "olmo2", "qwen2"])
def test_a_training_step(name, checkpointing):
    """Gradients are as close to those in float64 as torch's own, to a factor."""
    model, tokens = make(name, attention="sdpa"), PROMPT[:, :18]

    def gradients(of):
        of.train()
        if checkpointing:
            of.gradient_checkpointing_enable()
        of.zero_grad()
        of(tokens, labels=tokens, use_cache=False).loss.backward()
        return {which: weight.grad.clone() for which, weight in of.named_parameters()}

    exact = gradients(copy.deepcopy(model).double())
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


def test_generates_own_option_compiles_one_graph(made):
    """Decode with a static cache."""
    model = made("llama")
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    compiled = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    compiled._compile_all_devices = True  # otherwise it compiles on a GPU alone
    before = model.generate(PROMPT, disable_compile=True, **how)
    tilery.patch(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert model.generate(PROMPT, compile_config=compiled, **how).tolist() == before.tolist()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# What is refused


def test_what_is_refused(made):
    model = made("llama")
    with pytest.raises(BadInput, match="ops must be some of norms, rope, mlp, qkv, attention, loss, got 'norm'"):
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


@pytest.mark.parametrize(
    "code",
    [
        "import tilery; tilery.patch",
        "import tilery.patch; import tilery",
        "from tilery.patch import unpatch; import tilery; assert tilery.unpatch is unpatch",
        "import tilery; tilery.unpatch; from tilery import patch; assert patch is tilery.patch",
    ],
)
def test_the_package_is_called_in_either_order(code):
    code += "; assert callable(tilery.patch) and tilery.patch.register_attention is tilery.register_attention"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_document_is_what_the_command_prints_and_what_patches_replace():
    made = CliRunner().invoke(app, ["ops", "--models"]).stdout
    assert (ROOT / "docs" / "models.md").read_text() == made, "tilery ops --models > docs/models.md"
    lines = {name: line.split(" | ") for name in ARCHITECTURES for line in made.splitlines() if f"| `{name}` |" in line}
    for name, (_, norms, qkv, rotation, mlp, _, stays) in lines.items():
        report = tilery.patch(make(name))
        ops = {piece: {op for row in report.replaced if row.piece == piece for op in row.ops} for piece in PIECES}
        assert ops["norms"] == set(re.findall(r"`(\w+)`", norms))
        assert (ops["qkv"], ops["rope"]) == (set(re.findall(r"`(\w+)`", qkv)), set(re.findall(r"`(\w+)`", rotation)))
        assert bool(ops["mlp"]) == bool(mlp) and ops["attention"] == {"attention", "attention_decode"}
        assert len(report.left) == len([part for part in stays.rstrip(" |").split(", ") if part])
    assert set(lines) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_a_static_cache(made, name):
    """It has room for more keys than there are: the mask is then a tensor."""
    model = made(name)
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    before, after, _ = both(model, model.generate, PROMPT, attention_mask=PADDING["left"], **how)
    assert after.tolist() == before.tolist()


def test_what_is_joined_in_inference_mode_can_be_trained():
    model = make("llama")
    before, _, _ = both(model, model, PROMPT)
    tilery.unpatch(model)
    with torch.inference_mode():
        tilery.patch(model)
        same(model(PROMPT).logits, before.logits)
    model(PROMPT, labels=PROMPT).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_batch_with_one_row_of_positions(made):
    """transformers hands cos and sin of one sequence to all, if no padding makes them differ."""
    model = made("llama")
    before, after, _ = both(model, model, PROMPT.repeat(2, 1), position_ids=torch.arange(3, 23)[None])
    same(after.logits, before.logits)
    far = {"position_ids": torch.stack([torch.arange(20), torch.arange(20) + 30])}
    after = model(PROMPT, **far)
    tilery.unpatch(model)
    same(after.logits, model(PROMPT, **far).logits)


def test_dropout_of_attention_is_for_training():
    model = make("llama", attention_dropout=0.5)
    before, after, _ = both(model, model, PROMPT)
    same(after.logits, before.logits)
    with pytest.raises(BadInput, match=r"has no dropout, got 0\.5"):
        model.train()(PROMPT)


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
