"""RMSNorm on CUDA tensors: allocate, find the kernel, launch.

Warm, a call costs one dictionary lookup on plain values. The launchers themselves check dtypes,
sizes, strides, alignment and devices. When one refuses, our own checks say what is wrong, and
what is not wrong gets another launcher or is copied.
"""

from typing import Any

import torch
from torch import Tensor

from quack_core import torch_workspace
from quack_core.errors import QuackError
from quack_norm.ops import rows
from quack_norm.ops.row_map.spec import MAX_ROWS

from . import check, prepare, reference
from .spec import STATISTICS

Forward = tuple[Tensor, Tensor | None, Tensor | None]
Backward = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]

_empty_like = torch.empty_like  # a look-up less per call
# The keys hold dtypes, ranks, N and flags. M is not among them, so their number is bounded.
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
    centred: bool = False,
) -> Forward:
    """As `reference.forward`, on CUDA tensors.

    Args:
        want_rstd: whether to return rstd.
        out: written instead of new memory; it has passed `check.output`.
        centred: subtract the mean.

    Returns:
        ``(out, h or None, rstd or None)``. Without residual and change of dtype h is x itself.
    """
    shape, dtype, dense = x.shape, x.dtype, x.is_contiguous()
    rank = len(shape)
    parameter_rank = weight_dtype = bias_dtype = given_dtype = rstd = None
    h: Tensor | None = None
    if weight is not None:
        weight_dtype, parameter_rank = weight.dtype, weight.ndim
    if bias is not None:
        bias_dtype, parameter_rank = bias.dtype, bias.ndim
    if residual is not None:
        given_dtype = residual.dtype
    elif residual_dtype is dtype:
        residual_dtype, h = None, x
    if out is not None:
        out_dtype = out.dtype
    key = (
        shape[-1] if rank else 0,
        rank,
        parameter_rank,
        dtype,
        weight_dtype,
        bias_dtype,
        given_dtype,
        out_dtype,
        residual_dtype,
        want_rstd,
        weight_offset != 0,
        centred,
        x.get_device(),
    )
    launch = _forward.get(key)
    if (
        launch is None
        or not 0 < (count := shape[0] if rank == 2 else shape[0] * shape[1]) <= MAX_ROWS
        or not (dense or rows.is_rows(x))
    ):
        args = (x, weight, bias, residual, eps, weight_offset, out_dtype, residual_dtype, want_rstd)
        y, stored, rstd = _forward_cold(key, None, *args, out, centred)
        return y, x if h is x else stored, rstd
    if out is not None:
        y = out
    else:
        y = _empty_like(x) if dense and out_dtype is None else _empty(x, dense, out_dtype)
    if residual_dtype is not None:
        h = _empty(x, dense, residual_dtype)
    if want_rstd:
        outer = (count,) if rank == 2 else shape[:-1]
        rstd = x.new_empty((*outer, STATISTICS) if centred else outer, dtype=torch.float32)
    stored = None if h is x else h
    try:
        launch(x, weight, bias, residual, y, stored, rstd, None, eps, weight_offset, count)
    except QuackError:  # not a launcher's refusal
        raise
    except (TypeError, ValueError) as refusal:
        args = (x, weight, bias, residual, eps, weight_offset, out_dtype, residual_dtype, want_rstd)
        y, stored, rstd = _forward_cold(key, refusal, *args, out, centred)
        return y, x if h is x else stored, rstd
    except Exception:  # a tensor without memory, such as a meta tensor; CUDA's own trouble
        dtypes, name = (out_dtype, residual_dtype), check.name_of(centred)
        check.forward(x, weight, bias, residual, eps, weight_offset, *dtypes, out, name)
        raise
    return y, h, rstd


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
    centred: bool = False,
) -> Backward:
    """As `reference.backward`, on CUDA tensors, in one launch."""
    shape, dense = h.shape, h.is_contiguous()
    rank = len(shape)
    weight_dtype = None if weight is None else weight.dtype
    key = (
        shape[-1] if rank else 0,
        rank,
        h.dtype,
        weight_dtype,
        dout.dtype,
        None if dresidual_out is None else dresidual_out.dtype,
        dx_dtype,
        dresidual_dtype,
        dweight,
        dbias_dtype,
        per_head,
        weight_offset != 0,
        centred,
        h.get_device(),
    )
    launch = _backward.get(key)
    args = (h, weight, dout, rstd, dresidual_out)
    options = (dx_dtype, dresidual_dtype, dweight, dbias_dtype, per_head)
    if (
        launch is None
        or not 0 < (count := shape[0] if rank == 2 else shape[0] * shape[1]) <= MAX_ROWS
        or not (dense or rows.is_rows(h))
        or not (dout.is_contiguous() or rows.is_rows(dout))
    ):
        return _backward_cold(key, None, *args, weight_offset, *options, centred)
    dx = _empty(h, dense, dx_dtype)
    dh = dw = db = None
    if dresidual_dtype is not None:
        dh = _empty(h, dense, dresidual_dtype)
    parameter: Any = shape[-2:] if per_head else shape[-1]
    if dweight:
        dw = h.new_empty(parameter, dtype=weight_dtype)
    if dbias_dtype is not None:
        db = h.new_empty(parameter, dtype=dbias_dtype)
    try:
        launch(*args, dx, dh, dw, db, None, None, weight_offset, count)
    except QuackError:
        raise
    except (TypeError, ValueError) as refusal:
        return _backward_cold(key, refusal, *args, weight_offset, *options, centred)
    except Exception:  # as in the forward; more heads than a grid has, too
        check.backward(*args, *options, centred, check.name_of(centred))
        raise
    return dx, dh, dw, db


