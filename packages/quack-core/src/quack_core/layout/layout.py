"""The layout record: a function from coordinates to offsets, and what one is made of."""

from collections.abc import Iterator
from dataclasses import dataclass

from quack_core.errors import LayoutError, ShapeError
from quack_core.layout import int_tuple
from quack_core.layout.int_tuple import IntTuple


@dataclass(frozen=True, init=False)
class Layout:
    """A function from coordinates to offsets.

    Args:
        shape: an integer or nested tuples of integers, all at least 1.
        stride: congruent to ``shape``; left out, the layout is compact with the leftmost mode
            fastest.

    Raises:
        ShapeError: a size below 1.
        LayoutError: shape and stride are nested differently, or hold other things than integers.
    """

    shape: IntTuple
    stride: IntTuple

    def __init__(self, shape: IntTuple, stride: IntTuple | None = None) -> None:
        shape = int_tuple.freeze(shape)
        stride = int_tuple.prefix_products(shape) if stride is None else int_tuple.freeze(stride)
        if min(int_tuple.leaves(shape), default=1) < 1:
            raise ShapeError(f"shape {int_tuple.spell(shape)}: sizes must be at least 1")
        if not int_tuple.congruent(shape, stride):
            spelt = f"{int_tuple.spell(shape)} and stride {int_tuple.spell(stride)}"
            raise LayoutError(f"shape {spelt} must be nested alike")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "stride", stride)

    def __call__(self, *coord: IntTuple) -> int:
        """The offset of a coordinate; ``layout(i, j)`` is ``layout((i, j))``."""
        whole = coord[0] if len(coord) == 1 else coord
        return int_tuple.crd2idx(whole, self.shape, self.stride)

    def __getitem__(self, mode: int) -> "Layout":
        """One top-level mode as a layout."""
        return tuple(self)[mode]

    def __iter__(self) -> Iterator["Layout"]:
        """The top-level modes."""
        if isinstance(self.shape, tuple) and isinstance(self.stride, tuple):
            return map(Layout, self.shape, self.stride)
        return iter((self,))

    def __str__(self) -> str:
        return f"{int_tuple.spell(self.shape)}:{int_tuple.spell(self.stride)}"

    def leaves(self) -> list[tuple[int, int]]:
        """``(size, stride)`` of every integer mode, from left to right."""
        return list(zip(int_tuple.leaves(self.shape), int_tuple.leaves(self.stride), strict=True))

    def image(self) -> list[int]:
        """The offsets of all coordinates, leftmost mode fastest."""
        offsets = [0]
        for extent, step in self.leaves():
            offsets = [offset + step * i for i in range(extent) for offset in offsets]
        return offsets


def size(layout: Layout) -> int:
    """Number of coordinates."""
    return int_tuple.product(layout.shape)


def cosize(layout: Layout) -> int:
    """One more than the largest offset: how many elements an array needs to hold the image.

    Raises:
        LayoutError: a stride is negative.
    """
    if any(stride < 0 for _, stride in layout.leaves()):
        raise LayoutError(f"cosize of {layout}: strides must not be negative")
    return 1 + sum((extent - 1) * stride for extent, stride in layout.leaves())


def rank(layout: Layout) -> int:
    """Number of top-level modes; 1 for an integer shape."""
    return len(layout.shape) if isinstance(layout.shape, tuple) else 1


def depth(layout: Layout) -> int:
    """How deep the shape is nested; 0 for an integer shape."""
    return int_tuple.depth(layout.shape)


def column_major(shape: IntTuple) -> Layout:
    """The compact layout whose leftmost mode is fastest. Law: ``column_major(s)(i) == i``."""
    return Layout(shape)


def row_major(shape: IntTuple) -> Layout:
    """The compact layout whose rightmost mode is fastest."""
    shape = int_tuple.freeze(shape)
    return Layout(shape, int_tuple.suffix_products(shape))


def ordered(shape: tuple[IntTuple, ...], order: tuple[int, ...]) -> Layout:
    """The compact layout whose mode ``i`` is the ``order[i]``-th fastest.

    Raises:
        LayoutError: ``order`` is no permutation of the modes.
    """
    if sorted(order) != list(range(len(shape))):
        raise LayoutError(
            f"order {order} must be a permutation of the {len(shape)} modes of {shape}"
        )
    strides: list[IntTuple] = [0] * len(shape)
    current = 1
    for mode in sorted(range(len(shape)), key=order.__getitem__):
        strides[mode] = int_tuple.prefix_products(shape[mode], current)
        current *= int_tuple.product(shape[mode])
    return Layout(tuple(shape), tuple(strides))


def concat(*layouts: Layout) -> Layout:
    """The layout with these modes. Law: ``concat(A, B)((a, b)) == A(a) + B(b)``."""
    return Layout(tuple(a.shape for a in layouts), tuple(a.stride for a in layouts))


def is_injective(layout: Layout) -> bool:
    """Whether no two coordinates share an offset (all are looked at)."""
    return len(set(layout.image())) == size(layout)


def is_compact(layout: Layout) -> bool:
    """Whether the offsets are exactly the integers below size: a layout without gaps."""
    return sorted(layout.image()) == list(range(size(layout)))
