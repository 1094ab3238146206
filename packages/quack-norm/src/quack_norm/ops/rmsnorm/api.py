"""The public function."""

from typing import Literal, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from quack_core import torch_op

from . import autograd, check, launch


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
    direct = torch_op.eager(x, weight, bias, residual, out) and x.is_cuda
    if not direct and not is_dynamo_compiling():  # there, the operator's fake does it
        dtypes = (out_dtype, residual_dtype)
        check.forward(x, weight, bias, residual, eps, weight_offset, *dtypes, out)
    record = is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )
    if residual_dtype is not None:
        check.dtype("residual_dtype", residual_dtype)  # refused even where it is not used
    if not prenorm and (residual is None or not record):
        residual_dtype = None
    elif residual_dtype is None:
        residual_dtype = x.dtype if residual is None else residual.dtype
    if out is not None:
        check.output(out, out_dtype, x, weight, bias, residual, direct)
        if residual is None and residual_dtype is x.dtype:
            check.input_survives(out, x)
        out_dtype = out.dtype
    h: Tensor | None
    rstd: Tensor | None
    if direct and not record:
        result, h, rstd = launch.forward(
            x,
            weight,
            bias,
            residual,
            eps,
            weight_offset,
            out_dtype,
            residual_dtype,
            return_rstd,
            out,
        )
        if out is not None:
            torch_op.bump_version(out)
    else:
        args = (x, weight, bias, residual, eps, weight_offset, out_dtype, residual_dtype)
        if direct:
            result, h, rstd = autograd.RMSNormFunction.apply(*args)
        else:
            result, h, rstd = _dispatched(*args, out)
    if not (prenorm or return_rstd):
        return result
    extra = (h if prenorm else None, rstd if return_rstd else None)
    return (result, *(tensor for tensor in extra if tensor is not None))


def _dispatched(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Through the registered operator, whose results never alias an operand."""
    torch_op.check_no_tangent("rmsnorm", x, weight, bias, residual)
    unchanged = residual is None and residual_dtype == x.dtype
    stored_dtype = None if unchanged else residual_dtype
    args = (x, weight, bias, residual, eps, weight_offset, out_dtype, stored_dtype)
    result, h, rstd = autograd.rmsnorm_fwd(*args)
    if out is not None:
        result = out.copy_(result)
    return result, x if unchanged else h, rstd
