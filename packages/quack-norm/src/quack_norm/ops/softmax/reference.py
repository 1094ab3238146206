"""Softmax in plain torch, in float32: what CPU tensors run, and what the kernels are compared with."""

import torch
from torch import Tensor


def forward(x: Tensor, log: bool, scale: float, out_dtype: torch.dtype) -> Tensor:
    """Over the last dimension.

    Args:
        x: ``(..., N)``.
        log: the logarithm is wanted.
        scale: multiplies x.
        out_dtype: of the result, which is rounded to it once.
    """
    values = x.float() if scale == 1.0 else x.float() * scale
    result = torch.log_softmax(values, -1) if log else torch.softmax(values, -1)
    return result.to(out_dtype)


def backward(out: Tensor, dout: Tensor, log: bool, scale: float, dx_dtype: torch.dtype) -> Tensor:
    """Gradient of x, from the result and its gradient."""
    y, dy = out.float(), dout.float()
    if log:
        dx = dy - y.exp() * dy.sum(-1, keepdim=True)
    else:
        dx = y * (dy - (dy * y).sum(-1, keepdim=True))
    return (dx if scale == 1.0 else dx * scale).to(dx_dtype)
