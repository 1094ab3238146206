"""A product of blocks in plain torch: the definition, and what CPU tensors run."""

import itertools

import torch
from torch import Tensor

from quack_core.errors import ShapeError

from .spec import BLOCK


def matmul(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """The products of each 128 of K are summed in float32, scaled by both scales, and added.

    Args:
        a: (M, K), b: (N, K), e4m3.
        scale_a: (M, K / 128), scale_b: (N / 128, K / 128) or (N, K / 128), float32.
        dtype: of the result, (M, N).
    """
    sums = a.new_zeros(a.shape[0], b.shape[0], dtype=torch.float32)
    cols = b.shape[0] // max(1, scale_b.shape[0])  # that have one scale
    with torch.autocast(a.device.type, enabled=False):  # it would multiply in 16 bits
        for k in range(a.shape[1] // BLOCK):
            part = slice(k * BLOCK, (k + 1) * BLOCK)
            of_b = scale_b[:, k].repeat_interleave(cols)
            sums += a[:, part].float() @ b[:, part].float().T * (scale_a[:, k, None] * of_b)
    return sums.to(dtype)


def grouped(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """Each group of rows by a matrix of its own.

    Args:
        a: (M, K), b: (G, N, K), e4m3.
        scale_a: (M, K / 128), scale_b: (G, N / 128, K / 128), float32.
        offsets: (G + 1,), from 0 to M: where groups begin, and where the last one ends.
        dtype: of the result, (M, N).

    Raises:
        ShapeError: offsets are something else.
    """
    at = offsets.tolist()
    if at[0] != 0 or at[-1] != a.shape[0] or at != sorted(at):
        raise ShapeError(
            f"matmul_grouped: offsets are {at}: they must not descend, from 0 to a.shape[0], which is "
            f"{a.shape[0]}"
        )
    found = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
    for group, (first, end) in enumerate(itertools.pairwise(at)):
        rows = slice(first, end)
        found[rows] = matmul(a[rows], scale_a[rows], b[group], scale_b[group], dtype)
    return found
