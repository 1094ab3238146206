"""What a product of blocks may be, from float64: computed bounds, and cuBLAS beside it.

An instruction of Hopper's tensor cores adds 32 products of 8-bit floats and the sum so far. It aligns
these 33 terms to the largest exponent among them and keeps `KEPT_BITS` below it of each, so it loses
less than ``33 * 2**-13 * largest term``; the sum that it writes has as many bits behind its first one.
"""

import pytest
import torch
from torch import Tensor

from quack_blockscaled import BlockScaledTensor, sizes
from quack_core.testing.compare import EPS32

BLOCK = 128
ADDED = 32
"""Products of an instruction."""
KEPT_BITS = 13
"""Below the largest exponent."""


def numbers(x: BlockScaledTensor, device: torch.device | str) -> Tensor:
    """What values and scales stand for, exactly: float64."""
    scales = x.scales.to(device).double()
    for dim, block in sizes.blocks(x.format, x.dim).items():
        scales = scales.repeat_interleave(block, dim)
    return x.values.to(device).float().double() * scales


def lost(a: Tensor, b: Tensor) -> Tensor:
    """At most so much of each sum is lost by the tensor cores, in float64: (M, N).

    Args:
        a: (M, K), b: (K, N), float64, with a block's scales in them, which are the same for all
            terms of a block and so change nothing.
    """
    unit = 2.0**-KEPT_BITS
    total = a.new_zeros(a.shape[0], b.shape[1])
    for block in range(0, a.shape[1], BLOCK):
        sums, error = torch.zeros_like(total), torch.zeros_like(total)
        for k in range(block, min(block + BLOCK, a.shape[1]), ADDED):
            left, right = a[:, k : k + ADDED], b[k : k + ADDED]
            product = left.abs().amax(1, keepdim=True) * right.abs().amax(0)
            largest = torch.maximum(product, sums.abs() + error)
            sums += left @ right
            error += unit * ((ADDED + 1) * largest)
            error += unit * (sums.abs() + error)
        total += error
    return total


def check(
    found: Tensor, a: BlockScaledTensor, b: BlockScaledTensor, before: Tensor | None = None
) -> None:
    """Each element within its rounding, and on a GPU what sums may lose there.

    Args:
        found: (M, N).
        before: what the product was added to.
    """
    a64, b64 = numbers(a, found.device), numbers(b, found.device)
    right, terms = a64 @ b64, a64.abs() @ b64.abs()
    if before is not None:
        right, terms = right + before, terms + before.abs()
    kind = torch.finfo(found.dtype)
    allowed = right.abs().clamp(min=kind.tiny) * kind.eps
    allowed += terms * (a.shape[1] // BLOCK + BLOCK) * EPS32
    if found.is_cuda:
        allowed += lost(a64, b64)
    error = (found.double() - right).abs()
    assert (error <= allowed).all(), float((error / allowed.clamp(min=1e-300)).max())


def check_like_cublas(found: Tensor, a: BlockScaledTensor, b: BlockScaledTensor) -> None:
    """The relative Frobenius error is at most 1.5 times that of cuBLAS with the same scales.

    Args:
        found: (M, N), bfloat16, on a GPU.
    """
    right = numbers(a, found.device) @ numbers(b, found.device)
    other = cublas(a, b)
    errors = [float((x.double() - right).norm() / right.norm()) for x in (found, other)]
    assert errors[0] <= 1.5 * errors[1], errors


def cublas(a: BlockScaledTensor, b: BlockScaledTensor) -> Tensor:
    """The same product by torch, in bfloat16; skips where torch refuses.

    Scales of blocks of one row lie along that side first, those of 128x128 along K.
    """
    scale_a, scale_b = _as_torch_wants(a.scales, a), _as_torch_wants(b.scales.mT, b).mT
    values_b = b.values.mT.contiguous().mT
    try:
        return torch._scaled_mm(a.values, values_b, scale_a, scale_b, out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        pytest.skip(f"torch does not multiply these: {str(error).splitlines()[0]}")


def _as_torch_wants(scales: Tensor, x: BlockScaledTensor) -> Tensor:
    """Scales of (rows, blocks of K) in the memory order that torch asks for."""
    return scales.mT.contiguous().mT if x.format.rows == 1 else scales.contiguous()
