"""Top-k as registered operators, and its gradient.

``quack_norm::topk_fwd`` and ``quack_norm::topk_bwd`` are what torch.compile, export, fake tensors,
tensor subclasses and the CPU see. Eager calls on CUDA tensors skip the dispatcher and share the
backward.
"""

from typing import Any

import torch
from torch import Tensor

from quack_core import torch_op

from . import check, launch, reference

_LIBRARY = torch.library.Library("quack_norm", "FRAGMENT")


class TopKFunction(torch.autograd.Function):
    """Forward and backward of eager calls on CUDA tensors; operands as of ``topk_fwd``."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = launch.forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return _gradients(ctx, *gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, softmax = inputs
    values, indices = output
    ctx.mark_non_differentiable(indices)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(indices, values if softmax else None)
    ctx.n, ctx.dtype = x.shape[-1], x.dtype


def _gradients(ctx: Any, dvalues: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dvalues is None:
        return None, None, None
    indices, values = ctx.saved_tensors
    direct = indices.is_cuda and torch_op.eager(dvalues, indices, values)
    # under create_graph the operator makes a second derivative raise
    call = launch.backward if direct and not torch.is_grad_enabled() else topk_bwd
    return call(dvalues, indices, values, ctx.n, ctx.dtype), None, None


def _forward_cpu(x: Tensor, k: int, softmax: bool) -> tuple[Tensor, Tensor]:
    check.forward(x, k, softmax)
    return reference.forward(x, k, softmax)


def _forward_cuda(x: Tensor, k: int, softmax: bool) -> tuple[Tensor, Tensor]:
    check.forward(x, k, softmax)
    return launch.forward(x, k, softmax)


def _forward_fake(x: Tensor, k: int, softmax: bool) -> tuple[Tensor, Tensor]:
    check.forward(x, k, softmax)
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _backward_cpu(*operands: Any) -> Tensor:
    check.backward(*operands)
    return reference.backward(*operands)


def _backward_cuda(*operands: Any) -> Tensor:
    check.backward(*operands)
    return launch.backward(*operands)


def _backward_fake(
    dvalues: Tensor, indices: Tensor, softmax_values: Tensor | None, n: int, dx_dtype: torch.dtype
) -> Tensor:
    check.backward(dvalues, indices, softmax_values, n, dx_dtype)
    return indices.new_empty((*indices.shape[:-1], n), dtype=dx_dtype)


_no_second_derivative = torch_op.no_second_derivative(
    "topk", "use torch.topk, and torch.nn.functional.softmax, for double backward"
)


topk_fwd = torch_op.register(
    _LIBRARY,
    "topk_fwd(Tensor x, int k, bool softmax) -> (Tensor, Tensor)",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
    backward=_gradients,
    setup_context=lambda ctx, inputs, output: _save(ctx, inputs, output),
)

topk_bwd = torch_op.register(
    _LIBRARY,
    "topk_bwd(Tensor dvalues, Tensor indices, Tensor? softmax_values, SymInt n, "
    "ScalarType dx_dtype) -> Tensor",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
    backward=_no_second_derivative,
)
