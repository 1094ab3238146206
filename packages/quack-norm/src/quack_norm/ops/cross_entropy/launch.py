"""Cross-entropy on CUDA tensors: allocate, find the kernel, launch. A row holds the classes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quack_core import arch, dtypes, torch_op, torch_workspace
from quack_core.jit import cache
from quack_norm.ops import rows
from quack_norm.ops.row_map.launch import (
    ALIGN,
    Aligned,
    Launcher,
    resident_groups,
    row_align,
)

from . import reference, rules
from .config import STATE_INTS, WEIGHT_CHUNKS
from .spec import CrossEntropyBwdSpec, CrossEntropyFwdSpec, RescaleSpec

Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]

# The keys hold dtypes, ranks, the number of classes and flags: their number is bounded.
_launchers: dict[tuple[Any, ...], Launcher] = {}


def forward(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    want_dx: bool = False,
    inplace: bool = False,
) -> Forward:
    """As `reference.forward`, on CUDA tensors.

    Args:
        want_dx: also the gradient of the logits, for an incoming gradient of one; not under
            ``"none"``.
        inplace: it may replace the logits, in their memory; elements of input must not share any.

    Returns:
        ``(loss, lse, peak, exp_sum, total, dx)``. ``total`` is None where it is one and no kernel
        wrote it. dx lies in rows, see `as_input`; None if it is not wanted.
    """
    options = (ignore_index, reduction, label_smoothing, softcap, z_loss)
    if input.numel() == 0:  # torch's own kernels know what to do with nothing
        results = reference.forward(input, target, weight, *options)
        return *results, torch.empty_like(as_rows(input)) if want_dx else None
    packed = as_rows(input)
    dx = _gradient(packed, inplace or not _shares(packed, input)) if want_dx else None
    flags = (label_smoothing > 0, softcap is not None, z_loss > 0)
    weight_dtype = None if weight is None else weight.dtype
    kind = (packed.shape[-1], packed.dim(), packed.dtype, target.dtype, weight_dtype)
    key = (*kind, reduction, want_dx, *flags, input.get_device())
    launch = _launchers.get(key)
    if launch is None:
        spec = forward_spec(packed, target, weight, reduction, *flags, want_dx)
        launch = _launchers[key] = _forward_launcher(spec, input.get_device())
    # In their final shapes: a view could not be changed in place where autograd records it.
    lse = torch.empty(target.shape, dtype=torch.float32, device=input.device)
    peak, exp_sum = torch.empty_like(lse), torch.empty_like(lse)
    losses = sums = loss = total = None
    if reduction == "none":
        losses = torch.empty_like(lse, dtype=input.dtype)
    else:
        loss, total = input.new_empty(()), lse.new_empty(())
        sums = lse.new_empty((2, max(target.numel(), WEIGHT_CHUNKS)))
    launch(
        packed,
        _flat(target),
        _columns(weight),
        None if losses is None else _flat(losses),
        _flat(lse),
        _flat(peak),
        _flat(exp_sum),
        sums,
        None if total is None else total.view(1),
        None if loss is None else loss.view(1),
        dx,
        *_numbers(ignore_index, label_smoothing, softcap, z_loss),
    )
    found = losses if loss is None else loss
    assert found is not None
    return found, lse, peak, exp_sum, total, dx


def backward(
    dloss: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    peak: Tensor,
    exp_sum: Tensor,
    total: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    inplace: bool = False,
) -> Tensor:
    """As `reference.backward`, on CUDA tensors; ``inplace`` and a ``total`` of None as in `forward`."""
    if input.numel() == 0:
        return torch.zeros_like(input, memory_format=torch.contiguous_format)
    packed, count = as_rows(input), target.numel()
    dx = _gradient(packed, inplace or not _shares(packed, input))
    flags = (label_smoothing > 0, softcap is not None, z_loss > 0)
    weight_dtype = None if weight is None else weight.dtype
    kind = (packed.shape[-1], packed.dim(), packed.dtype, target.dtype, weight_dtype)
    key = (*kind, dloss.dtype, *flags, input.get_device())
    launch = _launchers.get(key)
    if launch is None:
        spec = backward_spec(dloss.dtype, packed, target, weight, *flags)
        launch = _launchers[key] = _backward_launcher(spec, input.get_device())
    if total is None:
        total = torch.ones(1, dtype=torch.float32, device=input.device)
    launch(
        dloss.reshape(-1) if reduction == "none" else dloss.reshape(1).expand(count),
        packed,
        _flat(target),
        _columns(weight),
        _flat(peak),
        _flat(exp_sum),
        total.view(1),
        dx,
        *_numbers(ignore_index, label_smoothing, softcap, z_loss),
    )
    return as_input(dx, input.shape)


def forward_spec(
    packed: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    smoothing: bool,
    softcap: bool,
    z_loss: bool,
    want_dx: bool,
) -> CrossEntropyFwdSpec:
    """The spec of the forward, fully aligned; operands give dtypes and shapes only.

    Args:
        packed: the logits as rows.
    """
    return CrossEntropyFwdSpec(
        n=packed.shape[-1],
        x=torch_op.dtype_name(packed.dtype),
        target=_integers(target),
        weight=None if weight is None else torch_op.dtype_name(weight.dtype),
        dx=want_dx,
        reduction=reduction,
        smoothing=smoothing,
        softcap=softcap,
        z_loss=z_loss,
        rank=packed.dim(),
    )


def backward_spec(
    dloss_dtype: torch.dtype,
    packed: Tensor,
    target: Tensor,
    weight: Tensor | None,
    smoothing: bool,
    softcap: bool,
    z_loss: bool,
) -> CrossEntropyBwdSpec:
    """The spec of the backward; see `forward_spec`."""
    return CrossEntropyBwdSpec(
        n=packed.shape[-1],
        x=torch_op.dtype_name(packed.dtype),
        target=_integers(target),
        dloss=torch_op.dtype_name(dloss_dtype),
        weight=None if weight is None else torch_op.dtype_name(weight.dtype),
        smoothing=smoothing,
        softcap=softcap,
        z_loss=z_loss,
        rank=packed.dim(),
    )


def plain(spec: Any) -> Any:
    """For operands that are contiguous from a multiple of 16 bytes on."""
    return replace(spec, align=row_align(spec.n, spec.x), in_phase=True)


def rescale_spec(dx_dtype: torch.dtype, factor_dtype: torch.dtype) -> RescaleSpec:
    """The spec of `rescale`."""
    return RescaleSpec(torch_op.dtype_name(dx_dtype), torch_op.dtype_name(factor_dtype))


def rescale(dx: Tensor, factor: Tensor) -> None:
    """Multiply a gradient by a number on its device, in place; nothing waits for the number.

    Args:
        dx: any strides.
        factor: one element.
    """
    if dx.numel() == 0:
        return
    if not dx.is_contiguous() or dx.data_ptr() % ALIGN:  # logits that their own gradient replaced
        with torch.no_grad():
            dx.mul_(factor.reshape(()))
        return
    key = (dx.dtype, factor.dtype, dx.get_device())
    launch = _launchers.get(key)
    if launch is None:
        spec = rescale_spec(dx.dtype, factor.dtype)
        with torch_workspace.relaxed_capture():
            function = _kernel(spec, rules.default_rescale, dx.get_device())
        launch = _launchers[key] = torch_op.on_device(function, dx.get_device())
    launch(dx.view(-1), factor.reshape(1))


def as_input(dx: Tensor, shape: torch.Size) -> Tensor:
    """The gradient in rows as one of logits of a shape: of more than two dimensions, one copy."""
    if len(shape) < 3:
        return dx.view(shape)
    return dx.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()


def as_rows(input: Tensor) -> Tensor:
    """``(M, C)`` or ``(M1, M0, C)``: a view if its strides allow it, otherwise one copy."""
    if input.dim() == 2:
        return input if rows.is_rows(input) else input.contiguous()
    moved = input.unsqueeze(0) if input.dim() == 1 else input.movedim(1, -1)
    if not rows.is_rows(moved):
        moved = moved.contiguous()
    shape, count = moved.shape, moved.shape[:-1].numel()
    groups = rows.outer_groups(shape, moved.stride())
    return moved.reshape(*(groups if len(groups) == 2 else (count,)), shape[-1])


def _shares(packed: Tensor, input: Tensor) -> bool:
    """Whether rows are a view of the logits."""
    return packed.data_ptr() == input.data_ptr()


def _gradient(packed: Tensor, replaces: bool) -> Tensor:
    """Memory for the gradient of rows: their own, or new."""
    if replaces:
        return packed.detach()
    return torch.empty_like(packed, memory_format=torch.contiguous_format)


def _flat(each: Tensor) -> Tensor:
    """Contiguous ``(M,)``."""
    each = each.contiguous()
    return each if each.dim() == 1 else each.view(-1)


def _columns(weight: Tensor | None) -> Tensor | None:
    """Contiguous from a multiple of 16 bytes on."""
    if weight is None:
        return None
    weight = weight.contiguous()
    return weight.clone() if weight.data_ptr() % ALIGN else weight


def _numbers(
    ignore_index: int, label_smoothing: float, softcap: float | None, z_loss: float
) -> tuple[int, float, float, float]:
    """As kernels take them; without a softcap they do not read it."""
    bound = 1.0 if softcap is None else float(softcap)
    return int(ignore_index), float(label_smoothing), bound, float(z_loss)


def _integers(target: Tensor) -> str:
    return str(target.dtype).removeprefix("torch.")


def _forward_launcher(spec: CrossEntropyFwdSpec, device: int) -> Launcher:
    """``launch(input, ..., loss, dx, numbers...)`` for rows like these, whatever their alignment."""

    def kernel(align: int, in_phase: bool) -> Launcher:
        exact = replace(spec, align=align, in_phase=in_phase)
        function = _kernel(exact, rules.default_fwd, device)
        config, reduces = rules.default_fwd(exact, arch.detect(device)), spec.reduction != "none"
        resident = resident_groups(device, exact, config) if config.persistent else 0

        def launch(*operands: Any) -> None:
            state = torch_workspace.counters(device, STATE_INTS) if reduces else None
            groups = config.groups(exact, operands[1].numel(), 1, resident) if resident else 0
            function(*operands[:11], state, *operands[11:], groups)

        return torch_op.on_device(launch, device)

    return Aligned(kernel, lambda input, *rest: _alignment(spec, input, rest[9]))


def _backward_launcher(spec: CrossEntropyBwdSpec, device: int) -> Launcher:
    """``launch(dloss, ..., dx, numbers...)`` for rows like these, whatever their alignment."""

    def kernel(align: int, in_phase: bool) -> Launcher:
        exact = replace(spec, align=align, in_phase=in_phase)
        return torch_op.on_device(_kernel(exact, rules.default_bwd, device), device)

    return Aligned(kernel, lambda _, input, *rest: _alignment(spec, input, rest[5]))


def _alignment(
    spec: CrossEntropyFwdSpec | CrossEntropyBwdSpec, input: Tensor, dx: Tensor | None
) -> tuple[int, bool]:
    """``align`` and ``in_phase`` of the spec for these rows."""
    if rows.are_plain(input, dx):
        return row_align(spec.n, spec.x), True
    align = rows.alignment(input, dx)
    return align, align == ALIGN or rows.in_phase(128 // dtypes.width(spec.x), input, dx)


def _kernel(spec: Any, choose: Callable[..., Any], device: int) -> Launcher:
    """The compiled function."""
    target = arch.detect(device)
    config = choose(spec, target)
    function: Launcher = cache.load(config.module, spec, config, target)
    return function
