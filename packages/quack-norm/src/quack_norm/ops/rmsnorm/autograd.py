"""RMSNorm and LayerNorm as registered operators, and their gradients.

``quack_norm::rmsnorm_fwd`` and ``quack_norm::rmsnorm_bwd`` are what torch.compile, export, fake
tensors, tensor subclasses and the CPU see. Eager calls on CUDA tensors skip the dispatcher and
share the backward.
"""

from typing import Any

import torch
from torch import Tensor

from quack_core import torch_op

from . import check, launch, reference
from .spec import STATISTICS

_LIBRARY = torch.library.Library("quack_norm", "FRAGMENT")


class RMSNormFunction(torch.autograd.Function):
    """Forward and backward of eager calls on CUDA tensors; operands as of ``rmsnorm_fwd``.

    Without residual and change of dtype the second result is x itself, and its gradient is added
    within the backward kernel.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        operands: Any = (*inputs[:-1], True, None, inputs[-1])
        output = launch.forward(*operands)
        _save(ctx, inputs, output)
        return output  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return _gradients(ctx, *gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    """Keep h, weight and rstd for the backward."""
    x, weight, bias, residual, _, weight_offset, _, residual_dtype, ctx.centred = inputs
    _, stored, rstd = output
    unused = [rstd]
    if residual_dtype is None and stored is not None:
        unused.append(stored)
    ctx.mark_non_differentiable(*unused)
    ctx.set_materialize_grads(False)
    addend = residual if residual_dtype is None else None  # h was not stored: add again
    h = x if residual is None or residual_dtype is None else stored
    ctx.save_for_backward(h, addend, weight, rstd)
    ctx.weight_offset = weight_offset
    ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, bias, residual))
    parameter = bias if weight is None else weight
    ctx.per_head = parameter is not None and parameter.dim() == 2


def _gradients(
    ctx: Any, dout: Tensor | None, dresidual_out: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    """Gradients of the operands of ``rmsnorm_fwd``."""
    wants_x, wants_weight, wants_bias, wants_residual = ctx.needs_input_grad[:4]
    x_dtype, bias_dtype, residual_dtype = ctx.dtypes
    dx = dweight = dbias = dresidual = None
    if dout is not None:
        h, addend, weight, rstd = ctx.saved_tensors
        if addend is not None:
            h = h.float() + addend.float()
        direct = h.is_cuda and torch_op.eager(h, dout, dresidual_out)
        # under create_graph the operator makes a second derivative raise
        call = launch.backward if direct and not torch.is_grad_enabled() else rmsnorm_bwd
        dx, dresidual, dweight, dbias = call(
            h,
            weight,
            dout,
            rstd,
            dresidual_out,
            ctx.weight_offset,
            x_dtype,
            residual_dtype if wants_residual and residual_dtype != x_dtype else None,
            wants_weight,
            bias_dtype if wants_bias else None,
            ctx.per_head,
            ctx.centred,
        )
        if wants_residual and residual_dtype == x_dtype:
            dresidual = dx
    elif dresidual_out is not None:  # only h was used: its gradient passes through
        dx = dresidual_out.to(x_dtype) if wants_x else None
        dresidual = dresidual_out.to(residual_dtype) if wants_residual else None
    return (
        dx if wants_x else None,
        dweight if wants_weight else None,
        dbias if wants_bias else None,
        dresidual if wants_residual else None,
        *(None,) * 5,
    )


def _present(x: Tensor, results: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Operators return tensors only: an empty one stands for an absent result."""
    return tuple(x.new_empty(0) if t is None else t for t in results)


def _forward_cpu(*args: Any) -> tuple[Tensor, ...]:
    _check_forward(*args)
    return _present(args[0], reference.forward(*args))


def _forward_cuda(*args: Any) -> tuple[Tensor, ...]:
    operands: Any = (*args[:-1], True, None, args[-1])
    out, stored, rstd = launch.forward(*operands)
    x = args[0]
    return _present(x, (out, stored.clone() if stored is x else stored, rstd))


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    _check_forward(*args)
    x, *_, out_dtype, residual_dtype, centred = args
    stored = x.new_empty(0) if residual_dtype is None else _empty(x, residual_dtype)
    shape = (*x.shape[:-1], STATISTICS) if centred else x.shape[:-1]
    rstd = torch.empty(shape, dtype=torch.float32, device=x.device)
    return _empty(x, out_dtype or x.dtype), stored, rstd


def _backward_cpu(h: Tensor, *args: Any) -> tuple[Tensor, ...]:
    _check_backward(h, *args)
    return _present(h, reference.backward(h, *args))


def _backward_cuda(h: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _present(h, launch.backward(h, *args))


def _backward_fake(
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
    centred: bool,
) -> tuple[Tensor, ...]:
    options = (dx_dtype, dresidual_dtype, dweight, dbias_dtype, per_head, centred)
    _check_backward(h, weight, dout, rstd, dresidual_out, weight_offset, *options)
    parameter = h.shape[-2:] if per_head else h.shape[-1:]
    absent = h.new_empty(0)
    return (
        _empty(h, dx_dtype),
        absent if dresidual_dtype is None else _empty(h, dresidual_dtype),
        weight.new_empty(parameter) if dweight and weight is not None else absent.clone(),
        absent.clone() if dbias_dtype is None else h.new_empty(parameter, dtype=dbias_dtype),
    )


def _check_forward(*args: Any) -> None:
    options: Any = (*args[:-1], None, check.name_of(args[-1]))
    check.forward(*options)


def _check_backward(*args: Any) -> None:
    h, weight, dout, rstd, dresidual_out, _, *options = args
    checked: Any = (h, weight, dout, rstd, dresidual_out, *options, check.name_of(args[-1]))
    check.backward(*checked)


def _empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


_no_second_derivative = torch_op.no_second_derivative(
    "rmsnorm or layernorm", "use torch.nn.functional for double backward", whose="their"
)


rmsnorm_fwd = torch_op.register(
    _LIBRARY,
    "rmsnorm_fwd(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, "
    "float weight_offset, ScalarType? out_dtype, ScalarType? residual_dtype, bool centred) "
    "-> (Tensor out, Tensor residual_out, Tensor rstd)",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
    backward=_gradients,
    setup_context=lambda ctx, inputs, output: _save(ctx, inputs, output),
)
"""``residual_out`` is empty if ``residual_dtype`` is None; ``centred`` makes it LayerNorm."""

rmsnorm_bwd = torch_op.register(
    _LIBRARY,
    "rmsnorm_bwd(Tensor h, Tensor? weight, Tensor dout, Tensor rstd, Tensor? dresidual_out, "
    "float weight_offset, ScalarType dx_dtype, ScalarType? dresidual_dtype, bool dweight, "
    "ScalarType? dbias_dtype, bool per_head, bool centred) "
    "-> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
    backward=_no_second_derivative,
)
"""Results that are not wanted are empty."""
