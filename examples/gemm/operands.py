"""Matrices as TMA and the tensor cores want them; the same in all steps. Not an idea."""

from typing import Any, NamedTuple

import cutlass
import cutlass.memory
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum
from tiling import ATOM_M, BUFFERS, PIECE, WARPGROUP, K, Tiling

from quack_core.device import tma
from quack_core.gemm.sm90 import fragment, store

ROW = LayoutEnum.ROW_MAJOR


class Operand(NamedTuple):
    """A matrix whose tiles TMA moves.

    Args:
        atom: how.
        tensor: of coordinates, which stands for the matrix.
        smem: layout of its tiles in shared memory, (rows, columns, stages).
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor
    smem: cute.ComposedLayout


def loaded(a: Any, b: Any, tiling: Tiling) -> tuple[Operand, Operand]:
    """A and B; with a cluster, its CTAs load a part of each tile of B for all of them."""
    tile = (tiling.tile_m, tiling.tile_n, K)
    smem_a = sm90.make_smem_layout_a(ROW, tile, BFloat16, tiling.stages)
    smem_b = sm90.make_smem_layout_b(ROW, tile, BFloat16, tiling.stages)
    of_a = tma.load_atom(a, smem_a, (tiling.tile_m, K))
    of_b = tma.load_atom(b, smem_b, (tiling.tile_n, K), tiling.cluster)
    return Operand(*of_a, smem_a), Operand(*of_b, smem_b)


def stored(d: Any, tiling: Tiling) -> Operand:
    """D, of which each warpgroup stores parts of 64 x 64."""
    smem = store.smem_layout(BFloat16, ROW, PIECE, BUFFERS * tiling.groups)
    return Operand(*tma.store_atom(d, smem, (ATOM_M, PIECE)), smem)


def instruction(tiling: Tiling, groups: int) -> cute.TiledMma:
    """The matrix instruction of so many warpgroups, one below the other."""
    major = ROW.sm90_mma_major_mode()
    shape = (ATOM_M, tiling.tile_n)
    return sm90.make_trivial_tiled_mma(
        BFloat16, BFloat16, major, major, Float32, (groups, 1, 1), tiler_mn=shape
    )


def room(smem: cutlass.memory.SmemAllocator, operand: Operand) -> cute.Tensor:
    """Stages in shared memory."""
    return smem.allocate_tensor(BFloat16, operand.smem.outer, 1024, operand.smem.inner)


def fragments(
    mma: cute.TiledMma, sA: cute.Tensor, sB: cute.Tensor, tiling: Tiling, group: Any
) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
    """What a warpgroup multiplies: descriptors (instruction, m or n, k, stages) of A and of B; its sums.

    From here on the instruction adds to them.

    Args:
        group: number of the warpgroup among those that share a tile.
    """
    mma.set(warpgroup.Field.ACCUMULATE, True)
    leader = cute.make_layout(tiling.sharing, stride=WARPGROUP)(group)
    own = mma.get_slice(leader)
    rA, rB = mma.make_fragment_A(own.partition_A(sA)), mma.make_fragment_B(own.partition_B(sB))
    shape = own.partition_shape_C((tiling.tile_m, tiling.tile_n))
    return rA, rB, cute.make_rmem_tensor(shape, Float32)


@cute.jit
def store_sums(sums: cute.Tensor, mD: cute.Tensor, row: Int32, col: Int32, thread: Int32):
    """Round a warpgroup's sums and write them from registers, two columns at a time.

    Args:
        row, col: of D, where the warpgroup's sums begin; its next 64 rows follow directly.
    """
    row, col = row + fragment.first_row(thread), col + fragment.first_col(thread)
    pair, layout = cute.make_rmem_tensor(fragment.PAIR, BFloat16), cute.make_layout(fragment.PAIR)
    shape = cutlass.const_expr(cute.shape(sums)[0])  # a pair, two rows, blocks of 8 columns
    for atom in cutlass.range_constexpr(cute.size(sums, mode=[1])):
        for block in cutlass.range_constexpr(shape[2]):
            for r in cutlass.range_constexpr(fragment.ROWS):
                for j in cutlass.range_constexpr(fragment.PAIR):
                    pair[j] = sums[(j, r, block), atom, 0].to(BFloat16)
                at_row = row + atom * ATOM_M + r * fragment.ROW_STEP
                at_col = col + block * fragment.BLOCK
                if at_row < mD.shape[0] and at_col < mD.shape[1]:
                    target = mD[cutlass.Int64(at_row), None].iterator + at_col
                    cute.autovec_copy(pair, cute.make_tensor(target.align(4), layout))


@cute.jit
def store_tile(
    sums: cute.Tensor,
    sink: store.Sink,
    row: Int32,
    col: Int32,
    group: Int32,
    number: Int32,
    thread: Int32,
):
    """Round a warpgroup's 64 rows of sums and store them by TMA, part by part, without waiting for it.

    Args:
        row: of D, in 64 rows.
        col: of D, in tiles.
        group: whose buffers these are.
        number: of a named barrier of the warpgroup.
    """
    each = cutlass.const_expr(fragment.sums_of(PIECE))
    pieces = cutlass.const_expr(cute.size(sums) // each)
    for p in cutlass.range_constexpr(pieces):
        values = [sums[p * each + i] for i in range(each)]
        buffer, at = group * BUFFERS + p % BUFFERS, (row, col * pieces + p)
        store.store_piece(sink, values, buffer, at, BUFFERS - 1, number, thread)
