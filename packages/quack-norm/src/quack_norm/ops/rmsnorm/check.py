"""What RMSNorm accepts: one set of checks for the CPU, CUDA devices, meta and fake tensors.

They run for the first call of a kind, and again to explain why a launcher refused a later one.
"""

import numbers

import torch
from torch import Tensor

from quack_core import torch_op
from quack_core.errors import DeviceError, DTypeError, LayoutError, ShapeError, UnsupportedError
from quack_norm.ops import rows
from quack_norm.ops.row_map.spec import MAX_ROWS

from .spec import MAX_N, STATISTICS

MAX_HEADS = 65535
"""The backward with weights per head has its heads along the second dimension of the grid."""


def name_of(centred: bool) -> str:
    """The operator's name, for messages."""
    return "layernorm" if centred else "rmsnorm"


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    out: Tensor | None = None,
    op: str = "rmsnorm",
) -> None:
    """Check the operands of the forward.

    Raises:
        ShapeError, DTypeError, DeviceError, LayoutError, UnsupportedError: name the operand, what
            was found, what is needed and the way out.
    """
    _tensors(
        ("x", x), ("weight", weight), ("bias", bias), ("residual", residual), ("out", out), op=op
    )
    _rows("x", x, op=op)
    _parameters(x, weight, bias, op=op)
    _same_shape("residual", residual, x, op=op)
    _same_shape("out", out, x, op=op)
    for name, given in (("out_dtype", out_dtype), ("residual_dtype", residual_dtype)):
        if given is not None:
            torch_op.check_dtype(op, name, given)
    for name, value in (("eps", eps), ("weight_offset", weight_offset)):
        if not isinstance(value, numbers.Real):
            raise DTypeError(
                f"{op}: {name} is {type(value).__name__}: it must be a Python number; "
                "for a tensor of one element pass .item()"
            )


def backward(
    h: Tensor,
    weight: Tensor | None,
    dout: Tensor,
    rstd: Tensor,
    dresidual_out: Tensor | None,
    dx_dtype: torch.dtype,
    dresidual_dtype: torch.dtype | None,
    dweight: bool,
    dbias_dtype: torch.dtype | None,
    per_head: bool,
    centred: bool = False,
    op: str = "rmsnorm",
) -> None:
    """Check the operands of the backward; raises as `forward` does."""
    operands = (("h", h), ("weight", weight), ("dout", dout), ("dresidual_out", dresidual_out))
    _tensors(*operands, ("rstd", rstd), op=op)
    _rows("h", h, op=op)
    _parameters(h, weight, None, op=op)
    _same_shape("dout", dout, h, op=op)
    _same_shape("dresidual_out", dresidual_out, h, op=op)
    shape = (*h.shape[:-1], STATISTICS) if centred else tuple(h.shape[:-1])
    if rstd.dtype != torch.float32 or rstd.shape != shape:
        raise ShapeError(
            f"{op}: rstd is {rstd.dtype} {tuple(rstd.shape)}: it must be the float32 "
            f"{shape} that the forward returned"
        )
    wanted = (("dx", dx_dtype), ("dresidual", dresidual_dtype), ("dbias", dbias_dtype))
    for name, given in wanted:
        if given is not None:
            torch_op.check_dtype(op, f"dtype of {name}", given)
    if dweight and weight is None:
        raise ShapeError(f"{op}: dweight is wanted, but there is no weight: pass the weight")
    if per_head and h.dim() < 2:
        raise ShapeError(f"{op}: h has 1 dimension: per-head weights need (..., H, N)")
    heads = h.shape[-2] if per_head else 1
    if isinstance(heads, int) and heads > MAX_HEADS:
        raise UnsupportedError(
            f"{op}: h.shape[-2] is {heads}",
            f"the backward takes at most {MAX_HEADS} heads with weights of their own",
            f"split the heads: call it for x[..., :{MAX_HEADS}, :] and weight[:{MAX_HEADS}], and "
            "for the others",
        )
    if weight is not None and per_head != (weight.dim() == 2):
        raise ShapeError(
            f"{op}: weight has {weight.dim()} dimensions, but per_head is {per_head}: "
            "per-head weights are (H, N), others (N,)"
        )


