"""What top-k accepts: one set of checks for the CPU, CUDA devices, meta and fake tensors."""

import numbers

import torch
from torch import Tensor

from quack_core import torch_op
from quack_core.errors import DeviceError, DTypeError, ShapeError, UnsupportedError

from .spec import MAX_K, MAX_N


def forward(x: Tensor, k: int, softmax: bool) -> None:
    """Check the operands of the forward.

    Args:
        x: ``(..., N)``.
        k: from 1 to N.
        softmax: whether the values are to be normalised.

    Raises:
        ShapeError, DTypeError: name the operand, what was found, what is needed and the way out.
        UnsupportedError: no kernel is made for so long a row or so large a k.
    """
    _is_tensor("x", x)
    torch_op.check_dtype("topk", "x", x.dtype)
    if x.dim() == 0:
        raise ShapeError("topk: x has no dimension: it must be (..., N); use x.reshape(1)")
    if not isinstance(k, numbers.Integral) or isinstance(k, bool):
        raise DTypeError(f"topk: k is {type(k).__name__}: it must be an int")
    if not isinstance(softmax, bool):
        raise DTypeError(f"topk: softmax is {type(softmax).__name__}: it must be True or False")
    if not 1 <= k <= x.shape[-1]:
        raise ShapeError(
            f"topk: k is {k}, x.shape[-1] is {x.shape[-1]}: k must be from 1 to x.shape[-1]"
        )
    if x.is_cuda:
        _fits("k", k, MAX_K)
        _fits("x.shape[-1]", x.shape[-1], MAX_N)


def backward(
    dvalues: Tensor, indices: Tensor, softmax_values: Tensor | None, n: int, dx_dtype: torch.dtype
) -> None:
    """Check the operands of the backward; raises as `forward` does, and DeviceError.

    The indices themselves are not looked at: the forward made them.
    """
    operands = [("indices", indices), ("dvalues", dvalues)]
    if softmax_values is not None:
        operands.append(("softmax_values", softmax_values))
    for name, tensor in operands:
        _is_tensor(name, tensor)
        if tensor.device != indices.device:
            raise DeviceError(
                f"topk: {name} is on {tensor.device}, indices on {indices.device}: all operands "
                f"must be on one device; move it with .to({str(indices.device)!r})"
            )
        if tensor.shape != indices.shape:
            raise ShapeError(
                f"topk: {name} has shape {tuple(tensor.shape)}: it must be that of the indices, "
                f"{tuple(indices.shape)}"
            )
        if name != "indices":
            torch_op.check_dtype("topk", name, tensor.dtype)
    if indices.dtype != torch.int64:
        raise DTypeError(f"topk: indices are {_name(indices.dtype)}: they must be int64")
    if indices.dim() == 0 or not 1 <= indices.shape[-1] <= n:
        raise ShapeError(
            f"topk: indices have shape {tuple(indices.shape)}, n is {n}: they must be (..., k) "
            "with k from 1 to n"
        )
    torch_op.check_dtype("topk", "dtype of dx", dx_dtype)


def _fits(name: str, found: int, limit: int) -> None:
    if found > limit:
        raise UnsupportedError(
            f"topk: {name} is {found}",
            f"on CUDA devices it is at most {limit}",
            "use torch.sort(x, dim=-1, descending=True, stable=True), or the CPU",
        )


def _is_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise DTypeError(f"topk: {name} is {type(tensor).__name__}: it must be a tensor")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
