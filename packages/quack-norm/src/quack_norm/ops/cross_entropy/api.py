"""The public function."""

from typing import Literal, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from quack_core import torch_op

from . import autograd, check, launch


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    return_lse: Literal[False] = False,
    inplace_backward: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
) -> Tensor: ...
@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    return_lse: bool = False,
    inplace_backward: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    return_lse: bool = False,
    inplace_backward: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of logits and class indices, as ``torch.nn.functional.cross_entropy``.

        z    = softcap * tanh(input / softcap), or input without a softcap
        lse  = log(sum(exp(z)))                                        over the C classes
        loss = (1 - s) * w[t] * (lse - z[t]) + s / C * sum_c(w[c] * (lse - z[c])) + z_loss * lse^2

    CUDA tensors run a CuTe kernel, CPU tensors the reference; meta and fake tensors give shapes.
    Differentiable once, in input. Class probabilities as targets are not implemented.

    Args:
        input: logits ``(C,)``, ``(N, C)`` or ``(N, C, d1, ...)``, in float32, bfloat16 or float16.
            Contiguous classes with up to two outer strides, at any alignment, are read where they
            lie; other layouts, hence most logits of more than two dimensions, are copied once, and
            their gradient is once more.
        target: labels t, shaped like input without its classes, int32 or int64.
        weight: w, ``(C,)``, in any of the three dtypes; ones by default. It has no gradient.
        ignore_index: positions with this label have loss and gradient zero, whatever their logits.
        reduction: ``"none"``; ``"sum"``; or ``"mean"``, which divides the sum by that of w[t] over
            the positions that are not ignored.
        label_smoothing: s, from 0 to 1.
        softcap: bound of the logits.
        z_loss: factor of lse^2, which keeps the sum of exponentials near one.
        return_lse: return lse as well. It is not differentiable.
        inplace_backward: the gradient may overwrite the logits, from this call on. It does in eager
            mode on CUDA devices where they are read where they lie; only one backward is possible
            then. They must be the result of an operation.
        size_average, reduce: torch's deprecated spelling of ``reduction``.

    Returns:
        The loss in the dtype of input, shaped like target under ``"none"``, without dimensions
        otherwise; or ``(loss, lse)``, lse in float32 and shaped like target.

    Raises:
        ShapeError, DTypeError, DeviceError: operands that do not fit together.
        OptionError: an option out of its range.
        LabelError: on the CPU, a label that is neither a class nor ``ignore_index``. On CUDA
            devices it makes the loss NaN: looking at it would wait for the device.
        LayoutError, UnsupportedError: logits that ``inplace_backward`` must not overwrite.
        UnsupportedError: more classes than a kernel takes; class probabilities; a weight that
            requires a gradient; second derivatives; a second backward of a mean or sum, in eager
            mode on CUDA devices and but for float16, whose gradient the forward computes and the
            backward uses up. Reduce the result of ``"none"`` where that is needed.
        ArchError: there is no kernel for the GPU.

    Numerics:
        All arithmetic is float32; every result is rounded once, but a gradient from the forward
        twice if its incoming one is not 1. Deterministic; loss, lse and gradient of a position have
        the same bits whatever positions come with it, but for the total of a mean. Sums over
        positions are added in an order that their number fixes.

    Source: Szegedy et al., Rethinking the Inception Architecture, arXiv:1512.00567 (smoothing);
    Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867.
    """
    if size_average is not None or reduce is not None:
        reduction = check.reduction_of(size_average, reduce, reduction)
    if not is_dynamo_compiling():  # there, the operator's fake does it
        check.forward(
            input, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss
        )
        if inplace_backward and is_grad_enabled():
            check.in_place(input)
    args = (input, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss)
    loss: Tensor
    lse: Tensor
    if not (torch_op.eager(input, target, weight) and input.is_cuda):
        torch_op.check_no_tangent("cross_entropy", input, weight)
        loss, lse, *_ = autograd.cross_entropy_fwd(*args)
    elif not (is_grad_enabled() and input.requires_grad):
        loss, lse, *_ = launch.forward(*args)
    elif reduction == "none" or input.dtype == torch.float16:
        # float16 has no room for small probabilities divided by N before a loss scale lifts them
        loss, lse = autograd.CrossEntropyFunction.apply(inplace_backward, *args)
    else:
        loss, lse = autograd.FusedFunction.apply(inplace_backward, *args)
    return (loss, lse) if return_lse else loss