def output(
    out: Tensor,
    out_dtype: torch.dtype | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    direct: bool,
    op: str = "rmsnorm",
) -> None:
    """Check that ``out`` may be written: dtype, layout, no gradient, no harmful overlap.

    Args:
        out: the caller's tensor.
        out_dtype: the caller's ``out_dtype``.
        x, weight, bias, residual: what the operator reads.
        direct: whether they are known to have addresses.
    """
    operands = (("x", x), ("weight", weight), ("bias", bias), ("residual", residual))
    if out_dtype is not None and out.dtype != out_dtype:
        raise DTypeError(
            f"{op}: out is {_name(out.dtype)}, out_dtype is {_name(out_dtype)}: leave "
            "out_dtype away, or make them equal"
        )
    if torch.is_grad_enabled():
        for name, tensor in (("out", out), *operands):
            if tensor is not None and tensor.requires_grad:
                raise UnsupportedError(
                    f"{op}: out= is given while {name} requires a gradient",
                    "results in the caller's memory cannot be differentiated",
                    "call it under torch.no_grad(), or leave out= away",
                )
    dense = out.is_contiguous()
    if not dense:
        parameter = bias if weight is None else weight
        _writable(out, parameter is not None and parameter.dim() == 2, op=op)
    if not direct and (out.is_meta or not torch_op.eager(out, x, weight, bias, residual)):
        return  # no addresses to compare
    start = out.data_ptr()
    end = start + out.nbytes if dense else -1
    for name, tensor in operands:
        if tensor is None:
            continue
        if dense and tensor.is_contiguous():  # the quick answer
            other = tensor.data_ptr()
            if end <= other or other + tensor.nbytes <= start:
                continue
        if _overlap(out, tensor) and not (name == "x" and torch_op.identical(out, tensor)):
            raise LayoutError(
                f"{op}: out overlaps {name} in memory: out may be x itself, and must share "
                "nothing else with an operand; pass other memory"
            )


def input_survives(out: Tensor, x: Tensor, op: str = "rmsnorm") -> None:
    """Check that ``out`` leaves x alone, which is to be returned as h as well."""
    if not torch_op.eager(out, x) or out.is_meta:
        return  # no addresses to compare
    if out.data_ptr() == x.data_ptr() and x.numel() > 0:
        raise LayoutError(
            f"{op}: out is x, which prenorm=True returns as well: pass other memory, or a "
            "residual_dtype other than that of x"
        )


def _tensors(*operands: tuple[str, Tensor | None], op: str = "rmsnorm") -> None:
    (_, x), *others = operands
    for name, tensor in operands:
        if tensor is None and name not in ("x", "h", "dout"):
            continue
        if not isinstance(tensor, Tensor):
            raise DTypeError(f"{op}: {name} is {type(tensor).__name__}: it must be a tensor")
        torch_op.check_dtype(op, name, tensor.dtype)
    for name, tensor in others:
        if tensor is not None and x is not None and tensor.device != x.device:
            raise DeviceError(
                f"{op}: {name} is on {tensor.device}, {operands[0][0]} on {x.device}: all "
                f"operands must be on one device; move it with .to({str(x.device)!r})"
            )


def _rows(name: str, x: Tensor, op: str = "rmsnorm") -> None:
    if x.dim() == 0:
        raise ShapeError(f"{op}: {name} has no dimension: it must be (..., N)")
    n = x.shape[-1]
    if n > MAX_N:
        raise UnsupportedError(
            f"{op}: {name}.shape[-1] is {n}",
            f"rows have at most {MAX_N} elements",
            "split the row, or use torch.nn.functional.rms_norm",
        )
    count = x.numel() // n if n else 0
    if isinstance(count, int) and count > MAX_ROWS:  # no guard on a symbolic batch
        raise UnsupportedError(
            f"{op}: {name} has {count} rows",
            f"a launch takes at most {MAX_ROWS}",
            "split the batch",
        )


