"""From operands to a launcher of the backward, as `prepare` for the forward."""

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
    resident_groups,
    row_align,
)
from quack_norm.ops.row_map.spec import full_vector

from . import bwd_rules
from .bwd_spec import RMSNormBwdSpec
from .prepare import dtype_of, name_of


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
        weight=name_of(dtype_of(weight)),
        dweight=dweight,
        dbias=name_of(dbias_dtype),
        dresidual_out=name_of(dtype_of(dresidual_out)),
        dresidual=name_of(dresidual_dtype),
        offset=weight is not None and weight_offset != 0,
        per_head=per_head,
        rank=h.dim(),
        centred=centred,
    )


def plain_backward(spec: RMSNormBwdSpec) -> RMSNormBwdSpec:
    """As `prepare.plain_forward`."""
    align = row_align(spec.n, spec.x, spec.dout, spec.dx, spec.dresidual_out, spec.dresidual)
    weights = row_align(spec.n, spec.weight, spec.dbias) if spec.per_head else ALIGN
    return replace(spec, align=align, weight_align=weights)


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
    """A launcher of the backward for rows like these; ``aligned`` as in
    `prepare.forward`.

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


def _backward_kernel(spec: RMSNormBwdSpec, device: int) -> Launcher:
    """The kernel, with scratch, state and groups."""
    target = arch.detect(device)
    chosen = bwd_rules.default_bwd(spec, target)
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

    return torch_op.on_device(launch, device)
