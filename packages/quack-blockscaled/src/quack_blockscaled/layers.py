"""A linear layer whose three products are of FP8 blocks, differentiable."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quack_core import torch_op
from quack_core.errors import DeviceError, DTypeError, ShapeError

from .api import quantize, quantize_both
from .formats import FP8_BLOCK_1X128, FP8_BLOCK_128X128
from .products import matmul
from .tensor import BlockScaledTensor

BLOCK = FP8_BLOCK_1X128.cols


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` by FP8 blocks, as ``torch.nn.functional.linear``. Differentiable once.

        out = Q(x) Q(weight)ᵀ      dx = Q(dout) Q(weight)      dweight = Q(doutᵀ) Q(xᵀ)ᵀ

    Q quantises along the dimension that is summed over: weights in blocks of 128x128, all else in
    blocks of 1x128. Weights stay what they are, and are quantised by each call and each backward.

    Args:
        x: (..., K), any number of rows: float32, bfloat16 or float16. Rows that fill no block of 128
            are filled up with zeros where the weight's gradient sums over them.
        weight: (N, K), any of these dtypes; N and K are multiples of 128.
        bias: (N,), likewise.

    Returns:
        (..., N) in the dtype of ``x``, or that of ``torch.autocast``. Gradients have the dtypes of
        what they are gradients of.

    Raises:
        DTypeError, ShapeError, DeviceError: name operand, dimension, found and needed value.
        UnsupportedError: there is no kernel for the GPU; names the way out.

    Numerics:
        Products as of `matmul`; the bias is added in float32, and its gradient summed in it, where
        ``x`` has 16 bits rounded once more. If the weight needs a gradient, the backward keeps x in
        8 bits, transposed, in place of x. Deterministic.
    """
    _check(x, weight, bias)
    x = _autocast(x)
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    keep = torch.is_grad_enabled() and weight.requires_grad
    found: Tensor = _Linear.apply(rows, weight, bias, keep)
    return found.reshape(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, keep: bool) -> Tensor:
        given, kept = _copies(x) if keep else (quantize(x, FP8_BLOCK_1X128), None)
        ctx.save_for_backward(
            weight if ctx.needs_input_grad[0] else None,
            None if kept is None else kept.values,
            None if kept is None else kept.scales,
        )
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        out = matmul(given, quantize(weight, FP8_BLOCK_128X128).mT)
        if bias is None:
            return out
        if torch.compiler.is_compiling():  # torch 2.11 would make zeros of the gradients of add_
            return torch.add(out, bias).to(out.dtype)
        return out.add_(bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weight, values, scales = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        dx = dweight = dbias = rowwise = None
        if values is not None:
            if weight is not None:
                rowwise, turned = _copies(dout)
            else:
                turned = quantize(_whole(dout), FP8_BLOCK_1X128, dim=-2)
            x = BlockScaledTensor(values, scales, FP8_BLOCK_1X128, -2, None, dout.dtype)
            dweight = matmul(turned.mT, x, out_dtype=weight_dtype)
        if weight is not None:
            rowwise = quantize(dout, FP8_BLOCK_1X128) if rowwise is None else rowwise
            dx = matmul(rowwise, quantize(weight, FP8_BLOCK_128X128, dim=-2))
        if ctx.needs_input_grad[2]:
            dbias = dout.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dweight, dbias, None


def _copies(x: Tensor) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """x in blocks along its last dimension, and along its rows."""
    rowwise, columnwise = quantize_both(_whole(x), FP8_BLOCK_1X128)
    return rowwise[: x.shape[0]], columnwise


def _whole(x: Tensor) -> Tensor:
    """x with zeros below it, up to a multiple of 128 rows."""
    return F.pad(x, (0, 0, 0, -x.shape[0] % BLOCK))


def _autocast(x: Tensor) -> Tensor:
    """In the dtype that ``torch.autocast`` wants, where that is on."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """That a layer can be made of them.

    Raises:
        As of `linear`.
    """
    given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, one in given.items():
        if not isinstance(one, Tensor):
            raise DTypeError(f"linear: {name} is {type(one).__name__}: it must be a tensor")
        torch_op.check_dtype("linear", name, one.dtype)
        if one.device != x.device:
            raise DeviceError(f"linear: {name} is on {one.device}, x on {x.device}")
    if weight.dim() != 2 or x.dim() < 1:
        raise ShapeError(
            f"linear: x has {x.dim()} dimensions, weight {weight.dim()}: they must have 1 or more, and 2"
        )
    for dim, size in enumerate(weight.shape):
        if size % BLOCK:
            raise ShapeError(
                f"linear: weight.shape[{dim}] is {size}: it must be a multiple of {BLOCK}; pad it "
                f"with zeros to {-(-size // BLOCK) * BLOCK}, or use torch's linear"
            )
    if x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"linear: x.shape[{x.dim() - 1}] is {x.shape[-1]}, weight.shape[1] {weight.shape[1]}: must "
            "be equal"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ShapeError(
            f"linear: bias has the shape {tuple(bias.shape)}: it must be ({weight.shape[0]},)"
        )
