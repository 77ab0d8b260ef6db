"""A mask that is kept as what it says: all of it reaches attention, and what does not fit the layer is refused."""

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'tilery[hf]'")

from tilery.base.errors import BadInput
from tilery.patch.attention import _said
from tilery.patch.attention_masks import Mask

Q, K = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16)
SEEN = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("seen", [None, SEEN], ids=["all", "padded"])
def test_all_that_a_mask_says_reaches_attention(causal, window, seen):
    said = _said(Mask(6, 6, causal, window, seen), Q, K, not causal, None)
    assert (said["causal"], said["window"]) == (causal, window) and said["key_mask"] is seen


def test_a_window_that_the_mask_does_not_have_is_refused():
    with pytest.raises(BadInput, match=r"the layer has a sliding window of 3, the mask .* has none"):
        _said(Mask(6, 6, True, 0, None), Q, K, True, 3)
