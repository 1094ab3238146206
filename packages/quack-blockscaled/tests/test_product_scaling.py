"""Which scales meet a thread's sums, computed on the CPU by the code that kernels run."""

import cutlass
import numpy as np
import pytest
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from quack_blockscaled.product import scaling
from quack_blockscaled.product.spec import ATOM_M, TILE_M, MatmulConfig, MatmulSpec
from quack_core.gemm.sm90 import fragment

STAGES, STAGE = 3, 1


@cute.jit
def factors(
    a: cute.Tensor,
    b: cute.Tensor,
    out: cute.Tensor,
    spec: cutlass.Constexpr[MatmulSpec],
    config: cutlass.Constexpr[MatmulConfig],
):
    held = scaling.Scales(a, b)
    for group in range(2):
        for thread in range(128):
            first = group * ATOM_M + fragment.first_row(thread)
            of_stage = scaling.of_columns if spec.rows_b else scaling.of_blocks
            of_part = of_stage(spec, config, held, thread, first, Int32(STAGE))
            for part in cutlass.range_constexpr(spec.parts):
                each = of_part(part)
                for i in cutlass.range_constexpr(len(each)):
                    product = Float32(1.0)
                    for factor in each[i]:
                        product = product * factor
                    out[group, thread, part * len(each) + i] = product


@pytest.mark.parametrize("tile_n", [128, 192])
@pytest.mark.parametrize("rows_b", [False, True])
def test_each_sum_meets_the_scales_of_its_row_and_column(tile_n: int, rows_b: bool) -> None:
    config, spec = MatmulConfig(tile_n), MatmulSpec("float32", rows_b)
    count = config.scales_b(spec)
    rng = np.random.default_rng(0)
    a, b = (2.0 ** rng.integers(-9, 9, (STAGES, n)) for n in (TILE_M, count))
    out = np.zeros((2, 128, fragment.sums_of(tile_n)), np.float32)
    held = [from_dlpack(np.ascontiguousarray(each, np.float32).T) for each in (a, b)]
    factors(*held, from_dlpack(out), spec, config)
    for group in range(2):
        for thread in range(128):
            first_row = group * ATOM_M + thread // 32 * 16 + thread % 32 // 4
            for i in range(out.shape[-1]):
                row, pair = fragment.place(i)
                col = thread % 4 * 2 + pair // 2 * 8 + pair % 2
                right = a[STAGE, first_row + row * 8] * b[STAGE, col // (tile_n // count)]
                assert out[group, thread, i] == right
