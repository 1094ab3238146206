"""RMSNorm in plain PyTorch: the definition that kernels are tested against, and the CPU path.

It rounds where the kernels round: all arithmetic in float32, each result once to its dtype.
"""

import torch
from torch import Tensor


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    centred: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``h = x + residual``, ``out = h * rstd * (weight + weight_offset) + bias``.

    LayerNorm (``centred``) takes ``h - mean(h)`` in place of h.

    Args:
        x: ``(..., N)``.
        weight: ``(N,)``, or ``(H, N)`` for x ``(..., H, N)``; ``bias`` likewise.
        residual: shaped like x.
        eps: added to the mean square.
        weight_offset: added to the weight.
        out_dtype: of ``out``; that of x by default.
        residual_dtype: of h as a result; None does not return it.
        centred: subtract the mean.

    Returns:
        ``(out, h or None, rstd)``; rstd is float32 without the last dimension of x. With the mean
        subtracted it is ``(..., 3)``: rstd, mean, and what float32 lacks of the mean.
    """
    h = x.contiguous().float()  # the order of a row's sum must not follow strides
    if residual is not None:
        h = h + residual.float()
    mean, around = None, h
    if centred:  # the mean keeps bits below its own ulp, as in the kernels
        mean = h.double().mean(dim=-1, keepdim=True)
        around = (h.double() - mean).float()
    rstd = torch.rsqrt(around.square().mean(dim=-1) + eps)
    out = around * rstd.unsqueeze(-1)
    if weight is not None:
        out = out * (weight.float() + weight_offset)
    if bias is not None:
        out = out + bias.float()
    stored = None if residual_dtype is None else _fresh(h, x, residual_dtype)
    if mean is not None:
        rounded = mean.float()
        rstd = torch.cat((rstd.unsqueeze(-1), rounded, (mean - rounded).float()), dim=-1)
    return out.to(out_dtype or x.dtype), stored, rstd


def backward(
    h: Tensor,
    weight: Tensor | None,
    dout: Tensor,
    rstd: Tensor,
    dresidual_out: Tensor | None,
    weight_offset: float,
    dx_dtype: torch.dtype,
    dresidual_dtype: torch.dtype | None,
    dweight: bool,
    dbias_dtype: torch.dtype | None,
    per_head: bool,
    centred: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `forward`; ``dh = rstd * (wdy - xhat * mean(wdy * xhat)) + dresidual_out``.

    Where the mean is subtracted, ``mean(wdy)`` is subtracted from wdy, too.

    Args:
        h: the normalised rows ``(..., N)``: x, or the stored ``x + residual``.
        weight: as in `forward`.
        dout: gradient of ``out``.
        rstd: from `forward`.
        dresidual_out: gradient of h as a result.
        weight_offset: as in `forward`.
        dx_dtype: dtype of dx.
        dresidual_dtype: dtype of dresidual; None if it is not wanted.
        dweight: whether the gradient of the weight is wanted; it has the weight's dtype.
        dbias_dtype: dtype of dbias; None if it is not wanted.
        per_head: weight and bias are ``(H, N)``.
        centred: as in `forward`.

    Returns:
        ``(dx, dresidual, dweight, dbias)``, None for those not wanted.
    """
    parameter = h.shape[-2:] if per_head else h.shape[-1:]
    kind = torch.float64 if centred else torch.float32
    scale = (rstd[..., :1] if centred else rstd.unsqueeze(-1)).to(kind)
    dy = dout.contiguous().to(kind)
    around = h.contiguous().to(kind)
    if centred:
        around = around - rstd[..., 1:].to(kind).sum(dim=-1, keepdim=True)
    normalised = around * scale
    wdy = dy if weight is None else dy * (weight.to(kind) + weight_offset)
    level = wdy.mean(dim=-1, keepdim=True) if centred else 0.0
    dh = scale * (wdy - level - normalised * (wdy * normalised).mean(dim=-1, keepdim=True))
    if dresidual_out is not None:
        dh = dh + dresidual_out.float()
    dw = None
    if dweight and weight is not None:
        dw = (dy * normalised).sum_to_size(parameter).to(weight.dtype)
    db = None if dbias_dtype is None else _fresh(dy.sum_to_size(parameter), dout, dbias_dtype)
    dx = _fresh(dh, h, dx_dtype)
    dresidual = None if dresidual_dtype is None else _fresh(dh, dx, dresidual_dtype)
    return dx, dresidual, dw, db


def _fresh(values: Tensor, operand: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to ``dtype``, in memory that the operand does not have."""
    result = values.to(dtype)
    return result.clone() if result.data_ptr() == operand.data_ptr() else result
