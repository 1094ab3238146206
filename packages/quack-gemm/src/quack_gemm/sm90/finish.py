"""What happens to a tile's sums: operands, ops, stores."""

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from quack_core.device import barrier
from quack_core.gemm import epilogue as epi
from quack_core.gemm import visit
from quack_core.gemm.epilogue import Kind
from quack_core.gemm.sm90 import fragment, store

from ..config import ATOM_M, WARPGROUP, GemmConfig
from ..spec import GemmSpec
from . import views
from .places import Part, Place, Sizes, Worker
from .vectors import TileVectors

SWAPPED = {Kind.ROW: Kind.COLUMN, Kind.COLUMN: Kind.ROW}
STORE = 1
"""First of the named barriers at which warpgroups write a part of D."""


class Ends(NamedTuple):
    """What an epilogue reads and writes.

    Args:
        operands: of its ops, in order.
        shared_rows: of 32 bits (columns of a tile, row operands, warpgroups), or None.
        sinks: what is stored, as ``GemmSpec.sinks`` lists it.
        reduced: what rows and columns are reduced to, as ``GemmSpec.reductions`` lists it, of each
            tile: (M or N, tiles) or (L, M or N, tiles); or None.
        shared_columns: of ``TileVectors.allocate``.
    """

    operands: Any
    shared_rows: Any
    sinks: list[store.Sink]
    reduced: Any
    shared_columns: list


