"""Scales of a tile's operands: into shared memory beside their stage, and from there to the sums."""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from quack_core.device import tma
from quack_core.gemm.sm90 import fragment
from quack_core.layout import views

from .spec import BLOCK, MatmulConfig, MatmulSpec, lines


class Scales(NamedTuple):
    """Those of A and B in shared memory: (rows, stages)."""

    a: cute.Tensor
    b: cute.Tensor


def allocate(
    smem: cutlass.memory.SmemAllocator, spec: MatmulSpec, config: MatmulConfig, stages: int
) -> Scales:
    """Room for those of each stage."""
    counts = (spec.scales_a, config.scales_b(spec))
    layouts = [cute.make_layout((n, stages), stride=(1, lines(n))) for n in counts]
    return Scales(*[smem.allocate_tensor(Float32, one, byte_alignment=128) for one in layouts])


def num_bytes(spec: MatmulSpec, config: MatmulConfig) -> int:
    """Of the scales of a stage that TMA brings."""
    return 4 * (spec.scales_a + (config.tile_n if spec.rows_b else 0))


def sources(
    scale_a: cute.Tensor,
    scale_b: cute.Tensor,
    spec: MatmulSpec,
    config: MatmulConfig,
    stages: int,
) -> tuple[Any, Any]:
    """Where the loading warp gets them from: loads of a column of single rows' scales, each with its
    tensor of coordinates (rows, steps) or (rows, steps, L); of blocks, the tensor (blocks, steps, L).

    Args:
        scale_a: (steps, M).
        scale_b: (L, steps, N), or (L, blocks, steps).
    """
    of_a = _load_atom(views.permute(scale_a, 1, 0), spec.scales_a, stages)
    if spec.rows_b:
        return of_a, _load_atom(views.permute(scale_b, 2, 1, 0), config.tile_n, stages)
    return of_a, views.permute(scale_b, 1, 2, 0)


def _load_atom(scales: cute.Tensor, rows: int, stages: int) -> cpasync.TmaInfo:
    return tma.load_atom(scales, _columns(rows, stages), (rows, 1))


def _columns(rows: int, stages: int) -> cute.Layout:
    """Stages of a column each: (rows, 1, stages)."""
    return cute.make_layout((rows, 1, stages), stride=(1, rows, lines(rows)))


def bind(source: tuple[Any, Any], held: cute.Tensor, first: Int32) -> tma.Tiles:
    """Columns of the rows from ``first`` on, a multiple of `UNIT`, and the stages that they go to."""
    atom, tensor = source
    rows, stages = held.shape
    below = cute.domain_offset((first, 0) if cute.rank(tensor) == 2 else (first, 0, 0), tensor)
    columns = cute.make_tensor(held.iterator, _columns(rows, stages))
    return tma.bind(atom, below, columns, (rows, 1))


@cute.jit
def copy(
    scales: cute.Tensor,
    held: cute.Tensor,
    first: Int32,
    at: tuple[Int32, Int32],
    stage: Int32,
    lane: Int32,
    config: cutlass.Constexpr[MatmulConfig],
) -> None:
    """Start copying a stage's scales of blocks; columns beyond the last block get that one's.

    Threads: all lanes of one warp, each of which then says that its copies are to arrive.

    Args:
        scales: (blocks, steps, L).
        held: (scales of a tile, stages).
        first: column of the tile.
        at: step, and matrix.
    """
    if lane < held.shape[0]:
        block = cutlass.min((first + lane * config.scale_cols) // BLOCK, scales.shape[0] - 1)
        source: Any = scales.iterator + cute.crd2idx((Int64(block), *at), scales.layout)
        target: Any = held.iterator + cute.crd2idx((lane, stage), held.layout)
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
        one = cute.make_layout(1)
        cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(target, one))


def of_blocks(
    spec: MatmulSpec,
    config: MatmulConfig,
    held: Scales,
    thread: Int32,
    first_row: Int32,
    stage: Int32,
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
        for row, pair in _places(part, spec, config):
            col = pair // fragment.PAIR * fragment.BLOCK
            found.append((both[row][col // config.scale_cols],))
        return found

    return of_part


def of_columns(
    spec: MatmulSpec,
    config: MatmulConfig,
    held: Scales,
    thread: Int32,
    first_row: Int32,
    stage: Int32,
) -> Callable[[int], list[tuple[Float32, ...]]]:
    """Of each sum, the scale of its column and that of its row, where those of B are of one column.

    Those of a part are read when the part before is done: registers do not hold all at once.
    """
    rows = _rows(held, first_row, stage)
    width = config.tile_n // spec.parts

    def of_part(part: int) -> list[tuple[Float32, ...]]:
        first = part * width + fragment.first_col(thread)
        cols = fragment.read_row(held.b[None, stage], first, width)
        each = _places(part, spec, config)
        return [(cols[pair - each[0][1]], rows[row]) for row, pair in each]

    return of_part


def _rows(held: Scales, first_row: Int32, stage: Int32) -> list[Float32]:
    """Scales of the thread's rows."""
    return [held.a[first_row + i * fragment.ROW_STEP, stage] for i in range(fragment.ROWS)]


def _places(part: int, spec: MatmulSpec, config: MatmulConfig) -> list[tuple[int, int]]:
    """Row and column, of the thread's own, of each of its sums of a part."""
    size = fragment.sums_of(config.tile_n // spec.parts)
    return [fragment.place(part * size + i) for i in range(size)]
