"""`BlockScaledTensor`: its parts, views, what torch does with it."""

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quack_blockscaled import (
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    MXFP4,
    MXFP6_E2M3,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
    BlockScaledTensor,
    quantize,
)
from quack_blockscaled.formats import E2M1, FORMATS, UE4M3
from quack_core.errors import DeviceError, DTypeError, ShapeError
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import random

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
U8, E8M0 = torch.uint8, torch.float8_e8m0fnu
MINE = BlockFormat("mine", E2M1, UE4M3, (4, 8), per_tensor=True)
ALL = [*FORMATS.values(), MINE]


def made(
    format: BlockFormat,
    shape: tuple[int, ...] = (256, 384),
    dim: int = -1,
    dtype: torch.dtype = BF16,
    seed: int = 1,
) -> BlockScaledTensor:
    scale = 0.5 if format.per_tensor else None
    return quantize(random(shape, dtype, "cpu", seed=seed), format, dim=dim, per_tensor_scale=scale)


def assert_same(actual: BlockScaledTensor, expected: BlockScaledTensor) -> None:
    """Bit for bit, all of them."""
    for name in ("format", "dim", "dtype"):
        assert getattr(actual, name) == getattr(expected, name)
    parts, others = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(parts) == len(others)
    for part, other in zip(parts, others, strict=True):
        assert_bitwise(part, other)


# --- parts


