"""From operands to a launcher: spec, config, kernel, and what is bound to a device."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quack_core import arch, dtypes, occupancy, torch_op, torch_workspace
from quack_core.jit import cache
from quack_norm.ops import rows

from . import config, rules
from .spec import RMSNormBwdSpec, RMSNormFwdSpec, full_vector

Launcher = Callable[..., None]

ALIGN = 16
"""Bytes of the widest access: with this alignment kernels are at their best."""

_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


class Aligned:
    """Launches the kernel for the alignment of its operands; compiles it when it is new.

    The kernels themselves refuse operands that are aligned less than they were compiled for. This
    stands in for them where rows are no multiple of 16 bytes, or after the first refusal.

    Args:
        kernel: gives the launcher for values of `alignment`.
        alignment: of the operands of a launch.
    """

    def __init__(
        self, kernel: Callable[..., Launcher], alignment: Callable[..., tuple[Any, ...]]
    ) -> None:
        self._kernel, self._alignment = kernel, alignment
        self._launchers: dict[tuple[Any, ...], Launcher] = {}

    def __call__(self, *operands: Any) -> None:
        key = self._alignment(*operands)
        launch = self._launchers.get(key)
        if launch is None:
            with torch_workspace.relaxed_capture():
                launch = self._launchers[key] = self._kernel(*key)
        launch(*operands)


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
) -> Launcher:
    """A launcher of the forward for rows like these.

    Args:
        aligned: whether all addresses and outer strides are multiples of 16 bytes. If a later
            launch breaks this, the launcher raises ValueError.

    Returns:
        ``launch(x, weight, bias, residual, out, residual_out, rstd, None, eps, offset, rows)``: the
        kernel itself, or a function that first finds the kernel, its state or its groups.
    """
    parameter = bias if weight is None else weight
    spec = RMSNormFwdSpec(
        n=x.shape[-1],
        x=torch_op.dtype_name(x.dtype),
        out=torch_op.dtype_name(out_dtype or x.dtype),
        weight=_name(_dtype(weight)),
        bias=_name(_dtype(bias)),
        residual=_name(_dtype(residual)),
        residual_out=_name(residual_dtype),
        rstd=want_rstd,
        offset=weight is not None and weight_offset != 0,
        per_head=parameter is not None and parameter.dim() == 2,
        rank=x.dim(),
    )
    device, vector = x.get_device(), spec.full_vector
    whole = spec.n % vector == 0
    compact = _row_align(spec.n, spec.x, spec.out, spec.residual, spec.residual_out)
    plain = (compact, _row_align(spec.n, spec.weight, spec.bias) if spec.per_head else ALIGN, True)

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
) -> Launcher:
    """A launcher of the backward for rows like these; ``aligned`` as in `forward`.

    Returns:
        ``launch(h, weight, dout, rstd, dresidual_out, dx, dresidual, dweight, dbias, None, None,
        offset, rows)``: it finds scratch, state and groups first.
    """
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
    )
    device = h.get_device()
    operands = (spec.x, spec.dout, spec.dx, spec.weight, spec.dbias)
    whole = spec.n % full_vector(*operands, spec.dresidual_out, spec.dresidual) == 0
    moved = (spec.x, spec.dout, spec.dx, spec.dresidual_out, spec.dresidual)
    parameters = _row_align(spec.n, spec.weight, spec.dbias) if per_head else ALIGN
    plain = (_row_align(spec.n, *moved), parameters)

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
    if not chosen.persistent:
        return _on_device(cache.load(chosen.module, spec, chosen, target), device)
    return _on_device(_staying(spec, chosen, device), device)


def _staying(spec: RMSNormFwdSpec, chosen: config.FwdConfig, device: int) -> Launcher:
    """A kernel whose CTAs stay; where each would have one tile, the one of the same bits."""
    target, single = arch.detect(device), chosen.one_tile()

    @functools.cache
    def kernel(few: bool) -> Launcher:
        use = single if few else chosen
        with torch_workspace.relaxed_capture():
            return cache.load(use.module, spec, use, target)

    resident, ints = _resident(device, spec, chosen), chosen.state_ints
    counters = torch_workspace.counters

    @functools.lru_cache
    def groups(rows: int) -> int:
        return chosen.groups(spec, rows, 1, resident)

    def launch(x, weight, bias, residual, out, h, rstd, _, eps, offset, rows):  # type: ignore[no-untyped-def]
        few = not spec.odd and rows <= resident  # odd rows have another tiling there
        state = None if few else counters(device, ints)
        operands = (x, weight, bias, residual, out, h, rstd, state)
        kernel(few)(*operands, eps, offset, groups(rows))

    return launch


def _backward_kernel(spec: RMSNormBwdSpec, device: int) -> Launcher:
    """The kernel, with scratch, state and groups."""
    target = arch.detect(device)
    chosen = rules.default_bwd(spec, target)
    function = cache.load(chosen.module, spec, chosen, target)
    resident, sums = _resident(device, spec, chosen), spec.column_sums
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

    return _on_device(launch, device)


def _on_device(launch: Launcher, device: int) -> Launcher:
    """``launch`` with its device current; the caller's comes back afterwards."""
    if torch.cuda.device_count() <= 1:
        return launch

    def switching(*args: Any) -> None:
        if _current_device() == device:
            launch(*args)
        else:
            with torch.cuda.device(device):
                launch(*args)

    return switching


def _resident(device: int, spec: Any, chosen: Any) -> int:
    """Clusters that are on the device together."""
    sizes = (chosen.cluster, chosen.num_threads, chosen.smem_bytes(spec))
    return occupancy.resident_clusters(device, *sizes, registers=chosen.registers)


def _row_align(n: int, *names: str | None) -> int:
    """Bytes that divide the strides of contiguous rows of these dtypes."""
    return math.gcd(ALIGN, *(n * dtypes.width(name) // 8 for name in names if name))


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else torch_op.dtype_name(dtype)
