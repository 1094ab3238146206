"""Tensors of any rank as rows: ``(M, N)`` or ``(M1, M0, N)``, as views wherever strides allow it."""

from collections.abc import Sequence

from torch import Tensor


def outer_groups(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Sizes of the dimensions in front of the last one after merging neighbours.

    Dimensions merge where one stride steps through both; those of size 1 have no stride that
    matters and vanish.

    Returns:
        One size per stride that is needed, slowest first; empty for a single row.
    """
    sizes: list[int] = []
    stride = 0
    for extent, step in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if extent == 1:
            continue
        if sizes and step == stride * sizes[0]:
            sizes[0] *= extent
        else:
            sizes.insert(0, extent)
            stride = step
    return sizes


def outer_shape(operands: Sequence[Tensor | None], per_head: bool) -> tuple[int, ...]:
    """The outer sizes ``(M,)`` or ``(M1, M0)`` under which the fewest operands need a copy.

    Args:
        operands: of one shape ``(..., N)``, not empty, most important first; None is skipped.
        per_head: the second-to-last dimension selects the weight and stays by itself.
    """
    present = [t for t in operands if t is not None]
    shape = present[0].shape
    rows = present[0].numel() // shape[-1]
    if per_head:
        return rows // shape[-2], shape[-2]
    if len(shape) in (2, 3):
        return tuple(shape[:-1])
    for tensor in present:
        if tensor.is_contiguous():
            continue
        groups = outer_groups(shape, tensor.stride())
        if len(groups) == 2 and is_rows(tensor):
            return groups[0], groups[1]
    return (rows,)


def is_reachable(tensor: Tensor, per_head: bool) -> bool:
    """Whether at most two outer strides reach every row; per head, one and the heads' own."""
    shape, strides = tensor.shape, tensor.stride()
    if per_head:
        return len(outer_groups(shape[:-1], strides[:-1])) <= 1
    return len(outer_groups(shape, strides)) <= 2


def is_rows(tensor: Tensor) -> bool:
    """Whether the elements of a row are neighbours."""
    return tensor.shape[-1] == 1 or tensor.stride(-1) == 1


def as_rows(tensor: Tensor, outer: tuple[int, ...]) -> Tensor:
    """``tensor`` as ``(*outer, N)``: a view if its strides allow it, otherwise one copy."""
    if not is_rows(tensor):
        tensor = tensor.contiguous()
    shape = tensor.shape
    if len(shape) == len(outer) + 1 and shape[:-1] == outer:
        return tensor
    return tensor.reshape(*outer, shape[-1])


def alignment(*tensors: Tensor | None) -> int:
    """Bytes, up to 16, that divide the addresses and outer strides of all tensors.

    Strides of dimensions of size 1 do not count: they lead nowhere.
    """
    bits = 16
    for tensor in tensors:
        if tensor is not None:
            strides = 0
            for extent, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
                if extent != 1:
                    strides |= stride
            bits |= tensor.data_ptr() | strides * tensor.element_size()
    return bits & -bits


def in_phase(vector: int, *tensors: Tensor | None) -> bool:
    """Whether corresponding rows of all tensors begin at one offset modulo ``vector`` elements."""
    phases = set()
    for tensor in tensors:
        if tensor is not None:
            outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
            strides = [0 if extent == 1 else stride % vector for extent, stride in outer]
            phases.add((tensor.data_ptr() // tensor.element_size() % vector, *strides))
    return len(phases) <= 1


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether all tensors are contiguous and begin at multiples of 32 bytes.

    Then their rows are in phase: 32 bytes are 8 elements of float32.
    """
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            if not tensor.is_contiguous():
                return False
            bits |= tensor.data_ptr()
    return not bits & 31
