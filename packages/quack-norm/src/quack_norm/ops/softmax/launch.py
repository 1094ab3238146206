"""Softmax on CUDA tensors: allocate, find the kernel, launch. Rows lie along the last dimension."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quack_core import arch, dtypes, torch_op
from quack_core.errors import UnsupportedError
from quack_norm.ops import rows
from quack_norm.ops.row_map import rules
from quack_norm.ops.row_map.launch import ALIGN, Aligned, Launcher, on_device, picker, row_align

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
        spec = SoftmaxFwdSpec(
            n=x.shape[-1],
            x=torch_op.dtype_name(x.dtype),
            out=torch_op.dtype_name(out_dtype),
            log=log,
            scaled=scale != 1.0,
            rank=len(outer) + 1,
        )
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
        spec = SoftmaxBwdSpec(
            n=out.shape[-1],
            out=torch_op.dtype_name(out.dtype),
            dout=torch_op.dtype_name(dout.dtype),
            dx=torch_op.dtype_name(dx_dtype),
            log=log,
            scaled=scaled,
            rank=len(outer) + 1,
        )
        launch = _launchers[key] = _aligned(spec, index)
    launch(*operands, scale, out.numel() // out.shape[-1])
    return dx


def _aligned(spec: SoftmaxFwdSpec | SoftmaxBwdSpec, device: int) -> Launcher:
    """A launcher for rows like these, whatever their alignment."""
    moved = (spec.x, spec.out) if isinstance(spec, SoftmaxFwdSpec) else (*spec.rows, spec.dx)
    plain, uniform = row_align(spec.n, *moved), len(set(moved)) == 1
    vector = 128 // dtypes.width(spec.x)

    def kernel(align: int, in_phase: bool) -> Launcher:
        return _kernel(replace(spec, align=align, in_phase=in_phase), device)

    def alignment(*operands: Any) -> tuple[int, bool]:
        tensors = operands[:-2]
        if rows.are_plain(*tensors):
            return plain, uniform
        align = rows.alignment(*tensors)
        return align, uniform and (align == ALIGN or rows.in_phase(vector, *tensors))

    return Aligned(kernel, alignment)


def _kernel(spec: SoftmaxFwdSpec | SoftmaxBwdSpec, device: int) -> Launcher:
    """``launch(rows..., scale, number of rows)``"""
    target = arch.detect(device)
    kind = FwdConfig if isinstance(spec, SoftmaxFwdSpec) else BwdConfig
    chosen = rules.choose(kind, replace(spec, align=ALIGN), target)
    if chosen is None:
        raise UnsupportedError(
            f"softmax, n={spec.n} on {target.name}",
            f"a cluster of {target.max_cluster} CTAs cannot hold such a row",
            "use shorter rows, or call it on the CPU",
        )
    pick = picker(spec, chosen, device)

    def launch(*operands: Any) -> None:
        run, _, _ = pick(operands[-1])
        run(*operands[:-1])

    return on_device(launch, device)
