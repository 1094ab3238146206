"""What softmax accepts: one set of checks for the CPU, CUDA devices, meta and fake tensors."""

import numbers

from torch import Tensor

from quack_core import torch_op
from quack_core.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from quack_norm.ops.row_map.spec import MAX_ROWS

from .spec import MAX_N


def operand(name: str, x: Tensor, dim: int) -> int:
    """Check the operand of a call.

    Returns:
        ``dim`` counted from the front; 0 for a tensor without dimensions.

    Raises:
        DTypeError, ShapeError, UnsupportedError: name the operand, what was found, what is needed.
    """
    if not isinstance(x, Tensor):
        raise DTypeError(f"{name}: input is {type(x).__name__}: it must be a tensor")
    torch_op.check_dtype(name, "input", x.dtype)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise DTypeError(f"{name}: dim is {type(dim).__name__}: it must be an int")
    rank = max(1, x.dim())
    if not -rank <= dim < rank:
        raise ShapeError(
            f"{name}: dim is {dim}, input has {x.dim()} dimensions: it must be {-rank} to {rank - 1}"
        )
    dim %= rank
    if x.dim():
        row(name, "input", x, dim)
    return dim


def row(name: str, what: str, x: Tensor, dim: int) -> None:
    """Check the length and number of rows."""
    n = x.shape[dim]
    if n > MAX_N:
        raise UnsupportedError(
            f"{name}: {what}.shape[{dim}] is {n}",
            f"rows have at most {MAX_N} elements",
            "use torch.nn.functional",
        )
    count = x.numel() // n if n else 0
    if isinstance(count, int) and count > MAX_ROWS:  # no guard on a symbolic batch
        raise UnsupportedError(
            f"{name}: {what} has {count} rows",
            f"kernels count at most {MAX_ROWS}",
            "split the batch",
        )


def scale(name: str, given: float) -> None:
    """Check the factor."""
    if not isinstance(given, numbers.Real):
        raise DTypeError(
            f"{name}: scale is {type(given).__name__}: it must be a Python number; for a tensor of "
            "one element pass .item()"
        )


def gradient(name: str, out: Tensor, dout: Tensor) -> None:
    """Check that the incoming gradient fits the result."""
    if dout.shape != out.shape:
        raise ShapeError(
            f"{name}: dout.shape is {tuple(dout.shape)}, out.shape is {tuple(out.shape)}: they must "
            "be equal"
        )
    if dout.device != out.device:
        raise DeviceError(f"{name}: dout is on {dout.device}, out on {out.device}")
