"""The public function."""

from typing import Literal, overload

import torch
from torch import Tensor

from .call import normalise


@overload
def rmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    prenorm: Literal[False] = False,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    return_rstd: Literal[False] = False,
    out: Tensor | None = None,
) -> Tensor: ...
@overload
def rmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    prenorm: bool = False,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    return_rstd: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]: ...


def rmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    prenorm: bool = False,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    return_rstd: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Root-mean-square normalisation over the last dimension, with an optional addition before it.

        h    = x + residual
        rstd = rsqrt(mean(h^2) + eps)
        out  = h * rstd * (weight + weight_offset) + bias

    CUDA tensors run a CuTe kernel, CPU tensors the reference; meta and fake tensors give shapes.
    All operands may be float32, bfloat16 or float16 independently of one another. Differentiable
    once in x, weight, bias and residual.

    Args:
        x: ``(..., N)`` with N up to 262144, any rank. A contiguous last dimension with up to two
            outer strides is read where it lies (slices of a packed qkv row, for instance); other
            layouts are copied once. Any alignment is accepted; 16 bytes is the fastest.
        weight: ``(N,)``, or ``(H, N)`` for x ``(..., H, N)``: one weight per head.
        bias: like weight.
        residual: shaped like x; added before the norm.
        eps: added to the mean square.
        weight_offset: added to the weight, 1.0 for weights stored around zero.
        prenorm: return h as well.
        out_dtype: dtype of the result, by default that of x (of ``out``, if given).
        residual_dtype: dtype of h as a result, by default that of residual, or of x without one.
        return_rstd: return rstd as well. It is not differentiable.
        out: memory for the result, shaped like x, with a contiguous last dimension; only where no
            gradient is recorded. It may be x itself and must not overlap an operand otherwise.

    Returns:
        ``out``, or a tuple of ``out``, h ``(..., N)`` if ``prenorm``, and rstd ``(...)`` in float32
        if ``return_rstd``. Results are contiguous. With ``prenorm``, without residual and in the
        dtype of x, h is x itself.

    Raises:
        ShapeError, LayoutError, DTypeError, DeviceError: operands that do not fit together.
        ArchError: there is no kernel for the GPU.
        UnsupportedError: rows longer than 262144; ``out`` with gradients; second derivatives.

    Numerics:
        Sums, rstd and all arithmetic are float32; every result is rounded once. Deterministic. A
        row of out, h, rstd or dx has the same bits whatever rows come with it; gradients of weight
        and bias are summed in float32, in an order that the number of rows fixes.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    return normalise(
        x,
        weight,
        bias,
        residual,
        eps,
        weight_offset,
        prenorm,
        out_dtype,
        residual_dtype,
        return_rstd,
        out,
        False,
    )
