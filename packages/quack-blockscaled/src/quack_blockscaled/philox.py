"""Random bits for stochastic rounding: Philox 4x32-10, as a function of a seed and an element.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).

Element i of a tensor, counted in row-major order of its shape whatever its strides are, has 16 bits:

* key: the low 32 bits of the seed, then the high 32;
* counter: the low 32 bits of ``i // 8``, the high 32, 0, 0;
* bits: of output word ``i % 8 // 2`` the low 16 if i is even, the high 16 if it is odd.

So one call serves 8 neighbours, and how a kernel divides the tensor does not matter.
"""

import torch
from torch import Tensor

from quack_core.errors import ShapeError

ROUNDS = 10
NOISE_BITS = 16
"""Random bits of an element."""
PER_CALL = 8
"""Elements that one call of Philox serves."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(counter: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Four words of 32 random bits.

    Args:
        counter: four int64 tensors of one shape, of values below 2**32.
        key: two words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # Products have 64 bits: int64 wraps, and the masks below undo the sign.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _WORD) ^ c1 ^ k0,
            second & _WORD,
            (first >> 32 & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return [c0, c1, c2, c3]


def noise(elements: int, seed: int, device: torch.device) -> Tensor:
    """16 random bits for each element of a tensor, int32, in row-major order of its shape.

    Raises:
        ShapeError: the seed is negative, or has more than 63 bits.
    """
    if not 0 <= seed < 2**63:
        raise ShapeError(f"quantize: seed is {seed}: it must be 0 to 2**63 - 1")
    calls = torch.arange(-(-elements // PER_CALL), dtype=torch.int64, device=device)
    zero = torch.zeros_like(calls)
    words = philox([calls & _WORD, calls >> 32, zero, zero], (seed & _WORD, seed >> 32))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).reshape(-1)[:elements].int()
