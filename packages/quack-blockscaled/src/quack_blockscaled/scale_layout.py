"""The order in which tensor cores of SM100 and SM120 read the scales of a matrix.

The scales of rows of K elements are a matrix of (rows, K / block) bytes. It is cut into tiles of 128
rows and 4 columns, 512 bytes each, the last ones padded with zeros; tiles follow each other in
row-major order. In a tile, 4 columns of a row are neighbours, then come rows 32 apart, then the next
row::

    offset of row r, column c of a tile: (r % 32) * 16 + (r // 32) * 4 + c

    byte     0  1  2  3    4  5  6  7    8  9 10 11   12 13 14 15
    0..15    row 0         row 32        row 64       row 96
    16..31   row 1         row 33        row 65       row 97
    ...
    496..    row 31        row 63        row 95       row 127

Source: cuBLAS documentation, layout of block scaling factors; torch calls it ``SWIZZLE_32_4_4``.
"""

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from quack_core.errors import DeviceError, DTypeError, ShapeError, UnsupportedError

from .formats import FLOAT32, BlockFormat

TILE_ROWS = 128
TILE_COLS = 4
TILE_BYTES = TILE_ROWS * TILE_COLS
_APART = 32  # rows that are neighbours in memory
_GROUPS = TILE_ROWS // _APART

_SCALING = {
    (1, 16): ScalingType.BlockWise1x16,
    (1, 32): ScalingType.BlockWise1x32,
    (1, 128): ScalingType.BlockWise1x128,
    (128, 128): ScalingType.BlockWise128x128,
}


def scaling_type(format: BlockFormat) -> ScalingType:
    """What torch calls the blocks of a format.

    Raises:
        UnsupportedError: torch has no name for them.
    """
    if format.block not in _SCALING:
        known = ", ".join(f"{rows}x{cols}" for rows, cols in _SCALING)
        raise UnsupportedError(
            f"scaling_type: blocks of {format.name} are {format.rows}x{format.cols}",
            f"torch has names for {known}",
        )
    return _SCALING[format.block]


def swizzle_type(format: BlockFormat) -> SwizzleType:
    """In which order torch wants the scales of a format: scales of one byte as `pack` gives them."""
    return SwizzleType.NO_SWIZZLE if format.scale == FLOAT32 else SwizzleType.SWIZZLE_32_4_4


def padded(rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns of whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-cols // TILE_COLS) * TILE_COLS


def size(rows: int, cols: int) -> int:
    """Bytes of packed scales, padding included."""
    all_rows, all_cols = padded(rows, cols)
    return all_rows * all_cols


def offset(row: int, col: int, cols: int) -> int:
    """Where the scale of a row and a column lies.

    Args:
        cols: of the matrix of scales: K / block.
    """
    tile_row, r = divmod(row, TILE_ROWS)
    tile_col, c = divmod(col, TILE_COLS)
    tile = tile_row * (padded(row, cols)[1] // TILE_COLS) + tile_col
    return tile * TILE_BYTES + r % _APART * 16 + r // _APART * 4 + c


def pack(scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Scales in the order of the hardware; padding is zeros, whatever was in ``out``.

    Args:
        scales: (..., rows, cols), of a dtype of one byte, any strides.
        out: where to, contiguous (..., size(rows, cols)) of the same dtype; None allocates it.

    Returns:
        (..., size(rows, cols)): each matrix of a batch begins with a tile of its own.

    Raises:
        DTypeError, ShapeError, DeviceError: names operand, found and needed value.
    """
    _check_bytes("scales", scales)
    if scales.dim() < 2:
        raise ShapeError(
            f"pack: scales has {scales.dim()} dimensions: it must have 2 or more, (..., rows, cols)"
        )
    *batch, rows, cols = scales.shape
    all_rows, all_cols = padded(rows, cols)
    needed = (*batch, size(rows, cols))
    if out is None:
        out = scales.new_empty(needed)
    _check_out(out, scales, needed)
    whole = torch.zeros((*batch, all_rows, all_cols), dtype=torch.uint8, device=scales.device)
    whole[..., :rows, :cols] = scales.view(torch.uint8)
    tiles = whole.view(
        *batch, all_rows // TILE_ROWS, _GROUPS, _APART, all_cols // TILE_COLS, TILE_COLS
    )
    out.view(torch.uint8).copy_(_swapped(tiles).reshape(needed))
    return out


def unpack(packed: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `pack`: (..., rows, cols), without the padding.

    Args:
        packed: (..., size(rows, cols)), of a dtype of one byte.

    Raises:
        DTypeError, ShapeError: names operand, found and needed value.
    """
    _check_bytes("packed", packed)
    if packed.dim() < 1 or packed.shape[-1] != size(rows, cols):
        found = packed.shape[-1] if packed.dim() else 1
        raise ShapeError(
            f"unpack: packed.shape[-1] is {found}: {rows} rows of {cols} scales are in "
            f"{size(rows, cols)} bytes, tiles of {TILE_ROWS}x{TILE_COLS} as a whole"
        )
    batch = packed.shape[:-1]
    all_rows, all_cols = padded(rows, cols)
    tiles = (
        packed.contiguous()
        .view(torch.uint8)
        .view(*batch, all_rows // TILE_ROWS, all_cols // TILE_COLS, _APART, _GROUPS, TILE_COLS)
    )
    whole = _swapped(tiles).reshape(*batch, all_rows, all_cols)
    return whole[..., :rows, :cols].contiguous().view(packed.dtype)


def _swapped(tiles: Tensor) -> Tensor:
    """The groups of rows and the tiles of a row exchange their places; twice is nothing."""
    return tiles.transpose(-4, -2)


def _check_bytes(name: str, x: Tensor) -> None:
    if x.element_size() != 1:
        raise DTypeError(
            f"scale_layout: {name} is {str(x.dtype).removeprefix('torch.')}: it must be uint8 or a "
            "float8 dtype; float32 scales are in no special order"
        )


def _check_out(out: Tensor, scales: Tensor, needed: tuple[int, ...]) -> None:
    if out.dtype != scales.dtype:
        raise DTypeError(
            f"pack: out is {out.dtype}, scales is {scales.dtype}: they must be the same"
        )
    if tuple(out.shape) != needed:
        raise ShapeError(
            f"pack: out has the shape {tuple(out.shape)}: scales of {tuple(scales.shape)} need "
            f"{needed}, tiles of {TILE_ROWS}x{TILE_COLS} as a whole"
        )
    if out.device != scales.device:
        raise DeviceError(f"pack: out is on {out.device}, scales on {scales.device}")
