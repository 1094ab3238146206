"""The order of scales: its rule on every coordinate, padding, and what is refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import ScalingType, SwizzleType

from quack_blockscaled import scale_layout
from quack_blockscaled.formats import E2M1, E8M0, FORMATS, FP8_BLOCK_1X128, MXFP4, BlockFormat
from quack_blockscaled.scale_layout import offset, pack, padded, size, unpack
from quack_core.errors import DTypeError, ShapeError, UnsupportedError

DTYPES = [torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn]


def scales(*shape: int) -> torch.Tensor:
    """Bytes that are never zero, different from their neighbours."""
    return (torch.arange(math.prod(shape)) % 251 + 1).to(torch.uint8).view(shape)


def test_offsets_KQ_09() -> None:
    assert [offset(1, 0, 4), offset(32, 0, 4), offset(33, 1, 4)] == [16, 4, 21]
    assert [offset(0, 4, 8), offset(128, 0, 8), offset(127, 3, 4)] == [512, 1024, 511]
    assert offset(128, 0, 5) == 1024  # 5 columns lie in tiles of 4 as 8 do


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 9), (256, 8), (33, 4), (384, 5)])
def test_every_scale_lies_at_its_offset_KQ_09(shape: tuple[int, int]) -> None:
    rows, cols = shape
    given = scales(rows, cols)
    packed = pack(given)
    places = [offset(row, col, cols) for row in range(rows) for col in range(cols)]
    assert packed.shape == (size(rows, cols),)
    assert torch.equal(packed[places], given.flatten())
    padding = sorted(set(range(packed.numel())) - set(places))
    assert packed[padding].eq(0).all()
    assert torch.equal(unpack(packed, rows, cols), given)


def test_sizes_are_of_whole_tiles_KQ_08() -> None:
    assert padded(1, 1) == (128, 4) and size(1, 1) == 512
    assert padded(128, 4) == (128, 4) and size(129, 5) == 2048
    assert padded(0, 4) == (0, 4) and size(0, 4) == size(128, 0) == 0
    assert size(128, 1) == 512  # M = 128, K = 32 in blocks of 32: a column is a tile


@given(
    rows=st.integers(0, 300),
    cols=st.integers(0, 11),
    batch=st.lists(st.integers(0, 3), max_size=2),
    dtype=st.sampled_from(DTYPES),
)
def test_unpack_is_the_inverse(rows: int, cols: int, batch: list[int], dtype: torch.dtype) -> None:
    given = scales(*batch, rows, cols).view(dtype)
    packed = pack(given)
    found = unpack(packed, rows, cols)
    assert packed.dtype == found.dtype == dtype
    assert packed.shape == (*batch, size(rows, cols))
    assert torch.equal(found.view(torch.uint8), given.view(torch.uint8))


def test_each_matrix_of_a_batch_begins_with_a_tile() -> None:
    given = scales(3, 130, 9)
    assert torch.equal(pack(given), torch.stack([pack(each) for each in given]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 127, 128, 129])
def test_padding_is_zero_whatever_the_buffer_held_KQ_07(rows: int, dtype: torch.dtype) -> None:
    given = scales(rows, 3).view(dtype)
    buffer = torch.full((size(rows, 3),), 0xFF, dtype=torch.uint8).view(dtype)
    found = pack(given, out=buffer)
    assert found is buffer
    assert torch.equal(buffer.view(torch.uint8), pack(given).view(torch.uint8))
    assert buffer.view(torch.uint8).count_nonzero() == 3 * rows


def test_a_buffer_of_another_size_is_refused_KQ_08() -> None:
    given = scales(128, 1)
    with pytest.raises(ShapeError, match=r"out has the shape \(128,\): .* need \(512,\)"):
        pack(given, out=torch.empty(128, dtype=torch.uint8))
    for bytes_ in (128, 511, 513, 1024):
        with pytest.raises(ShapeError, match=f"packed.shape\\[-1\\] is {bytes_}: .* in 512 bytes"):
            unpack(torch.zeros(bytes_, dtype=torch.uint8), 128, 1)
    with pytest.raises(ShapeError, match=r"packed.shape\[-1\] is 1: .* in 512 bytes"):
        unpack(torch.zeros((), dtype=torch.uint8), 128, 1)


def test_strides_do_not_matter() -> None:
    given = scales(9, 130).mT
    assert torch.equal(pack(given), pack(given.contiguous()))
    wide = torch.zeros(512, 2, dtype=torch.uint8)
    wide[:, 0] = pack(scales(100, 4))
    assert torch.equal(unpack(wide[:, 0], 100, 4), scales(100, 4))
    assert torch.equal(pack(scales(100, 4), out=torch.empty_like(wide)[:, 0]), wide[:, 0])


def test_meta_tensors() -> None:
    given = torch.empty(2, 130, 9, dtype=torch.float8_e8m0fnu, device="meta")
    packed = pack(given)
    assert packed.is_meta and packed.shape == (2, 3072) and packed.dtype == given.dtype
    assert unpack(packed, 130, 9).shape == given.shape


def test_what_has_no_such_order() -> None:
    with pytest.raises(DTypeError, match="scales is float32: it must be uint8 or a float8 dtype"):
        pack(torch.ones(128, 4))
    with pytest.raises(DTypeError, match="packed is float32"):
        unpack(torch.ones(512), 128, 4)
    with pytest.raises(DTypeError, match="out is torch.uint8, scales is torch.float8_e8m0fnu"):
        pack(scales(1, 1).view(torch.float8_e8m0fnu), out=torch.empty(512, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="scales has 1 dimensions"):
        pack(scales(4))


def test_names_are_those_of_torch() -> None:
    found = {name: scale_layout.scaling_type(each).name for name, each in FORMATS.items()}
    assert found == {
        "mxfp8_e4m3": "BlockWise1x32",
        "mxfp8_e5m2": "BlockWise1x32",
        "mxfp6_e3m2": "BlockWise1x32",
        "mxfp6_e2m3": "BlockWise1x32",
        "mxfp4": "BlockWise1x32",
        "nvfp4": "BlockWise1x16",
        "fp8_block_1x128": "BlockWise1x128",
        "fp8_block_128x128": "BlockWise128x128",
    }
    assert isinstance(scale_layout.scaling_type(MXFP4), ScalingType)
    assert scale_layout.swizzle_type(MXFP4) == SwizzleType.SWIZZLE_32_4_4
    assert scale_layout.swizzle_type(FP8_BLOCK_1X128) == SwizzleType.NO_SWIZZLE
    with pytest.raises(UnsupportedError, match="blocks of own are 1x64"):
        scale_layout.scaling_type(BlockFormat("own", E2M1, E8M0, (1, 64)))
