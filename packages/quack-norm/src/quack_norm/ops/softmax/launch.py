"""Softmax on CUDA tensors: allocate, find the kernel, launch. Rows lie along the last dimension."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quack_core import arch, dtypes, torch_op
from quack_core.errors import UnsupportedError
from quack_norm.ops import rows
from quack_norm.ops.row_map import rules
from quack_norm.ops.row_map.config import RowConfig
from quack_norm.ops.row_map.launch import ALIGN, Aligned, Launcher, picker, row_align

from .config import BwdConfig, FwdConfig
from .spec import SoftmaxBwdSpec, SoftmaxFwdSpec

# The keys hold dtypes, ranks, N and flags. M is not among them, so their number is bounded.
_launchers: dict[tuple[Any, ...], Launcher] = {}


def forward(x: Tensor, log: bool, scale: float, out_dtype: torch.dtype) -> Tensor:
    """As `reference.forward`, on CUDA tensors."""
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if x.numel() == 0:
        return out
    outer = rows.outer_shape((x,), per_head=False)
    packed, result = rows.as_rows(x, outer), rows.as_rows(out, outer)
    key = (x.shape[-1], len(outer), x.dtype, out_dtype, log, scale != 1.0, x.get_device())
    launch = _launchers.get(key)
    if launch is None:
        spec = forward_spec(packed, log, scale, out_dtype)
        launch = _launchers[key] = _aligned(spec, x.get_device())
    launch(packed, result, scale, x.numel() // x.shape[-1])
    return out


def backward(out: Tensor, dout: Tensor, log: bool, scale: float, dx_dtype: torch.dtype) -> Tensor:
    """As `reference.backward`, on CUDA tensors."""
    dx = torch.empty(out.shape, dtype=dx_dtype, device=out.device)
    if out.numel() == 0:
        return dx
    outer = rows.outer_shape((dout, out), per_head=False)
    operands = tuple(rows.as_rows(tensor, outer) for tensor in (out, dout, dx))
    index, scaled = out.get_device(), scale != 1.0
    key = (out.shape[-1], len(outer), out.dtype, dout.dtype, dx_dtype, log, scaled, index)
    launch = _launchers.get(key)
    if launch is None:
        spec = backward_spec(operands[0], operands[1], log, scale, dx_dtype)
        launch = _launchers[key] = _aligned(spec, index)
    launch(*operands, scale, out.numel() // out.shape[-1])
    return dx


def forward_spec(x: Tensor, log: bool, scale: float, out_dtype: torch.dtype) -> SoftmaxFwdSpec:
    """The spec of the forward, fully aligned; x gives dtype and shape only, and is in rows."""
    return SoftmaxFwdSpec(
        n=x.shape[-1],
        x=torch_op.dtype_name(x.dtype),
        out=torch_op.dtype_name(out_dtype),
        log=log,
        scaled=scale != 1.0,
        rank=x.dim(),
    )


def backward_spec(
    out: Tensor, dout: Tensor, log: bool, scale: float, dx_dtype: torch.dtype
) -> SoftmaxBwdSpec:
    """The spec of the backward; see `forward_spec`."""
    return SoftmaxBwdSpec(
        n=out.shape[-1],
        out=torch_op.dtype_name(out.dtype),
        dout=torch_op.dtype_name(dout.dtype),
        dx=torch_op.dtype_name(dx_dtype),
        log=log,
        scaled=scale != 1.0,
        rank=out.dim(),
    )


def plain(spec: Any) -> Any:
    """For operands that are contiguous from a multiple of 16 bytes on."""
    moved = _moved(spec)
    return replace(spec, align=row_align(spec.n, *moved), in_phase=len(set(moved)) == 1)


def choose(spec: SoftmaxFwdSpec | SoftmaxBwdSpec, target: arch.Arch) -> RowConfig:
    """The configuration of a spec, whatever its alignment.

    Raises:
        UnsupportedError: there is none.
    """
    kind = FwdConfig if isinstance(spec, SoftmaxFwdSpec) else BwdConfig
    chosen: RowConfig | None = rules.choose(kind, replace(spec, align=ALIGN), target)
    if chosen is None:
        raise UnsupportedError(
            f"softmax, n={spec.n} on {target.name}",
            f"a cluster of {target.max_cluster} CTAs cannot hold such a row",
            "use shorter rows, or call it on the CPU",
        )
    return chosen


def _moved(spec: SoftmaxFwdSpec | SoftmaxBwdSpec) -> tuple[str, ...]:
    """Dtypes of the rows that are read and written."""
    return (spec.x, spec.out) if isinstance(spec, SoftmaxFwdSpec) else (*spec.rows, spec.dx)


def _aligned(spec: SoftmaxFwdSpec | SoftmaxBwdSpec, device: int) -> Launcher:
    """A launcher for rows like these, whatever their alignment."""
    contiguous, uniform = plain(spec), len(set(_moved(spec))) == 1
    vector = 128 // dtypes.width(spec.x)

    def kernel(align: int, in_phase: bool) -> Launcher:
        return _kernel(replace(spec, align=align, in_phase=in_phase), device)

    def alignment(*operands: Any) -> tuple[int, bool]:
        tensors = operands[:-2]
        if rows.are_plain(*tensors):
            return contiguous.align, contiguous.in_phase
        align = rows.alignment(*tensors)
        return align, uniform and (align == ALIGN or rows.in_phase(vector, *tensors))

    return Aligned(kernel, alignment)


def _kernel(spec: SoftmaxFwdSpec | SoftmaxBwdSpec, device: int) -> Launcher:
    """``launch(rows..., scale, number of rows)``"""
    chosen = choose(spec, arch.detect(device))
    pick = picker(spec, chosen, device)

    def launch(*operands: Any) -> None:
        run, _, _ = pick(operands[-1])
        run(*operands[:-1])

    return torch_op.on_device(launch, device)
