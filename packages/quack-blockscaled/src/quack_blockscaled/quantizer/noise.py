"""Random bits of elements, as `philox` defines them."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64

from ..philox import NOISE_BITS, WORD, philox
from .spec import VECTOR


def of_vectors(first: Int64, count: int, seed: Int64, lost: Int32) -> list[Int32]:
    """Of so many elements from vector number ``first`` on, 16 bits each.

    Args:
        first: counted in vectors of 8 elements.
        lost: -1 for elements of a block with a NaN, which take none; else 0.
    """
    key = Uint64(seed)
    found = []
    for i in range(count // VECTOR):
        at = Uint64(first + i)
        counter = [Uint32(at), Uint32(at >> 32), 0, 0]
        for word in philox(counter, (Uint32(key), Uint32(key >> 32)), _multiply):
            kept = Uint32(word) & ~Uint32(lost)
            found += [Int32(kept & (1 << NOISE_BITS) - 1), Int32(kept >> NOISE_BITS)]
    return found


def _multiply(word: Any, by: int) -> tuple[Any, Any]:
    """The compiler makes no such instruction of a factor that has 32 bits."""
    if isinstance(word, int):
        return word * by >> 32, word * by & WORD
    low, high = cute.arch.inline_ptx(
        f"{{ .reg .b64 product; mul.wide.u32 product, {{$r0}}, {by}; "
        "mov.b64 {{$w0}, {$w1}}, product; }",
        write_only_types=[Uint32, Uint32],
        read_only_args=[Uint32(word)],
    )
    return high, low
