"""What GEMM accepts: one set of checks for the CPU, CUDA devices, meta and fake tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quack_core import torch_op
from quack_core.errors import DeviceError, DTypeError, LayoutError, ShapeError, UnsupportedError
from quack_core.gemm.epilogue import Kind, Op, doubles, halves, mirrors

from .spec import Major

HALF = (torch.bfloat16, torch.float16)
EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT = (torch.bfloat16, torch.float16, torch.float32)
ALIGN = 16
"""Bytes that TMA wants addresses and strides to be multiples of."""


def operands(a: Tensor, b: Tensor) -> tuple[int, int, int, int | None]:
    """Check shapes, dtypes and devices of A and B.

    Returns:
        m, n, k, and the number of matrices, None without a batch.

    Raises:
        DTypeError, ShapeError, DeviceError, UnsupportedError: name what was found and is needed.
    """
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Tensor):
            raise DTypeError(f"gemm: {name} is {type(x).__name__}: it must be a tensor")
        if x.dim() not in (2, 3):
            raise ShapeError(f"gemm: {name} has {x.dim()} dimensions: it must have 2 or 3")
    if a.dtype == torch.float32 or b.dtype == torch.float32:
        raise UnsupportedError(
            f"gemm: a is {_name(a.dtype)}, b is {_name(b.dtype)}",
            "there are no float32 kernels, and precision is never lowered silently",
            "use torch.matmul, or convert to bfloat16 with .to()",
        )
    if not ((a.dtype == b.dtype and a.dtype in HALF) or (a.dtype in EIGHT and b.dtype in EIGHT)):
        raise DTypeError(
            f"gemm: a is {_name(a.dtype)}, b is {_name(b.dtype)}: both must be bfloat16, both "
            "float16, or each float8_e4m3fn or float8_e5m2"
        )
    if a.device != b.device:
        raise DeviceError(f"gemm: a is on {a.device}, b on {b.device}")
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"gemm: a.shape[-1] is {a.shape[-1]}, b.shape[-2] is {b.shape[-2]}: they must be equal"
        )
    batches = None
    if a.dim() == 3 and b.dim() == 3:
        if 1 not in (a.shape[0], b.shape[0]) and a.shape[0] != b.shape[0]:
            raise ShapeError(
                f"gemm: a.shape[0] is {a.shape[0]}, b.shape[0] is {b.shape[0]}: they must be equal, "
                "or one of them 1"
            )
        batches = max(a.shape[0], b.shape[0]) if 0 not in (a.shape[0], b.shape[0]) else 0
    elif a.dim() == 3 or b.dim() == 3:
        batches = (a if a.dim() == 3 else b).shape[0]
    return a.shape[-2], b.shape[-1], a.shape[-1], batches


def layer(
    op: str,
    x: Tensor,
    width: int,
    name: str,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool = False,
) -> int:
    """Check a weight (N, K) and a bias (N,) of a linear layer.

    Args:
        x: what dtype and device are compared with.
        width: K.
        name: the weight's.

    Returns:
        Features that go out: N, or half of it.

    Raises:
        DTypeError, ShapeError, DeviceError, UnsupportedError: name what was found and is needed.
    """
    if torch.float32 in (x.dtype, weight.dtype):
        raise UnsupportedError(
            f"{op}: x is {_name(x.dtype)}, {name} is {_name(weight.dtype)}",
            "there are no float32 kernels, and precision is never lowered silently",
            "convert both to bfloat16, or call it under torch.autocast",
        )
    if x.dtype not in HALF or weight.dtype != x.dtype:
        raise DTypeError(
            f"{op}: x is {_name(x.dtype)}, {name} is {_name(weight.dtype)}: both must be bfloat16, or "
            "both float16"
        )
    if weight.dim() != 2:
        raise ShapeError(f"{op}: {name} has {weight.dim()} dimensions: it must have 2")
    if weight.shape[1] != width:
        raise ShapeError(f"{op}: {name}.shape[1] is {weight.shape[1]}: it must be {width}")
    if gated and weight.shape[0] % 16:
        raise ShapeError(
            f"{op}: {name}.shape[0] is {weight.shape[0]}: with gates it must be a multiple of 16"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ShapeError(
            f"{op}: the bias of {name} has the shape {tuple(bias.shape)}: it must be "
            f"({weight.shape[0]},)"
        )
    for what, tensor in ((name, weight), (f"the bias of {name}", bias)):
        if tensor is not None and tensor.device != x.device:
            raise DeviceError(f"{op}: x is on {x.device}, {what} on {tensor.device}")
    return weight.shape[0] // 2 if gated else weight.shape[0]


def steps(
    given: list[tuple[Op, tuple[Any, ...]]],
    m: int,
    n: int,
    batches: int | None,
    device: torch.device,
) -> int:
    """Check an epilogue and its operands.

    Returns:
        Columns of D.

    Raises:
        DTypeError, ShapeError, DeviceError: name op, operand, what was found and is needed.
    """
    try:
        ops = tuple(op for op, _ in given)
        gated, doubled = halves(ops), doubles(ops)
        if mirrors(ops) and m != n:
            raise ValueError(f"D has {m} rows and {n} columns: to be mirrored it must be square")
    except ValueError as error:
        raise ShapeError(f"gemm: {error}") from None
    needed = 16 if gated else 8 if doubled else 1
    if n % needed:
        raise ShapeError(f"gemm: b.shape[-1] is {n}: with pairs it must be a multiple of {needed}")
    cols = n
    for op, tensors in given:
        name = type(op).__name__
        kinds = [what.kind for what in op.operands]
        if gated and (Kind.TILE in kinds or (cols != n and Kind.ROW in kinds)):
            raise UnsupportedError(
                f"gemm: {name} beside an op that takes pairs",
                "there it has no operands of D's shape, and behind that op no row operands",
                "add them in a step of their own",
            )
        if (Kind.PAIRS in kinds and not op.splits) or (
            cols > n and (Kind.TILE in kinds or Kind.ROW in kinds)
        ):
            raise UnsupportedError(
                f"gemm: operands of {name}",
                "those of twice the columns are for the op that gives pairs, and none are behind it",
                "add them in a step of their own",
            )
        if op.reduces and (gated or doubled):
            raise UnsupportedError(
                f"gemm: {name} beside an op with pairs", "pairs are not reduced", "reduce D itself"
            )
        if len(tensors) != len(op.operands):
            raise ShapeError(
                f"gemm: {name} was given {len(tensors)} operands: it takes {len(op.operands)}"
            )
        for tensor, what in zip(tensors, op.operands, strict=True):
            _operand(f"gemm: {what.name} of {name}", tensor, what, m, cols, batches, device)
        cols = cols // 2 if op.pairs else cols * 2 if op.splits else cols
    return cols


def product(
    a: Tensor,
    b: Tensor,
    given: list[tuple[Op, tuple[Any, ...]]],
    out_dtypes: Sequence[torch.dtype],
) -> None:
    """Check everything but memory orders: `operands`, `steps` and each `out_dtype`."""
    m, n, _, batches = operands(a, b)
    steps(given, m, n, batches, a.device)
    for dtype in out_dtypes:
        out_dtype(dtype)


def _operand(
    name: str,
    tensor: Any,
    what: Any,
    m: int,
    n: int,
    batches: int | None,
    device: torch.device,
) -> None:
    if what.kind == Kind.SCALAR:
        if isinstance(tensor, bool) or not isinstance(tensor, (int, float)):
            raise DTypeError(f"{name} is {type(tensor).__name__}: it must be a number")
        return
    if not isinstance(tensor, Tensor):
        raise DTypeError(f"{name} is {type(tensor).__name__}: it must be a tensor")
    if _name(tensor.dtype) != what.dtype:
        raise DTypeError(f"{name} is {_name(tensor.dtype)}: it must be {what.dtype}")
    if tensor.device != device:
        raise DeviceError(f"{name} is on {tensor.device}, a on {device}")
    shape: tuple[int, ...] = {
        Kind.DEVICE_SCALAR: (1,),
        Kind.ROW: (n,),
        Kind.COLUMN: (m,),
        Kind.TILE: (m, n),
        Kind.PAIRS: (m, 2 * n),
    }[what.kind]
    if what.batched:
        if what.kind == Kind.DEVICE_SCALAR:
            raise ShapeError(f"{name} has a batch: scalars have none")
        if batches is None:
            raise ShapeError(f"{name} has a batch, a and b have none")
        shape = (batches, *shape)
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name} has the shape {tuple(tensor.shape)}: it must be {shape}")


def output(
    out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, a: Tensor, b: Tensor, c: Tensor | None
) -> None:
    """Check a given result.

    Raises:
        ShapeError, DTypeError, DeviceError, LayoutError: name what was found and is needed.
    """
    device = a.device
    if tuple(out.shape) != shape:
        raise ShapeError(f"gemm: out has the shape {tuple(out.shape)}: it must be {shape}")
    if out.dtype != dtype:
        raise DTypeError(
            f"gemm: out is {_name(out.dtype)}, out_dtype {_name(dtype)}: they must be equal"
        )
    if out.device != device:
        raise DeviceError(f"gemm: out is on {out.device}, a on {device}")
    for dim, (size, stride) in enumerate(zip(out.shape, out.stride(), strict=True)):
        if size > 1 and stride == 0:
            raise LayoutError(f"gemm: out.stride({dim}) is 0: its elements would be one in memory")
    for name, x in (("a", a), ("b", b), ("c", c)):
        if x is None or not shares(out, x):
            continue
        # Of the same memory order, each element of C is read before the one of D is written.
        if name == "c" and torch_op.identical(out, x):
            continue
        raise LayoutError(f"gemm: out shares memory with {name}: it must not; leave out away")


def out_dtype(dtype: torch.dtype) -> None:
    """Check the dtype of a result.

    Raises:
        DTypeError: kernels do not write it.
    """
    if dtype not in OUT:
        names = ", ".join(_name(one) for one in OUT)
        raise DTypeError(f"gemm: out_dtype is {_name(dtype)}: it must be one of {names}")


def order(x: Tensor) -> Major | None:
    """Which memory order a matrix has, for a kernel; None if TMA cannot read it."""
    needed = ALIGN // x.element_size()
    if x.dim() == 3 and x.shape[0] > 1 and (x.stride(0) % needed or x.stride(0) == 0):
        return None
    if misaligned(x):
        return None
    if _strided(x, -1, -2, needed):
        return "row"
    return "column" if _strided(x, -2, -1, needed) else None


def major(name: str, x: Tensor) -> Major:
    """As `order`.

    Raises:
        LayoutError: TMA cannot read it; says why and what helps.
    """
    found = order(x)
    if found is not None:
        return found
    if misaligned(x):
        raise LayoutError(
            f"gemm: the address of {name} is {misaligned(x)} bytes off a multiple of {ALIGN}; call "
            f"{name}.clone()"
        )
    needed = ALIGN // x.element_size()
    dims = [(-1, -2), (-2, -1)]
    dims = [pair for pair in dims if x.stride(pair[0]) == 1 or x.shape[pair[0]] == 1]
    if not dims:
        raise LayoutError(
            f"gemm: {name} has the strides {tuple(x.stride())}: one of the last two must be 1; call "
            f"{name}.contiguous()"
        )
    if not any(_strided(x, *pair, needed) for pair in dims):
        along, across = dims[0]
        raise LayoutError(
            f"gemm: {name}.stride({across}) is {x.stride(across)}: rows in memory must begin at "
            f"multiples of {ALIGN} bytes, so it must be a positive multiple of {needed}; pad "
            f"{name}.shape[{along}], and slice what you pass"
        )
    raise LayoutError(
        f"gemm: {name}.stride(0) is {x.stride(0)}: it must be a positive multiple of {needed}"
    )


def _strided(x: Tensor, along: int, across: int, needed: int) -> bool:
    """Whether one dimension is contiguous, and steps of the other are multiples of 16 bytes."""
    step = x.stride(across)
    return (x.stride(along) == 1 or x.shape[along] == 1) and (
        (step > 0 and step % needed == 0) or x.shape[across] == 1
    )


def misaligned(x: Tensor) -> int:
    """By how many bytes a tensor misses an address that TMA takes; 0 where it has no address yet."""
    return x.data_ptr() % ALIGN if torch_op.addressed(x) else 0


def layouts(a: Tensor, b: Tensor, d: Tensor, given: Sequence[tuple[Op, tuple[Any, ...]]]) -> None:
    """Check the memory orders of operands and result for a GPU.

    Raises:
        LayoutError: names operand, stride and what is needed.
    """
    ops = tuple(op for op, _ in given)
    needed: dict[str, Major] = {}
    if a.dtype in EIGHT:
        needed |= {"a": "row", "b": "column"}
    if halves(ops):
        needed["b"] = "column"
    if halves(ops) or doubles(ops):
        needed["out"] = "row"
    for name, x in (("a", a), ("b", b), ("out", d)):
        found = major(name, x)
        if found == needed.get(name, found):
            continue
        dim, turn = (-1, "") if needed[name] == "row" else (-2, ".mT")
        raise LayoutError(
            f"gemm: {name}.stride({dim}) is {x.stride(dim)}: with 8-bit operands or pairs of columns "
            f"it must be 1; pass {name}{turn}.contiguous(){turn}"
        )
    for op, tensors in given:
        for tensor, what in zip(tensors, op.operands, strict=True):
            if what.kind in (Kind.SCALAR, Kind.DEVICE_SCALAR):
                continue
            if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
                raise LayoutError(
                    f"gemm: {what.name}.stride(-1) is {tensor.stride(-1)}: it must be 1; call "
                    f"{what.name}.contiguous()"
                )


def shares(out: Tensor, x: Tensor) -> bool:
    """Whether memory of two tensors may overlap, by their addresses."""
    if not (torch_op.addressed(out) and torch_op.addressed(x)) or 0 in (out.numel(), x.numel()):
        return False
    (first, last), (begin, end) = torch_op.span(out), torch_op.span(x)
    return first < end and begin < last


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
