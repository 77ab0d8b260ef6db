"""What tests of `bind` share: arguments of a launch, and values of calls on a GPU that is not there."""

import torch

from tilery.base.launch import Argument, Scalar
from tilery.base.spec import TensorSpec

STREAM = 77  # of device 0, as the fixture `current` has it; one more of device 1
GPU = torch.device("cuda", 0)


def argument(slot, shape=(4, 8), dtype=torch.float32):
    """A tensor of a call, as a launch refers to it."""
    return Argument.at_slot(TensorSpec.contiguous(shape, dtype, "cuda:0"), slot)


X, Y, EPS = argument(0), argument(1), Scalar(2, float)


def values(eps=0.5):
    """Values of one call: x, y and eps. They lie on the CPU: nobody looks."""
    return torch.randn(4, 8), torch.zeros(4, 8), eps
