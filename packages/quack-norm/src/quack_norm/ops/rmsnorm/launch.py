"""RMSNorm on CUDA tensors: allocate, find the kernel, launch.

Warm, a call costs one dictionary lookup on plain values. The launchers themselves check dtypes,
sizes, strides, alignment and devices; when one refuses, our own checks say what is wrong.
"""

from typing import Any

import torch
from torch import Tensor

from quack_core import torch_workspace
from quack_norm.ops import rows

from . import check, prepare, reference

Forward = tuple[Tensor, Tensor | None, Tensor | None]
Backward = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]

# The keys hold dtypes, ranks, N, flags and four bits of addresses. M is not among them, so their
# number is bounded.
_forward: dict[tuple[Any, ...], prepare.Launcher] = {}
_backward: dict[tuple[Any, ...], prepare.Launcher] = {}


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
    out: Tensor | None = None,
) -> Forward:
    """As `reference.forward`, on CUDA tensors.

    Args:
        want_rstd: whether to return rstd.
        out: written instead of new memory; it has passed `check.output`.

    Returns:
        ``(out, h or None, rstd or None)``. Without residual and change of dtype h is x itself.
    """
    shape, dtype, dense = x.shape, x.dtype, x.is_contiguous()
    rank = len(shape)
    bits = x.data_ptr() if dense else x.data_ptr() | rows.stride_bits(x)
    weight_key = bias_key = residual_key = h = rstd = None
    unchanged = residual is None and residual_dtype is dtype  # h is x
    if unchanged:
        residual_dtype = None
    if weight is not None:
        weight_key = weight.dtype, weight.ndim
        bits |= weight.data_ptr()
    if bias is not None:
        bias_key = bias.dtype, bias.ndim
        bits |= bias.data_ptr()
    if residual is not None:
        residual_key = residual.dtype
        bits |= residual.data_ptr()
        if not residual.is_contiguous():
            bits |= rows.stride_bits(residual)
    if out is not None:
        out_dtype = out.dtype
        bits |= out.data_ptr() | rows.stride_bits(out)
    key = (
        shape[-1] if rank else 0,
        rank,
        dtype,
        weight_key,
        bias_key,
        residual_key,
        out_dtype,
        residual_dtype,
        want_rstd,
        weight_offset != 0,
        bits & 15,  # odd where a row's elements are apart: such a key never finds a launcher
        x.get_device(),
    )
    launch = _forward.get(key)
    if launch is None or not 0 < (shape[0] if rank == 2 else shape[0] * shape[1]) <= check.MAX_ROWS:
        args = (x, weight, bias, residual, eps, weight_offset, out_dtype, residual_dtype, want_rstd)
        out, h, rstd = _forward_cold(key, *args, out)
        return out, x if unchanged else h, rstd
    if out is None:
        out = _empty(x, dense, out_dtype)
    if residual_dtype is not None:
        h = _empty(x, dense, residual_dtype)
    if want_rstd:
        rstd = x.new_empty(shape[:-1], dtype=torch.float32)
    try:
        launch(x, weight, bias, residual, out, h, rstd, None, eps, weight_offset, 0)
    except (TypeError, ValueError):
        check.forward(x, weight, bias, residual, eps, weight_offset, out_dtype, residual_dtype, out)
        dense_weight, dense_bias = _contiguous(weight), _contiguous(bias)
        if dense_weight is weight and dense_bias is bias:
            raise
        options = (eps, weight_offset, out_dtype, residual_dtype, want_rstd, out)
        out, h, rstd = forward(x, dense_weight, dense_bias, residual, *options)
    return out, x if unchanged else h, rstd


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
) -> Backward:
    """As `reference.backward`, on CUDA tensors, in one launch."""
    shape = h.shape
    rank = len(shape)
    bits = h.data_ptr() | dout.data_ptr()
    if not h.is_contiguous():
        bits |= rows.stride_bits(h)
    if not dout.is_contiguous():
        bits |= rows.stride_bits(dout)
    weight_dtype = dresidual_out_dtype = None
    if weight is not None:
        weight_dtype = weight.dtype
        bits |= weight.data_ptr()
    if dresidual_out is not None:
        dresidual_out_dtype = dresidual_out.dtype
        bits |= dresidual_out.data_ptr() | rows.stride_bits(dresidual_out)
    key = (
        shape[-1] if rank else 0,
        rank,
        h.dtype,
        weight_dtype,
        dout.dtype,
        dresidual_out_dtype,
        dx_dtype,
        dresidual_dtype,
        dweight,
        dbias_dtype,
        per_head,
        weight_offset != 0,
        bits & 15,
        h.get_device(),
    )
    launch = _backward.get(key)
    args = (h, weight, dout, rstd, dresidual_out)
    options = (dx_dtype, dresidual_dtype, dweight, dbias_dtype, per_head)
    if launch is None or not 0 < (shape[0] if rank == 2 else shape[0] * shape[1]) <= check.MAX_ROWS:
        return _backward_cold(key, *args, weight_offset, *options)
    dx = _empty(h, h.is_contiguous(), dx_dtype)
    dh = dw = db = None
    if dresidual_dtype is not None:
        dh = _empty(h, h.is_contiguous(), dresidual_dtype)
    parameter = shape[-2:] if per_head else shape[-1:]
    if dweight:
        dw = h.new_empty(parameter, dtype=weight_dtype)
    if dbias_dtype is not None:
        db = h.new_empty(parameter, dtype=dbias_dtype)
    try:
        launch(*args, dx, dh, dw, db, None, None, weight_offset, 0)
    except (TypeError, ValueError):
        check.backward(*args, *options)
        dense_weight = _contiguous(weight)
        if dense_weight is weight:
            raise
        return backward(h, dense_weight, dout, rstd, dresidual_out, weight_offset, *options)
    return dx, dh, dw, db


