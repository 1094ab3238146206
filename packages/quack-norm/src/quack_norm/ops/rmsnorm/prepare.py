"""From operands to a launcher of the forward: spec, config, kernel, and what is bound to a device."""

from dataclasses import replace

import torch
from torch import Tensor

from quack_core import arch, torch_op
from quack_core.jit import cache
from quack_norm.ops import rows
from quack_norm.ops.row_map.launch import (
    ALIGN,
    Aligned,
    Launcher,
    picker,
    row_align,
)

from . import rules
from .spec import RMSNormFwdSpec


def forward_spec(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    want_rstd: bool,
    centred: bool,
) -> RMSNormFwdSpec:
    """The spec of the forward, fully aligned; operands give dtypes and shapes only."""
    parameter = bias if weight is None else weight
    return RMSNormFwdSpec(
        n=x.shape[-1],
        x=torch_op.dtype_name(x.dtype),
        out=torch_op.dtype_name(out_dtype or x.dtype),
        weight=name_of(dtype_of(weight)),
        bias=name_of(dtype_of(bias)),
        residual=name_of(dtype_of(residual)),
        residual_out=name_of(residual_dtype),
        rstd=want_rstd,
        centred=centred,
        offset=weight is not None and weight_offset != 0,
        per_head=parameter is not None and parameter.dim() == 2,
        rank=x.dim(),
    )


def plain_forward(spec: RMSNormFwdSpec) -> RMSNormFwdSpec:
    """For operands that are contiguous from a multiple of 16 bytes on."""
    align = row_align(spec.n, spec.x, spec.out, spec.residual, spec.residual_out)
    weights = row_align(spec.n, spec.weight, spec.bias) if spec.per_head else ALIGN
    return replace(spec, align=align, weight_align=weights, in_phase=True)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    want_rstd: bool,
    aligned: bool,
    centred: bool = False,
) -> Launcher:
    """A launcher of the forward for rows like these.

    Args:
        aligned: whether all addresses and outer strides are multiples of 16 bytes. If a later
            launch breaks this, the launcher raises ValueError.

    Returns:
        ``launch(x, weight, bias, residual, out, residual_out, rstd, None, eps, offset, rows)``: the
        kernel itself, or a function that first finds the kernel, its state or its groups.
    """
    options = (weight_offset, out_dtype, residual_dtype, want_rstd, centred)
    spec = forward_spec(x, weight, bias, residual, *options)
    device, vector = x.get_device(), spec.full_vector
    whole = spec.n % vector == 0
    contiguous = plain_forward(spec)
    plain = (contiguous.align, contiguous.weight_align, True)

    def kernel(align: int, weight_align: int, in_phase: bool) -> Launcher:
        exact = replace(spec, align=align, weight_align=weight_align, in_phase=in_phase)
        return _forward_kernel(exact, device)

    def alignment(x, weight, bias, residual, out, h, *_):  # type: ignore[no-untyped-def]
        if rows.are_plain(x, weight, bias, residual, out, h):
            return plain
        moved = x, residual, out, h
        in_phase = whole or rows.in_phase(vector, *moved)
        return rows.alignment(*moved), rows.alignment(weight, bias), in_phase

    return kernel(ALIGN, ALIGN, True) if aligned and whole else Aligned(kernel, alignment)


def _forward_kernel(spec: RMSNormFwdSpec, device: int) -> Launcher:
    """The kernel, with groups and state if its CTAs stay."""
    target = arch.detect(device)
    chosen = rules.default_fwd(spec, target)
    if not (chosen.persistent or chosen.for_few(spec) or chosen.crowded(spec, target)):
        return torch_op.on_device(cache.load(chosen.module, spec, chosen, target), device)
    pick = picker(spec, chosen, device)

    def launch(x, weight, bias, residual, out, h, rstd, _, eps, offset, rows):  # type: ignore[no-untyped-def]
        kernel, state, groups = pick(rows)
        kernel(x, weight, bias, residual, out, h, rstd, state, eps, offset, groups)

    return torch_op.on_device(launch, device)


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    """None for an absent operand."""
    return None if tensor is None else tensor.dtype


def name_of(dtype: torch.dtype | None) -> str | None:
    """As specs name it; None for an absent operand."""
    return None if dtype is None else torch_op.dtype_name(dtype)
