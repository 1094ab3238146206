"""From operands to a launcher: spec, config, kernel, and what is bound to a device."""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from quack_core import arch, torch_op, torch_workspace
from quack_core.jit import cache
from quack_norm.ops import rows
from quack_norm.ops.row_map.launch import (
    ALIGN,
    Aligned,
    Launcher,
    on_device,
    picker,
    resident_groups,
    row_align,
)

from . import rules
from .spec import RMSNormBwdSpec, RMSNormFwdSpec, full_vector


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
        weight=_name(_dtype(weight)),
        bias=_name(_dtype(bias)),
        residual=_name(_dtype(residual)),
        residual_out=_name(residual_dtype),
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


def backward_spec(
    h: Tensor,
    weight: Tensor | None,
    dout: Tensor,
    dresidual_out: Tensor | None,
    weight_offset: float,
    dx_dtype: torch.dtype,
    dresidual_dtype: torch.dtype | None,
    dweight: bool,
    dbias_dtype: torch.dtype | None,
    per_head: bool,
    centred: bool,
) -> RMSNormBwdSpec:
    """The spec of the backward, fully aligned; operands give dtypes and shapes only."""
    return RMSNormBwdSpec(
        n=h.shape[-1],
        x=torch_op.dtype_name(h.dtype),
        dout=torch_op.dtype_name(dout.dtype),
        dx=torch_op.dtype_name(dx_dtype),
        weight=_name(_dtype(weight)),
        dweight=dweight,
        dbias=_name(dbias_dtype),
        dresidual_out=_name(_dtype(dresidual_out)),
        dresidual=_name(dresidual_dtype),
        offset=weight is not None and weight_offset != 0,
        per_head=per_head,
        rank=h.dim(),
        centred=centred,
    )


def plain_backward(spec: RMSNormBwdSpec) -> RMSNormBwdSpec:
    """As `plain_forward`."""
    align = row_align(spec.n, spec.x, spec.dout, spec.dx, spec.dresidual_out, spec.dresidual)
    weights = row_align(spec.n, spec.weight, spec.dbias) if spec.per_head else ALIGN
    return replace(spec, align=align, weight_align=weights)


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
    aligned: bool,
    centred: bool = False,
) -> Launcher:
    """A launcher of the backward for rows like these; ``aligned`` as in `forward`.

    Returns:
        ``launch(h, weight, dout, rstd, dresidual_out, dx, dresidual, dweight, dbias, None, None,
        offset, rows)``: it finds scratch, state and groups first.
    """
    options = (weight_offset, dx_dtype, dresidual_dtype, dweight, dbias_dtype, per_head, centred)
    spec = backward_spec(h, weight, dout, dresidual_out, *options)
    device = h.get_device()
    operands = (spec.x, spec.dout, spec.dx, spec.weight, spec.dbias)
    whole = spec.n % full_vector(*operands, spec.dresidual_out, spec.dresidual) == 0
    contiguous = plain_backward(spec)
    plain = (contiguous.align, contiguous.weight_align)

    def kernel(align: int, weight_align: int) -> Launcher:
        return _backward_kernel(replace(spec, align=align, weight_align=weight_align), device)

    def alignment(h, weight, dout, rstd, dh, dx, dresidual, dw, db, *_):  # type: ignore[no-untyped-def]
        if rows.are_plain(h, weight, dout, dh, dx, dresidual, dw, db):
            return plain
        return rows.alignment(h, dout, dh, dx, dresidual), rows.alignment(weight, dw, db)

    return kernel(ALIGN, ALIGN) if aligned and whole else Aligned(kernel, alignment)


def _forward_kernel(spec: RMSNormFwdSpec, device: int) -> Launcher:
    """The kernel, with groups and state if its CTAs stay."""
    target = arch.detect(device)
    chosen = rules.default_fwd(spec, target)
    if not (chosen.persistent or chosen.for_few(spec)):
        return on_device(cache.load(chosen.module, spec, chosen, target), device)
    pick = picker(spec, chosen, device)

    def launch(x, weight, bias, residual, out, h, rstd, _, eps, offset, rows):  # type: ignore[no-untyped-def]
        kernel, state, groups = pick(rows)
        kernel(x, weight, bias, residual, out, h, rstd, state, eps, offset, groups)

    return on_device(launch, device)


def _backward_kernel(spec: RMSNormBwdSpec, device: int) -> Launcher:
    """The kernel, with scratch, state and groups."""
    target = arch.detect(device)
    chosen = rules.default_bwd(spec, target)
    function = cache.load(chosen.module, spec, chosen, target)
    resident, sums = resident_groups(device, spec, chosen), spec.column_sums
    counters = torch_workspace.counters

    @functools.lru_cache
    def sizes(rows: int, heads: int) -> tuple[int, int, int]:
        """Clusters for each head; elements of scratch; counters."""
        groups = chosen.groups(spec, rows // heads, heads, resident)
        return groups, chosen.work_elements(spec, groups, heads), chosen.state_ints * heads

    def launch(h, weight, dout, rstd, dh, dx, dresidual, dw, db, _, __, offset, rows):  # type: ignore[no-untyped-def]
        groups, elements, ints = sizes(rows, h.shape[1] if spec.per_head else 1)
        work = state = None
        if sums:  # partial sums over rows, and who arrives last
            work, state = h.new_empty(elements, dtype=torch.float32), counters(device, ints)
        operands = (h, weight, dout, rstd, dh, dx, dresidual, dw, db)
        function(*operands, work, state, offset, groups)

    return on_device(launch, device)


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else torch_op.dtype_name(dtype)
