"""In which order the tiles of D are worked on: neighbours in time share operands in L2.

Tiles are counted in clusters. They run down ``group`` rows of clusters, then to the next column;
behind the last column comes the next group of rows; then the next matrix of a batch.

Of a symmetric D only the clusters on and below the diagonal are worked on. That triangle is folded into
a rectangle, where row 0 lies beside the last row, row 1 beside the one before that, and so on: both
together are as long as any other two. (If the rows are odd in number, the longest one lies alone.) The
rectangle is walked over as any other, so neighbours in time are still neighbours in D.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


class Order(NamedTuple):
    """Made on the host, where it costs no division in the kernel.

    Args:
        total: clusters in all.
        rows: clusters along M.
        per_matrix: clusters of one matrix, as a divisor.
        per_group: clusters of a group of rows, as a divisor.
        last: rows of the last group, as a divisor.
    """

    total: Int32
    rows: Int32
    per_matrix: cute.FastDivmodDivisorV2
    per_group: cute.FastDivmodDivisorV2
    last: cute.FastDivmodDivisorV2


def make(rows: Int32, cols: Int32, batches: Int32, group: int) -> Order:
    """The order of ``rows x cols`` clusters of each of ``batches`` matrices.

    Args:
        group: rows of clusters that are worked on together; at least 1.
    """
    if group < 1:
        raise ValueError(f"group={group}: must be at least 1")
    divisor = cute.fast_divmod_create_divisor_v2
    rest = rows % group
    last = cutlass.max(rest, (1 - cutlass.min(rest, 1)) * group)  # a full group if nothing is left
    return Order(
        rows * cols * batches, rows, divisor(rows * cols), divisor(group * cols), divisor(last)
    )


@cute.jit
def locate(order: Order, work: Int32, group: cutlass.Constexpr[int]) -> tuple[Int32, Int32, Int32]:
    """Row, column and matrix of a cluster, from its number."""
    matrix, inside = divmod(work, order.per_matrix)
    which, inside = divmod(inside, order.per_group)
    first = which * group
    col, row = inside // group, inside % group
    if const_expr(group > 1):
        if first + group > order.rows:
            col, row = divmod(inside, order.last)
    return first + row, col, matrix


class Lower(NamedTuple):
    """The order of the clusters on and below the diagonal of square matrices.

    Args:
        folded: of the rectangle.
        size: clusters along M and along N.
    """

    folded: Order
    size: Int32

    @property
    def total(self) -> Int32:
        """Clusters in all."""
        return self.folded.total


def make_lower(size: Int32, batches: Int32, group: int) -> Lower:
    """The order of so many clusters along both sides of each of ``batches`` matrices.

    Args:
        group: as of ``make``, rows of the rectangle.
    """
    return Lower(make((size + 1) // 2, size + 1 - size % 2, batches, group), size)


@cute.jit
def locate_lower(
    order: Lower, work: Int32, group: cutlass.Constexpr[int]
) -> tuple[Int32, Int32, Int32]:
    """Row, column and matrix of a cluster, from its number."""
    folded, place, matrix = locate(order.folded, work, group)
    short = folded - order.size % 2  # the row that comes first, of ``short + 1`` clusters
    row, col = short, place
    if place > short:
        row, col = order.size - 1 - folded, place - short - 1
    return row, col, matrix
