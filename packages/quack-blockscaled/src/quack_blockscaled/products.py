"""The public products of operands in blocks."""

import torch
from torch import Tensor

from quack_core import torch_op
from quack_core.errors import DeviceError, DTypeError, LayoutError, ShapeError, UnsupportedError

from . import operators
from .product.spec import SQUARES, is_built
from .tensor import BlockScaledTensor


def matmul(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """``a @ b`` of operands in blocks: the products of each 128 of K are summed, scaled, and added.

    On Hopper the tensor cores take the operands as they are, and nothing of full size is made of
    them; CPU tensors run the reference; meta and fake tensors give shapes.

    Args:
        a: (M, K) in `FP8_BLOCK_1X128` along K.
        b: (K, N) along K, in `FP8_BLOCK_128X128` (``weight.mT`` of a quantised weight (N, K)) or in
            `FP8_BLOCK_1X128` (``x.mT`` of x (N, K)). Elements along K lie side by side in memory, as
            they do in these; those of others are copied first, 8 bits each.
        out_dtype: float32, bfloat16 or float16; by default that which ``a`` was quantised from.
        out: (M, N), to be written; on a GPU its rows begin at multiples of 16 bytes.
        accumulate: add to ``out``, which is float32; each element is read and written once.

    Returns:
        (M, N): ``out`` if it was given.

    Raises:
        DTypeError, ShapeError, DeviceError, LayoutError: name operand, dimension, found and needed
            value.
        UnsupportedError: other formats, or no kernel for the GPU; names the way out.

    Numerics:
        Sums of 128 products are those of the tensor cores, which keep about 14 bits of them on
        Hopper; all else is float32, rounded once. Deterministic.
    """
    _check_operands("matmul", a, b, 2)
    if out is not None:
        _check_out(a, b, out, out_dtype)
    if accumulate and (out is None or out.dtype != torch.float32):
        found = "missing" if out is None else torch_op.name_of(out.dtype)
        raise DTypeError(f"matmul: accumulate is True, out is {found}: it must be float32")
    dtype = out.dtype if out is not None else out_dtype or a.dtype
    torch_op.check_dtype("matmul", "out_dtype", dtype)
    parts = (a.values, a.scales, b.values.mT, b.scales.mT)
    if out is None:
        return operators.matmul(*parts, dtype)
    return operators.matmul_into(*parts, out, accumulate)


def matmul_grouped(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Groups of rows of ``a``, each by a matrix of its own: ``out[first:end] = a[first:end] @ b[g]``.

    One launch for all groups; their sizes stay on the device.

    Args:
        a: (M, K) in `FP8_BLOCK_1X128` along K: the rows of all groups, one group below the other.
        b: (G, K, N) in `FP8_BLOCK_128X128`: ``weights.mT`` of quantised weights (G, N, K).
        offsets: int32 (G + 1,), on the device of ``a``: group g has the rows ``offsets[g]`` to
            ``offsets[g + 1]``, of which there may be any number, or none. They do not descend, the
            first is 0 and the last M: which a GPU does not check. There, rows of no group are not
            written, and nothing outside of ``a`` is read.
        out_dtype: as of `matmul`.

    Returns:
        (M, N). Each row is what `matmul` gives of its group.

    Raises, Numerics: as of `matmul`.
    """
    _check_operands("matmul_grouped", a, b, 3)
    if b.format.block != SQUARES:
        raise UnsupportedError(
            f"matmul_grouped: b is {b.format.name}",
            "there are kernels for fp8_block_128x128 only",
            "quantise to that",
        )
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int32:
        found = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
        raise DTypeError(f"matmul_grouped: offsets is {found}: it must be a tensor of int32")
    if tuple(offsets.shape) != (b.shape[0] + 1,):
        raise ShapeError(
            f"matmul_grouped: offsets has the shape {tuple(offsets.shape)}: it must be "
            f"({b.shape[0] + 1},), one more than b has matrices"
        )
    if offsets.device != a.device:
        raise DeviceError(f"matmul_grouped: offsets is on {offsets.device}, a on {a.device}")
    dtype = out_dtype or a.dtype
    torch_op.check_dtype("matmul_grouped", "out_dtype", dtype)
    return operators.matmul_grouped(a.values, a.scales, b.values.mT, b.scales.mT, offsets, dtype)


def _check_operands(op: str, a: BlockScaledTensor, b: BlockScaledTensor, ndim_b: int) -> None:
    """That a product of them is built, and what dimensions agree.

    Args:
        ndim_b: dimensions of ``b``.

    Raises:
        As of `matmul`.
    """
    for name, x, ndim in (("a", a, 2), ("b", b, ndim_b)):
        if not isinstance(x, BlockScaledTensor):
            raise DTypeError(f"{op}: {name} is {type(x).__name__}: it must be a BlockScaledTensor")
        if x.ndim != ndim:
            raise ShapeError(f"{op}: {name} has {x.ndim} dimensions: it must have {ndim}")
    if not is_built(a.format, b.format):
        raise UnsupportedError(
            f"{op}: a is {a.format.name}, b is {b.format.name}",
            "there are products of fp8_block_1x128 and fp8_block_128x128 or fp8_block_1x128",
            "quantise to these, or multiply what dequantize() gives",
        )
    if a.dim != -1 or (b.dim != -2 and b.format.block != SQUARES):
        raise ShapeError(
            f"{op}: a is quantised along {a.dim}, b along {b.dim}: it must be -1 and -2, which is K; "
            "take .mT of an operand (N, K) that is quantised along -1"
        )
    if a.shape[1] != b.shape[-2]:
        raise ShapeError(
            f"{op}: a.shape[1] is {a.shape[1]}, b.shape[{ndim_b - 2}] {b.shape[-2]}: must be equal"
        )
    if a.device != b.device:
        raise DeviceError(f"{op}: a is on {a.device}, b on {b.device}")


def _check_out(
    a: BlockScaledTensor, b: BlockScaledTensor, out: Tensor, out_dtype: torch.dtype | None
) -> None:
    """That a result can be written there."""
    needed = (a.shape[0], b.shape[1])
    if tuple(out.shape) != needed:
        raise ShapeError(f"matmul: out has the shape {tuple(out.shape)}: it must be {needed}")
    if out.device != a.device:
        raise DeviceError(f"matmul: out is on {out.device}, a on {a.device}")
    if out_dtype not in (None, out.dtype):
        raise DTypeError(
            f"matmul: out is {torch_op.name_of(out.dtype)}, out_dtype {torch_op.name_of(out_dtype)}:"
            " must be equal"
        )
    if torch.is_grad_enabled() and out.requires_grad:
        raise UnsupportedError(
            "matmul: out requires a gradient",
            "results in given tensors are not differentiable",
            "leave out away, or use torch.no_grad()",
        )
    if out.is_cuda and not operators.writable(out):
        raise LayoutError(
            f"matmul: out has the strides {tuple(out.stride())}: stride(1) must be 1, and rows must "
            "begin at multiples of 16 bytes; leave out away and copy"
        )
