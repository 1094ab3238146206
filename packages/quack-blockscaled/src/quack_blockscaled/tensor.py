"""`BlockScaledTensor`: quantised values with all that is needed to read them."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quack_core import torch_op
from quack_core.errors import DeviceError, DTypeError, ShapeError

from . import operators, record, sizes
from .formats import BlockFormat

Index = int | slice | EllipsisType


@dataclass(frozen=True, eq=False)
class BlockScaledTensor:
    """A tensor as values and scales: ``values * scale of the block * tensor_scale``.

    `quantize` makes it. It is a record, and operators of torch do not take it: none may turn it into
    a full-size tensor behind the user's back. It is a pytree, and goes in and out of torch.compile.

    Args:
        values: elements as ``format`` stores them, in the shape of the tensor, but that those of
            fewer than 8 bits are packed along ``dim``, the first in the lowest bits.
        scales: one for each block, in logical order: blocked dimensions count blocks.
        format: what values and scales mean.
        dim: along which ``format``'s blocks lie, counted from the end: negative.
        tensor_scale: float32 of shape (), if the format has a per-tensor scale; else None.
        dtype: what was quantised, and what `dequantize` gives.

    Raises:
        ShapeError, DTypeError, DeviceError: parts do not belong together.
    """

    values: Tensor
    scales: Tensor
    format: BlockFormat
    dim: int
    tensor_scale: Tensor | None
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if isinstance(self.values, Tensor):  # a pytree may hold anything in place of tensors
            _check(self)

    @property
    def shape(self) -> torch.Size:
        """Of the tensor that was quantised."""
        return torch.Size(sizes.shape(self.values.shape, self.format, self.dim))

    @property
    def ndim(self) -> int:
        return self.values.dim()

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return sum(part.nbytes for part in _parts(self))

    @property
    def mT(self) -> "BlockScaledTensor":
        """The last two dimensions exchanged, as a view: blocks of 1x128 become blocks of 128x1.

        Raises:
            ShapeError: there is one dimension.
        """
        if self.ndim < 2:
            raise ShapeError(f"BlockScaledTensor.mT: it has {self.ndim} dimension: it must have 2")
        dim = {-1: -2, -2: -1}.get(self.dim, self.dim)
        return dataclasses.replace(self, values=self.values.mT, scales=self.scales.mT, dim=dim)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as numbers, each rounded once: the one way to a tensor of torch.

        CUDA tensors run a kernel, where `supports` says so; CPU tensors run the reference, whose bits
        the kernel's are, those of NaN included. What lies in memory otherwise than `quantize` made it,
        such as a slice, is copied first.

        Args:
            dtype: float32, bfloat16 or float16; by default that of what was quantised.

        Returns:
            Of shape ``shape``, in memory with ``dim`` last, as the values of `quantize` are: contiguous
            if that is the last dimension.

        Raises:
            DTypeError: names the dtypes that there are.
            UnsupportedError: on a GPU there is no kernel for the format; names the way out.
        """
        if dtype is not None:
            torch_op.check_dtype("dequantize", "dtype", dtype)
        return operators.dequantize(
            self.values, self.scales, self.tensor_scale, self.format, self.dim, dtype or self.dtype
        )

    def __getitem__(self, index: Index | tuple[Index, ...]) -> "BlockScaledTensor":
        """Part of it, by whole blocks, as a view.

        Args:
            index: slices of step 1, which begin and end at multiples of the block; numbers select
                along dimensions in front of those that have blocks.

        Raises:
            ShapeError: names dimension, found and needed value.
            IndexError: a number is out of range.
        """
        blocks = sizes.blocks(self.format, self.dim)
        values: list[int | slice] = []
        scales: list[int | slice] = []
        for dim, one in zip(range(-self.ndim, 0), _each(index, self.ndim), strict=True):
            if isinstance(one, slice):
                block = blocks.get(dim, 1)
                start, stop = _bounds(one, dim, self.shape[dim], block)
                scales.append(slice(start // block, stop // block))
                if dim == self.dim:
                    start, stop = self.format.packed(start), self.format.packed(stop)
                values.append(slice(start, stop))
            elif dim < min(blocks):
                values.append(one)
                scales.append(one)
            else:
                raise ShapeError(
                    f"BlockScaledTensor: the index of dimension {dim} is {one}: from dimension "
                    f"{min(blocks)} on, which has blocks, it must be a slice"
                )
        return dataclasses.replace(
            self, values=self.values[tuple(values)], scales=self.scales[tuple(scales)]
        )

    def to(
        self, device: torch.device | str | int, *, non_blocking: bool = False
    ) -> "BlockScaledTensor":
        """A copy on another device, or itself where it is there already."""
        moved = _map(self, lambda part: part.to(device, non_blocking=non_blocking))
        unchanged = all(a is b for a, b in zip(_parts(moved), _parts(self), strict=True))
        return self if unchanged else moved

    def clone(self) -> "BlockScaledTensor":
        """A copy with memory of its own."""
        return _map(self, Tensor.clone)

    def contiguous(self) -> "BlockScaledTensor":
        """A copy whose parts are contiguous; parts that are stay as they are."""
        return _map(self, Tensor.contiguous)

    def __repr__(self) -> str:
        return (
            f"BlockScaledTensor({self.format.name}, shape={tuple(self.shape)}, dim={self.dim}, "
            f"dtype={torch_op.name_of(self.dtype)}, device={str(self.device)!r})"
        )


def _parts(x: BlockScaledTensor) -> list[Tensor]:
    """Its tensors."""
    return [x.values, x.scales] + ([] if x.tensor_scale is None else [x.tensor_scale])


def _map(x: BlockScaledTensor, function: Callable[[Tensor], Tensor]) -> BlockScaledTensor:
    """Each of its tensors through ``function``."""
    return _unflatten([function(part) for part in _parts(x)], (x.format, x.dim, x.dtype))


def _each(index: Any, ndim: int) -> list[int | slice]:
    """One entry for each dimension."""
    entries = list(index) if isinstance(index, tuple) else [index]
    for one in entries:
        if one is not Ellipsis and (isinstance(one, bool) or not isinstance(one, int | slice)):
            raise ShapeError(
                f"BlockScaledTensor: index {one!r}: each must be a slice, a number or ..."
            )
    dots = [i for i, one in enumerate(entries) if one is Ellipsis]
    missing = ndim - (len(entries) - len(dots))
    if missing < 0 or len(dots) > 1:
        raise ShapeError(f"BlockScaledTensor: {len(entries)} indices for {ndim} dimensions")
    at = dots[0] if dots else len(entries)
    return [*entries[:at], *[slice(None)] * missing, *entries[at + len(dots) :]]


def _bounds(one: slice, dim: int, size: int, block: int) -> tuple[int, int]:
    """Where a slice of whole blocks begins and ends.

    As `slice.indices` does it, which torch.compile cannot follow.
    """
    if one.step not in (None, 1):
        raise ShapeError(
            f"BlockScaledTensor: the step of dimension {dim} is {one.step}: it must be 1"
        )
    start = 0 if one.start is None else _inside(one.start, size)
    stop = size if one.stop is None else _inside(one.stop, size)
    stop = max(start, stop)
    for name, at in (("start", start), ("stop", stop)):
        if at % block:
            raise ShapeError(
                f"BlockScaledTensor: {name} of dimension {dim} is {at}: it must be a multiple of the "
                f"block, {block}; dequantize() first to cut blocks"
            )
    return start, stop


def _inside(at: int, size: int) -> int:
    """A bound of a slice, counted from the front and within it; negative ones count from the end."""
    return min(max(at + size if at < 0 else at, 0), size)


def _check(x: BlockScaledTensor) -> None:
    """That parts belong together.

    Raises:
        ShapeError, DTypeError, DeviceError: name part, dimension, found and needed value.
    """
    ndim = x.values.dim()
    if not -ndim <= x.dim < 0:
        raise ShapeError(f"BlockScaledTensor: dim is {x.dim}: it must be from {-ndim} to -1")
    torch_op.check_dtype("BlockScaledTensor", "dtype", x.dtype)
    for name, part, dtype in (
        ("values", x.values, x.format.element.dtype),
        ("scales", x.scales, x.format.scale.dtype),
    ):
        if torch_op.name_of(part.dtype) != dtype:
            raise DTypeError(
                f"BlockScaledTensor: {name} is {torch_op.name_of(part.dtype)}: {x.format.name} "
                f"needs {dtype}"
            )
    if x.values.shape[x.dim] % x.format.element.group[1]:
        raise ShapeError(
            f"BlockScaledTensor: values.shape[{x.dim}] is {x.values.shape[x.dim]}: {x.format.name} "
            f"needs a multiple of {x.format.element.group[1]}"
        )
    sizes.check("BlockScaledTensor", x.shape, x.format, x.dim)
    needed = sizes.scales_shape(x.shape, x.format, x.dim)
    if tuple(x.scales.shape) != needed:
        raise ShapeError(
            f"BlockScaledTensor: scales has the shape {tuple(x.scales.shape)}: {x.format.name} of "
            f"shape {tuple(x.shape)} along {x.dim} needs {needed}"
        )
    if (x.tensor_scale is not None) != x.format.per_tensor:
        found = "None" if x.tensor_scale is None else "given"
        needs = "one" if x.format.per_tensor else "none"
        raise ShapeError(
            f"BlockScaledTensor: tensor_scale is {found}: {x.format.name} needs {needs}"
        )
    if x.tensor_scale is not None:
        check_tensor_scale("BlockScaledTensor: tensor_scale", x.tensor_scale, x.values.device)
    if x.scales.device != x.values.device:
        raise DeviceError(
            f"BlockScaledTensor: scales are on {x.scales.device}, values on {x.values.device}"
        )


def check_tensor_scale(name: str, scale: Tensor, device: torch.device) -> None:
    """That a tensor is a per-tensor scale.

    Raises:
        DTypeError, ShapeError, DeviceError: name what was found and is needed.
    """
    if scale.dtype != torch.float32:
        raise DTypeError(f"{name} is {torch_op.name_of(scale.dtype)}: it must be float32")
    if scale.dim():
        raise ShapeError(f"{name} has the shape {tuple(scale.shape)}: it must be ()")
    if scale.device != device:
        raise DeviceError(f"{name} is on {scale.device}, the values on {device}")


Context = tuple[BlockFormat, int, torch.dtype]


def _flatten(x: BlockScaledTensor) -> tuple[list[Tensor], Context]:
    return _parts(x), (x.format, x.dim, x.dtype)


def _flatten_with_keys(x: BlockScaledTensor) -> tuple[list[tuple[Any, Tensor]], Context]:
    names = ("values", "scales", "tensor_scale")
    parts, context = _flatten(x)
    return [(pytree.GetAttrKey(n), p) for n, p in zip(names, parts, strict=False)], context


def _unflatten(parts: Iterable[Any], context: Context) -> BlockScaledTensor:
    values, scales, *rest = parts
    format, dim, dtype = context
    return BlockScaledTensor(values, scales, format, dim, rest[0] if rest else None, dtype)


def _dumpable(context: Context) -> list[Any]:
    format, dim, dtype = context
    return [record.of(format), dim, torch_op.name_of(dtype)]


def _from_dumpable(context: list[Any]) -> Context:
    format, dim, dtype = context
    return record.read(format), dim, torch_op.torch_dtype(dtype)


# Our own class only; with keys and names, so that torch.export can save programs that take it.
pytree.register_pytree_node(
    BlockScaledTensor,
    _flatten,
    _unflatten,
    serialized_type_name="quack_blockscaled.BlockScaledTensor",
    to_dumpable_context=_dumpable,
    from_dumpable_context=_from_dumpable,
    flatten_with_keys_fn=_flatten_with_keys,
)
