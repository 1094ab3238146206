"""Cross-entropy as registered operators, and its gradient.

``quack_norm::cross_entropy_fwd`` and ``quack_norm::cross_entropy_bwd`` are what torch.compile,
export, fake tensors, tensor subclasses and the CPU see. Eager calls on CUDA tensors skip the
dispatcher: where the gradient is known but for one number, one pass over the logits gives loss and
gradient; elsewhere they share the backward.
"""

from typing import Any

import torch
from torch import Tensor

from quack_core import torch_op
from quack_core.errors import UnsupportedError

from . import check, launch, reference

_LIBRARY = torch.library.Library("quack_norm", "FRAGMENT")


class FusedFunction(torch.autograd.Function):
    """A mean or a sum; the forward keeps the gradient for an incoming one of 1, not the logits.

    Operands are ``inplace``, then those of ``cross_entropy_fwd``; results ``(loss, lse)``.
    """

    @staticmethod
    def forward(ctx: Any, inplace: bool, *inputs: Any) -> tuple[Tensor, Tensor]:
        operands: Any = (*inputs, True, inplace)
        loss, lse, *_, dx = launch.forward(*operands)
        assert dx is not None
        if inplace and dx.data_ptr() == inputs[0].data_ptr():
            torch_op.bump_version(inputs[0])  # whoever keeps the logits must notice
        ctx.save_for_backward(dx)
        ctx.shape, ctx.used = inputs[0].shape, False
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        if dloss is None:
            return (None,) * 9
        _refuse_second(ctx)
        (dx,) = ctx.saved_tensors
        if torch_op.eager(dloss):
            ctx.used = True
            launch.rescale(dx, dloss)
            torch_op.bump_version(dx)
        else:  # torch has to see the operation
            dx = dx * dloss
        dx = launch.as_input(dx, ctx.shape)
        if torch.is_grad_enabled():
            dx = _Constant.apply(dx.detach().requires_grad_())
        return None, dx, *(None,) * 7


class CrossEntropyFunction(torch.autograd.Function):
    """The other eager calls on CUDA tensors; operands and results as of `FusedFunction`."""

    @staticmethod
    def forward(ctx: Any, inplace: bool, *inputs: Any) -> tuple[Tensor, Tensor]:
        loss, lse, peak, exp_sum, total, _ = launch.forward(*inputs)
        _save(ctx, inputs, (peak, exp_sum, total), inplace)
        ctx.mark_non_differentiable(lse)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        return None, *_gradients(ctx, dloss)


class _Constant(torch.autograd.Function):
    """A gradient that no graph leads to: its derivative raises instead of being left out."""

    @staticmethod
    def forward(ctx: Any, dx: Tensor) -> Tensor:
        return dx.view_as(dx)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        _no_second_derivative(ctx)


def _save(ctx: Any, inputs: tuple[Any, ...], sums: tuple[Any, ...], inplace: bool) -> None:
    ctx.set_materialize_grads(False)
    input, target, weight, *ctx.options = inputs
    ctx.save_for_backward(input, target, weight, *sums)
    ctx.inplace, ctx.used = inplace, False


def _gradients(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """Gradients of the operands of ``cross_entropy_fwd``."""
    if dloss is None:
        return (None,) * 8
    _refuse_second(ctx)
    input, target, weight, peak, exp_sum, total = ctx.saved_tensors
    operands: Any = (dloss, input, target, weight, peak, exp_sum)
    # under create_graph the operator makes a second derivative raise
    if input.is_cuda and torch_op.eager(*operands[:4]) and not torch.is_grad_enabled():
        whole: Any = (*operands, total, *ctx.options, ctx.inplace)
        dx = launch.backward(*whole)
        if ctx.inplace and dx.data_ptr() == input.data_ptr():
            ctx.used = True
            torch_op.bump_version(input)
    else:
        dx = cross_entropy_bwd(
            *operands, peak.new_ones(()) if total is None else total, *ctx.options
        )
    return dx, *(None,) * 7


def _refuse_second(ctx: Any) -> None:
    """Raise if a backward has overwritten what this one needs."""
    if ctx.used:
        raise UnsupportedError(
            "cross_entropy: a second backward was asked for",
            "the first one has used up the gradient that the forward computed, or overwritten the "
            "logits",
            'call cross_entropy again; or pass reduction="none", without inplace_backward, and '
            "reduce the result",
        )


def _forward_cpu(input: Tensor, target: Tensor, *options: Any) -> tuple[Tensor, ...]:
    check.forward(input, target, *options)
    check.labels(target, input.shape[min(input.dim() - 1, 1)], options[1])
    return reference.forward(input, target, *options)


def _forward_cuda(*operands: Any) -> tuple[Tensor, ...]:
    check.forward(*operands)
    loss, lse, peak, exp_sum, total, _ = launch.forward(*operands)
    return loss, lse, peak, exp_sum, lse.new_ones(()) if total is None else total


def _forward_fake(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
) -> tuple[Tensor, ...]:
    options = (ignore_index, reduction, label_smoothing, softcap, z_loss)
    check.forward(input, target, weight, *options)
    loss = input.new_empty(target.shape if reduction == "none" else ())
    lse, peak, exp_sum = (input.new_empty(target.shape, dtype=torch.float32) for _ in range(3))
    return loss, lse, peak, exp_sum, input.new_empty((), dtype=torch.float32)


def _backward_cpu(*operands: Any) -> Tensor:
    check.backward(*operands)
    return reference.backward(*operands)


def _backward_cuda(*operands: Any) -> Tensor:
    check.backward(*operands)
    return launch.backward(*operands)


def _backward_fake(*operands: Any) -> Tensor:
    check.backward(*operands)
    input: Tensor = operands[1]
    return input.new_empty(input.shape)


_no_second_derivative = torch_op.no_second_derivative(
    "cross_entropy", "use torch.nn.functional.cross_entropy for double backward"
)


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs, output[2:], inplace=False)
    ctx.mark_non_differentiable(*output[1:])


_OPTIONS = "int ignore_index, str reduction, float label_smoothing, float? softcap, float z_loss"

cross_entropy_fwd = torch_op.register(
    _LIBRARY,
    f"cross_entropy_fwd(Tensor input, Tensor target, Tensor? weight, {_OPTIONS}) -> "
    "(Tensor loss, Tensor lse, Tensor peak, Tensor exp_sum, Tensor total)",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
    backward=_gradients,
    setup_context=lambda ctx, inputs, output: _save_all(ctx, inputs, output),
)

cross_entropy_bwd = torch_op.register(
    _LIBRARY,
    "cross_entropy_bwd(Tensor dloss, Tensor input, Tensor target, Tensor? weight, Tensor peak, "
    f"Tensor exp_sum, Tensor total, {_OPTIONS}) -> Tensor",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
    backward=_no_second_derivative,
)
