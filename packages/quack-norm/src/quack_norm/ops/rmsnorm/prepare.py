"""From operands to a launcher: spec, config, kernel, and what is bound to a device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quack_core import arch, occupancy, torch_op, torch_workspace
from quack_core.jit import cache
from quack_norm.ops import rows

from . import config
from .spec import RMSNormBwdSpec, RMSNormFwdSpec

Launcher = Callable[..., None]


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
    bits: int,
) -> Launcher:
    """A launcher of the forward for rows like these.

    Args:
        bits: addresses and strides of the strided operands, or-ed together.

    Returns:
        ``launch(x, weight, bias, residual, out, residual_out, rstd, None, eps, offset, 0)``: the
        kernel itself, or a function that finds state and groups first.
    """
    out_dtype = out_dtype or x.dtype
    per_head = _per_head(weight, bias)
    moved = [x.dtype, out_dtype, _dtype(residual), residual_dtype]
    if per_head:
        moved += [_dtype(weight), _dtype(bias)]
    spec = RMSNormFwdSpec(
        n=x.shape[-1],
        x=torch_op.dtype_name(x.dtype),
        out=torch_op.dtype_name(out_dtype),
        weight=_name(_dtype(weight)),
        bias=_name(_dtype(bias)),
        residual=_name(_dtype(residual)),
        residual_out=_name(residual_dtype),
        rstd=want_rstd,
        offset=weight is not None and weight_offset != 0,
        per_head=per_head,
        rank=x.dim(),
        align=_align(bits, x.shape[-1], moved),
    )
    device = x.get_device()
    target = arch.detect(device)
    chosen = config.default_fwd(spec, target)
    function = cache.load(chosen.module, spec, chosen, target)
    resident = _resident(device, spec, chosen)

    ints = chosen.state_ints

    def stay(x, weight, bias, residual, out, h, rstd, _, eps, offset, __):  # type: ignore[no-untyped-def]
        groups = chosen.groups(spec, _count(x), 1, resident)
        state = torch_workspace.counters(device, ints) if ints else None
        function(x, weight, bias, residual, out, h, rstd, state, eps, offset, groups)

    return _on_device(stay if chosen.persistent else function, device)


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
    bits: int,
) -> Launcher:
    """A launcher of the backward for rows like these.

    Returns:
        ``launch(h, weight, dout, rstd, dresidual_out, dx, dresidual, dweight, dbias, None, None,
        offset, 0)``: a function that finds scratch, state and groups first.
    """
    moved = [h.dtype, dout.dtype, dx_dtype, _dtype(dresidual_out), dresidual_dtype]
    if per_head:
        moved += [_dtype(weight), dbias_dtype]
    spec = RMSNormBwdSpec(
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
        align=_align(bits, h.shape[-1], moved),
    )
    device = h.get_device()
    target = arch.detect(device)
    chosen = config.default_bwd(spec, target)
    function = cache.load(chosen.module, spec, chosen, target)
    resident = _resident(device, spec, chosen)

    def launch(h: Tensor, *args: Any) -> None:
        *operands, _, _, offset, _ = args
        heads, groups, work, state = _heads(spec, h), 0, None, None
        if chosen.persistent:
            groups = chosen.groups(spec, _count(h) // heads, heads, resident)
        elements = chosen.work_elements(spec, groups, heads)
        if elements:  # sums over rows: partial ones, and who arrives last
            work = h.new_empty(elements, dtype=torch.float32)
            state = torch_workspace.counters(device, chosen.state_ints * heads)
        function(h, *operands, work, state, offset, groups)

    return _on_device(launch, device)


def _on_device(launch: Launcher, device: int) -> Launcher:
    """``launch`` with its device current; the caller's comes back afterwards."""
    if torch.cuda.device_count() == 1:
        return launch

    def switching(*args: Any) -> None:
        if torch.cuda.current_device() == device:
            launch(*args)
        else:
            with torch.cuda.device(device):
                launch(*args)

    return switching


def _resident(device: int, spec: Any, chosen: config.FwdConfig | config.BwdConfig) -> int:
    if not chosen.persistent:
        return 0
    smem_bytes = chosen.smem_bytes(spec)
    return occupancy.resident_clusters(device, chosen.cluster, chosen.num_threads, smem_bytes)


def _align(bits: int, n: int, moved: list[torch.dtype | None]) -> int:
    """Alignment of every address and row, contiguous operands included."""
    for dtype in moved:
        if dtype is not None:
            bits |= n * dtype.itemsize
    return rows.alignment(bits)


def _per_head(weight: Tensor | None, bias: Tensor | None) -> bool:
    parameter = bias if weight is None else weight
    return parameter is not None and parameter.dim() == 2


def _heads(spec: RMSNormFwdSpec | RMSNormBwdSpec, x: Tensor) -> int:
    return x.shape[1] if spec.per_head else 1


def _count(x: Tensor) -> int:
    """Rows of ``(M, N)`` or ``(M1, M0, N)``."""
    shape = x.shape
    return shape[0] if len(shape) == 2 else shape[0] * shape[1]


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else torch_op.dtype_name(dtype)
