"""Seeded inputs in every memory layout that a caller may hand us, in memory that is dirty.

Values depend on shape, dtype, seed and scale only: the same call with another layout or device
gives equal tensors. Memory beside the elements of a view is filled with NaN, so a kernel that
reads outside its operand shows it.
"""

import enum
import math

import torch
from torch import Tensor

_GAP = 64
"""Elements between the rows of a strided view: a multiple of 16 bytes in every dtype."""


class Layout(enum.Enum):
    """How the elements lie in memory."""

    CONTIGUOUS = "contiguous"
    ROW_STRIDED = "row_strided"
    """Rows are contiguous and lie apart, 16-byte aligned where the row length allows it."""
    ODD_ROW_STRIDED = "odd_row_strided"
    """Rows are contiguous; their stride is odd, so most rows have element alignment only."""
    TRANSPOSED = "transposed"
    """The last two dimensions are swapped in memory."""
    COLUMN_STRIDED = "column_strided"
    """Every second element, as from ``big[..., ::2]``."""
    EXPANDED = "expanded"
    """Stride 0 in all but the last dimension: every row is the first row."""
    OFFSET = "offset"
    """Contiguous, with a storage offset that keeps 16-byte alignment."""
    ODD_OFFSET = "odd_offset"
    """Contiguous, one element into its storage."""
    PACKED_QKV = "packed_qkv"
    """The middle third of a row of three, as k in a packed qkv row."""


def random(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    *,
    seed: int,
    layout: Layout = Layout.CONTIGUOUS,
    scale: float = 1.0,
    shift: float = 0.0,
) -> Tensor:
    """Normally distributed values, ``shift + scale * randn``, rounded once to `dtype`.

    Args:
        shape: any; transposed layouts need two dimensions, strided ones one.
        dtype: a floating-point dtype.
        device: where the tensor is to lie; values are drawn on the CPU.
        seed: of a generator of its own: torch's global state is neither read nor changed.
        layout: the tensor's strides and storage offset.
        scale: standard deviation.
        shift: mean.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float32) * scale + shift
    return arrange(values.to(dtype).to(device), layout)


def arrange(values: Tensor, layout: Layout) -> Tensor:
    """Copy `values` into new memory with the given layout; a view into NaN-filled storage.

    EXPANDED cannot hold different rows and repeats the first; the others keep the values.

    Raises:
        ValueError: `values` has too few dimensions for the layout.
    """
    least = {Layout.CONTIGUOUS: 0, Layout.OFFSET: 0, Layout.ODD_OFFSET: 0, Layout.TRANSPOSED: 2}
    if values.dim() < least.get(layout, 1):
        needed = least.get(layout, 1)
        found = f"values have {values.dim()} dimensions"
        raise ValueError(f"{found}: layout {layout.value} needs at least {needed}")
    if layout is Layout.EXPANDED:
        row = values[(slice(0, 1),) * (values.dim() - 1)].contiguous()
        return row.expand(values.shape)
    view = _empty_view(values, layout)
    view.copy_(values)
    return view


def poisoned_like(x: Tensor) -> Tensor:
    """New memory with the strides of `x`, every bit set: NaN in floating point, -1 in integers.

    For outputs and scratch: an element that a kernel leaves alone stays recognisable.
    """
    return poison_(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device))


def poison_(x: Tensor) -> Tensor:
    """Set every bit of the memory that `x` spans, in place; return `x`."""
    if x.numel() == 0:
        return x
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    x.detach().as_strided((span,), (1,)).view(torch.uint8).fill_(0xFF)
    return x


def dirty_allocator(device: str | torch.device, largest_bytes: int = 1 << 26) -> None:
    """Leave NaN in memory that the next allocations on `device` are likely to get.

    Allocates two blocks of every power of two from 512 bytes to `largest_bytes`, sets all their
    bits and frees them together: caching allocators hand the same blocks out again.
    """
    sizes = [1 << k for k in range(9, int(math.log2(largest_bytes)) + 1)]
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes * 2]
    for block in blocks:
        block.fill_(0xFF)


def _empty_view(values: Tensor, layout: Layout) -> Tensor:
    """A view shaped like `values` into new NaN-filled storage."""
    shape = tuple(values.shape)

    def storage(*extents: int) -> Tensor:
        return poison_(torch.empty(extents, dtype=values.dtype, device=values.device))

    def strided(gap: int) -> Tensor:
        return storage(*shape[:-1], shape[-1] + gap)[..., : shape[-1]]

    match layout:
        case Layout.ROW_STRIDED:
            return strided(_GAP)
        case Layout.ODD_ROW_STRIDED:
            return strided(1 + shape[-1] % 2)
        case Layout.TRANSPOSED:
            return storage(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        case Layout.COLUMN_STRIDED:
            return storage(*shape[:-1], 2 * shape[-1])[..., ::2]
        case Layout.PACKED_QKV:
            return storage(*shape[:-1], 3 * shape[-1])[..., shape[-1] : 2 * shape[-1]]
        case Layout.OFFSET | Layout.ODD_OFFSET:
            offset = 1 if layout is Layout.ODD_OFFSET else _GAP
            size = math.prod(shape)
            return storage(size + 2 * _GAP)[offset : offset + size].view(shape)
        case _:  # what lies behind the last element is NaN too
            size = math.prod(shape)
            return storage(size + _GAP)[:size].view(shape)
