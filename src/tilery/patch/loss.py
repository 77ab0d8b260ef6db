"""The loss of a training step without its logits, which are the largest tensor of the step."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import can_return_tuple

from tilery.patch.forwards import run
from tilery.patch.swap import STATE, hooked, original_class


def refusal(model: Any) -> str | None:
    """Why the loss stays in torch, in a sentence; None if it is patched."""
    head = getattr(model, "lm_head", None)
    if head is None or not hasattr(model, "model"):
        return "the model has no head that predicts tokens"
    if type(head) is not nn.Linear or head.bias is not None or head.weight.dtype != model.dtype:
        return "its head is not a plain product of the model's dtype"
    if getattr(model.config, "final_logit_softcapping", None):
        return "its logits have a soft cap, which the op does not take"
    if getattr(model.config, "output_router_logits", False):
        return "it adds the loss of a router, from which transformers makes its output"
    return None if model.loss_function is ForCausalLMLoss else "it has a loss of its own"


@can_return_tuple
def causal_lm(
    self: Any, input_ids: Tensor | None = None, attention_mask: Any = None, position_ids: Tensor | None = None,
    past_key_values: Any = None, inputs_embeds: Tensor | None = None, labels: Tensor | None = None, *,
    use_cache: bool | None = None, logits_to_keep: int | Tensor = 0, **kwargs: Any,
) -> Any:  # fmt: skip
    """As the model's own forward, but for the loss where gradients are needed: then there are no logits."""
    given: dict[str, Any] = {
        "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
        "past_key_values": past_key_values, "inputs_embeds": inputs_embeds, "use_cache": use_cache, **kwargs,
    }  # fmt: skip
    whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
    if labels is None or not torch.is_grad_enabled() or not whole or not _is_usual(self, kwargs):
        base: Any = original_class(self)
        return base.forward(self, **given, labels=labels, logits_to_keep=logits_to_keep)
    made = self.model(**given)
    output = self.tilery_patch.output
    found = {name: getattr(made, name, None) for name in ("past_key_values", "hidden_states", "attentions")}
    return output(loss=_loss(self, made.last_hidden_state, labels, **kwargs), **found)


def _is_usual(self: Any, kwargs: dict[str, Any]) -> bool:
    """Whether nothing has been changed since the model was patched, and nothing is asked for that needs logits."""
    return (
        not kwargs.get("output_router_logits")
        and hasattr(self, STATE)
        and refusal(self) is None
        and not hooked(self.lm_head)
    )


def _loss(
    self: Any, hidden_states: Tensor, labels: Tensor, num_items_in_batch: Any = None, ignore_index: int = -100,
    shift_labels: Tensor | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """What ForCausalLMLoss computes of the logits."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    targets = shift_labels.to(hidden_states.device)
    scalars = (0.0, ignore_index)
    losses, _ = run(self, "fused_linear_cross_entropy", hidden_states, self.lm_head.weight, targets, *scalars)
    if num_items_in_batch is None:
        return losses.sum() / (targets != ignore_index).sum()  # type: ignore[no-any-return]
    count = num_items_in_batch.to(losses.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
    return losses.sum() / count  # type: ignore[no-any-return]
