"""Quantising CUDA tensors, and back: allocate, find the kernel, launch."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from quack_core import arch, torch_op, torch_workspace
from quack_core.errors import UnsupportedError
from quack_core.jit import cache

from .. import sizes
from ..formats import BlockFormat
from .spec import VECTOR, DequantizeSpec, QuantizeSpec, has_columns

ALIGN = 16
Pair = tuple[Tensor, Tensor]


def forward(
    x: Tensor,
    format: BlockFormat,
    dim: int,
    scale_rounding: str,
    element_rounding: str,
    seed: int | None,
    tensor_scale: Tensor | None,
) -> Pair:
    """As `reference.quantize`, on CUDA tensors; x is copied unless it is contiguous and aligned.

    Along the last but one dimension a kernel of its own reads x as it lies, where there is one;
    else x is copied with that dimension last.

    Raises:
        UnsupportedError: there is no kernel for that; names the way out.
    """
    stochastic = element_rounding == "stochastic"
    if stochastic and dim != -1:
        raise UnsupportedError(
            f"quantize: element_rounding is 'stochastic', dim is {dim}, x is on {x.device}",
            "kernels round so along the last dimension only",
            "call .cpu() on x first, or quantize x.mT.contiguous(), whose random bits are others",
        )
    values, scales = empty(x, format, dim)
    if dim == -2 and has_columns(format) and x.shape[-1] % VECTOR == 0:
        spec = QuantizeSpec(_name(x), format, scale_rounding, copies="columns")
        _matrices(spec, x, None, (values.mT, scales.mT))
        return values, scales
    spec = QuantizeSpec(_name(x), format, scale_rounding, stochastic)
    turned = x.transpose(dim, -1)
    stored = (values.transpose(dim, -1), scales.transpose(dim, -1))
    _rows(spec, turned, stored, seed, tensor_scale)
    return values, scales


def both(
    x: Tensor, format: BlockFormat, scale_rounding: str, tensor_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Along the last dimension and along the one before it, from one read where there is a kernel.

    Raises:
        UnsupportedError: there is no kernel for the format; names the way out.
    """
    if has_columns(format):
        rows, columns = empty(x, format, -1), empty(x, format, -2)
        spec = QuantizeSpec(_name(x), format, scale_rounding, copies="both")
        _matrices(spec, x, rows, (columns[0].mT, columns[1].mT))
        return *rows, *columns
    given = (scale_rounding, "nearest-even", None, tensor_scale)
    return *forward(x, format, -1, *given), *forward(x, format, -2, *given)


def numbers(
    values: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None,
    format: BlockFormat,
    dim: int,
    dtype: torch.dtype,
) -> Tensor:
    """As `reference.dequantize`, on CUDA tensors; values and scales are copied unless they lie as
    `empty` makes them.

    Raises:
        UnsupportedError: there is no kernel for the format; names the way out.
    """
    spec = DequantizeSpec(torch_op.dtype_name(dtype), format)
    out = empty_numbers(values, format, dim, dtype)
    if out.numel() == 0:
        return out
    codes = _readable(values.transpose(dim, -1).view(torch.uint8))
    flat = _flat((codes, _in_order(scales.transpose(dim, -1), format)), format)
    whole = None if tensor_scale is None else tensor_scale.reshape(1)
    turned = out.transpose(dim, -1)
    columns = min(turned.shape[-1], 2**31 - 1)  # as of rows
    _kernel(spec, values.get_device())(*flat, whole, turned.view(-1), columns)
    return out


def empty_numbers(values: Tensor, format: BlockFormat, dim: int, dtype: torch.dtype) -> Tensor:
    """Numbers of values, to be written: in memory with ``dim`` last, as values are."""
    shape = _turned(sizes.shape(values.shape, format, dim), dim)
    return values.new_empty(shape, dtype=dtype).transpose(dim, -1)


def empty(x: Tensor, format: BlockFormat, dim: int) -> Pair:
    """Values and scales of a tensor like x, to be written: values in memory with ``dim`` last, scales
    as of `empty_scales`."""
    shape = _turned(sizes.values_shape(x.shape, format, dim), dim)
    values = x.new_empty(shape, dtype=getattr(torch, format.element.dtype)).transpose(dim, -1)
    return values, empty_scales(x, format, dim)


def empty_scales(x: Tensor, format: BlockFormat, dim: int) -> Tensor:
    """Scales of a tensor like x: in memory with ``dim`` last, or first where a format has them
    ``by_column``; then columns begin at multiples of 16 bytes."""
    shape = _turned(sizes.scales_shape(x.shape, format, dim), dim)
    dtype = getattr(torch, format.scale.dtype)
    if not format.by_column:
        return x.new_empty(shape, dtype=dtype).transpose(dim, -1)
    rows, per_access = math.prod(shape[:-1]), ALIGN // dtype.itemsize
    columns = x.new_empty(shape[-1], -(-rows // per_access) * per_access, dtype=dtype)
    return columns[:, :rows].mT.view(shape).transpose(dim, -1)


def _turned(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    found = list(shape)
    found[dim], found[-1] = found[-1], found[dim]
    return tuple(found)


def _rows(
    spec: QuantizeSpec, x: Tensor, stored: Pair, seed: int | None, tensor_scale: Tensor | None
) -> None:
    """Blocks along the last dimension."""
    if x.numel() == 0:
        return
    x = _readable(x)
    whole = None if tensor_scale is None else tensor_scale.reshape(1)
    columns = min(x.shape[-1], 2**31 - 1)  # more are in one row, where they do not matter
    run = _kernel(spec, x.get_device())
    flat = _flat(stored, spec.format)
    run(x.flatten(), *flat, whole, columns, 0 if seed is None else seed)


def _matrices(spec: QuantizeSpec, x: Tensor, rows: Pair | None, columns: Pair) -> None:
    """Blocks along the last but one dimension, and along the last one if ``rows`` are given."""
    if x.numel() == 0:
        return
    x = _readable(x)
    *batch, m, n = x.shape
    run = _kernel(spec, x.get_device())
    copies = [None if pair is None else _flat(pair, spec.format) for pair in (rows, columns)]
    run(x.flatten(), *copies, math.prod(batch), m, n)


def _readable(x: Tensor) -> Tensor:
    """Contiguous, at a multiple of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGN else x


def _in_order(scales: Tensor, format: BlockFormat) -> Tensor:
    """Scales with the quantised dimension last, in the memory order that `empty_scales` has but for
    the padding."""
    if not format.by_column:
        return (scales if scales.itemsize > 1 else scales.view(torch.uint8)).contiguous()
    columns = scales.reshape(-1, scales.shape[-1]).mT
    return columns.contiguous().mT if columns.stride(-1) != 1 else columns.mT


def _flat(stored: Pair, format: BlockFormat) -> Pair:
    """Values and scales as kernels take them: bytes of one dimension; scales likewise, or float32, or
    (blocks of a row, rows)."""
    values, scales = stored
    codes = values.view(-1).view(torch.uint8)
    if format.by_column:
        return codes, scales.view(-1, scales.shape[-1]).mT
    scales = scales.view(-1)
    return codes, scales if scales.dtype == torch.float32 else scales.view(torch.uint8)


def _name(x: Tensor) -> str:
    return torch_op.dtype_name(x.dtype)


@functools.cache
def _kernel(spec: QuantizeSpec | DequantizeSpec, device: int) -> Callable[..., None]:
    """Finding a kernel reads source files."""
    target = arch.detect(device)
    with torch_workspace.relaxed_capture():
        found: Callable[..., None] = cache.load(spec.module, spec, spec.configure(target), target)
    return torch_op.on_device(found, device)
