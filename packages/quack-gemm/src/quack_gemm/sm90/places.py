"""Where a tile is, and who works on it."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, const_expr

from quack_core.gemm import order
from quack_core.gemm.sm90 import split
from quack_core.gemm.sm90.ring import Cluster

from ..config import GemmConfig, SplitK
from ..spec import GemmSpec


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


class Walk:
    """Which tiles a CTA works on, one after the other, and which steps along K.

    With parts of K that are tiles of their own, each of D's matrices is one of ``ranges`` in the order
    of tiles: either D has a matrix for each, or what they store is added to it. Of a symmetric D only
    clusters on and below the diagonal are in that order.
    """

    def __init__(self, spec: GemmSpec, config: GemmConfig):
        self.spec, self.config = spec, config

    def make_order(self, rows: Int32, cols: Int32, matrices: Int32) -> order.Order | order.Lower:
        """The order of the tiles of a product.

        Args:
            matrices: of the tensor that is stored.
        """
        config = self.config
        down = cute.ceil_div(rows, config.tile_m * config.cluster_m)
        across = cute.ceil_div(cols, config.tile_n * config.cluster_n)
        if self.spec.symmetric:
            return order.make_lower(down, matrices, config.group)
        if config.split_mode == SplitK.PARALLEL:
            matrices = matrices * config.ranges
        return order.make(down, across, matrices, config.group)

    @cute.jit
    def locate(self, tile_order, work: Int32, at: Cluster, sizes: Sizes):
        """This CTA's tile; first step along K, and how many."""
        config, first, count = self.config, Int32(0), sizes.steps
        if const_expr(config.peers > 1):
            first, count = split.part(at.part, config.peers, sizes.steps)
        find = const_expr(order.locate_lower if self.spec.symmetric else order.locate)
        row, col, matrix = find(tile_order, work, config.group)
        if const_expr(config.ranges > 1):
            first, count = split.part(matrix % config.ranges, config.ranges, sizes.steps)
        if const_expr(config.split_mode == SplitK.PARALLEL):
            matrix = matrix // config.ranges
        row, col = row * config.cluster_m + at.row, col * config.cluster_n + at.col
        return Place(row, col, matrix), first, count

    def operands_of(self, matrix: Int32) -> tuple[Int32, Int32]:
        """Which matrix of each operand belongs to one of those that are stored."""
        if self.config.split_mode == SplitK.SEPARATE:
            matrix = matrix // self.config.ranges
        batched = (self.spec.a_batched, self.spec.b_batched)
        first, second = reversed(batched) if self.config.swap else batched
        return matrix if first else Int32(0), matrix if second else Int32(0)
