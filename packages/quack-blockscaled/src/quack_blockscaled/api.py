"""The public functions."""

import math

import torch
from torch import Tensor

from quack_core import arch as arches
from quack_core import torch_op
from quack_core.arch import Arch
from quack_core.errors import DTypeError, ShapeError, UnsupportedError

from . import operators, reference, scales, sizes
from .formats import FP8_BLOCK_1X128, BlockFormat
from .quantizer.spec import is_built
from .tensor import BlockScaledTensor, check_tensor_scale

OPERATORS = ("quantize", "dequantize", "matmul", "matmul_grouped", "linear")
"""What is built somewhere, or planned."""
_PRODUCTS = ("matmul", "matmul_grouped", "linear")


def quantize(
    x: Tensor,
    format: BlockFormat,
    *,
    dim: int = -1,
    scale_rounding: str = "rceil",
    element_rounding: str = "nearest-even",
    seed: int | None = None,
    per_tensor_scale: float | Tensor | None = None,
) -> BlockScaledTensor:
    """``x`` in a block-scaled format: a scale for each block, and elements divided by it.

    CUDA tensors run a kernel, where `supports` says so; CPU tensors run the reference; meta and fake
    tensors give shapes.

    Args:
        x: any shape of at least one dimension: float32, bfloat16 or float16. Blocked dimensions are
            multiples of the block.
        format: such as `quack_blockscaled.MXFP8_E4M3`, or one of your own.
        dim: along which blocks lie; blocks of several rows have them along the other one of the last
            two dimensions.
        scale_rounding: how scales that are powers of two come from the block's maximum: "rceil"
            (NVIDIA's rule), "floor" (OCP's), "ceil" or "even"; scales of other kinds know "rceil" only.
        element_rounding: "nearest-even" or "stochastic".
        seed: of stochastic rounding, which needs one; the same seed gives the same bits.
        per_tensor_scale: a number, or a float32 tensor of one element on the device of ``x``, by
            which ``x`` is divided first, of a format that has one; 1 if None.

    Returns:
        A `BlockScaledTensor` of the shape of ``x``, in memory with ``dim`` last.

    Raises:
        DTypeError, ShapeError, DeviceError: name operand, dimension, found and needed value.
        UnsupportedError: an unknown rule; on a GPU, what `supports` says no to, stochastic rounding
            along another dimension than the last: names the way out.
    """
    dim = _checked("quantize", x, format, dim, scale_rounding)
    _check_rounding(element_rounding, seed)
    tensor_scale = _tensor_scale("quantize", x, format, per_tensor_scale)
    values, found = operators.quantize(
        x, format, dim, scale_rounding, element_rounding, seed, tensor_scale
    )
    return BlockScaledTensor(values, found, format, dim, tensor_scale, x.dtype)


def quantize_both(
    x: Tensor,
    format: BlockFormat,
    *,
    scale_rounding: str = "rceil",
    per_tensor_scale: float | Tensor | None = None,
) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """``x`` quantised along its last dimension and along the one before it: two calls of `quantize`.

    On a GPU one kernel makes both from one read of ``x``, where elements have 8 bits and blocks of
    one row 16 to 128 columns, or are of 128x128.

    Args:
        x: (..., M, N): float32, bfloat16 or float16. M and N are multiples of the block.
        format, scale_rounding, per_tensor_scale: as of `quantize`.

    Returns:
        (rowwise, columnwise) of the shape of ``x``, with ``dim`` -1 and -2. The columns of the second
        one are contiguous: its ``mT`` is the transposed tensor in row-major order.

    Raises:
        DTypeError, ShapeError, DeviceError, UnsupportedError: as of `quantize`.
    """
    name = "quantize_both"
    _checked(name, x, format, -1, scale_rounding)
    if x.dim() < 2:
        raise ShapeError(f"{name}: x has {x.dim()} dimension: it must have 2 or more")
    sizes.check(f"{name}: x", x.shape, format, -2)
    tensor_scale = _tensor_scale(name, x, format, per_tensor_scale)
    parts = operators.quantize_both(x, format, scale_rounding, tensor_scale)
    rows = BlockScaledTensor(*parts[:2], format, -1, tensor_scale, x.dtype)
    return rows, BlockScaledTensor(*parts[2:], format, -2, tensor_scale, x.dtype)


