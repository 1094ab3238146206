"""Inputs: the layout is what it says, the values do not depend on it, the gaps are poisoned."""

import pytest

torch = pytest.importorskip("torch")

from quack_core.testing.inputs import (
    Layout,
    arrange,
    dirty_allocator,
    poison_,
    poisoned_like,
    random,
)

SHAPE = (6, 5, 40)
STRIDES = {
    Layout.CONTIGUOUS: ((200, 40, 1), 0),
    Layout.ROW_STRIDED: ((5 * 104, 104, 1), 0),
    Layout.ODD_ROW_STRIDED: ((5 * 41, 41, 1), 0),
    Layout.TRANSPOSED: ((200, 1, 5), 0),
    Layout.COLUMN_STRIDED: ((400, 80, 2), 0),
    Layout.EXPANDED: ((0, 0, 1), 0),
    Layout.OFFSET: ((200, 40, 1), 64),
    Layout.ODD_OFFSET: ((200, 40, 1), 1),
    Layout.PACKED_QKV: ((600, 120, 1), 40),
}


@pytest.mark.parametrize("layout", Layout)
def test_strides_and_offset(layout):
    x = random(SHAPE, torch.bfloat16, seed=3, layout=layout)
    assert (x.stride(), x.storage_offset()) == STRIDES[layout]
    assert x.shape == SHAPE and x.dtype == torch.bfloat16


@pytest.mark.parametrize("layout", Layout)
def test_values_do_not_depend_on_the_layout(layout):
    x = random(SHAPE, torch.float16, seed=3)
    wanted = x[:1, :1].expand(SHAPE) if layout is Layout.EXPANDED else x
    assert torch.equal(random(SHAPE, torch.float16, seed=3, layout=layout), wanted)
    assert not torch.equal(random(SHAPE, torch.float16, seed=4, layout=layout), wanted)


@pytest.mark.parametrize("layout", [key for key in Layout if key is not Layout.EXPANDED])
def test_memory_beside_the_view_is_nan(layout):
    x = random(SHAPE, torch.float32, seed=3, layout=layout)
    storage = torch.tensor([], dtype=x.dtype).set_(x.untyped_storage())
    assert int(storage.isnan().sum()) == storage.numel() - x.numel()
    padded = layout is not Layout.TRANSPOSED
    assert (storage.numel() > x.numel()) == padded


def test_odd_row_stride_is_odd_for_odd_rows_too():
    for n in (16, 17):
        x = random((3, n), torch.float32, seed=0, layout=Layout.ODD_ROW_STRIDED)
        assert x.stride(0) % 2 == 1 and x.stride(0) > n


def test_random_leaves_the_global_generator_alone():
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    random((4, 4), torch.float32, seed=1)
    assert torch.equal(torch.rand(3), wanted)


def test_scale_and_shift():
    x = random((1000,), torch.float32, seed=0)
    assert torch.equal(random((1000,), torch.float32, seed=0, scale=3.0, shift=5.0), x * 3 + 5)


def test_too_few_dimensions():
    with pytest.raises(ValueError, match="transposed needs at least 2"):
        arrange(torch.zeros(3), Layout.TRANSPOSED)


@pytest.mark.parametrize("layout", Layout)
def test_poisoned_like_keeps_strides(layout):
    x = random(SHAPE, torch.float16, seed=0, layout=layout)
    y = poisoned_like(x)
    assert y.stride() == x.stride() and y.data_ptr() != x.data_ptr()
    assert bool(y.isnan().all())


def test_poison_of_integers_and_nothing():
    assert poisoned_like(torch.zeros(2, 3, dtype=torch.int32)).tolist() == [[-1] * 3] * 2
    assert poisoned_like(torch.zeros(0, 3)).shape == (0, 3)
    x = torch.zeros(4)
    poison_(x[1:3])
    assert x.isnan().tolist() == [False, True, True, False]


def test_dirty_allocator_reaches_new_memory(cuda):
    dirty_allocator(cuda)
    for size in (512, 1 << 12, 1 << 20):
        fresh = torch.empty(size // 4, dtype=torch.float32, device=cuda)
        assert bool(fresh.isnan().all())


def test_dirty_allocator_on_the_cpu():
    dirty_allocator("cpu", largest_bytes=1 << 12)
