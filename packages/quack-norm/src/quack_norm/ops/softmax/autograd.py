"""Softmax as registered operators, and its gradient.

``quack_norm::softmax_fwd`` and ``quack_norm::softmax_bwd`` are what torch.compile, export, fake
tensors, tensor subclasses and the CPU see. Eager calls on CUDA tensors skip the dispatcher and
share the backward. Rows lie along the last dimension.
"""

from typing import Any

import torch
from torch import Tensor

from quack_core import torch_op

from . import check, launch, reference

_LIBRARY = torch.library.Library("quack_norm", "FRAGMENT")


class SoftmaxFunction(torch.autograd.Function):
    """Forward and backward of eager calls on CUDA tensors; operands as of ``softmax_fwd``."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = launch.forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return _gradients(ctx, dout)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.log, ctx.scale, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(output)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    (out,) = ctx.saved_tensors
    args = (out, dout, ctx.log, ctx.scale, ctx.dtype)
    if torch.is_grad_enabled() and (out.requires_grad or dout.requires_grad):
        return softmax_bwd(*args), None, None, None  # its own derivative raises
    direct = torch_op.eager(out, dout) and out.is_cuda
    return (launch.backward(*args) if direct else softmax_bwd(*args)), None, None, None


def _forward_cpu(x: Tensor, log: bool, scale: float, out_dtype: torch.dtype) -> Tensor:
    _check_forward(x, log, scale, out_dtype)
    return reference.forward(x, log, scale, out_dtype)


def _forward_cuda(x: Tensor, log: bool, scale: float, out_dtype: torch.dtype) -> Tensor:
    _check_forward(x, log, scale, out_dtype)
    return launch.forward(x, log, scale, out_dtype)


def _forward_fake(x: Tensor, log: bool, scale: float, out_dtype: torch.dtype) -> Tensor:
    _check_forward(x, log, scale, out_dtype)
    return torch.empty(x.shape, dtype=out_dtype, device=x.device)


def _check_forward(x: Tensor, log: bool, scale: float, out_dtype: torch.dtype) -> None:
    name = "log_softmax" if log else "softmax"
    check.operand(name, x, -1)
    torch_op.check_dtype(name, "dtype", out_dtype)


def _backward_cpu(
    out: Tensor, dout: Tensor, log: bool, scale: float, dx_dtype: torch.dtype
) -> Tensor:
    check.gradient("softmax", out, dout)
    return reference.backward(out, dout, log, scale, dx_dtype)


def _backward_cuda(
    out: Tensor, dout: Tensor, log: bool, scale: float, dx_dtype: torch.dtype
) -> Tensor:
    check.gradient("softmax", out, dout)
    return launch.backward(out, dout, log, scale, dx_dtype)


def _backward_fake(
    out: Tensor, dout: Tensor, log: bool, scale: float, dx_dtype: torch.dtype
) -> Tensor:
    check.gradient("softmax", out, dout)
    return torch.empty(out.shape, dtype=dx_dtype, device=out.device)


_no_second_derivative = torch_op.no_second_derivative(
    "softmax", "use torch.nn.functional.softmax for double backward"
)


softmax_fwd = torch_op.register(
    _LIBRARY,
    "softmax_fwd(Tensor x, bool log, float scale, ScalarType out_dtype) -> Tensor",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
    backward=_gradients,
    setup_context=lambda ctx, inputs, output: _save(ctx, inputs, output),
)

softmax_bwd = torch_op.register(
    _LIBRARY,
    "softmax_bwd(Tensor out, Tensor dout, bool log, float scale, ScalarType dx_dtype) -> Tensor",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
    backward=_no_second_derivative,
)
