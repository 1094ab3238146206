"""Plain Triton kernels that move the same bytes as ours, so that ours is not the only witness."""

import torch
import triton
import triton.language as tl

BLOCK = 2048
SUM_BLOCK, SUM_THREADS = 4096, 256


@triton.jit
def _copy(a, out, words, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    tl.store(out + at, tl.load(a + at, mask=inside), mask=inside)


@triton.jit
def _xor(a, b, out, words, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    value = tl.load(a + at, mask=inside) ^ tl.load(b + at, mask=inside)
    tl.store(out + at, value, mask=inside)


@triton.jit
def _sums(a, out, words, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, words, step):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(a + at, mask=at < words, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(total))


def copy(a: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = a, or a ^ b; contiguous int32."""
    grid = (triton.cdiv(out.numel(), BLOCK),)
    if b is None:
        _copy[grid](a, out, out.numel(), BLOCK=BLOCK)
    else:
        _xor[grid](a, b, out, out.numel(), BLOCK=BLOCK)


def sums(a: torch.Tensor, out: torch.Tensor) -> None:
    """Sums of as many parts of `a` as `out` has elements; contiguous float32."""
    warps = SUM_THREADS // 32
    _sums[(out.numel(),)](a, out, a.numel(), BLOCK=SUM_BLOCK, num_warps=warps)
