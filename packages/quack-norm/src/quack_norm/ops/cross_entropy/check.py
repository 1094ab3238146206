"""What cross-entropy accepts: one set of checks for the CPU, CUDA devices, meta and fake tensors.

`labels` alone looks at values: the implementation on the CPU calls it, where that costs no sync.
"""

import math
import numbers
import warnings

import torch
from torch import Tensor

from quack_core import torch_op
from quack_core.errors import (
    DeviceError,
    DTypeError,
    LayoutError,
    QuackError,
    ShapeError,
    UnsupportedError,
)
from quack_norm.ops.row_map.spec import MAX_ROWS

REDUCTIONS = ("none", "mean", "sum")
TARGETS = (torch.int32, torch.int64)


class LabelError(QuackError, IndexError):
    """A target is neither a class nor ``ignore_index``."""


class OptionError(QuackError, ValueError):
    """A number or a name among the options is out of its range."""


def forward(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
) -> None:
    """Check the operands of the forward; see `reference.forward` for their shapes.

    Raises:
        ShapeError, DTypeError, DeviceError, UnsupportedError, OptionError: name the operand, what
            was found, what is needed and the way out.
    """
    _tensors(input, target, weight)
    _target(input, target)
    _weight(input, weight)
    _options(ignore_index, reduction, label_smoothing, softcap, z_loss)


def backward(
    dloss: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    peak: Tensor,
    exp_sum: Tensor,
    total: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
) -> None:
    """Check the operands of the backward; raises as `forward` does."""
    forward(input, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss)
    given = (("dloss", dloss), ("peak", peak), ("exp_sum", exp_sum), ("total", total))
    for name, tensor in given:
        _is_tensor(name, tensor)
        _same_device(name, tensor, input)
    expected = target.shape if reduction == "none" else torch.Size()
    if dloss.shape != expected:
        raise ShapeError(
            f"cross_entropy: dloss has shape {tuple(dloss.shape)}: it must be {tuple(expected)}, "
            f"as the loss under reduction={reduction!r}"
        )
    torch_op.check_dtype("cross_entropy", "dloss", dloss.dtype)
    for name, tensor, shape in (
        ("peak", peak, target.shape),
        ("exp_sum", exp_sum, target.shape),
        ("total", total, torch.Size()),
    ):
        if tensor.dtype != torch.float32 or tensor.shape != shape:
            raise ShapeError(
                f"cross_entropy: {name} is {_name(tensor.dtype)} {tuple(tensor.shape)}: it must "
                f"be the float32 {tuple(shape)} that the forward returned"
            )


def partial(
    lse: Tensor,
    target_logit: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    z_loss: float,
) -> None:
    """Check the operands of `cross_entropy_from_lse`; raises as `forward`."""
    for name, tensor in (("lse", lse), ("target_logit", target_logit), ("target", target)):
        _is_tensor(name, tensor)
        _same_device(name, tensor, lse, "lse")
    torch_op.check_dtype("cross_entropy", "lse", lse.dtype)
    torch_op.check_dtype("cross_entropy", "target_logit", target_logit.dtype)
    if target.dtype not in TARGETS:
        raise DTypeError(
            f"cross_entropy: target is {_name(target.dtype)}: it must be int32 or int64"
        )
    if lse.dim() not in (1, 2) or lse.shape[-1] == 0 < lse.dim() - 1:
        raise ShapeError(
            f"cross_entropy: lse has shape {tuple(lse.shape)}: it must be (rows,) or (rows, parts) "
            "with at least one part"
        )
    for name, tensor in (("target_logit", target_logit), ("target", target)):
        if tensor.shape != lse.shape[:1]:
            raise ShapeError(
                f"cross_entropy: {name} has shape {tuple(tensor.shape)}, lse "
                f"{tuple(lse.shape)}: it must be ({lse.shape[0]},)"
            )
    _options(ignore_index, reduction, 0.0, None, z_loss)


def labels(target: Tensor, classes: int, ignore_index: int) -> None:
    """Check every label of a CPU tensor: a class, or ``ignore_index``.

    On other devices this would wait for them: there, an illegal label gives NaN.

    Args:
        target: any shape, int32 or int64, with values (neither meta nor fake).
        classes: how many there are.
        ignore_index: the label that is always legal.

    Raises:
        LabelError: names the first illegal label, its position and the legal range.
    """
    wide = target.long()
    illegal = ((wide < 0) | (wide >= classes)) & (wide != ignore_index)
    if not bool(illegal.any()):
        return
    position = illegal.nonzero()[0].tolist()
    raise LabelError(
        f"cross_entropy: target{position if position else ''} is {int(wide[tuple(position)])}: "
        f"labels must be at least 0 and less than the number of classes, {classes}, or equal "
        f"ignore_index, {ignore_index}"
    )


def in_place(input: Tensor) -> None:
    """Check that the gradient may overwrite the logits.

    Raises:
        LayoutError: elements share memory.
        UnsupportedError: the memory is that of a leaf, whose values the caller keeps.
    """
    if not input.requires_grad:
        return  # there will be no gradient
    base = input._base if input._is_view() else None
    if input.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
        raise UnsupportedError(
            "cross_entropy: inplace_backward=True, but input is a leaf or a view of one",
            "the gradient must not overwrite values that the caller keeps",
            "leave inplace_backward away, or pass the result of an operation",
        )
    reach = 0  # from the first to the last element along the smaller strides
    for axis in sorted(range(input.dim()), key=input.stride):
        extent, stride = input.shape[axis], input.stride(axis)
        if extent > 1 and stride <= reach:
            raise LayoutError(
                f"cross_entropy: inplace_backward=True, but input.stride({axis}) is {stride} for "
                f"{extent} elements, which share memory: pass .contiguous(), or leave it away"
            )
        reach += (extent - 1) * stride


