"""Epilogues as values: what happens to a GEMM's float32 sums before they are stored.

An epilogue is a tuple of ops, applied in order to each element; it is part of the spec, and so of the
cache key. An op is a frozen dataclass with plain fields. Users write their own in the same way:

    @dataclass(frozen=True)
    class Clamp(Op):
        limit: float

        def apply(self, x):
            return cute.arch.fmin(x, Float32(self.limit))

        def reference(self, x):
            return x.clamp(max=self.limit)

``apply`` is traced into the kernel, with numbers; ``reference`` is the definition, with torch
tensors, and what CPU tensors run. Both import what they need themselves: this module imports
neither torch nor cutlass.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from quack_core.errors import DTypeError

from .op import (
    PARTIALS,
    REDUCTIONS,
    Keep,
    Kind,
    Op,
    Operand,
    Vector,
    doubles,
    halves,
    mirrors,
    operands,
)

__all__ = [
    "ACTIVATIONS",
    "PARTIALS",
    "REDUCTIONS",
    "Activation",
    "ActivationGrad",
    "AddC",
    "AddVector",
    "ColumnReduce",
    "Gate",
    "GateGrad",
    "Keep",
    "Kind",
    "Mirror",
    "Op",
    "Operand",
    "RowReduce",
    "Scale",
    "SelectColumn",
    "SelectRow",
    "StoreAux",
    "Vector",
    "doubles",
    "halves",
    "mirrors",
    "operands",
]


@dataclass(frozen=True)
class Scale(Op):
    """x * alpha.

    Args:
        kind: of alpha: a number, a tensor of one element, or a vector along rows or columns.
        dtype: of alpha.
    """

    kind: Kind = Kind.SCALAR
    name: str = "alpha"
    dtype: str = "float32"
    batched: bool = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.name, self.kind, self.dtype, self.batched),)

    def apply(self, x: Any, *operands: Any) -> Any:
        return x * operands[0]

    def reference(self, x: Any, *operands: Any) -> Any:
        return x * operands[0]


@dataclass(frozen=True)
class AddC(Op):
    """x + beta * c.

    Args:
        dtype: of c.
        beta: what beta is; None for 1.
        batched: c has a matrix for each of a batch.
    """

    dtype: str
    beta: Kind | None = None
    batched: bool = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        c = Operand("c", Kind.TILE, self.dtype, self.batched)
        return (c,) if self.beta is None else (c, Operand("beta", self.beta))

    def apply(self, x: Any, *operands: Any) -> Any:
        c, *beta = operands
        return x + (beta[0] * c if beta else c)

    def reference(self, x: Any, *operands: Any) -> Any:
        return self.apply(x, *operands)


@dataclass(frozen=True)
class AddVector(Op):
    """x + bias.

    Args:
        kind: ``ROW`` for a bias of N elements, ``COLUMN`` for one of M.
        dtype: of the bias.
    """

    dtype: str
    kind: Kind = Kind.ROW
    batched: bool = False

    def __post_init__(self) -> None:
        if self.kind not in (Kind.ROW, Kind.COLUMN):
            raise ValueError(f"kind={self.kind}: a bias is a row or a column")

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (Operand("bias", self.kind, self.dtype, self.batched),)

    def apply(self, x: Any, *operands: Any) -> Any:
        return x + operands[0]

    def reference(self, x: Any, *operands: Any) -> Any:
        return x + operands[0]


@dataclass(frozen=True)
class Activation(Op):
    """f(x); ``quack_core.gemm.activations`` lists the names."""

    name: str

    def __post_init__(self) -> None:
        _check_activation(self.name)

    def apply(self, x: Any, *operands: Any) -> Any:
        from quack_core.device.activation import FUNCTIONS

        return FUNCTIONS[self.name](x)

    def reference(self, x: Any, *operands: Any) -> Any:
        from .activations import reference

        return reference(self.name, x)


@dataclass(frozen=True)
class Gate(Op):
    """f(gate) * up: neighbouring columns of x are gate and up of one column of D.

    Args:
        name: of f: "silu" for SwiGLU, "gelu_tanh" for GeGLU, "relu" for ReGLU, "sigmoid" for GLU.
    """

    name: str

    pairs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_activation(self.name)

    def apply(self, x: Any, *operands: Any) -> Any:
        from quack_core.device.activation import FUNCTIONS

        gate, up = x
        return FUNCTIONS[self.name](gate) * up

    def reference(self, x: Any, *operands: Any) -> Any:
        from .activations import reference

        gate, up = x[..., ::2], x[..., 1::2]
        return reference(self.name, gate) * up


@dataclass(frozen=True)
class ActivationGrad(Op):
    """x * f'(v), of the values v that went into an activation.

    Args:
        name: of f.
        dtype: of v.
    """

    name: str
    dtype: str
    batched: bool = False

    def __post_init__(self) -> None:
        _check_activation(self.name)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (Operand("preact", Kind.TILE, self.dtype, self.batched),)

    def apply(self, x: Any, *operands: Any) -> Any:
        from quack_core.device.activation import DERIVATIVES

        return x * DERIVATIVES[self.name](operands[0])

    def reference(self, x: Any, *operands: Any) -> Any:
        from .activations import derivative

        return x * derivative(self.name, operands[0])


@dataclass(frozen=True)
class GateGrad(Op):
    """x * f'(gate) * up and x * f(gate), neighbours: the gradient of what went into a ``Gate``.

    Args:
        name: of f.
        dtype: of gate and up.
    """

    name: str
    dtype: str
    batched: bool = False

    splits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_activation(self.name)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (Operand("preact", Kind.PAIRS, self.dtype, self.batched),)

    def apply(self, x: Any, *operands: Any) -> Any:
        from quack_core.device.activation import DERIVATIVES, FUNCTIONS

        gate, up = operands[0]
        return x * DERIVATIVES[self.name](gate) * up, x * FUNCTIONS[self.name](gate)

    def reference(self, x: Any, *operands: Any) -> Any:
        import torch

        from .activations import derivative, reference

        gate, up = operands[0][..., ::2], operands[0][..., 1::2]
        parts = (x * derivative(self.name, gate) * up, x * reference(self.name, gate))
        return torch.stack(parts, -1).flatten(-2)


@dataclass(frozen=True)
class StoreAux(Keep):
    """x, which is also stored: such as what goes into an activation, for the backward.

    Args:
        dtype: of the copy.
    """

    dtype: str

    @property
    def aux(self) -> str | None:
        return self.dtype


@dataclass(frozen=True)
class _Reduce(Keep):
    """Both kinds of reductions; ``gives`` is the kind of their result."""

    name: str

    gives: ClassVar[Kind]

    def __post_init__(self) -> None:
        if self.name not in REDUCTIONS:
            raise ValueError(f"name={self.name!r}: must be one of {', '.join(REDUCTIONS)}")

    @property
    def reduces(self) -> Vector | None:
        return Vector(self.name, self.gives)


@dataclass(frozen=True)
class RowReduce(_Reduce):
    """x, which is also reduced over each row of D, to float32: (M,) or (L, M).

    Args:
        name: one of ``REDUCTIONS``.
    """

    gives: ClassVar[Kind] = Kind.COLUMN


@dataclass(frozen=True)
class ColumnReduce(_Reduce):
    """x, which is also reduced over each column of D, to float32: (N,) or (L, N).

    Args:
        name: one of ``REDUCTIONS``.
    """

    gives: ClassVar[Kind] = Kind.ROW


@dataclass(frozen=True)
class _Select(Keep):
    """Both kinds of selections; ``gives`` is the kind of their index and of their result."""

    dtype: str = "int64"
    batched: bool = False

    gives: ClassVar[Kind]

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (Operand("index", self.gives, self.dtype, self.batched),)

    @property
    def reduces(self) -> Vector | None:
        return Vector("select", self.gives)


@dataclass(frozen=True)
class SelectColumn(_Select):
    """x, of which one value of each row is given as well, that of a column: float32 (M,) or (L, M).

    So a row's target logit is found beside its ``RowReduce("lse")``. Where the index is no column, such
    as -100, the value is 0.

    Args:
        dtype: of the index, a number for each row: "int64" or "int32".
    """

    gives: ClassVar[Kind] = Kind.COLUMN


@dataclass(frozen=True)
class SelectRow(_Select):
    """x, of which one value of each column is given as well, that of a row: float32 (N,) or (L, N).

    Args:
        dtype: of the index, a number for each column; the rest as of ``SelectColumn``.
    """

    gives: ClassVar[Kind] = Kind.ROW


@dataclass(frozen=True)
class Mirror(Keep):
    """x on and below the diagonal, and above it the x on the other side of it.

    For a product that is symmetric, such as of a matrix and its transpose: half of it is not computed.
    What is added to it is symmetric as well.
    """

    mirrors: ClassVar[bool] = True

    def reference(self, x: Any, *operands: Any) -> Any:
        import torch

        lower = torch.ones_like(x, dtype=torch.bool).tril()
        return torch.where(lower, x, x.mT)


ACTIVATIONS = (
    "identity",
    "relu",
    "relu_sq",
    "silu",
    "sigmoid",
    "tanh",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
)
"""Names of activation functions."""


def _check_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        raise DTypeError(f"activation {name!r} must be one of {', '.join(ACTIVATIONS)}")
