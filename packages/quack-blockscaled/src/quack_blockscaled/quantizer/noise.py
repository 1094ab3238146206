"""Random bits of elements, as `philox` defines them."""

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
        counter = [at & WORD, at >> 32, Uint64(0), Uint64(0)]
        for word in philox(counter, (key & WORD, key >> 32)):
            kept = Uint32(word) & ~Uint32(lost)
            found += [Int32(kept & (1 << NOISE_BITS) - 1), Int32(kept >> NOISE_BITS)]
    return found
