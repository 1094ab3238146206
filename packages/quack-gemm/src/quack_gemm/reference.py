"""GEMM in plain torch: the definition, and what CPU tensors run."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quack_core.gemm.epilogue import Kind, Op, Vector

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

    Results of reductions come last, in float32: (M,) or (N,), or with an L in front.

    Args:
        a: (M, K) or (L, M, K).
        b: (K, N) or (L, K, N).
        steps: ops of the epilogue with their operands.
        out_dtypes: of D, then of the copies that ops store.
        concat: gates are the first half of the columns, not the even ones.
    """
    kind = torch.float64 if a.dtype == torch.float64 else torch.float32
    x = torch.matmul(a.to(kind), b.to(kind))
    turned = concat and any(op.pairs for op, _ in steps)  # ops want pairs side by side
    if turned:
        x = _interleaved(x)
    outputs, reduced = [], []
    for op, operands in steps:
        given = [
            _broadcast(operand, what.kind, kind, turned, concat)
            for operand, what in zip(operands, op.operands, strict=True)
        ]
        x = op.reference(x, *given)
        turned = (turned or (concat and op.splits)) and not op.pairs
        if op.aux:
            outputs.append(_separate(x) if turned else x)
        if op.reduces:
            found = reduce(op.reduces.name, x, dim(op.reduces), *given)
            reduced.append(found if kind == torch.float64 else found.float())
    outputs.insert(0, _separate(x) if turned else x)
    results: list[Tensor] = []
    for value, dtype in zip(outputs, out_dtypes, strict=True):
        again = results and value is outputs[0] and dtype == value.dtype
        results.append(value.clone() if again else value.to(dtype))  # they do not share memory
    return results + reduced


def dim(vector: Vector) -> int:
    """Which dimension of D it reduces."""
    return -1 if vector.kind == Kind.COLUMN else -2


def reduce(name: str, x: Tensor, over: int = -1, index: Tensor | None = None) -> Tensor:
    """Over a dimension; -inf is the largest of nothing.

    Args:
        index: of "select": places in that dimension, in which its own size is 1; 0 where there is none.
    """
    if name == "select" and index is not None and x.shape[over]:
        size = x.shape[over]
        at = index.long().clamp(0, size - 1).expand(*x.shape[: x.dim() - 2], *index.shape[-2:])
        found = torch.where((index >= 0) & (index < size), x.gather(over, at), 0)
        return found.squeeze(over)
    if name in ("max", "lse") and x.shape[over] == 0:
        return x.sum(over) - math.inf
    if name == "max":
        return x.amax(over)
    if name == "lse":
        return x.logsumexp(over)
    return (x.square() if name == "sum_squares" else x).sum(over)


def _broadcast(operand: Any, what: Kind, kind: torch.dtype, turned: bool, concat: bool) -> Any:
    """An operand so that it broadcasts against D."""
    if what == Kind.SCALAR:
        return operand
    value = operand.to(kind) if operand.is_floating_point() else operand
    if what == Kind.ROW:
        value = value.unsqueeze(-2)
        return _interleaved(value) if turned else value
    if what == Kind.COLUMN:
        return value.unsqueeze(-1)
    if what == Kind.PAIRS and concat:
        return _interleaved(value)
    return value


def _interleaved(x: Tensor) -> Tensor:
    """Columns of both halves in turn."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def _separate(x: Tensor) -> Tensor:
    """The inverse."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)
