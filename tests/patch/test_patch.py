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
from tiny import ARCHITECTURES, PADDING, PROMPT, both, make, same
from typer.testing import CliRunner

import tilery
from cases import home
from tilery.base.errors import BadInput
from tilery.cli import app
from tilery.patch import architectures
from tilery.patch.architectures import PIECES

ROOT = Path(__file__).parents[2]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


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


def test_a_backend_of_all_ops_or_of_some():
    where = home("triton")  # where Triton's kernels run
    model, prompt = make("qwen3").to(where), PROMPT.to(where)
    before = both(model, model, prompt)[0]
    tilery.unpatch(model)
    for backend in ("numba", {"rms_norm": "triton"}) if where.type == "cpu" else ("triton", {"rms_norm": "triton"}):
        tilery.patch(model, backend=backend)
        with torch.no_grad():
            same(model(prompt).logits, before.logits)
        tilery.unpatch(model)
    with pytest.raises(BadInput, match=r"backend for rope_ must be one of numba, triton, got 'cuda'"):
        tilery.patch(model, backend={"rms_norm": "cuda", "rope_": "cuda"})
    with pytest.raises(BadInput, match=r"names ops that a patch calls, .*; got 'softmax'"):
        tilery.patch(model, backend={"softmax": "numba"})


def test_tables_of_angles_that_are_transposed(made, monkeypatch):
    """transformers 5.17 gives GPT-OSS such cos and sin."""
    model = made("gpt_oss")
    rotary = type(model.model.rotary_emb)
    given = rotary.forward
    transposed = lambda *args, **kwargs: tuple(x.mT.contiguous().mT for x in given(*args, **kwargs))  # noqa: E731
    monkeypatch.setattr(rotary, "forward", transposed)
    before, after, _ = both(model, model, PROMPT)
    same(after.logits, before.logits)


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
