"""Operands as the kernel sees them: (rows, columns, matrices), made of what torch hands over."""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from quack_core.layout import views

BLOCK = 8
"""Columns of gates, and of what they gate, side by side in a tile."""


def matrices(tensor: cute.Tensor) -> cute.Tensor:
    """(M, N) or (L, M, N) as (M, N, L)."""
    if cute.rank(tensor) == 2:
        return views.expand(tensor, 2, 1)
    return views.permute(tensor, 1, 2, 0)


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """(M, N, L) as (N, M, L)."""
    return views.transpose(tensor)


@cute.jit
def paired(tensor: cute.Tensor, concat: bool) -> cute.Tensor:
    """(N, K, L) with gates and what they gate in turn, 8 rows each: ((8, 2, N / 16), K, L).

    Args:
        concat: gates are the first N / 2 rows; else they are the even ones.
    """
    n, k, batches = tensor.shape
    stride, *others = tensor.stride
    count = n // (2 * BLOCK)
    if const_expr(concat):
        strides = (stride, stride * (n // 2), stride * BLOCK)
    else:
        strides = (stride * 2, stride, stride * (2 * BLOCK))
    layout = cute.make_layout(((BLOCK, 2, count), k, batches), stride=(strides, *others))
    return cute.make_tensor(tensor.iterator, layout)


def half(tensor: cute.Tensor, which: int) -> cute.Tensor:
    """(M, 2 N, L) as the first or second N columns; N columns are a multiple of 16 bytes."""
    rows, cols, matrices = tensor.shape
    start = (tensor.iterator + which * (cols // 2) * tensor.stride[1]).align(16)
    layout = cute.make_layout((rows, cols // 2, matrices), stride=tensor.stride)
    return cute.make_tensor(start, layout)


def natural(col: Int32, cols: Int32, concat: bool) -> Int32:
    """Which row of B the column of a product is, where ``paired`` has moved it."""
    block, half, place = col // (2 * BLOCK), col // BLOCK % 2, col % BLOCK
    if concat:
        return half * (cols // 2) + block * BLOCK + place
    return block * (2 * BLOCK) + place * 2 + half
