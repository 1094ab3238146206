"""Which shapes of a tensor, its values and its scales belong together."""

from collections.abc import Sequence

from quack_core.errors import ShapeError

from .formats import BlockFormat


def blocks(format: BlockFormat, dim: int) -> dict[int, int]:
    """Block sizes by dimension, counted from the end; dimensions without blocks are left out.

    Args:
        dim: the dimension that is quantised, negative. Rows of a block lie along the other one of
            the last two.
    """
    found = {dim: format.cols}
    if format.rows > 1:
        found[-1 if dim == -2 else -2] = format.rows
    return found


def check(name: str, shape: Sequence[int], format: BlockFormat, dim: int) -> None:
    """That a tensor is made of whole blocks; ``dim`` is one of its dimensions.

    Raises:
        ShapeError: names dimension, found and needed value, and the way out.
    """
    if format.rows > 1 and (dim < -2 or len(shape) < 2):
        raise ShapeError(
            f"{name} has the shape {tuple(shape)}, dim is {dim}: blocks of {format.rows}x{format.cols} "
            "lie along the last two dimensions"
        )
    for at, block in blocks(format, dim).items():
        if shape[at] % block:
            above = -(-shape[at] // block) * block
            raise ShapeError(
                f"{name}.shape[{at}] is {shape[at]}: with {format.name} it must be a multiple of "
                f"{block}; pad it with zeros to {above}"
            )


def values_shape(shape: Sequence[int], format: BlockFormat, dim: int) -> tuple[int, ...]:
    """Of the values of a tensor of this shape: packed along ``dim``."""
    found = list(shape)
    found[dim] = format.packed(found[dim])
    return tuple(found)


def shape(values: Sequence[int], format: BlockFormat, dim: int) -> tuple[int, ...]:
    """The inverse: of a tensor whose values have this shape."""
    elements, size = format.element.group
    found = list(values)
    found[dim] = found[dim] // size * elements
    return tuple(found)


def scales_shape(shape: Sequence[int], format: BlockFormat, dim: int) -> tuple[int, ...]:
    """Of the scales of a tensor of this shape: blocked dimensions count blocks."""
    found = list(shape)
    for at, block in blocks(format, dim).items():
        found[at] //= block
    return tuple(found)
