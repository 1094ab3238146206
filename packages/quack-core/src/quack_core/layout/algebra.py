"""Layout algebra in pure Python: functions from coordinates to offsets, and how to combine them.

A layout ``shape:stride`` maps a coordinate to the sum of its parts times their strides. An integer
is a coordinate too: it counts the coordinates with the leftmost mode fastest, and past the end it
goes on along the last mode. So every layout is also a function of integers, which is how the laws
below are written; ``A(i)`` is ``A`` at the integer ``i``.

Everything here is static. The same names in ``cutlass.cute`` work on layouts within kernels.
"""

from collections.abc import Callable, Iterable, Iterator

from quack_core.errors import LayoutError, ShapeError
from quack_core.layout.int_tuple import IntTuple
from quack_core.layout.layout import (
    Layout,
    column_major,
    concat,
    cosize,
    depth,
    is_compact,
    is_injective,
    ordered,
    rank,
    row_major,
    size,
)

__all__ = [
    "Layout",
    "Tiler",
    "blocked_product",
    "coalesce",
    "coalesce_modes",
    "column_major",
    "complement",
    "composition",
    "concat",
    "cosize",
    "depth",
    "flat_divide",
    "flatten",
    "is_compact",
    "is_injective",
    "left_inverse",
    "logical_divide",
    "logical_product",
    "max_common_layout",
    "max_common_vector",
    "ordered",
    "raked_product",
    "rank",
    "right_inverse",
    "row_major",
    "size",
    "tiled_divide",
    "zipped_divide",
    "zipped_product",
]

Tiler = Layout | int | tuple["Tiler", ...]
"""How to tile: a layout or a size for the whole layout, or a tuple with one tiler per mode."""


def coalesce(layout: Layout) -> Layout:
    """The flat layout with the fewest modes. Law: it equals ``layout`` at every integer below size.

    Neighbours merge when the right one continues where the left one ends; size 1 disappears.
    """
    return _from_leaves(_merged(layout.leaves()))


def coalesce_modes(layout: Layout) -> Layout:
    """Each top-level mode coalesced by itself, so that ``(i, j)`` keeps its meaning."""
    return concat(*map(coalesce, layout))


def flatten(layout: Layout) -> Layout:
    """The same integer modes without nesting. Law: equal at every integer below size."""
    return _from_leaves(layout.leaves())


def composition(a: Layout, b: Tiler) -> Layout:
    """``a`` seen through ``b``. Law: ``composition(a, b)(i) == a(b(i))``, with b's shape refined.

    Args:
        a: the outer function.
        b: the inner one; with a tuple, one per mode of ``a`` (modes past the tuple stay).

    Raises:
        LayoutError: no layout equals ``a(b(i))``, since a mode of ``b`` crosses a mode of ``a``
            without dividing it, or a stride of ``b`` is negative.
    """
    if isinstance(b, tuple):
        return concat(*_by_mode(composition, a, b))
    inner = _as_layout(b)
    outer = _merged(a.leaves(), keep_last=True)
    found = [_compose_leaf(outer, extent, stride, a, inner) for extent, stride in inner.leaves()]
    return Layout(
        _nest(inner.shape, iter([part.shape for part in found])),
        _nest(inner.shape, iter([part.stride for part in found])),
    )


