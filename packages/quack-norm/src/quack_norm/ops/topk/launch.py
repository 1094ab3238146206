"""Top-k on CUDA tensors: allocate, find the kernel, launch. Rows lie along the last dimension."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quack_core import arch, dtypes, torch_op, torch_workspace
from quack_core.jit import cache
from quack_norm.ops import rows
from quack_norm.ops.row_map.launch import ALIGN, Aligned, Launcher, row_align

from .config import SelectConfig, SortConfig, default_bwd, default_fwd
from .spec import TopKBwdSpec, TopKFwdSpec

# The keys hold dtypes, ranks, N, k and flags. M is not among them, so their number is bounded.
_launchers: dict[tuple[Any, ...], Launcher] = {}


def forward(x: Tensor, k: int, softmax: bool) -> tuple[Tensor, Tensor]:
    """As `reference.forward`, on CUDA tensors."""
    shape, n, index = (*x.shape[:-1], k), x.shape[-1], x.get_device()
    values = torch.empty(shape, dtype=x.dtype, device=x.device)
    indices = torch.empty(shape, dtype=torch.int64, device=x.device)
    if x.numel() == 0:
        return values, indices
    outer = rows.outer_shape((x,), per_head=False)
    key = (n, k, x.dtype, softmax, len(outer), index)
    launch = _launchers.get(key)
    if launch is None:
        spec = forward_spec(x, k, softmax, len(outer) + 1)
        launch = _launchers[key] = _forward(spec, index)
    launch(rows.as_rows(x, outer), values.view(-1, k), indices.view(-1, k))
    return values, indices


def backward(
    dvalues: Tensor, indices: Tensor, softmax_values: Tensor | None, n: int, dx_dtype: torch.dtype
) -> Tensor:
    """As `reference.backward`, on CUDA tensors."""
    k, index = indices.shape[-1], indices.get_device()
    dx = torch.empty((*indices.shape[:-1], n), dtype=dx_dtype, device=indices.device)
    if dx.numel() == 0:
        return dx
    kind = None if softmax_values is None else softmax_values.dtype
    key = (n, k, dvalues.dtype, dx_dtype, kind, index)
    launch = _launchers.get(key)
    if launch is None:
        spec = backward_spec(n, k, dvalues.dtype, dx_dtype, kind)
        launch = _launchers[key] = _kernel(spec, index)
    launch(
        rows.as_rows(dvalues, (indices.numel() // k,)),
        indices.contiguous().view(-1, k),
        None if softmax_values is None else softmax_values.contiguous().view(-1, k),
        dx.view(-1, n),
    )
    return dx


def forward_spec(x: Tensor, k: int, softmax: bool, rank: int) -> TopKFwdSpec:
    """The spec of the forward, fully aligned; x gives dtype and N only.

    Args:
        rank: dimensions of x as rows.
    """
    return TopKFwdSpec(x.shape[-1], k, torch_op.dtype_name(x.dtype), softmax, rank)


def backward_spec(
    n: int, k: int, dvalues: torch.dtype, dx: torch.dtype, values: torch.dtype | None
) -> TopKBwdSpec:
    """The spec of the backward, from dtypes."""
    return TopKBwdSpec(
        n=n,
        k=k,
        dvalues=torch_op.dtype_name(dvalues),
        dx=torch_op.dtype_name(dx),
        values=None if values is None else torch_op.dtype_name(values),
    )


def plain(spec: TopKFwdSpec) -> TopKFwdSpec:
    """For operands that are contiguous from a multiple of 16 bytes on."""
    return _for_alignment(spec, row_align(spec.n, spec.x))


def _for_alignment(spec: TopKFwdSpec, found: int) -> TopKFwdSpec:
    """The spec for rows of an alignment in bytes."""
    config, element = default_fwd(spec), dtypes.width(spec.x) // 8
    if isinstance(config, SelectConfig):  # takes rows that begin anywhere
        return replace(spec, align=element)
    # groups are read in whole vectors of memory: either rows begin with one, or anywhere
    kept = isinstance(config, SortConfig) or found == ALIGN
    return replace(spec, align=found if kept else element)


def _forward(spec: TopKFwdSpec, device: int) -> Launcher:
    """A launcher for rows like these, whatever their alignment."""
    if isinstance(default_fwd(spec), SelectConfig):
        return _kernel(_for_alignment(spec, ALIGN), device)

    def alignment(x: Tensor, *_: Tensor) -> tuple[int]:
        return (_for_alignment(spec, rows.alignment(x)).align,)

    return Aligned(lambda align: _kernel(replace(spec, align=align), device), alignment)


def _kernel(spec: TopKFwdSpec | TopKBwdSpec, device: int) -> Launcher:
    """The compiled function, launched on its device."""
    config = default_fwd(spec) if isinstance(spec, TopKFwdSpec) else default_bwd(spec)
    with torch_workspace.relaxed_capture():
        function: Launcher = cache.load(config.module, spec, config, arch.detect(device))
    return torch_op.on_device(function, device)
