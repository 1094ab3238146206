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
from enum import StrEnum
from typing import Any, ClassVar

from quack_core.errors import DTypeError


class Kind(StrEnum):
    """What an operand of an op is, for D of shape (M, N) or (L, M, N)."""

    SCALAR = "scalar"
    """A Python number."""
    DEVICE_SCALAR = "device_scalar"
    """A float32 tensor of one element, read when the kernel runs."""
    ROW = "row"
    """(N,) or (L, N): the same for all rows of D."""
    COLUMN = "column"
    """(M,) or (L, M): the same for all columns."""
    TILE = "tile"
    """(M, N) or (L, M, N)."""
    PAIRS = "pairs"
    """(M, 2 N) or (L, M, 2 N): two values, of gate and up, for each element of D's."""


@dataclass(frozen=True)
class Operand:
    """An operand of an op.

    Args:
        name: for messages.
        kind: what it is.
        dtype: torch's name; of scalars "float32".
        batched: there is one for each matrix of a batch.
    """

    name: str
    kind: Kind
    dtype: str = "float32"
    batched: bool = False


class Op:
    """One step of an epilogue.

    Args:
        operands: what it reads beside the value itself, in the order of ``apply``'s arguments.
        pairs: ``apply`` takes two values, of gate and up, and gives one: D has half as many columns.
        splits: ``apply`` gives two values, of gate and up: D has twice as many columns.
        aux: dtype of a copy of the value that is stored as well, as it is here; None for none.
        reduces: name of a reduction over the columns of D of the value, as it is here; None for none.
    """

    pairs: ClassVar[bool] = False
    splits: ClassVar[bool] = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        return ()

    @property
    def aux(self) -> str | None:
        return None

    @property
    def reduces(self) -> str | None:
        return None

    def apply(self, x: Any, *operands: Any) -> Any:
        """In a kernel, on float32 numbers."""
        raise NotImplementedError

    def reference(self, x: Any, *operands: Any) -> Any:
        """On torch tensors that broadcast against each other, in the dtype of ``x``."""
        raise NotImplementedError


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
class StoreAux(Op):
    """x, which is also stored: such as what goes into an activation, for the backward.

    Args:
        dtype: of the copy.
    """

    dtype: str

    @property
    def aux(self) -> str | None:
        return self.dtype

    def apply(self, x: Any, *operands: Any) -> Any:
        return x

    def reference(self, x: Any, *operands: Any) -> Any:
        return x


@dataclass(frozen=True)
class RowReduce(Op):
    """x, which is also reduced over each row of D, to float32.

    Args:
        name: one of ``REDUCTIONS``.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in REDUCTIONS:
            raise ValueError(f"name={self.name!r}: must be one of {', '.join(REDUCTIONS)}")

    @property
    def reduces(self) -> str | None:
        return self.name

    def apply(self, x: Any, *operands: Any) -> Any:
        return x

    def reference(self, x: Any, *operands: Any) -> Any:
        return x


REDUCTIONS = ("sum", "sum_squares", "max", "lse")
"""Over the columns of a row; "lse" is the logarithm of the sum of exponentials."""
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


def halves(epilogue: tuple[Op, ...]) -> bool:
    """Whether D has half as many columns as the product.

    Raises:
        ValueError: more than one op takes pairs.
    """
    pairs = sum(op.pairs or op.splits for op in epilogue)
    if pairs > 1:
        raise ValueError(f"{pairs} ops of an epilogue take or give pairs: one can")
    return any(op.pairs for op in epilogue)


def doubles(epilogue: tuple[Op, ...]) -> bool:
    """Whether D has twice as many columns as the product."""
    return any(op.splits for op in epilogue)


def operands(epilogue: tuple[Op, ...]) -> tuple[Operand, ...]:
    """Operands of all ops, in order."""
    return tuple(operand for op in epilogue for operand in op.operands)
