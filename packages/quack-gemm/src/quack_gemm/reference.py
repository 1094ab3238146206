"""GEMM in plain torch: the definition, and what CPU tensors run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quack_core.gemm.epilogue import Kind, Op

Step = tuple[Op, tuple[Any, ...]]
"""An op and its operands."""


def forward(
    a: Tensor,
    b: Tensor,
    steps: Sequence[Step],
    out_dtypes: Sequence[torch.dtype],
    concat: bool = False,
) -> list[Tensor]:
    """``epilogue(a @ b)`` in float32, each output rounded once; float64 operands stay float64.

    Args:
        a: (M, K) or (L, M, K).
        b: (K, N) or (L, K, N).
        steps: ops of the epilogue with their operands.
        out_dtypes: of D, then of the copies that ops store.
        concat: gates are the first half of the columns, not the even ones.
    """
    kind = torch.float64 if a.dtype == torch.float64 else torch.float32
    x = torch.matmul(a.to(kind), b.to(kind))
    if concat:
        x = _interleaved(x)
    copies = []
    for op, operands in steps:
        given = [
            _broadcast(operand, what.kind, kind, concat)
            for operand, what in zip(operands, op.operands, strict=True)
        ]
        x = op.reference(x, *given)
        if op.aux:
            copies.append(_separate(x) if concat and x.shape[-1] == b.shape[-1] else x)
    return [found.to(dtype) for found, dtype in zip((x, *copies), out_dtypes, strict=True)]


def _broadcast(operand: Any, what: Kind, kind: torch.dtype, concat: bool) -> Any:
    """An operand so that it broadcasts against D."""
    if what == Kind.SCALAR:
        return operand
    value = operand.to(kind)
    if what == Kind.ROW:
        value = value.unsqueeze(-2)
        return _interleaved(value) if concat else value
    if what == Kind.COLUMN:
        return value.unsqueeze(-1)
    return value


def _interleaved(x: Tensor) -> Tensor:
    """Columns of both halves in turn."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def _separate(x: Tensor) -> Tensor:
    """The inverse."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)
