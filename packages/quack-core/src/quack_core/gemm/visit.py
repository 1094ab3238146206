"""Apply an epilogue to the sums of a thread."""

from collections.abc import Callable, Iterator

from cutlass import Float32

from .epilogue import Op

BLOCK_SUMS = 4
"""Sums of a thread that are gates, before as many that they gate: what a warpgroup's threads have of 8
columns, and 16 bytes of float32."""


def outputs(
    epilogue: tuple[Op, ...],
    sums: list[Float32],
    operand: Callable[[int, int], Float32],
) -> Iterator[tuple[int, list[Float32]]]:
    """Number and values of each output, in the order of the thread's sums, as soon as they are known.

    Number 0 is D, which comes last; -1, -2 and so on are values to be reduced. Where an op takes or
    gives pairs, blocks of ``BLOCK_SUMS`` alternate: gates, then what they gate.

    Args:
        operand: gives operand number i of the epilogue for sum number j.
    """
    values, first, copies, reduced = list(sums), 0, 0, 0
    for op in epilogue:
        count = len(op.operands)
        if op.pairs:
            values = [
                op.apply((values[i], values[i + BLOCK_SUMS]), *_read(operand, first, count, i))
                for start in range(0, len(values), 2 * BLOCK_SUMS)
                for i in range(start, start + BLOCK_SUMS)
            ]
        elif op.splits:
            halves = [op.apply(x, *_read(operand, first, count, i)) for i, x in enumerate(values)]
            values = [
                pair[half]
                for start in range(0, len(halves), BLOCK_SUMS)
                for half in range(2)
                for pair in halves[start : start + BLOCK_SUMS]
            ]
        else:
            values = [op.apply(x, *_read(operand, first, count, i)) for i, x in enumerate(values)]
        if op.aux:
            copies += 1
            yield copies, values
        if op.reduces:
            reduced += 1
            yield -reduced, values
        first += count
    yield 0, values


def _read(operand: Callable[[int, int], Float32], first: int, count: int, i: int) -> list[Float32]:
    return [operand(first + j, i) for j in range(count)]
