"""Hugging Face models with attn_implementation="tilery" give what they give with "eager", or say why not."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from tiny import PADDING, PROMPT, make
from transformers import AutoModel, masking_utils

import tilery
from tilery.base.errors import BadInput, NoBackward
from tilery.patch.attention import forward
from tilery.patch.attention_masks import Mask, make_mask

# What each adds to plain causal attention; windows are shorter than prompts.
MODELS = {
    "llama": {},
    "qwen3": {},  # norms of queries and keys
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 7},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},  # sinks
}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    tilery.register_attention()


@pytest.fixture(scope="module")
def made():
    """Models by name, made once."""
    kept = {}

    def get(name):
        kept[name] = kept.get(name) or make(name, attention="tilery", **MODELS[name])
        kept[name].set_attn_implementation("tilery")
        return kept[name].eval()

    return get


@torch.no_grad()
def both(model, what, *args, **kwargs):
    """With tilery, then with eager."""
    found = []
    for name in ("tilery", "eager"):
        model.set_attn_implementation(name)
        found.append(what(*args, **kwargs))
    return found


def same(ours, theirs, seen=None):
    ours, theirs = (x if seen is None else x[seen.bool()] for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_eager(made, name, padding):
    mask = PADDING[padding]
    ours, theirs = both(made(name), made(name), PROMPT, attention_mask=mask)
    same(ours.logits, theirs.logits, mask)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_generated_is_what_eager_generates(made, name):
    """Past the window, with sequences of their own lengths."""
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for mask in (PADDING["left"], PADDING["none"]):
        ours, theirs = both(made(name), made(name).generate, PROMPT, attention_mask=mask, **how)
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        same(torch.stack(ours.logits), torch.stack(theirs.logits))


def test_more_tokens_than_one_against_a_cache(made):
    """They stand at its end."""

    def run(first, later):
        cache = transformers.DynamicCache(config=model.config)
        model(PROMPT[:, :first], past_key_values=cache, use_cache=True)
        return model(PROMPT[:, first:later], past_key_values=cache, use_cache=True).logits

    for name in ("llama", "gemma3_text"):
        model = made(name)
        for first, later in ((2, 20), (12, 16)):
            same(*both(model, run, first, later))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_cache_that_has_room_for_more(made, name):
    """Its keys end after the queries do: the mask is then a tensor."""
    model = made(name)
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    ours, theirs = both(model, model.generate, PROMPT, attention_mask=PADDING["left"], **how)
    assert ours.tolist() == theirs.tolist()


def test_masks_of_the_users_own(made):
    model = made("llama")
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    seen = causal & (torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(2)) < 0.7) | torch.eye(20).bool()
    least = torch.finfo(torch.float32).min
    bends = torch.randn(2, 4, 20, 20, generator=torch.Generator().manual_seed(3)).masked_fill(~causal, least)
    plain, _ = both(model, model, PROMPT)
    for mask in (bends, torch.where(seen, 0.0, least)):
        ours, theirs = both(model, model, PROMPT, attention_mask=mask)
        same(ours.logits, theirs.logits)
        assert (ours.logits - plain.logits).abs().max() > 0.1
    as_bools, _ = both(model, model, PROMPT, attention_mask=seen)  # eager would add them
    same(as_bools.logits, theirs.logits)


def test_packed_sequences_by_their_position_ids(made):
    model, places = made("mistral"), torch.cat([torch.arange(13), torch.arange(7)])[None]
    ours, theirs = both(model, model, PROMPT[:1], position_ids=places, use_cache=False)
    same(ours.logits, theirs.logits)
    alone, _ = both(model, model, PROMPT[:1, 13:], use_cache=False)
    same(ours.logits[:, 13:], alone.logits)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_attention_that_is_not_causal(name):
    """modernbert: windows on both sides."""
    more = {"local_attention": 6, "global_attn_every_n_layers": 2} if name == "modernbert" else {}
    model = make(name, AutoModel, "tilery", **more)
    for mask in (PADDING["left"], None):
        ours, theirs = both(model, model, PROMPT, attention_mask=mask)
        same(ours.last_hidden_state, theirs.last_hidden_state, mask)


@pytest.mark.parametrize("tokens", [20, 9])  # as many as a step of decoding may have: it has no backward
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "gpt_oss"])
def test_gradients(made, name, tokens):
    model, found, ids = made(name), {}, PROMPT[:, :tokens]
    for which in ("tilery", "eager"):
        model.set_attn_implementation(which)
        model.zero_grad()
        model(ids, labels=ids, attention_mask=torch.ones_like(ids)).loss.backward()
        found[which] = {of: w.grad.clone() for of, w in model.named_parameters() if w.grad is not None}
    assert found["tilery"].keys() == found["eager"].keys()
    for of, grad in found["tilery"].items():
        torch.testing.assert_close(grad, found["eager"][of], atol=1e-3, rtol=1e-3, msg=of)


def test_sinks_alone_may_be_trained(made):
    """A step of decoding has no gradient of them either."""
    model = made("gpt_oss")
    try:
        for of, weight in model.named_parameters():
            weight.requires_grad_("sinks" in of)
        model.zero_grad()
        model(PROMPT[:, :9]).logits.square().sum().backward()
        assert all(weight.grad.any() for of, weight in model.named_parameters() if "sinks" in of)
    finally:
        model.requires_grad_(True)


def test_gradients_that_there_are_not(made):
    """Refused when the model is called, not hours later when its loss is."""
    with pytest.raises(NoBackward, match=r"gradients with .*key_mask"):
        made("llama")(PROMPT, attention_mask=PADDING["left"])


# What is made of masks


def asked(function=masking_utils.causal_mask_function, queries=6, keys=6, **how):
    """As transformers asks for a mask, and as it would be in full."""
    sizes = {"batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": keys - queries}
    how = {**sizes, "mask_function": function, **how}
    return make_mask(**how), masking_utils.sdpa_mask(**{**how, "allow_is_causal_skip": False})


def test_masks_that_kernels_know_are_not_spelt_out():
    window = masking_utils.sliding_window_causal_mask_function
    both_sides = masking_utils.sliding_window_bidirectional_mask_function
    padding = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    full, ones = masking_utils.bidirectional_mask_function, torch.ones(2, 6, dtype=torch.bool)
    assert asked()[0] == asked(attention_mask=ones)[0] == Mask(6, 6, True, 0, None)
    assert asked(queries=2)[0] == Mask(2, 6, True, 0, None)
    assert asked(window(3), local_size=3)[0] == Mask(6, 6, True, 3, None)
    assert asked(both_sides(3), local_size=3, allow_is_bidirectional_skip=True)[0] == Mask(6, 6, False, 4, None)
    assert asked(full, queries=2, q_offset=0, allow_is_bidirectional_skip=True)[0] == Mask(2, 6, False, 0, None)
    assert asked(attention_mask=padding)[0].seen.equal(padding)
    cut = asked(window(3), queries=1, keys=3, q_offset=5, kv_offset=3, attention_mask=padding, local_size=3)[0]
    assert cut.seen is None and (cut.causal, cut.window) == (True, 3)  # what was padded has left the cache


@pytest.mark.parametrize(
    ("function", "how"),
    [
        (masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int)), {"local_size": 3}),
        (masking_utils.sliding_window_causal_mask_function(3), {"local_size": 4}),  # another window
        (masking_utils.causal_mask_function, {"q_offset": 1, "queries": 2}),  # keys after the queries
        (masking_utils.causal_mask_function, {"q_offset": torch.tensor(4), "queries": 2}),
        (masking_utils.causal_mask_function, {"allow_is_causal_skip": False}),  # the model computes with it
        (lambda batch, head, q, k: (k <= q) | (k < 2), {}),
    ],
)
def test_other_masks_are_spelt_out(function, how):
    ours, full = asked(function, **how)
    assert isinstance(ours, torch.Tensor) and ours.equal(full)


def test_a_model_that_computes_with_its_mask_is_told():
    mask = Mask(2, 2, True, 0, None)
    for act in (lambda: mask[:, :, :1], lambda: torch.zeros(2) + mask, lambda: torch.cat([mask, mask])):
        with pytest.raises(BadInput, match="this model computes with its attention mask"):
            act()
    with pytest.raises(AttributeError, match="this model computes with its attention mask"):
        _ = mask.shape
    assert mask.to("cpu") == mask.contiguous() == mask


# What is refused


def layer(mask=None, queries=20, keys=20, causal=True, **how):
    q, k = torch.randn(2, 4, queries, 16), torch.randn(2, 2, keys, 16)
    return forward(SimpleNamespace(is_causal=causal), q, k, k, mask, **how)[0]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"dropout": 0.1}, "has no dropout, got 0.1"),
        ({"output_attentions": True}, "does not take output_attentions: the weights are never all there"),
        ({"head_mask": torch.ones(4)}, "does not take head_mask: heads are not scaled"),
        ({"cu_seq_lens_q": torch.tensor([0, 20])}, "does not take cu_seq_lens_q: position_ids alone"),
        ({"cache": object()}, "does not take cache: it reads no paged cache"),
        ({"indices": torch.zeros(1)}, "does not take indices: it does not know what that means"),
        ({"mask": torch.ones(2, 20, 20)}, r"a mask must be \[B, keys\] .* got \[2, 20, 20\]"),
        ({"mask": torch.zeros(2, 1, 20, 24)}, r"bias must be .* got fp32\[2, 1, 20, 24\]"),
        ({"mask": torch.ones(2, 1, 20, 24, dtype=torch.bool)}, "bias must be"),
        ({"mask": torch.ones(2, 24, dtype=torch.bool)}, r"key_mask must be bool\[2, 20\]"),
        ({"mask": Mask(20, 24, True, 0, None)}, "the mask is of 20 queries and 24 keys, the layer has 20 and 20"),
        ({"mask": Mask(20, 20, True, 0, None), "sliding_window": 5}, "window of 5, the mask .* has none"),
        ({"sliding_window": 5, "causal": False}, "window of 5 in attention that is not causal comes with a mask"),
        ({"s_aux": torch.zeros(2)}, r"sinks must be fp32\[4\]"),
    ],
)
def test_what_is_refused(how, words):
    with pytest.raises(BadInput, match=words):
        layer(**how)


def test_models_refuse_too(made):
    model = made("llama")
    with pytest.raises(BadInput, match="does not take output_attentions"):
        model(PROMPT, output_attentions=True)
    dropping = make("llama", attention="tilery", attention_dropout=0.1)
    dropping(PROMPT)
    with pytest.raises(BadInput, match=r"has no dropout, got 0\.1; set attention_dropout=0"):
        dropping.train()(PROMPT)


def test_what_no_score_depends_on_is_let_through():
    layer(output_attentions=False, head_mask=None, position_ids=torch.arange(20), use_cache=True)


def test_a_layer_by_itself():
    """Without a mask it goes by what the layer says; a mask of padding comes on top of that."""
    torch.manual_seed(0)
    q, k, v, bias = (torch.randn(2, heads, 20, size) for heads, size in ((4, 16), (2, 16), (2, 16), (4, 20)))
    padding, causal = PADDING["left"], torch.ones(20, 20, dtype=torch.bool).tril()
    near = causal & ~torch.ones(20, 20, dtype=torch.bool).tril(-3)

    def ours(mask=None, causal=True, **how):
        return forward(SimpleNamespace(is_causal=causal), q, k, v, mask, **how)[0]

    def theirs(mask):
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return made.transpose(1, 2)

    same(ours(), theirs(causal))
    same(ours(causal=False), theirs(None))
    few, _ = forward(SimpleNamespace(is_causal=False), q[:, :, :3], k, v, None)
    same(few, theirs(None)[:, :3])
    same(ours(is_causal=False), theirs(None))
    same(ours(sliding_window=3), theirs(near))
    seen = padding[:, None, None].bool()
    same(ours(padding), theirs(causal & seen), padding)
    same(ours(seen), theirs(seen))
    same(ours(causal=False, position_bias=bias), theirs(bias))
    same(ours(seen, position_bias=bias), theirs(bias.masked_fill(~seen, -torch.inf)))
    same(ours(near[None, None], position_bias=bias), theirs(bias.masked_fill(~near, -torch.inf)))


def test_without_transformers_the_command_is_said():
    code = "import sys; sys.modules['transformers'] = None; import tilery; tilery.register_attention()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ToolMissing: transformers is not installed: pip install 'tilery[hf]'" in done.stderr