def reduction_of(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """The reduction that torch's two deprecated arguments ask for; ``reduction`` if both are None.

    Each counts as True if only the other is given, and ``reduce=False`` wins.
    """
    if size_average is None and reduce is None:
        return reduction
    if reduce is not None and not reduce:
        found = "none"
    else:
        found = "mean" if size_average is None or size_average else "sum"
    warnings.warn(
        f"cross_entropy: size_average and reduce are deprecated: use reduction={found!r}",
        stacklevel=3,  # who called the public function
    )
    return found


def _tensors(input: Tensor, target: Tensor, weight: Tensor | None) -> None:
    _is_tensor("input", input)
    _is_tensor("target", target)
    torch_op.check_dtype("cross_entropy", "input", input.dtype)
    if target.is_floating_point():
        raise UnsupportedError(
            f"cross_entropy: target is {_name(target.dtype)}",
            "targets are class indices, int32 or int64; class probabilities are not implemented",
            "for probabilities use torch.nn.functional.cross_entropy; for indices pass .long()",
        )
    if target.dtype not in TARGETS:
        raise DTypeError(
            f"cross_entropy: target is {_name(target.dtype)}: it must be int32 or int64; "
            "convert with .long()"
        )
    _same_device("target", target, input)
    if weight is not None:
        _is_tensor("weight", weight)
        torch_op.check_dtype("cross_entropy", "weight", weight.dtype)
        _same_device("weight", weight, input)


def _target(input: Tensor, target: Tensor) -> None:
    if input.dim() == 0:
        raise ShapeError(
            "cross_entropy: input has no dimension: it must be (C,), (N, C) or (N, C, d1, ...)"
        )
    if target.dim() != input.dim() - 1:
        raise ShapeError(
            f"cross_entropy: target has {target.dim()} dimensions, input has {input.dim()}: "
            "target must have the shape of input without its classes: (N, d1, ...) for input "
            f"(N, C, d1, ...), () for (C,); found {tuple(target.shape)} and {tuple(input.shape)}"
        )
    for axis in range(target.dim()):
        other = axis + (axis > 0)
        if target.shape[axis] != input.shape[other]:
            raise ShapeError(
                f"cross_entropy: target.shape[{axis}] is {target.shape[axis]}, "
                f"input.shape[{other}] is {input.shape[other]}: they must be equal; target has "
                "the shape of input without its classes, input.shape[1]"
            )
    count = target.numel()
    if isinstance(count, int) and count > MAX_ROWS:  # no guard on a symbolic batch
        raise UnsupportedError(
            f"cross_entropy: target has {count} elements",
            f"kernels count at most {MAX_ROWS}",
            "split the batch",
        )


def _weight(input: Tensor, weight: Tensor | None) -> None:
    if weight is None:
        return
    axis = min(input.dim() - 1, 1)
    if weight.dim() != 1:
        raise ShapeError(
            f"cross_entropy: weight has {weight.dim()} dimensions: it must be (C,), one number "
            f"for each of the {input.shape[axis]} classes"
        )
    if weight.shape[0] != input.shape[axis]:
        raise ShapeError(
            f"cross_entropy: weight.shape[0] is {weight.shape[0]}, input.shape[{axis}] is "
            f"{input.shape[axis]}: they must be equal, one number for each class"
        )
    if weight.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "cross_entropy: weight requires a gradient",
            "the loss has no derivative by the class weights, nor has it in torch",
            "pass weight.detach()",
        )


def _options(
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
) -> None:
    if not isinstance(ignore_index, numbers.Integral) or isinstance(ignore_index, bool):
        raise DTypeError(
            f"cross_entropy: ignore_index is {type(ignore_index).__name__}: it must be an int"
        )
    if not -(2**63) <= ignore_index < 2**63:
        raise OptionError(f"cross_entropy: ignore_index is {ignore_index}: it must fit into int64")
    if reduction not in REDUCTIONS:
        raise OptionError(
            f"cross_entropy: reduction is {reduction!r}: it must be one of {', '.join(REDUCTIONS)}"
        )
    if not 0 <= _number("label_smoothing", label_smoothing) <= 1:
        raise OptionError(
            f"cross_entropy: label_smoothing is {label_smoothing}: it must be from 0 to 1"
        )
    if softcap is not None and not 0 < _number("softcap", softcap) < math.inf:
        raise OptionError(
            f"cross_entropy: softcap is {softcap}: it must be positive and finite; None leaves "
            "the logits as they are"
        )
    if not 0 <= _number("z_loss", z_loss) < math.inf:
        raise OptionError(f"cross_entropy: z_loss is {z_loss}: it must be finite and not negative")


def _number(name: str, value: float) -> float:
    if not isinstance(value, numbers.Real):
        raise DTypeError(
            f"cross_entropy: {name} is {type(value).__name__}: it must be a Python number; for a "
            "tensor of one element pass .item()"
        )
    return value


def _is_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise DTypeError(f"cross_entropy: {name} is {type(tensor).__name__}: it must be a tensor")


def _same_device(name: str, tensor: Tensor, input: Tensor, of: str = "input") -> None:
    if tensor.device != input.device:
        raise DeviceError(
            f"cross_entropy: {name} is on {tensor.device}, {of} on {input.device}: all operands "
            f"must be on one device; move it with .to({str(input.device)!r})"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
