"""Quantising and back in plain torch: the definition, and what CPU tensors run.

Every step is an integer operation or one float32 operation of IEEE 754, so that a kernel can make
the same bits. For a block of x with the largest magnitude ``amax``::

    scale   = scale_of(amax / per_tensor)      as of `scales`
    step    = scale * per_tensor
    element = round(x * (1 / step))            saturating, as of `elements`
    x'      = element * step

Where 1 / step is Inf, elements are zeros: the block is too small for its scale.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quack_core import torch_op
from quack_core.errors import DeviceError, DTypeError, ShapeError, UnsupportedError

from . import elements, sizes
from . import scales as scaling
from .formats import BlockFormat

ROUNDINGS = ("nearest-even", "stochastic")


class Quantized(NamedTuple):
    """Parts of a quantised tensor.

    Args:
        values: of x's shape, in the dtype of the elements; those of fewer than 8 bits are packed
            along the dimension that is quantised.
        scales: blocked dimensions of x count blocks, the others are as they are.
        per_tensor_scale: float32 of shape (), or None where the format has none.
    """

    values: Tensor
    scales: Tensor
    per_tensor_scale: Tensor | None


def quantize(
    x: Tensor,
    format: BlockFormat,
    *,
    dim: int = -1,
    scale_rounding: str = "rceil",
    element_rounding: str = "nearest-even",
    seed: int | None = None,
    per_tensor_scale: float | Tensor | None = None,
) -> Quantized:
    """Elements and scales of x, in memory with ``dim`` last: a product reads them along it.

    A block with a NaN or an Inf is lost as a whole, and says so, in every format alike: its scale is
    NaN, and so are its elements where they have one; else they are the largest number. No other
    block changes. A block of zeros has zeros, with their signs, and the smallest scale that there
    is. What rounds to zero keeps its sign.

    Args:
        x: float32, bfloat16 or float16; blocked dimensions are multiples of the block.
        format: such as `formats.MXFP8_E4M3`.
        dim: along which the columns of blocks lie; their rows lie along the other one of the last two.
        scale_rounding: one of `scales.RULES`.
        element_rounding: ``"nearest-even"``, or ``"stochastic"``, whose bits `philox` defines.
        seed: of stochastic rounding, 0 to 2**63 - 1.
        per_tensor_scale: of a format that has one, greater than 0; None is exactly 1. It is not
            rounded or clamped, and comes back with the result.

    Raises:
        DTypeError, ShapeError, DeviceError, UnsupportedError: name operand, dimension, found and
            needed value.
    """
    torch_op.check_dtype("quantize", "x", x.dtype)
    dim = _dim("quantize: x", x.dim(), dim)
    sizes.check("quantize: x", x.shape, format, dim)
    scaling.check_rule(format, scale_rounding)
    bits = _noise(x, element_rounding, seed)
    whole = _per_tensor("quantize", format, per_tensor_scale, x.device)
    blocks = _blocks(x.detach().float(), format, dim)
    # As integers magnitudes have the same order, NaN above all.
    amax = (blocks.view(torch.int32) & elements.MAGNITUDE).amax((-3, -1)).view(torch.float32)
    # Zeros stay zeros, and NaN and Inf stay lost, whatever the scale of the tensor is.
    divided = amax if whole is None else (amax / whole).clamp(max=torch.finfo(torch.float32).max)
    divided = torch.where((amax == 0) | ~amax.isfinite(), amax, divided)
    found = scaling.encode(divided, format, scale_rounding)
    steps = _steps(found, format, whole)
    inverse = torch.ones_like(steps) / steps
    inverse = torch.where(inverse.isinf(), 0.0, inverse)
    ratio = blocks * inverse[..., :, None, :, None]
    if bits is not None:
        bits = _blocks(bits, format, dim)
    codes = elements.encode(ratio, format.element, bits)
    values = elements.pack(codes.flatten(-2).flatten(-3, -2), format.element)
    dtype = getattr(torch, format.element.dtype)
    return Quantized(_turn(values.view(dtype), x.dim(), dim), _turn(found, x.dim(), dim), whole)


def dequantize(
    values: Tensor,
    scales: Tensor,
    format: BlockFormat,
    *,
    dim: int = -1,
    per_tensor_scale: float | Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The numbers that elements and scales stand for, in float32, then rounded to ``dtype``; in memory
    with ``dim`` last.

    With e8m0 scales, products are exact. Close to the largest float32 they may overflow to Inf, where
    elements were rounded up. Each NaN has the bits of ``torch.nan``, whatever it came from: 0x7fc00000,
    0x7fc0 in bfloat16, 0x7e00 in float16.

    Args:
        values, scales, per_tensor_scale: parts as `quantize` gives them.
        dim: along which the columns of blocks lie.
        dtype: float32, bfloat16 or float16.

    Raises:
        DTypeError, ShapeError, DeviceError, UnsupportedError: name operand, dimension, found and
            needed value.
    """
    torch_op.check_dtype("dequantize", "dtype", dtype)
    dim = _dim("dequantize: values", values.dim(), dim)
    for name, part, needed in (
        ("values", values, format.element.dtype),
        ("scales", scales, format.scale.dtype),
    ):
        if torch_op.name_of(part.dtype) != needed:
            raise DTypeError(
                f"dequantize: {name} is {torch_op.name_of(part.dtype)}: {format.name} needs {needed}"
            )
    shape = sizes.shape(values.shape, format, dim)
    sizes.check("dequantize: the tensor of values", shape, format, dim)
    if tuple(scales.shape) != sizes.scales_shape(shape, format, dim):
        raise ShapeError(
            f"dequantize: scales has the shape {tuple(scales.shape)}: values of {tuple(shape)} need "
            f"{sizes.scales_shape(shape, format, dim)}"
        )
    whole = _per_tensor("dequantize", format, per_tensor_scale, values.device)
    codes = elements.unpack(_rows(values, dim).view(torch.uint8), format.element)
    steps = _steps(_rows(scales, dim), format, whole)
    blocks = _cut(elements.decode(codes, format.element), format) * steps[..., :, None, :, None]
    found = blocks.flatten(-2).flatten(-3, -2).to(dtype)
    return _turn(found.masked_fill_(found.isnan(), math.nan), values.dim(), dim)


