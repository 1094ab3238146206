"""The public functions."""

import torch
from torch import Tensor, is_grad_enabled

from quack_core import torch_op

from . import autograd, check, launch


def softmax(
    input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, scale: float = 1.0
) -> Tensor:
    """``e ** (scale * input)`` along a dimension, divided by its sum; as ``torch.softmax``.

    CUDA tensors run a CuTe kernel, CPU tensors the reference; meta and fake tensors give shapes.
    Differentiable once.

    Args:
        input: any rank, in float32, bfloat16 or float16; up to 262144 elements along ``dim``. Rows
            along a contiguous last dimension, with up to two outer strides, are read where they
            lie; other layouts and other dimensions are copied once.
        dim: the dimension that adds up to one.
        dtype: converts the input first, and is the dtype of the result; by default that of input.
        scale: multiplies the input.

    Returns:
        Contiguous, shaped like input.

    Raises:
        DTypeError, ShapeError: operands that kernels do not take.
        UnsupportedError: rows longer than 262144; second derivatives.
        ArchError: there is no kernel for the GPU.

    Numerics:
        All arithmetic is float32, the maximum is subtracted first, and results are rounded once. A
        row that holds NaN or inf, or nothing but -inf, becomes NaN, as in torch. Deterministic; a
        row has the same bits whatever rows come with it.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867.
    """
    return _call("softmax", input, dim, dtype, scale, log=False)


def log_softmax(
    input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, scale: float = 1.0
) -> Tensor:
    """The logarithm of ``softmax``, computed without it; as ``torch.log_softmax``.

    Arguments, results, errors and numerics are those of ``softmax``.
    """
    return _call("log_softmax", input, dim, dtype, scale, log=True)


def _call(
    name: str, x: Tensor, dim: int, dtype: torch.dtype | None, scale: float, log: bool
) -> Tensor:
    dim = check.operand(name, x, dim)
    check.scale(name, scale)
    if dtype is None:
        dtype = x.dtype
    elif dtype != x.dtype:
        torch_op.check_dtype(name, "dtype", dtype)
        if dtype != torch.float32:  # a wider result needs no conversion of the input
            x = x.to(dtype)
    if x.dim() == 0:
        return _rows(x.view(1), log, scale, dtype).view(())
    if dim == x.dim() - 1:
        return _rows(x, log, scale, dtype)
    return _rows(x.movedim(dim, -1), log, scale, dtype).movedim(-1, dim).contiguous()


def _rows(x: Tensor, log: bool, scale: float, dtype: torch.dtype) -> Tensor:
    """Along the last dimension."""
    if torch_op.eager(x) and x.is_cuda:
        if is_grad_enabled() and x.requires_grad:
            return autograd.SoftmaxFunction.apply(x, log, scale, dtype)  # type: ignore[no-any-return]
        return launch.forward(x, log, scale, dtype)
    torch_op.check_no_tangent("softmax", x)
    result: Tensor = autograd.softmax_fwd(x, log, scale, dtype)
    return result