class TileEpilogue:
    """The epilogue of one warpgroup's rows of a tile, 64 rows and some columns at a time."""

    def __init__(self, spec: GemmSpec, config: GemmConfig):
        self.spec, self.config = spec, config
        self.cols, self.buffers = config.piece_cols(spec), config.buffers(spec)
        self.pieces = config.pieces(spec) // config.shares(spec)
        self.operands = epi.operands(spec.epilogue)
        self.vectors = TileVectors(spec, config)

    def kind(self, operand: epi.Operand) -> Kind:
        """What it is for the product that the kernel computes."""
        return SWAPPED.get(operand.kind, operand.kind) if self.config.swap else operand.kind

    @property
    def num_rows(self) -> int:
        """Row operands."""
        return sum(self.kind(operand) == Kind.ROW for operand in self.operands)

    def first_row(self, tile: Place, atom: int, who: Worker) -> Int32:
        """Of D, the row of the thread's first sum in its instruction number ``atom``."""
        config = self.config
        above = atom if config.pingpong else atom * config.sharing + who.group
        return tile.row * config.tile_m + above * ATOM_M + fragment.first_row(who.thread)

    @cute.jit
    def fetch(self, operands, tile: Place, sizes: Sizes, who: Worker) -> list:
        """Vectors and scalars of a tile, on their way while it is multiplied."""
        held = []
        for i in cutlass.range_constexpr(len(self.operands)):
            kind, tensor = self.kind(self.operands[i]), operands[i]
            if const_expr(kind == Kind.SCALAR):
                held.append(Float32(tensor))
            elif const_expr(kind == Kind.DEVICE_SCALAR):
                held.append(Float32(tensor[0]))
            elif const_expr(kind == Kind.ROW):
                held.append(
                    fragment.fetch_row(
                        tensor,
                        tile.col * self.config.tile_n,
                        sizes.cols,
                        tile.matrix,
                        who.thread,
                        self.config.tile_n,
                        functools.partial(self._natural, cols=sizes.cols),
                    )
                )
            elif const_expr(kind == Kind.COLUMN):
                held.append(
                    [
                        fragment.read_column(
                            tensor, self.first_row(tile, atom, who), sizes.rows, tile.matrix
                        )
                        for atom in range(self.config.atoms)
                    ]
                )
            else:
                held.append(None)
        return held

    def _natural(self, col: Int32, cols: Int32) -> Int32:
        return views.natural(col, cols, self.spec.concat) if self.spec.gated else col

    @cute.jit
    def finish(
        self,
        sums,
        ends: Ends,
        held,
        tile: Place,
        sizes: Sizes,
        who: Worker,
        turn: Int32,
        share: Int32 = 0,
    ):
        """Apply the epilogue to a tile, or to a share of its columns, and store it part by part.

        Synchronises: named barriers of the warpgroup.

        Args:
            held: of ``fetch``.
            turn: how many tiles the warpgroup has stored before.
            share: which one; only with split-K.
        """
        self._share_rows(ends, held, who)
        config = self.config
        per_piece = const_expr(fragment.sums_of(self.cols))
        per_atom = const_expr(config.tile_n // self.cols)
        so_far = self.vectors.nothing()
        for p in cutlass.range_constexpr(self.pieces):
            atom, inside = const_expr(p // per_atom), p % per_atom
            if const_expr(config.peers > 1):
                inside = share * self.pieces + p
            part = Part(
                self.first_row(tile, atom, who),
                tile.col * config.tile_n + inside * self.cols + fragment.first_col(who.thread),
                atom,
                inside,
            )
            if const_expr(p % per_atom == 0):
                so_far = self.vectors.nothing()
            given = self._given(ends, held, part, tile, who)
            above = (
                Int32(atom) if const_expr(config.pingpong) else atom * config.sharing + who.group
            )
            place = (
                tile.row * config.tile_m // ATOM_M + above,
                tile.col * per_atom + inside,
                tile.matrix,
            )
            number = Int32(p)
            if const_expr(self.pieces % self.buffers):  # a tile begins where the one before ended
                number = turn * self.pieces + p
            buffer = who.group * self.buffers + number % self.buffers
            pending = const_expr(self.buffers * len(ends.sinks) - 1)
            mine = [sums[p * per_piece + i] for i in range(per_piece)]
            operand = functools.partial(_value, given)
            for which, values in visit.outputs(self.spec.epilogue, mine, operand):
                if const_expr(which < 0):
                    so_far = self.vectors.add(
                        -which - 1, so_far, values, part, sizes, operand, ends.shared_columns, who
                    )
                for sink in self._sinks(ends, which):
                    wanted = self._wanted(sink.form, place)
                    turn_of = (buffer, place, pending, STORE + who.group, who.thread)
                    store.store_piece(sink, values, *turn_of, wanted)
            if const_expr(p % per_atom == per_atom - 1):
                self.vectors.store_rows(so_far, ends.reduced, part, tile, sizes, who)
        self.vectors.store_columns(
            ends.shared_columns, ends.reduced, tile, sizes, STORE + who.group, who
        )

    @cute.jit
    def _share_rows(self, ends: Ends, held, who: Worker):
        """Row operands of a tile into shared memory, where each thread finds those of its columns."""
        if const_expr(ends.shared_rows is not None):
            barrier.sync_numbered(STORE + who.group, WARPGROUP)  # the tile before has been read
            number = 0
            for i in cutlass.range_constexpr(len(self.operands)):
                if const_expr(self.kind(self.operands[i]) == Kind.ROW):
                    target = _row(ends.shared_rows, number, who, held[i].element_type)
                    fragment.share_row(held[i], target, who.thread)
                    number += 1
            barrier.sync_numbered(STORE + who.group, WARPGROUP)

    def _sinks(self, ends: Ends, which: int) -> list[store.Sink]:
        """What is stored of output number ``which``."""
        return [ends.sinks[i] for i, (output, _) in enumerate(self.spec.sinks) if output == which]

    def _wanted(self, form: store.Form, place: tuple) -> Boolean | bool:
        """Whether a part is stored: of a symmetric D those on and below the diagonal of blocks of 64
        rows and columns, and those below it once more."""
        if not self.spec.symmetric:
            return True
        row, col = place[0], place[1] * self.cols // ATOM_M
        return col < row if form == store.Form.MIRROR else col <= row

    def _given(self, ends: Ends, held, part: Part, tile: Place, who: Worker) -> list:
        """Each operand's values for a part, as ``_value`` takes them."""
        given, number, first = [], 0, (part.row, part.col)
        for i, operand in enumerate(self.operands):
            kind, values = self.kind(operand), held[i]
            if kind == Kind.ROW:
                start = part.inside * self.cols + fragment.first_col(who.thread)
                shared = _row(ends.shared_rows, number, who, held[i].element_type)
                values = fragment.read_row(shared, start, self.cols)
                number += 1
            elif kind == Kind.COLUMN:
                values = held[i][part.atom]
            elif kind == Kind.TILE:
                found = fragment.read_tile(ends.operands[i], first, tile.matrix, self.cols)
                values = found.load().to(Float32)
            elif kind == Kind.PAIRS:
                tensor = ends.operands[i]
                apart, step = (tensor.shape[1] // 2, 1) if self.spec.concat else (1, 2)
                both = fragment.read_pairs(tensor, first, tile.matrix, self.cols, apart, step)
                values = [half.load().to(Float32) for half in both]
            given.append((kind, values))
        return given


def _row(
    shared: cute.Tensor, number: int, who: Worker, dtype: type[cutlass.Numeric]
) -> cute.Tensor:
    """A warpgroup's row operand in shared memory."""
    return cute.recast_tensor(shared[None, number, who.group], dtype)


def _value(given: list[tuple], which: int, i: int) -> Float32:
    """An operand's value for the thread's sum number i."""
    kind, values = given[which]
    row, col = fragment.place(i)
    if kind == Kind.ROW:
        return values[col]
    if kind == Kind.COLUMN:
        return values[row]
    if kind == Kind.TILE:
        return values[i]
    if kind == Kind.PAIRS:
        return values[0][i], values[1][i]
    return values