def _empty(x: Tensor, dense: bool, dtype: torch.dtype | None) -> Tensor:
    """Contiguous memory shaped like x."""
    if not dense:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty_like(x) if dtype is None else torch.empty_like(x, dtype=dtype)


def _same_shape(x: Tensor, *others: Tensor | None) -> bool:
    return all(other is None or other.shape == x.shape for other in others)


def _packed(statistics: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Contiguous, in a shape; the same tensor if it is so already."""
    if statistics.shape == shape and statistics.is_contiguous():
        return statistics
    return statistics.reshape(shape).contiguous()


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _forward_cold(
    key: tuple[Any, ...],
    refusal: Exception | None,
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
    centred: bool,
) -> Forward:
    """The first call of a kind, empty operands, and operands that must become rows first.

    Args:
        refusal: what the launcher raised. If nothing is wrong with the operands, and nothing has to
            be copied, their alignment was the reason.
    """
    options = (eps, weight_offset, out_dtype, residual_dtype)
    # With more dimensions a launch follows whose launcher checks all but what merging them hides.
    if x.dim() < 4 or x.numel() == 0 or not _same_shape(x, residual, out):
        check.forward(x, weight, bias, residual, *options, out, check.name_of(centred))
    if x.numel() == 0:  # torch's own kernels know what to do with nothing
        empty, stored, none = reference.forward(x, weight, bias, residual, *options, centred)
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
        if refusal is not None and isinstance(_forward.get(key), prepare.Aligned):
            raise refusal
        with torch_workspace.relaxed_capture():  # compiling and loading, should a graph record
            aligned = refusal is None and rows.alignment(*given) == prepare.ALIGN
            _forward[key] = prepare.forward(*given[:4], *options, want_rstd, aligned, centred)
            return forward(*given[:4], *options, want_rstd, out, centred)
    result, stored, rstd = forward(*packed[:4], *options, want_rstd, packed[4], centred)
    return (
        result.view(x.shape) if out is None else out,
        None if stored is None else stored.view(x.shape),
        None
        if rstd is None
        else rstd.view((*x.shape[:-1], STATISTICS) if centred else x.shape[:-1]),
    )


def _backward_cold(
    key: tuple[Any, ...],
    refusal: Exception | None,
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
    centred: bool,
) -> Backward:
    """As `_forward_cold`."""
    options = (dx_dtype, dresidual_dtype, dweight, dbias_dtype, per_head)
    shape = (*h.shape[:-1], STATISTICS) if centred else h.shape[:-1]
    if h.dim() < 4 or not _same_shape(h, dout, dresidual_out) or rstd.shape != shape:
        check.backward(
            h, weight, dout, rstd, dresidual_out, *options, centred, check.name_of(centred)
        )
    if h.numel() == 0:
        args = (h, weight, dout, rstd, dresidual_out, weight_offset)
        return reference.backward(*args, *options, centred)
    outer = rows.outer_shape((h, dout, dresidual_out), per_head)
    given = (h, weight, dout, rstd, dresidual_out)
    packed = (
        rows.as_rows(h, outer),
        _contiguous(weight),
        rows.as_rows(dout, outer),
        _packed(rstd, (*outer, STATISTICS) if centred else outer),
        None if dresidual_out is None else rows.as_rows(dresidual_out, outer),
    )
    if all(a is b for a, b in zip(packed, given, strict=True)):
        if refusal is not None and isinstance(_backward.get(key), prepare.Aligned):
            raise refusal
        with torch_workspace.relaxed_capture():
            from . import bwd_prepare  # which a forward alone does not load

            moved = (h, weight, dout, dresidual_out)
            aligned = refusal is None and rows.alignment(*moved) == prepare.ALIGN
            _backward[key] = bwd_prepare.backward(*given, weight_offset, *options, aligned, centred)
            return backward(*given, weight_offset, *options, centred)
    dx, dh, dw, db = backward(*packed, weight_offset, *options, centred)
    shape = h.shape
    return dx.view(shape), None if dh is None else dh.view(shape), dw, db