def dequantize(x: BlockScaledTensor, dtype: torch.dtype | None = None) -> Tensor:
    """As `BlockScaledTensor.dequantize`."""
    if not isinstance(x, BlockScaledTensor):
        raise DTypeError(f"dequantize: x is {type(x).__name__}: it must be a BlockScaledTensor")
    return x.dequantize(dtype)


def supports(op: str, arch: Arch | str, format: BlockFormat) -> bool:
    """Whether an operator is built for an architecture and a format.

    What is not raises UnsupportedError when it is called; nothing slow takes its place.

    Args:
        op: one of `OPERATORS`; of a product, ``format`` is that of the first operand.
        arch: ``"cpu"``, an `Arch`, or a name as of `quack_core.arch.get`.
        format: any.

    Raises:
        UnsupportedError: no such operator.
        ArchError: no such architecture.
        DTypeError: ``format`` is no `BlockFormat`.
    """
    if op not in OPERATORS:
        raise UnsupportedError(f"operator {op!r} is unknown", f"known: {', '.join(OPERATORS)}")
    if not isinstance(format, BlockFormat):
        raise DTypeError(f"supports: format is {type(format).__name__}: it must be a BlockFormat")
    if arch == "cpu":
        return op not in _PRODUCTS or format == FP8_BLOCK_1X128
    target = arch if isinstance(arch, Arch) else arches.get(arch)
    if op in _PRODUCTS:
        return target.wgmma and format == FP8_BLOCK_1X128
    return is_built(format)


def _checked(name: str, x: Tensor, format: BlockFormat, dim: int, scale_rounding: str) -> int:
    """That x can be quantised so; its dimension counted from the end."""
    if not isinstance(x, Tensor):
        raise DTypeError(f"{name}: x is {type(x).__name__}: it must be a tensor")
    if not isinstance(format, BlockFormat):
        raise DTypeError(f"{name}: format is {type(format).__name__}: it must be a BlockFormat")
    torch_op.check_dtype(name, "x", x.dtype)
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(f"{name}: dim is {dim}: x has {x.dim()} dimensions")
    dim -= x.dim() if dim >= 0 else 0
    sizes.check(f"{name}: x", x.shape, format, dim)
    scales.check_rule(format, scale_rounding)
    return dim


def _check_rounding(rounding: str, seed: int | None) -> None:
    """That a rounding of elements is known, and has a seed if and only if it is random."""
    if rounding not in reference.ROUNDINGS:
        raise UnsupportedError(
            f"quantize: element_rounding is {rounding!r}",
            f"it must be one of {', '.join(reference.ROUNDINGS)}",
        )
    if (seed is not None) != (rounding == "stochastic"):
        raise UnsupportedError(
            f"quantize: element_rounding is {rounding!r}, seed is {seed}",
            "'stochastic' needs a seed, 'nearest-even' has none",
        )
    if seed is not None and not 0 <= seed < 2**63:
        raise UnsupportedError(f"quantize: seed is {seed}", "it must be 0 to 2**63 - 1")


def _tensor_scale(
    name: str, x: Tensor, format: BlockFormat, given: float | Tensor | None
) -> Tensor | None:
    """The per-tensor scale that is stored with the operand: absent means exactly 1."""
    if not format.per_tensor:
        if given is not None:
            raise UnsupportedError(
                f"{name}: per_tensor_scale was given",
                f"{format.name} has none",
                "divide x by it, or use a format that has one",
            )
        return None
    if isinstance(given, Tensor):
        if given.numel() != 1:
            raise ShapeError(
                f"{name}: per_tensor_scale has the shape {tuple(given.shape)}: it must be ()"
            )
        given = given.detach().reshape(())
        check_tensor_scale(f"{name}: per_tensor_scale", given, x.device)
        return given
    number = 1.0 if given is None else float(given)
    if not 0 < number < math.inf:
        raise UnsupportedError(
            f"{name}: per_tensor_scale is {number}", "it must be a positive number, and no Inf"
        )
    return x.new_full((), number, dtype=torch.float32)