def complement(layout: Layout, cotarget: int | None = None) -> Layout:
    """What is missing to reach every offset below ``cotarget``.

    Law: ``concat(layout, complement)`` is injective if ``layout`` is and, for a layout without
    repetitions, takes every value below ``cotarget``; the complement's offsets increase.

    Args:
        layout: a layout; repetitions (stride 0) are left out of account.
        cotarget: how many offsets to reach; left out, the layout's cosize.

    Raises:
        LayoutError: the modes overlap or do not divide one another, or a stride is negative.
    """
    target = cosize(layout) if cotarget is None else cotarget
    found = []
    reached = 1
    for extent, stride in sorted(_filtered(layout), key=lambda leaf: (leaf[1], leaf[0])):
        if stride < 0 or stride % reached:
            raise LayoutError(
                f"complement of {layout}: stride {stride} must be a multiple of {reached}, "
                "where the faster modes end"
            )
        found.append((stride // reached, reached))
        reached = extent * stride
    found.append((-(-target // reached), reached))
    return _from_leaves(_merged(found))


def right_inverse(layout: Layout) -> Layout:
    """The longest ``R`` with ``layout(R(i)) == i`` at every ``i`` below its size."""
    found = []
    reached = 1
    for extent, stride, position in _placed(layout):
        if stride == reached:
            found.append((extent, position))
            reached *= extent
    return _from_leaves(_merged(found))


def left_inverse(layout: Layout) -> Layout:
    """``L`` with ``L(layout(i)) == i`` at every ``i`` below size.

    Offsets that ``layout`` leaves out go to the coordinate of one that comes before.

    Raises:
        LayoutError: two coordinates share an offset, or the modes do not divide one another.
    """
    found = []
    reached = 1
    for extent, stride, position in _placed(layout):
        if stride < 1 or stride % reached:
            raise LayoutError(
                f"left inverse of {layout}: stride {stride} must be a positive multiple of "
                f"{reached}, where the faster modes end"
            )
        found += [(stride // reached, 0), (extent, position)]
        reached = extent * stride
    return _from_leaves(_merged(found))


def logical_divide(layout: Layout, tiler: Tiler) -> Layout:
    """Split into ``(tile, rest)``: what is in one tile, and where the tiles are.

    Law: ``logical_divide(A, B) == composition(A, concat(B, complement(B, size(A))))``; with a tuple
    the same for each mode. A tiler that does not divide covers more than ``A``: predicate.

    Raises:
        LayoutError: the composition or the complement does not exist.
    """
    if isinstance(tiler, tuple):
        return concat(*_by_mode(logical_divide, layout, tiler))
    tile = _as_layout(tiler)
    return composition(layout, concat(tile, complement(tile, size(layout))))


def zipped_divide(layout: Layout, tiler: Tiler) -> Layout:
    """`logical_divide` with the tiles' modes together: ``((tile0, tile1), (rest0, rest1))``."""
    return concat(*_unzip(logical_divide(layout, tiler), tiler))


def tiled_divide(layout: Layout, tiler: Tiler) -> Layout:
    """`zipped_divide` with the rest spread out: ``((tile0, tile1), rest0, rest1)``."""
    tile, rest = zipped_divide(layout, tiler)
    return concat(tile, *rest)


def flat_divide(layout: Layout, tiler: Tiler) -> Layout:
    """`zipped_divide` with both spread out: ``(tile0, tile1, rest0, rest1)``."""
    tile, rest = zipped_divide(layout, tiler)
    return concat(*tile, *rest)


def logical_product(layout: Layout, tiler: Tiler) -> Layout:
    """Repeat ``layout`` as ``tiler`` says: ``(layout, repetitions)``.

    Law: mode 0 is ``layout``; mode 1 is ``composition(complement(layout, size * cosize(tiler)),
    tiler)``, so the repetitions do not overlap if ``layout`` and ``tiler`` are injective.

    Raises:
        LayoutError: the composition or the complement does not exist.
    """
    if isinstance(tiler, tuple):
        return concat(*_by_mode(logical_product, layout, tiler))
    other = _as_layout(tiler)
    free = complement(layout, size(layout) * cosize(other))
    return concat(layout, composition(free, other))


def zipped_product(layout: Layout, tiler: Tiler) -> Layout:
    """`logical_product` with the blocks' modes together: ``((a0, a1), (b0, b1))``."""
    return concat(*_unzip(logical_product(layout, tiler), tiler))


def blocked_product(block: Layout, tiler: Layout) -> Layout:
    """Blocks side by side: mode ``i`` is ``(block_i, tiler_i)``, the block's coordinate fastest.

    Law: at ``((a0, b0), (a1, b1))`` it is ``logical_product(block, tiler)`` at
    ``((a0, a1), (b0, b1))``. The shorter operand counts as padded with modes of size 1.
    """
    inner, outer = _aligned_product(block, tiler)
    return concat(*map(concat, inner, outer))


def raked_product(block: Layout, tiler: Layout) -> Layout:
    """Blocks interleaved: like `blocked_product` with ``tiler``'s coordinate fastest."""
    inner, outer = _aligned_product(block, tiler)
    return concat(*map(concat, outer, inner))


def max_common_layout(a: Layout, b: Layout) -> Layout:
    """The longest ``V`` with ``a(V(i)) == b(V(i)) == i``: the same elements in the same order.

    Raises:
        ShapeError: ``a`` and ``b`` differ in size, so their coordinates do not correspond.
    """
    if size(a) != size(b):
        raise ShapeError(f"{a} has {size(a)} coordinates, {b} has {size(b)}: they must agree")
    found = []
    inverses = right_inverse(a).leaves(), right_inverse(b).leaves()
    for (extent, stride), (other_extent, other_stride) in zip(*inverses, strict=False):
        if stride != other_stride:
            break
        found.append((min(extent, other_extent), stride))
        if extent != other_extent:
            break
    return _from_leaves(found)


def max_common_vector(a: Layout, b: Layout) -> int:
    """How many elements a copy from ``a`` to ``b`` can move at once: size of `max_common_layout`.

    Alignment is not looked at: a wide access needs base addresses and other strides to fit too.
    """
    return size(max_common_layout(a, b))


Leaf = tuple[int, int]


def _from_leaves(leaves: list[Leaf]) -> Layout:
    if not leaves:
        return Layout(1, 0)
    if len(leaves) == 1:
        return Layout(*leaves[0])
    return Layout(tuple(extent for extent, _ in leaves), tuple(stride for _, stride in leaves))


def _merged(leaves: Iterable[Leaf], keep_last: bool = False) -> list[Leaf]:
    """Neighbours merged, size 1 dropped. ``keep_last``: also equal at integers past the size."""
    leaves = list(leaves)
    found: list[Leaf] = []
    for position, (extent, stride) in enumerate(leaves):
        kept = keep_last and position == len(leaves) - 1
        if extent == 1 and not kept:
            continue
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0] * extent, found[-1][1])
        else:
            found.append((extent, stride))
    return found


def _filtered(layout: Layout) -> list[Leaf]:
    return _merged(leaf for leaf in layout.leaves() if leaf[0] > 1 and leaf[1] != 0)


def _placed(layout: Layout) -> list[tuple[int, int, int]]:
    """``(size, stride, integer coordinate of one step)`` of the modes, by increasing stride."""
    placed = []
    position = 1
    for extent, stride in layout.leaves():
        if extent > 1:
            placed.append((extent, stride, position))
        position *= extent
    return sorted(placed, key=lambda item: item[1])


def _compose_leaf(outer: list[Leaf], extent: int, stride: int, a: Layout, b: Layout) -> Layout:
    """``outer`` at the integers ``0, stride, ..., (extent - 1) * stride``."""
    if stride < 0:
        raise LayoutError(f"composition of {a} with {b}: stride {stride} must not be negative")
    if extent == 1 or stride == 0:
        return Layout(extent, 0)
    found: list[Leaf] = []
    left = extent
    step = stride
    for position, (span, weight) in enumerate(outer):
        if position == len(outer) - 1 or (left - 1) * step < span:
            found.append((left, step * weight))
            left = 1
            break
        if step < span:
            if span % step or left % (span // step):
                raise LayoutError(_misfit(a, b, extent, stride, span))
            found.append((span // step, step * weight))
            left //= span // step
            step = 1
        elif step % span:
            raise LayoutError(_misfit(a, b, extent, stride, span))
        else:
            step //= span
    return _from_leaves(found)


def _misfit(a: Layout, b: Layout, extent: int, stride: int, span: int) -> str:
    return (
        f"composition of {a} with {b}: mode {extent}:{stride} crosses a mode of size {span} "
        "without dividing it; choose sizes and strides that divide one another"
    )


def _nest(like: IntTuple, parts: Iterator[IntTuple]) -> IntTuple:
    if isinstance(like, tuple):
        return tuple(_nest(part, parts) for part in like)
    return next(parts)


def _as_layout(tiler: Layout | int) -> Layout:
    return tiler if isinstance(tiler, Layout) else Layout(tiler, 1)


def _by_mode(
    function: Callable[[Layout, Tiler], Layout], layout: Layout, tiler: tuple[Tiler, ...]
) -> list[Layout]:
    modes = list(layout)
    if not 1 <= len(tiler) <= len(modes):
        raise ShapeError(f"a tiler of {len(tiler)} modes for {layout}, which has {len(modes)}")
    return [*map(function, modes, tiler), *modes[len(tiler) :]]


def _unzip(pairs: Layout, tiler: Tiler) -> tuple[Layout, Layout]:
    """The first and the second halves of the pairs that a tiler made, modes without one last."""
    if not isinstance(tiler, tuple):
        first, second = pairs
        return first, second
    modes = list(pairs)
    halves = [_unzip(mode, part) for mode, part in zip(modes, tiler, strict=False)]
    firsts, seconds = zip(*halves, strict=True)
    return concat(*firsts), concat(*seconds, *modes[len(tiler) :])


def _aligned_product(block: Layout, tiler: Layout) -> Layout:
    """The product of operands of the same rank."""
    modes = max(rank(block), rank(tiler))
    return logical_product(_padded(block, modes), _padded(tiler, modes))


def _padded(layout: Layout, modes: int) -> Layout:
    return concat(*layout, *[Layout(1, 0)] * (modes - rank(layout)))
