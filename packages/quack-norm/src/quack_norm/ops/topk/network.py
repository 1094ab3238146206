"""The bitonic network that finds the k largest of a row spread over threads: which keys meet.

Position p of a row is register ``p % values`` of thread ``p // values``. The network sorts runs of
``size`` keys, the power of two from k on, largest first; then it halves their number by meeting
runs in pairs, until the largest keys are all in the first run. Pure Python: no DSL, no GPU.

Source: Batcher, Sorting networks and their applications, 1968; for the halving Shanbhag, Pirk and
Madden, Efficient top-k query processing on GPUs, SIGMOD 2018.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """The key at position p meets that at position ``p ^ mask``.

    Args:
        mask: its highest bit tells the lower position of a pair from the upper one.
        halves: both positions keep the larger key. Otherwise the lower position keeps the larger
            key and the upper one the smaller.
        run: keys of a run; of steps that halve.
    """

    mask: int
    halves: bool = False
    run: int = 0

    @property
    def high_bit(self) -> int:
        """The bit of a position that the upper one of a pair has set."""
        return 1 << self.mask.bit_length() - 1


def power_of_two(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (number - 1).bit_length()


def steps(values: int, threads: int, k: int) -> Iterator[Step]:
    """All steps, in order, for ``values * threads`` keys.

    A step that halves runs within a thread leaves it half of its registers. One that halves over
    threads leaves the same run in both of a pair.

    Args:
        values: keys of a thread, a power of two.
        threads: of a row, a power of two.
        k: keys that are wanted; at most all.
    """
    size = power_of_two(k)
    length = 2
    while length <= size:
        yield Step(length - 1)  # two sorted runs: the last of one meets the first of the other
        yield from _merge(length // 2)
        length *= 2
    while values > size:
        yield Step(2 * size - 1, halves=True, run=size)
        yield from _merge(size)
        values //= 2
    block = 2 * size
    while block <= values * threads:
        yield Step(block - 1, halves=True, run=size)
        yield from _merge(size)
        block *= 2


def work(values: int, threads: int, k: int) -> int:
    """Instructions that all steps take of a thread, about: to choose between networks.

    A pair within a thread takes two. A key that meets one of another thread takes a shuffle, which
    runs at half the rate of others, and a maximum, or a comparison and a choice.
    """
    count = 0
    for step in steps(values, threads, k):
        if step.mask >= values:
            count += (3 if step.halves else 4) * values
            continue
        if step.halves:
            values //= 2
        count += values
    return count


def _merge(size: int) -> Iterator[Step]:
    """Sort a run that first falls and then rises, or the other way round."""
    distance = size // 2
    while distance:
        yield Step(distance)
        distance //= 2
