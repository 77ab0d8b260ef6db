"""SiLU and GELU: the constants of their formulas, and the reference.

`act` is silu, tanh or none; the last two are torch's words for the forms of GELU. All are g times a factor from 0 to 1:
sigmoid(g) for SiLU, the share of the normal distribution below g for GELU.
"""

import math

import torch
from torch import Tensor

GELU = ("tanh", "none")

# GELU's tanh form is g · sigmoid(g · (LINEAR + CUBIC · g²)).
LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = LINEAR * 0.044715
# The exact form: the normal distribution's tail beyond z ≥ 0 is exp(-z²/2) · P(t), t = 1 / (1 + RATE · z), where P has
# these coefficients from t on; fitted to a relative error of 6e-8 for z up to 14.5, past which fp32 holds 0.
RATE = 0.28
TAIL = (
    0.11168916483704153, 0.11196293961982448, 0.10115466101777926, 0.0912141526179711, 0.05526106765327426,
    0.01798701175227722, 0.0722432623820251, -0.08454310174454634, 0.02303086958891585,
)  # fmt: skip
DENSITY = 1 / math.sqrt(2 * math.pi)


def factor_and_slope(g: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """The reference: act(g) / g and act'(g)."""
    if act == "none":
        factor = torch.erfc(-g * math.sqrt(0.5)) / 2
        return factor, factor + g * DENSITY * torch.exp(-g * g / 2)
    inner, inner_slope = (g, 1) if act == "silu" else (g * (LINEAR + CUBIC * g * g), LINEAR + 3 * CUBIC * g * g)
    factor = torch.sigmoid(inner)
    return factor, factor * (1 + g * (1 - factor) * inner_slope)
