"""Gradients of weights that are added up in float32, where autograd would round each of them first."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quack_core.errors import DTypeError, ShapeError, UnsupportedError

from . import check
from .api import gemm


@dataclass(frozen=True)
class Owner:
    """A weight whose gradients are added up in a float32 tensor; no operand, as autograd sees it.

    Args:
        op: which function was called, for messages.
        weight: (N, K), a leaf.
    """

    op: str
    weight: Tensor

    @property
    def place(self) -> str:
        """The attribute of the weight that holds the sum."""
        return "grad" if self.weight.dtype == torch.float32 else "main_grad"

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b`` to the sum: one rounding to float32 for each element.

        Where there is no sum yet, the product becomes it. One whose rows do not begin at multiples of
        16 bytes takes a pass of its own on CUDA.

        Raises:
            DTypeError, ShapeError: the tensor in the sum's place cannot be it.
        """
        found = getattr(self.weight, self.place, None)
        if found is None:
            setattr(self.weight, self.place, gemm(a, b, out_dtype=torch.float32))
            return
        self._check(found)
        if found.is_cuda and check.order(found) != "row":
            found.add_(gemm(a, b, out_dtype=torch.float32))
        else:
            gemm(a, b, c=found, out=found)

    def _check(self, found: Tensor) -> None:
        name = f"{self.op}: {self.place} of the weight"
        if found.dtype != torch.float32:
            raise DTypeError(f"{name} is {found.dtype}: with accumulate=True it must be float32")
        if found.shape != self.weight.shape:
            raise ShapeError(
                f"{name} has the shape {tuple(found.shape)}: it must be {tuple(self.weight.shape)}"
            )


def owner(op: str, weight: Tensor, accumulate: bool) -> Owner | None:
    """The owner of a weight's sum; None where autograd takes care of the gradient, or there is none.

    Raises:
        UnsupportedError: the sum would have no place.
    """
    if not (accumulate and weight.requires_grad and torch.is_grad_enabled()):
        return None
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            f"{op}: accumulate=True in a graph of torch.compile",
            "its backward changes a tensor that the graph does not know of",
            "mark the module with torch.compiler.disable, or leave accumulate away",
        )
    if not weight.is_leaf:
        raise UnsupportedError(
            f"{op}: accumulate=True with a weight that was computed",
            "nobody would look for its gradient",
            "pass the parameter itself, and use torch.autocast to convert it",
        )
    return Owner(op, weight)
