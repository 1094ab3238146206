"""Where gates and what they gate are in a tile, and which row of B that is."""

import cutlass
import numpy as np
import pytest
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from quack_gemm.sm90 import views

WIDTHS = (16, 32, 48, 160, 272)
K, BATCHES = 3, 2


@cute.jit
def paired(b: cute.Tensor, out: cute.Tensor, concat: cutlass.Constexpr[bool]):
    """out[p, k, l] = element (p, k, l) of the rearranged B."""
    view = views.paired(views.transposed(views.matrices(b)), concat)
    for p in range(out.shape[0]):
        for k in range(out.shape[1]):
            for batch in range(out.shape[2]):
                out[p, k, batch] = view[p, k, batch]


@pytest.mark.parametrize("concat", [False, True], ids=["interleaved", "concat"])
@pytest.mark.parametrize("n", WIDTHS)
def test_columns_of_a_product_are_the_rows_that_natural_says(n, concat):
    b = np.arange(BATCHES * K * n, dtype=np.float32).reshape(BATCHES, n, K).transpose(0, 2, 1)
    out = np.zeros((n, K, BATCHES), np.float32)
    paired(from_dlpack(b), from_dlpack(out).mark_layout_dynamic(), concat)
    natural = [views.natural(p, n, concat) for p in range(n)]
    assert sorted(natural) == list(range(n))
    np.testing.assert_array_equal(out, b.transpose(2, 1, 0)[natural])


@pytest.mark.parametrize("concat", [False, True], ids=["interleaved", "concat"])
@pytest.mark.parametrize("n", WIDTHS)
def test_eight_gates_and_eight_that_they_gate_in_turn(n, concat):
    for p in range(n):
        block, half, place = p // 16, p // 8 % 2, p % 8
        column = 8 * block + place  # of D
        expected = half * (n // 2) + column if concat else 2 * column + half
        assert views.natural(p, n, concat) == expected


@cute.jit
def matrix_of(one: cute.Tensor, many: cute.Tensor, out: cute.Tensor):
    """Elements (1, 2) of the matrices of a batch, and of one that is no batch."""
    single, batch = views.matrices(one), views.matrices(many)
    for i in range(out.shape[0]):
        out[i, 0] = single[1, 2, 0]
        out[i, 1] = batch[1, 2, i]
        out[i, 2] = views.transposed(batch)[2, 1, i]


def test_matrices_have_the_batch_last():
    one, many = np.arange(12.0).reshape(3, 4), np.arange(24.0).reshape(2, 3, 4)
    out = np.zeros((2, 3))
    matrix_of(*(from_dlpack(a).mark_layout_dynamic() for a in (one, many, out)))
    np.testing.assert_array_equal(out, [[6, 6, 6], [6, 18, 18]])
