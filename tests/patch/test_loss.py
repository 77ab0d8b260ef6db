"""The loss of a patched model in training: the same, with the same gradients, and no logits."""

import copy

import pytest
import torch
from tiny import PROMPT, make

import tilery
from tilery.base.errors import BadInput

LABELS = PROMPT.clone()
LABELS[0, :9] = -100
LOSS = ("norms", "mlp", "loss")


def gradients(model, **how):
    model.zero_grad()
    out = model(PROMPT, labels=LABELS, use_cache=False, **how)
    out.loss.backward()
    return out, {of: weight.grad.clone() for of, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma"])
def test_loss_and_gradients_stay(name):
    model = make(name, tie_word_embeddings=name == "gemma").train()
    theirs, wanted = gradients(model)
    report = tilery.patch(model, ops=LOSS)
    assert [row.ops for row in report.replaced if row.piece == "loss"] == [("fused_linear_cross_entropy",)]
    ours, found = gradients(model)
    assert ours.logits is None and type(ours) is type(theirs)
    torch.testing.assert_close(ours.loss, theirs.loss, atol=1e-5, rtol=1e-5)
    for of, grad in wanted.items():
        torch.testing.assert_close(found[of], grad, atol=1e-4 * float(grad.abs().max()), rtol=1e-3, msg=of)
    as_tuple = model(PROMPT, labels=LABELS, use_cache=False, return_dict=False)
    assert isinstance(as_tuple, tuple) and as_tuple[0].equal(ours.loss)
    for count in (7, torch.tensor(7)):
        shared = model(PROMPT, labels=LABELS, use_cache=False, num_items_in_batch=count).loss
        torch.testing.assert_close(shared, ours.loss * (LABELS[:, 1:] != -100).sum() / 7)


def test_no_tensor_of_a_step_is_as_large_as_the_logits():
    model, sizes = make("llama", vocab_size=4096).train(), []
    for patched in (False, True):
        if patched:
            tilery.patch(model, ops="loss")
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            model(PROMPT, labels=PROMPT, use_cache=False)
        assert (PROMPT.numel() * 4096 in sizes) is not patched
        sizes.clear()


def test_logits_stay_where_they_are_asked_for():
    model = make("llama")
    with torch.no_grad():
        before = model(PROMPT, labels=LABELS)
    tilery.patch(model, ops="loss")
    with torch.no_grad():
        after = model(PROMPT, labels=LABELS)
    assert after.logits.equal(before.logits) and after.loss.equal(before.loss)
    assert model(PROMPT).logits.equal(before.logits)
    assert model(PROMPT, labels=LABELS).logits is None
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    assert model(PROMPT, labels=LABELS).logits is not None
    handle.remove()
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    torch.testing.assert_close(model(PROMPT, labels=LABELS).loss, before.logits.sum())
    del model._loss_function
    another = type(model)(copy.deepcopy(model.config))  # as from_pretrained of its class makes one
    assert another(PROMPT, labels=LABELS).logits is not None
    copied = copy.deepcopy(model)
    assert copied(PROMPT, labels=LABELS).loss.equal(model(PROMPT, labels=LABELS).loss)
    tilery.unpatch(model)
    assert model(PROMPT, labels=LABELS).logits is not None


def test_it_is_patched_where_it_is_asked_for():
    model = make("llama")
    assert "loss" not in {row.piece for row in tilery.patch(model).replaced}
    tilery.unpatch(model)
    tilery.patch(model, ops=LOSS, strict=True)
    with tilery.audit() as found:
        model(PROMPT, labels=LABELS).loss.backward()
    assert [row.layer for row in found.ran if row.op == "fused_linear_cross_entropy"] == ["(model)"]


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0}, "soft cap"),
        ("mixtral", {"output_router_logits": True}, "the loss of a router"),
    ],
)
def test_what_stays_in_torch(name, more, why):
    model = make(name, **more)
    report = tilery.patch(model, ops=LOSS)
    (left,) = [row for row in report.left if row.piece == "loss"]
    assert why in left.why and model(PROMPT, labels=LABELS).logits is not None
    tilery.unpatch(model)
    with pytest.raises(BadInput, match=f"loss of 1 .*{why}"):
        tilery.patch(model, ops=LOSS, strict=True)
    with pytest.raises(BadInput, match="nothing of the model could be replaced"):
        tilery.patch(model, ops="loss")