def _empty(x: Tensor, dense: bool, dtype: torch.dtype | None) -> Tensor:
    """Contiguous memory shaped like x."""
    if not dense:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty_like(x) if dtype is None else torch.empty_like(x, dtype=dtype)


def _same_shape(x: Tensor, *others: Tensor | None) -> bool:
    return all(other is None or other.shape == x.shape for other in others)


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _forward_cold(
    key: tuple[Any, ...],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    want_rstd: bool,
    out: Tensor | None,
) -> Forward:
    """The first call of a kind, empty operands, and operands that must become rows first."""
    options = (eps, weight_offset, out_dtype, residual_dtype)
    # With more dimensions a launch follows whose launcher checks all but what merging them hides.
    if x.dim() < 4 or x.numel() == 0 or not _same_shape(x, residual, out):
        check.forward(x, weight, bias, residual, *options, out)
    if x.numel() == 0:  # torch's own kernels know what to do with nothing
        empty, stored, none = reference.forward(x, weight, bias, residual, *options)
        return empty if out is None else out, stored, none if want_rstd else None
    per_head = 2 in [t.ndim for t in (weight, bias) if t is not None]
    outer = rows.outer_shape((out, x, residual), per_head)  # out is never copied
    given = (x, weight, bias, residual, out)
    packed = (
        rows.as_rows(x, outer),
        _contiguous(weight),
        _contiguous(bias),
        None if residual is None else rows.as_rows(residual, outer),
        None if out is None else rows.as_rows(out, outer),
    )
    if all(a is b for a, b in zip(packed, given, strict=True)):
        with torch_workspace.relaxed_capture():  # compiling and loading, should a graph record
            _forward[key] = prepare.forward(x, weight, bias, residual, *options, want_rstd, key[-2])
            return forward(x, weight, bias, residual, *options, want_rstd, out)
    result, stored, rstd = forward(*packed[:4], *options, want_rstd, packed[4])
    return (
        result.view(x.shape) if out is None else out,
        None if stored is None else stored.view(x.shape),
        None if rstd is None else rstd.view(x.shape[:-1]),
    )


def _backward_cold(
    key: tuple[Any, ...],
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
) -> Backward:
    options = (dx_dtype, dresidual_dtype, dweight, dbias_dtype, per_head)
    if h.dim() < 4 or not _same_shape(h, dout, dresidual_out) or rstd.shape != h.shape[:-1]:
        check.backward(h, weight, dout, rstd, dresidual_out, *options)
    if h.numel() == 0:
        args = (h, weight, dout, rstd, dresidual_out, weight_offset)
        return reference.backward(*args, *options)
    outer = rows.outer_shape((h, dout, dresidual_out), per_head)
    given = (h, weight, dout, rstd, dresidual_out)
    packed = (
        rows.as_rows(h, outer),
        _contiguous(weight),
        rows.as_rows(dout, outer),
        rstd if rstd.shape == outer and rstd.is_contiguous() else rstd.reshape(outer).contiguous(),
        None if dresidual_out is None else rows.as_rows(dresidual_out, outer),
    )
    if all(a is b for a, b in zip(packed, given, strict=True)):
        with torch_workspace.relaxed_capture():
            _backward[key] = prepare.backward(*given, weight_offset, *options, key[-2])
            return backward(*given, weight_offset, *options)
    dx, dh, dw, db = backward(*packed, weight_offset, *options)
    shape = h.shape
    return dx.view(shape), None if dh is None else dh.view(shape), dw, db
