"""Operands of products, and what results are compared with."""

from collections.abc import Callable

import torch
from torch import Tensor

from quack_core.testing.compare import assert_accurate
from quack_core.testing.inputs import random

BF16, F32 = torch.bfloat16, torch.float32
Finish = Callable[[Tensor], Tensor]


def matrix(
    rows: int,
    cols: int,
    major: str,
    device: str,
    seed: int,
    dtype: torch.dtype = BF16,
    batch: int = 0,
) -> Tensor:
    """(rows, cols) or (batch, rows, cols), stride 1 along rows' or columns' elements."""
    shape = (rows, cols) if major == "row" else (cols, rows)
    found = random((batch, *shape) if batch else shape, BF16, device, seed=seed).to(dtype)
    return found if major == "row" else found.mT


def product(a: Tensor, b: Tensor) -> Tensor:
    """torch's float32 product; of 16 bits on a GPU by its tensor cores, as ours."""
    if not a.is_cuda or a.element_size() != 2 or a.dtype != b.dtype:
        return a.float() @ b.float()
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2], (1,))
    found = torch.bmm(a.expand(*batch, -1, -1), b.expand(*batch, -1, -1), out_dtype=F32)
    return found if max(a.dim(), b.dim()) == 3 else found[0]


def compare(actual: Tensor, a: Tensor, b: Tensor, finish: Finish = lambda x: x) -> None:
    """Contract 1 for GEMM: per element, and relative Frobenius error 1.5 times the baseline's."""
    right = finish(a.double() @ b.double())
    base = finish(product(a, b)).to(actual.dtype)
    flat = (-1, actual.shape[-1])
    assert_accurate(actual.reshape(flat), right.reshape(flat), base.reshape(flat))
    error, allowed = ((x.double() - right).norm() for x in (actual, base))
    assert error <= 1.5 * allowed + 1e-12 * right.norm()