@pytest.mark.parametrize(
    ("format", "shape", "dim", "values", "scales"),
    [
        (MXFP8_E4M3, (3, 64), -1, ((3, 64), torch.float8_e4m3fn), ((3, 2), E8M0)),
        (MXFP8_E4M3, (64, 3), 0, ((64, 3), torch.float8_e4m3fn), ((2, 3), E8M0)),
        (MXFP6_E2M3, (2, 3, 64), -1, ((2, 3, 48), U8), ((2, 3, 2), E8M0)),
        (MXFP4, (3, 64), -1, ((3, 32), U8), ((3, 2), E8M0)),
        (MXFP4, (2, 64, 3), 1, ((2, 32, 3), U8), ((2, 2, 3), E8M0)),
        (NVFP4, (3, 64), -1, ((3, 32), U8), ((3, 4), torch.float8_e4m3fn)),
        (FP8_BLOCK_1X128, (3, 256), -1, ((3, 256), torch.float8_e4m3fn), ((3, 2), F32)),
        (FP8_BLOCK_128X128, (256, 384), -1, ((256, 384), torch.float8_e4m3fn), ((2, 3), F32)),
        (MINE, (2, 12, 16), -1, ((2, 12, 8), U8), ((2, 3, 2), torch.float8_e4m3fn)),
        (MINE, (2, 16, 12), -2, ((2, 8, 12), U8), ((2, 2, 3), torch.float8_e4m3fn)),
        (NVFP4, (16,), -1, ((8,), U8), ((1,), torch.float8_e4m3fn)),
        (MXFP8_E4M3, (0, 64), -1, ((0, 64), torch.float8_e4m3fn), ((0, 2), E8M0)),
        (NVFP4, (3, 0), -1, ((3, 0), U8), ((3, 0), torch.float8_e4m3fn)),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_shapes_and_dtypes(
    format: BlockFormat,
    shape: tuple[int, ...],
    dim: int,
    values: tuple[Any, Any],
    scales: tuple[Any, Any],
    where: str,
) -> None:
    found = quantize(torch.zeros(shape, dtype=F16, device=where), format, dim=dim)
    assert (tuple(found.values.shape), found.values.dtype) == values
    assert (tuple(found.scales.shape), found.scales.dtype) == scales
    assert (tuple(found.shape), found.ndim, found.dtype) == (shape, len(shape), F16)
    assert found.dim == (dim if dim < 0 else dim - len(shape))
    assert found.device.type == where == found.scales.device.type
    assert (found.tensor_scale is not None) == format.per_tensor
    numbers = found.dequantize()
    assert (tuple(numbers.shape), numbers.dtype, numbers.device.type) == (shape, F16, where)
    assert found.dequantize(F32).dtype == F32


def test_bytes() -> None:
    assert made(NVFP4, (4, 32)).nbytes == 4 * 16 + 4 * 2 + 4
    assert made(FP8_BLOCK_1X128, (4, 256)).nbytes == 4 * 256 + 4 * 2 * 4


def test_it_says_what_it_is() -> None:
    text = "BlockScaledTensor(nvfp4, shape=(4, 32), dim=-1, dtype=bfloat16, device='cpu')"
    assert repr(made(NVFP4, (4, 32))) == text


def test_it_is_frozen_and_no_operand_of_torch() -> None:
    x = made(MXFP4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        x.dim = -2  # type: ignore[misc]
    with pytest.raises(TypeError):
        torch.add(x, x)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        x @ x  # type: ignore[operator]


GOOD: dict[str, Any] = {
    "values": torch.zeros(8, 32, dtype=U8),
    "scales": torch.zeros(8, 4, dtype=U8).view(torch.float8_e4m3fn),
    "format": NVFP4,
    "dim": -1,
    "tensor_scale": torch.ones(()),
    "dtype": BF16,
}
E4 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dim": 1}, ShapeError, "dim is 1: it must be from -2 to -1"),
        ({"dim": -3}, ShapeError, "dim is -3: it must be from -2 to -1"),
        ({"dtype": U8}, DTypeError, "dtype is uint8: it must be one of float32, bfloat16, float16"),
        ({"values": torch.zeros(8, 32)}, DTypeError, "values is float32: nvfp4 needs uint8"),
        (
            {"scales": torch.zeros(8, 4, dtype=U8)},
            DTypeError,
            "scales is uint8: nvfp4 needs float8_e4m3fn",
        ),
        (
            {"scales": torch.zeros(8, 3).to(E4)},
            ShapeError,
            r"scales has the shape \(8, 3\): nvfp4 of shape \(8, 64\) along -1 needs \(8, 4\)",
        ),
        (
            {"dim": -2},
            ShapeError,
            r"scales has the shape \(8, 4\): nvfp4 of shape \(16, 32\) along -2 needs \(1, 32\)",
        ),
        (
            {"values": torch.zeros(8, 36, dtype=U8)},
            ShapeError,
            r"shape\[-1\] is 72: with nvfp4 it must be a multiple of 16",
        ),
        (
            {"values": torch.zeros(8, 32, dtype=U8), "format": MXFP6_E2M3, "tensor_scale": None},
            DTypeError,
            "scales is float8_e4m3fn: mxfp6_e2m3 needs float8_e8m0fnu",
        ),
        (
            {
                "scales": torch.zeros(8, 1, dtype=U8).view(E8M0),
                "format": MXFP6_E2M3,
                "tensor_scale": None,
            },
            ShapeError,
            r"values.shape\[-1\] is 32: mxfp6_e2m3 needs a multiple of 3",
        ),
        ({"tensor_scale": None}, ShapeError, "tensor_scale is None: nvfp4 needs one"),
        (
            {"tensor_scale": torch.ones(1)},
            ShapeError,
            r"tensor_scale has the shape \(1,\): it must be \(\)",
        ),
        (
            {"tensor_scale": torch.ones((), dtype=F16)},
            DTypeError,
            "tensor_scale is float16: it must be float32",
        ),
        (
            {"tensor_scale": torch.ones((), device="meta")},
            DeviceError,
            "tensor_scale is on meta, the values on cpu",
        ),
        (
            {"scales": torch.zeros(8, 4, device="meta").to(E4)},
            DeviceError,
            "scales are on meta, values on cpu",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_parts_that_do_not_belong_together(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    assert BlockScaledTensor(**GOOD).shape == (8, 64)
    with pytest.raises(error, match=message):
        BlockScaledTensor(**GOOD | changes)


def test_a_per_tensor_scale_of_a_format_without() -> None:
    x = made(MXFP4)
    with pytest.raises(ShapeError, match="tensor_scale is given: mxfp4 needs none"):
        dataclasses.replace(x, tensor_scale=torch.ones(()))


def test_rows_of_blocks_need_the_last_two_dimensions() -> None:
    with pytest.raises(ShapeError, match="blocks of 128x128 lie along the last two dimensions"):
        quantize(torch.zeros(128, 128, 128), FP8_BLOCK_128X128, dim=0)
    with pytest.raises(ShapeError, match="blocks of 128x128 lie along the last two dimensions"):
        quantize(torch.zeros(128), FP8_BLOCK_128X128)


# --- views


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("format", ALL, ids=lambda each: each.name)
def test_transposed(format: BlockFormat, dim: int) -> None:
    x = made(format, (2, 128, 256), dim)
    turned = x.mT
    assert (tuple(turned.shape), turned.dim) == ((2, 256, 128), -3 - dim)
    assert turned.values.data_ptr() == x.values.data_ptr()
    assert turned.scales.data_ptr() == x.scales.data_ptr()
    assert turned.tensor_scale is x.tensor_scale
    assert_bitwise(turned.dequantize(), x.dequantize().mT)
    # It is what the transposed tensor becomes.
    original = random((2, 128, 256), BF16, "cpu", seed=1)
    scale = 0.5 if format.per_tensor else None
    assert_same(turned, quantize(original.mT, format, dim=turned.dim, per_tensor_scale=scale))
    assert_same(turned.mT, x)


def test_transposed_along_another_dimension() -> None:
    x = made(MXFP4, (32, 4, 6), 0)
    assert (tuple(x.mT.shape), x.mT.dim) == ((32, 6, 4), -3)
    assert_bitwise(x.mT.dequantize(), x.dequantize().mT)


def test_one_dimension_is_not_transposed() -> None:
    with pytest.raises(ShapeError, match="it has 1 dimension: it must have 2"):
        made(MXFP4, (32,)).mT  # noqa: B018


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(128, 256)),
        (slice(0, 128),),
        slice(128, None),
        (..., slice(-128, None)),
        (slice(128, 256), ..., slice(256, 384)),
        (..., slice(128, 128)),
        (slice(256, 0), ...),
        ...,
    ],
    ids=str,
)
@pytest.mark.parametrize("format", ALL, ids=lambda each: each.name)
def test_whole_blocks_are_views(format: BlockFormat, index: Any) -> None:
    x = made(format)
    part = x[index]
    assert_bitwise(part.dequantize(), x.dequantize()[index])
    assert part.values.untyped_storage().data_ptr() == x.values.untyped_storage().data_ptr()
    assert part.scales.untyped_storage().data_ptr() == x.scales.untyped_storage().data_ptr()
    assert_bitwise(x.mT[:, :128].dequantize(), x.dequantize()[:128].mT)


def test_bounds_are_those_of_python() -> None:
    x = made(MXFP4, (3, 64))
    bounds = (None, -9, -3, -2, -1, 0, 1, 2, 3, 9)
    for start, stop in itertools.product(bounds, bounds):
        assert x[start:stop].shape[0] == len(range(3)[start:stop]), (start, stop)
        assert_bitwise(x[start:stop].values, x.values[start:stop])


def test_rows_are_free_where_blocks_have_one() -> None:
    x = made(MXFP6_E2M3, (5, 3, 64))
    numbers = x.dequantize()
    for index in ((2,), (-1, 1), (2, slice(1, 3)), (slice(3, 5), 0, slice(32, 64))):
        assert_bitwise(x[index].dequantize(), numbers[index])
    assert (tuple(x[2].shape), x[2].dim) == ((3, 64), -1)


@pytest.mark.parametrize(
    ("format", "index", "message"),
    [
        (MXFP4, (..., slice(16, 64)), r"start of dimension -1 is 16: .* multiple of the block, 32"),
        (MXFP4, (..., slice(0, 48)), r"stop of dimension -1 is 48: .* multiple of the block, 32"),
        (FP8_BLOCK_128X128, slice(64, None), "start of dimension -2 is 64: .* the block, 128"),
        (MXFP4, (slice(None, None, 2),), "the step of dimension -2 is 2: it must be 1"),
        (MXFP4, (0, 0), "index of dimension -1 is 0: from dimension -1 on, .* must be a slice"),
        (FP8_BLOCK_128X128, 1, "of dimension -2 is 1: from dimension -2 on, .* must be a slice"),
        (MXFP4, (0, 0, 0), "3 indices for 2 dimensions"),
        (MXFP4, (..., 0, ...), "3 indices for 2 dimensions"),
        (MXFP4, torch.tensor([0]), "each must be a slice, a number or ..."),
        (MXFP4, True, "index True: each must be a slice, a number or ..."),
        (MXFP4, None, "index None: each must be a slice, a number or ..."),
    ],
    ids=str,
)
def test_what_cannot_be_cut(format: BlockFormat, index: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        made(format)[index]


def test_a_number_out_of_range() -> None:
    with pytest.raises(IndexError):
        made(MXFP4)[256]


# --- copies


def test_on_its_device_it_stays_itself() -> None:
    x = made(NVFP4)
    assert x.to("cpu") is x
    moved = x.to("meta")
    assert {part.device.type for part in pytree.tree_leaves(moved)} == {"meta"}
    assert (moved.shape, moved.format, moved.dim, moved.dtype) == (x.shape, NVFP4, -1, BF16)


def test_copies_have_memory_of_their_own() -> None:
    x = made(NVFP4)
    for other in (x.clone(), copy.deepcopy(x)):
        assert_same(other, x)
        for a, b in zip(pytree.tree_leaves(other), pytree.tree_leaves(x), strict=True):
            assert a.data_ptr() != b.data_ptr()
    assert x.contiguous().values is x.values
    assert x.mT.contiguous().values.is_contiguous()
    assert_same(x.mT.contiguous(), x.mT)


# --- pytree


@pytest.mark.parametrize(("format", "count"), [(NVFP4, 3), (MXFP4, 2)])
def test_it_is_a_pytree(format: BlockFormat, count: int) -> None:
    x = made(format)
    leaves, spec = pytree.tree_flatten({"x": x})
    assert len(leaves) == count
    assert_same(pytree.tree_unflatten(leaves, spec)["x"], x)
    again = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert again == spec
    assert_same(pytree.tree_unflatten(leaves, again)["x"], x)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(x)[0]]
    assert paths == [".values", ".scales", ".tensor_scale"][:count]


def test_leaves_may_be_anything() -> None:
    shapes = pytree.tree_map(lambda part: tuple(part.shape), made(NVFP4, (4, 32)))
    assert (shapes.values, shapes.scales, shapes.tensor_scale) == ((4, 16), (4, 2), ())


# --- torch.compile and torch.export


def compiled(function: Callable[..., Any], *args: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")(*args)


@pytest.mark.parametrize("format", ALL, ids=lambda each: each.name)
def test_compiled_in_and_out(format: BlockFormat) -> None:
    x = made(format, (128, 256))

    def views(x: BlockScaledTensor) -> tuple[BlockScaledTensor, BlockScaledTensor, Tensor]:
        return x.mT, x[:, 128:], x.dequantize(F32) + 1

    turned, part, numbers = compiled(views, x)
    assert_same(turned, x.mT)
    assert_same(part, x[:, 128:])
    assert_bitwise(numbers, x.dequantize(F32) + 1)


def test_compiled_quantize_gives_the_same_bits() -> None:
    x = random((128, 256), BF16, "cpu", seed=2)

    def step(x: Tensor) -> tuple[BlockScaledTensor, BlockScaledTensor]:
        return quantize(x * 2, NVFP4, per_tensor_scale=0.5), quantize(x, FP8_BLOCK_128X128, dim=0)

    for actual, expected in zip(compiled(step, x), step(x), strict=True):
        assert_same(actual, expected)


def test_exported_with_its_tensors() -> None:
    class Read(torch.nn.Module):
        def forward(self, x: BlockScaledTensor) -> Tensor:
            return x.dequantize(F32) * 2

    x = made(NVFP4, (4, 32))
    program = torch.export.export(Read(), (x,))
    assert_bitwise(program.module()(x), x.dequantize(F32) * 2)
