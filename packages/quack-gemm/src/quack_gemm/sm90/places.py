"""Where a tile is, and who works on it."""

from typing import NamedTuple

from cutlass import Int32


class Place(NamedTuple):
    """A tile of D: row and column, in tiles, and the matrix of the batch."""

    row: Int32
    col: Int32
    matrix: Int32


class Sizes(NamedTuple):
    """Rows and columns of the product, and steps along K."""

    rows: Int32
    cols: Int32
    steps: Int32


class Worker(NamedTuple):
    """A warpgroup of those that multiply, and a thread of it."""

    group: Int32
    thread: Int32


class Part(NamedTuple):
    """64 rows and some columns of a tile, that a warpgroup finishes at a time.

    Args:
        row, col: of the thread's first sum, in D.
        atom: which of the warpgroup's 64 rows.
        inside: which columns, in parts.
    """

    row: Int32
    col: Int32
    atom: int
    inside: Int32 | int
