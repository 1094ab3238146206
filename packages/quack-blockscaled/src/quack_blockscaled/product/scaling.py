"""Scales of a tile's operands: into shared memory beside their stage, and from there to the sums."""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from quack_core.gemm.sm90 import fragment
from quack_core.reduction.tiling import WARP

from .spec import BLOCK, PARTS, TILE_M, MatmulConfig, MatmulSpec


class Scales(NamedTuple):
    """Those of A and B, in global or in shared memory: (rows, steps), of B also (rows, steps, L); or
    (rows, stages)."""

    a: cute.Tensor
    b: cute.Tensor


def allocate(
    smem: cutlass.memory.SmemAllocator, spec: MatmulSpec, config: MatmulConfig, stages: int
) -> Scales:
    """Room for those of each stage."""
    counts = (TILE_M, config.scales_b(spec))
    layouts = [cute.make_layout((count, stages)) for count in counts]
    return Scales(*[smem.allocate_tensor(Float32, one, byte_alignment=16) for one in layouts])


@cute.jit
def load(
    scales: Scales,
    held: Scales,
    first: tuple[Int32, Int32, Int32],
    k: Int32,
    stage: Int32,
    lane: Int32,
    cols: cutlass.Constexpr[int],
) -> None:
    """Start copying a stage's scales; rows beyond the last one get that one's.

    Threads: all lanes of one warp, each of which then says that its copies are to arrive.

    Args:
        first: row of the tile in A, in B, and the matrix of B.
        k: step.
        cols: of the tile that have one scale of B, in a block of 128 or of 1.
    """
    row_a, row_b, matrix = first
    for i in cutlass.range_constexpr(TILE_M // WARP):
        inside = lane + i * WARP
        source = cutlass.min(row_a + inside, scales.a.shape[0] - 1)
        _copy(scales.a, (Int64(source), k), held.a, inside, stage)
    count, block = held.b.shape[0], BLOCK if cols > 1 else 1
    for i in cutlass.range_constexpr(-(-count // WARP)):
        inside = lane + i * WARP
        if inside < count:
            source = cutlass.min((row_b + inside * cols) // block, scales.b.shape[0] - 1)
            _copy(scales.b, (Int64(source), k, matrix), held.b, inside, stage)


def _copy(
    scales: cute.Tensor, at: tuple[Any, ...], held: cute.Tensor, place: Int32, stage: Int32
) -> None:
    """Start copying one scale to shared memory."""
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
    one = cute.make_layout(1)
    source: Any = scales.iterator + cute.crd2idx(at, scales.layout)
    target: Any = held.iterator + (place + stage * held.shape[0])
    cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(target, one))


def of_blocks(
    held: Scales, thread: Int32, first_row: Int32, config: MatmulConfig, stage: Int32
) -> Callable[[int], list[tuple[Float32, ...]]]:
    """Of each sum, the product of both scales, where those of B are of 128 columns.

    There are few: all are there before the first part is waited for.

    Args:
        thread: of the warpgroup.
        first_row: of the thread, in the tile.
    """
    rows = _rows(held, first_row, stage)
    cols = [held.b[i, stage] for i in range(held.b.shape[0])]
    both = [[row * col for col in cols] for row in rows]

    def of_part(part: int) -> list[tuple[Float32, ...]]:
        found = []
        for row, pair in _places(part, config):
            col = pair // fragment.PAIR * fragment.BLOCK
            found.append((both[row][col // config.scale_cols],))
        return found

    return of_part


def of_columns(
    held: Scales, thread: Int32, first_row: Int32, config: MatmulConfig, stage: Int32
) -> Callable[[int], list[tuple[Float32, ...]]]:
    """Of each sum, the scale of its column and that of its row, where those of B are of one column.

    Those of a part are read when the part before is done: registers do not hold all at once.
    """
    rows = _rows(held, first_row, stage)
    width = config.tile_n // PARTS

    def of_part(part: int) -> list[tuple[Float32, ...]]:
        first = part * width + fragment.first_col(thread)
        cols = fragment.read_row(held.b[None, stage], first, width)
        each = _places(part, config)
        return [(cols[pair - each[0][1]], rows[row]) for row, pair in each]

    return of_part


def _rows(held: Scales, first_row: Int32, stage: Int32) -> list[Float32]:
    """Scales of the thread's rows."""
    return [held.a[first_row + i * fragment.ROW_STEP, stage] for i in range(fragment.ROWS)]


def _places(part: int, config: MatmulConfig) -> list[tuple[int, int]]:
    """Row and column, of the thread's own, of each of its sums of a part."""
    size = fragment.sums_of(config.tile_n // PARTS)
    return [fragment.place(part * size + i) for i in range(size)]
