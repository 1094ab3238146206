"""The public function."""

from typing import Literal, overload

import torch
from torch import Tensor

from quack_norm.ops.rmsnorm.call import normalise


@overload
def layernorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: Literal[False] = False,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    return_statistics: Literal[False] = False,
    out: Tensor | None = None,
) -> Tensor: ...
@overload
def layernorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    return_statistics: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]: ...
def layernorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    return_statistics: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Layer normalisation over the last dimension, with an optional addition before it.

        h    = x + residual
        rstd = rsqrt(mean((h - mean(h))^2) + eps)
        out  = (h - mean(h)) * rstd * weight + bias

    CUDA tensors run a CuTe kernel, CPU tensors the reference; meta and fake tensors give shapes.
    All operands may be float32, bfloat16 or float16 independently of one another. Differentiable
    once in x, weight, bias and residual.

    Args:
        x: ``(..., N)`` with N up to 262144, any rank; layouts as in `rmsnorm`.
        weight: ``(N,)``, or ``(H, N)`` for x ``(..., H, N)``: one weight per head.
        bias: like weight.
        residual: shaped like x; added before the norm.
        eps: added to the variance.
        prenorm: return h as well.
        out_dtype: dtype of the result, by default that of x (of ``out``, if given).
        residual_dtype: dtype of h as a result, by default that of residual, or of x without one.
        return_statistics: return rstd and mean of each row as well. They are not differentiable.
        out: memory for the result, as in `rmsnorm`.

    Returns:
        ``out``, or a tuple of ``out``, h ``(..., N)`` if ``prenorm``, and ``(..., 2)`` in float32,
        rstd and mean, if ``return_statistics``.

    Raises:
        As `rmsnorm`.

    Numerics:
        As `rmsnorm`. The variance is that of distances from the mean, never a difference of mean
        squares: a large mean costs no more than its own rounding to float32.

    Source: Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450.
    """
    return normalise(
        x,
        weight,
        bias,
        residual,
        eps,
        0.0,
        prenorm,
        out_dtype,
        residual_dtype,
        return_statistics,
        out,
        True,
    )