def _parameters(x: Tensor, weight: Tensor | None, bias: Tensor | None, op: str = "rmsnorm") -> None:
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dim() not in (1, 2) or tensor.dim() > x.dim():
            raise ShapeError(
                f"{op}: {name} has {tensor.dim()} dimensions: it must be (N,), or (H, N) for x "
                f"(..., H, N); x has shape {tuple(x.shape)}"
            )
        for axis in range(-tensor.dim(), 0):
            if tensor.shape[axis] != x.shape[axis]:
                raise ShapeError(
                    f"{op}: {name}.shape[{axis}] is {tensor.shape[axis]}, x.shape[{axis}] is "
                    f"{x.shape[axis]}: they must be equal; {name} is (N,) or, per head, (H, N)"
                )
    if weight is not None and bias is not None and weight.dim() != bias.dim():
        raise ShapeError(
            f"{op}: bias has shape {tuple(bias.shape)}, weight {tuple(weight.shape)}: both must "
            "be (N,) or both (H, N); use .expand() on the shorter one"
        )


def _same_shape(name: str, tensor: Tensor | None, x: Tensor, op: str = "rmsnorm") -> None:
    if tensor is None or tensor.shape == x.shape:
        return
    if tensor.dim() != x.dim():
        found = f"{name} has {tensor.dim()} dimensions, x has {x.dim()}"
    else:
        axis = next(i for i in range(x.dim()) if tensor.shape[i] != x.shape[i])
        found = f"{name}.shape[{axis}] is {tensor.shape[axis]}, x.shape[{axis}] is {x.shape[axis]}"
    raise ShapeError(
        f"{op}: {found}: the shapes must be equal; to broadcast, use {name}.expand(x.shape)"
        if name != "out"
        else f"{op}: {found}: out must have the shape of x; it is not resized"
    )


def _writable(out: Tensor, per_head: bool, op: str = "rmsnorm") -> None:
    """Rows must be views that a kernel can write, and no element may lie twice in memory."""
    for extent, stride in zip(out.shape, out.stride(), strict=True):
        if stride == 0 and extent > 1:
            raise LayoutError(
                f"{op}: out is expanded, so several elements share memory: pass .contiguous()"
            )
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise LayoutError(
            f"{op}: out.stride(-1) is {out.stride(-1)}: it must be 1; leave out= away and copy"
        )
    if not rows.is_reachable(out, per_head):
        raise LayoutError(
            f"{op}: out has strides {out.stride()}: at most two strides may lead to its rows"
            f"{', one of them to the heads' if per_head else ''}; leave out= away and copy"
        )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors can share an element; exact for slots that are one stride apart."""
    if not (a.numel() and b.numel()):
        return False
    (a0, a1), (b0, b1) = torch_op.span(a), torch_op.span(b)
    if a1 <= b0 or b1 <= a0:
        return False
    (a_run, a_pitch), (b_run, b_pitch) = _slots(a), _slots(b)
    if a_pitch != b_pitch or not a_pitch:
        return True
    apart = (b0 - a0) % a_pitch  # where a run of b begins in the slot of a run of a
    return not (a_run <= apart and apart + b_run <= a_pitch)


def _slots(tensor: Tensor) -> tuple[int, int]:
    """Bytes of a run of neighbouring elements, such as a row or all heads of a token, and of the
    slots in which the runs lie, each in its own; 0 if there are no such slots.
    """
    run = 1
    steps: list[int] = []
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1 or stride == 0:
            continue
        if stride == run and not steps:
            run *= extent
        else:
            steps.append(stride)
    pitch = steps[0] if steps else 0
    if run > pitch or any(step % pitch for step in steps):
        pitch = 0
    return run * tensor.element_size(), pitch * tensor.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
