"""Philox-4x32-10: four words of 32 bits from a counter and a key, the same on every device and in every language.

The key is a seed of 64 bits. As a uniform number in [0, 1) a word has 24 bits, so that fp32 holds it exactly.
"""

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
BELOW_ONE = 1 - 2.0**-24  # the largest fp32 value below 1
_WORD = 0xFFFFFFFF


def words(seed: int, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference: the four words of the counter (c0, c1, 0, 0). Words of 32 bits are held in int64."""
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & _WORD, (k1 + KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a · b, with nothing past 63 bits on the way."""
    high = (a * (b >> 16) + (a * (b & 0xFFFF) >> 16)) >> 16
    return high, (a * (b & 0xFFFF) + ((a * (b >> 16) & 0xFFFF) << 16)) & _WORD


def uniform(count: int, seed: int, device: torch.device) -> Tensor:
    """A number in [0, 1) for each element, in float64: element i takes word i % 4 of counter i // 4."""
    counter = torch.arange((count + 3) // 4, device=device)
    return (torch.stack(words(seed, counter & _WORD, counter >> 32), -1).view(-1)[:count] >> 8).double() * 2.0**-24


def low_key(seed: int) -> int:
    """The key's low word as a signed integer of 32 bits, as launches pass it."""
    return _signed(seed & _WORD)


def high_key(seed: int) -> int:
    """The key's high word as a signed integer of 32 bits."""
    return _signed((seed >> 32) & _WORD)


def _signed(word: int) -> int:
    return word - (word >> 31 << 32)


def quarter(n: int) -> int:
    """Columns that take the same word of their counters: whole sectors, so that all four quarters start aligned."""
    return -(-n // 64) * 16
