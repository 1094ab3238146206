"""One call of RMSNorm or LayerNorm: straight to the kernel, with gradients, or through torch."""

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from quack_core import torch_op

from . import autograd, check, launch


def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    prenorm: bool,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    return_rstd: bool,
    out: Tensor | None,
    centred: bool,
) -> Tensor | tuple[Tensor, ...]:
    """As `api.rmsnorm`; ``centred`` makes it LayerNorm, and what is returned of a row (rstd, mean)."""
    direct = torch_op.eager(x, weight, bias, residual, out) and x.is_cuda
    if not direct and not is_dynamo_compiling():  # there, the operator's fake does it
        dtypes = (out_dtype, residual_dtype)
        name = check.name_of(centred)
        check.forward(x, weight, bias, residual, eps, weight_offset, *dtypes, out, name)
    record = is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )
    if residual_dtype is not None:
        name = check.name_of(centred)
        torch_op.check_dtype(name, "residual_dtype", residual_dtype)  # even where it has no use
    residual_dtype = stored_dtype(x, residual, prenorm, residual_dtype, record)
    if out is not None:
        name = check.name_of(centred)
        check.output(out, out_dtype, x, weight, bias, residual, direct, name)
        if residual is None and residual_dtype is x.dtype:
            check.input_survives(out, x, name)
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
            centred,
        )
        if out is not None:
            torch_op.bump_version(out)
    else:
        args = (x, weight, bias, residual, eps, weight_offset, out_dtype, residual_dtype)
        if direct:
            result, h, rstd = autograd.RMSNormFunction.apply(*args, centred)
        else:
            result, h, rstd = _dispatched(*args, out, centred)
    if not (prenorm or return_rstd):
        return result
    if centred and return_rstd and rstd is not None:
        rstd = rstd[..., :2]
    extra = (h if prenorm else None, rstd if return_rstd else None)
    return (result, *(tensor for tensor in extra if tensor is not None))


def stored_dtype(
    x: Tensor,
    residual: Tensor | None,
    prenorm: bool,
    residual_dtype: torch.dtype | None,
    record: bool,
) -> torch.dtype | None:
    """In which dtype a call keeps h; None: it does not.

    Args:
        record: whether gradients are recorded.
    """
    if not prenorm and (residual is None or not record):
        return None
    return residual_dtype or (x.dtype if residual is None else residual.dtype)


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
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Through the registered operator, whose results never alias an operand."""
    torch_op.check_no_tangent(check.name_of(centred), x, weight, bias, residual)
    unchanged = residual is None and residual_dtype == x.dtype
    stored_dtype = None if unchanged else residual_dtype
    args = (x, weight, bias, residual, eps, weight_offset, out_dtype, stored_dtype)
    result, h, rstd = autograd.rmsnorm_fwd(*args, centred)
    if out is not None:
        result = out.copy_(result)
    return result, x if unchanged else h, rstd
