"""A product of blocks in plain torch: the definition, and what CPU tensors run."""

import torch
from torch import Tensor

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
