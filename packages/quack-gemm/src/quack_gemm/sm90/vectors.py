"""The vectors that an epilogue gives beside D: numbers of a tile, of which torch makes those of D."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, const_expr

from quack_core.device import barrier
from quack_core.gemm.epilogue import PARTIALS
from quack_core.gemm.sm90 import columns, fragment, rows
from quack_core.reduction.tiling import WARP

from ..config import WARPGROUP, WARPS, GemmConfig
from ..spec import GemmSpec
from .places import Part, Place, Sizes, Worker


class TileVectors:
    """What one warpgroup's rows of a tile are reduced to.

    Over columns, each row is complete behind the last part of its columns. Over rows, warps meet in
    shared memory behind the whole tile.
    """

    def __init__(self, spec: GemmSpec, config: GemmConfig):
        self.config, self.cols = config, config.piece_cols(spec)
        self.names = [one.name for one in spec.reductions]
        self.down = [config.down(one) for one in spec.reductions]
        before, self.index = 0, []
        for op in spec.epilogue:
            if op.reduces:
                self.index.append(before if op.reduces.name == "select" else None)
            before += len(op.operands)

    def allocate(self, smem: cutlass.memory.SmemAllocator) -> list[cute.Tensor | None]:
        """Room for those over rows: (columns of a tile, warps, numbers, warpgroups), or None."""
        return [
            smem.allocate_tensor(
                Float32,
                cute.make_layout((self.config.tile_n, WARPS, PARTIALS[name], self.config.groups)),
                byte_alignment=16,
            )
            if down
            else None
            for name, down in zip(self.names, self.down, strict=True)
        ]

    def nothing(self) -> list:
        """Partial results before the first part of a row's columns."""
        found = zip(self.names, self.down, strict=True)
        return [None if down else rows.neutral(name) for name, down in found]

    def add(
        self, which: int, so_far, values, part: Part, sizes: Sizes, operand, shared, who: Worker
    ) -> list:
        """Partial results with the values of a part, for reduction number ``which``.

        Args:
            operand: gives operand number i of the epilogue for sum number j.
        """
        found, name = list(so_far), self.names[which]
        counts = [self._counts(which, i, part, sizes, operand) for i in range(len(values))]
        if self.down[which]:
            place = shared[which][None, None, None, who.group]
            col, first = part.inside * self.cols, part.atom == 0
            columns.collect(name, values, counts, place, col, who.thread, first)
        else:
            found[which] = rows.add(name, so_far[which], values, counts)
        return found

    def _counts(self, which: int, i: int, part: Part, sizes: Sizes, operand) -> Boolean:
        """Whether a reduction counts the thread's value number i."""
        below, beside = fragment.offset(i)
        at, end = part.col + beside, sizes.cols
        if self.down[which]:
            at, end = part.row + below, sizes.rows
        if self.index[which] is None:
            return at < end
        return at == _inside(operand(self.index[which], i), end)

    @cute.jit
    def store_rows(self, so_far, targets, part: Part, tile: Place, sizes: Sizes, who: Worker):
        """Write what 64 rows were reduced to, behind the last part of their columns."""
        for i in cutlass.range_constexpr(len(self.names)):
            if const_expr(not self.down[i]):
                rows.store(
                    self.names[i],
                    so_far[i],
                    targets[i],
                    part.row,
                    sizes.rows,
                    tile.col,
                    tile.matrix,
                    who.thread % WARP,
                )

    @cute.jit
    def store_columns(self, shared, targets, tile: Place, sizes: Sizes, number: Int32, who: Worker):
        """Write what the tile's columns were reduced to, behind its last part.

        Synchronises: two named barriers of the warpgroup, where there are such reductions.

        Args:
            number: of the warpgroup's named barrier.
        """
        if const_expr(any(self.down)):
            config = self.config
            of_group = tile.row
            if const_expr(not config.pingpong):
                of_group = tile.row * config.sharing + who.group
            barrier.sync_numbered(number, WARPGROUP)  # all warps have collected
            for i in cutlass.range_constexpr(len(self.names)):
                if const_expr(self.down[i]):
                    columns.store(
                        self.names[i],
                        shared[i][None, None, None, who.group],
                        targets[i],
                        tile.col * config.tile_n,
                        sizes.cols,
                        of_group,
                        tile.matrix,
                        who.thread,
                    )
            barrier.sync_numbered(number, WARPGROUP)  # and all have read


@cute.jit
def _inside(index: Int32, end: Int32) -> Int32:
    """An index, or where that is beyond the end one that nothing has."""
    return index if index < end else Int32(-1)