def _steps(found: Tensor, format: BlockFormat, whole: Tensor | None) -> Tensor:
    """What elements of each block are multiplied by, float32."""
    steps = scaling.decode(found, format)
    return steps if whole is None else steps * whole


def _noise(x: Tensor, rounding: str, seed: int | None) -> Tensor | None:
    """Random bits for the elements of x, if they are rounded stochastically."""
    if rounding not in ROUNDINGS:
        raise UnsupportedError(
            f"quantize: element_rounding is {rounding!r}",
            f"it must be one of {', '.join(ROUNDINGS)}",
        )
    if rounding == "nearest-even":
        return None
    if seed is None:
        raise UnsupportedError(
            "quantize: element_rounding is 'stochastic', seed is None",
            "random bits are a function of a seed",
            "pass a seed, 0 to 2**63 - 1",
        )
    return elements.noise(x.numel(), seed, x.device).view(x.shape)


def _per_tensor(
    name: str, format: BlockFormat, given: float | Tensor | None, device: torch.device
) -> Tensor | None:
    """The scale of the tensor, float32 of shape (); None where the format has none."""
    if not format.per_tensor:
        if given is not None:
            raise UnsupportedError(
                f"{name}: per_tensor_scale was given",
                f"{format.name} has none",
                "leave it out, or divide x by it first",
            )
        return None
    if not isinstance(given, Tensor):
        number = 1.0 if given is None else given
        if not 0 <= number < math.inf:
            raise UnsupportedError(
                f"{name}: per_tensor_scale is {number}", "it must be a finite positive number"
            )
        return torch.tensor(number, dtype=torch.float32, device=device)
    if given.dtype != torch.float32:
        raise DTypeError(
            f"{name}: per_tensor_scale is {torch_op.name_of(given.dtype)}: it must be float32"
        )
    if given.numel() != 1:
        raise ShapeError(
            f"{name}: per_tensor_scale has the shape {tuple(given.shape)}: it must have one element"
        )
    if given.device != device:
        raise DeviceError(f"{name}: per_tensor_scale is on {given.device}, the rest on {device}")
    return given.detach().reshape(())


def _dim(name: str, ndim: int, dim: int) -> int:
    """A dimension counted from the end."""
    if not -ndim <= dim < ndim:
        raise ShapeError(f"{name} has {ndim} dimensions, dim is {dim}: it must be one of them")
    return dim - ndim if dim >= 0 else dim


def _rows(x: Tensor, dim: int) -> Tensor:
    """With at least two dimensions, the quantised one last; contiguous."""
    turned = x.transpose(dim, -1)
    return (turned.unsqueeze(0) if x.dim() == 1 else turned).contiguous()


def _turn(x: Tensor, ndim: int, dim: int) -> Tensor:
    """The inverse, for a result: a view."""
    return (x.squeeze(0) if ndim == 1 else x).transpose(dim, -1)


def _cut(x: Tensor, format: BlockFormat) -> Tensor:
    """(..., R, C) as (..., R / rows, rows, C / cols, cols)."""
    r, c = x.shape[-2:]
    return x.view(*x.shape[:-2], r // format.rows, format.rows, c // format.cols, format.cols)


def _blocks(x: Tensor, format: BlockFormat, dim: int) -> Tensor:
    return _cut(_rows(x, dim), format)
