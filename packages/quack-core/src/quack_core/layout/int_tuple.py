"""Nested tuples of integers: the shapes, strides and coordinates of layouts."""

import math
from collections.abc import Iterator

from quack_core.errors import LayoutError, ShapeError

IntTuple = int | tuple["IntTuple", ...]


def leaves(value: IntTuple) -> Iterator[int]:
    """The integers of ``value`` from left to right."""
    if isinstance(value, tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def product(value: IntTuple) -> int:
    """Product of all integers; the number of coordinates of a shape."""
    return math.prod(leaves(value))


def depth(value: IntTuple) -> int:
    """0 for an integer, one more than the deepest part for a tuple."""
    if isinstance(value, tuple):
        return 1 + max((depth(part) for part in value), default=0)
    return 0


def congruent(a: IntTuple, b: IntTuple) -> bool:
    """Whether ``a`` and ``b`` are nested in the same way, whatever their integers are."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(congruent, a, b))
    return isinstance(a, int) and isinstance(b, int)


def prefix_products(shape: IntTuple, start: int = 1) -> IntTuple:
    """Strides that number the coordinates of ``shape`` with the leftmost integer fastest."""
    if not isinstance(shape, tuple):
        return start
    parts = []
    for part in shape:
        parts.append(prefix_products(part, start))
        start *= product(part)
    return tuple(parts)


def suffix_products(shape: IntTuple, start: int = 1) -> IntTuple:
    """Strides that number the coordinates of ``shape`` with the rightmost integer fastest."""
    if not isinstance(shape, tuple):
        return start
    parts = []
    for part in reversed(shape):
        parts.append(suffix_products(part, start))
        start *= product(part)
    return tuple(reversed(parts))


def crd2idx(coord: IntTuple, shape: IntTuple, stride: IntTuple | None = None) -> int:
    """The offset of a coordinate: the inner product of its natural form with ``stride``.

    An integer may stand for the coordinates of a whole tuple of modes; it counts them with the
    leftmost fastest, and what exceeds them goes to the last mode. Bounds are not checked.

    Args:
        coord: nested like ``shape``, or coarser.
        shape: sizes.
        stride: congruent to ``shape``; left out, the leftmost mode is the fastest.

    Raises:
        ShapeError: ``coord`` is nested deeper than ``shape`` or has another rank.
    """
    if stride is None:
        stride = prefix_products(shape)
    if not isinstance(shape, tuple) or not isinstance(stride, tuple):
        if isinstance(coord, tuple) or isinstance(stride, tuple):
            raise ShapeError(f"coordinate {coord} does not fit shape {shape} and stride {stride}")
        return coord * stride
    if isinstance(coord, int):
        coord = _split(coord, shape)
    if len(coord) != len(shape) or len(stride) != len(shape):
        raise ShapeError(f"coordinate {coord} has rank {len(coord)}, shape {shape} {len(shape)}")
    return sum(map(crd2idx, coord, shape, stride))


def idx2crd(index: int, shape: IntTuple) -> IntTuple:
    """The coordinate number ``index`` of ``shape``, leftmost fastest, nested like ``shape``.

    Law: ``crd2idx(idx2crd(i, shape), shape) == i``.
    """
    if not isinstance(shape, tuple):
        return index
    return tuple(map(idx2crd, _split(index, shape), shape))


def refill(like: IntTuple, values: Iterator[int]) -> IntTuple:
    """A tuple nested like ``like`` whose integers are taken from ``values``."""
    if isinstance(like, tuple):
        return tuple(refill(part, values) for part in like)
    return next(values)


def freeze(value: object) -> IntTuple:
    """``value`` with lists turned into tuples.

    Raises:
        LayoutError: something in it is neither an integer nor a sequence.
    """
    if isinstance(value, (list, tuple)):
        return tuple(freeze(part) for part in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise LayoutError(f"{value!r} is no integer: layouts hold integers and tuples of them")


def spell(value: IntTuple) -> str:
    """The tuple without spaces and without trailing commas: ``(8,(4,2))``."""
    if isinstance(value, tuple):
        return "(" + ",".join(map(spell, value)) + ")"
    return str(value)


def _split(index: int, shape: tuple[IntTuple, ...]) -> tuple[int, ...]:
    coord = []
    for part in shape[:-1]:
        index, inner = divmod(index, product(part))
        coord.append(inner)
    return (*coord, index) if shape else ()
