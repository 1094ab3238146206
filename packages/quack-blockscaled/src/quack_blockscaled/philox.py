"""Random bits for stochastic rounding: Philox 4x32-10, as a function of a seed and an element.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).

Element i of a tensor, counted in row-major order of its shape whatever its strides are, has 16 bits:

* key: the low 32 bits of the seed, then the high 32;
* counter: the low 32 bits of ``i // 8``, the high 32, 0, 0;
* bits: of output word ``i % 8 // 2`` the low 16 if i is even, the high 16 if it is odd.

So one call serves 8 neighbours, and how a kernel divides the tensor does not matter.
"""

from collections.abc import Callable
from typing import Any

ROUNDS = 10
NOISE_BITS = 16
"""Random bits of an element."""
PER_CALL = 8
"""Elements that one call of Philox serves."""

WORD = 0xFFFFFFFF

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: list[Any], key: tuple[Any, Any], multiply: Callable[[Any, int], tuple[Any, Any]]
) -> list[Any]:
    """Four words of 32 random bits, in arithmetic that kernels and the reference share.

    Args:
        counter: four words, of any type that has the operators of integers.
        key: two.
        multiply: the high and the low word of a product.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = multiply(c0, _MULTIPLIERS[0]), multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = second[0] ^ c1 ^ k0, second[1], first[0] ^ c3 ^ k1, first[1]
        k0, k1 = k0 + _WEYL[0] & WORD, k1 + _WEYL[1] & WORD
    return [c0, c1, c2, c3]
