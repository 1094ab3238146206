"""What an op of an epilogue is, and what follows from a tuple of them; `epilogue` has the ops."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar


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
class Vector:
    """What an op gives beside D: a float32 number for each row of D, or for each column.

    Args:
        name: one of ``PARTIALS``: how values of a row, or of a column, become one.
        kind: ``COLUMN`` for (M,) or (L, M), a number for each row; ``ROW`` for (N,) or (L, N).
    """

    name: str
    kind: Kind

    def __post_init__(self) -> None:
        if self.name not in PARTIALS:
            raise ValueError(f"name={self.name!r}: must be one of {', '.join(PARTIALS)}")


REDUCTIONS = ("sum", "sum_squares", "max", "lse")
"""Ways to make one number of many; "lse" is the logarithm of the sum of exponentials."""
PARTIALS = {"sum": 1, "sum_squares": 1, "max": 1, "lse": 2, "select": 1}
"""How many float32 numbers a partial result has; "select" is the value where the op's operand, an index,
says, and 0 where that is outside."""


@dataclass(frozen=True)
class Operand:
    """An operand of an op.

    Args:
        name: for messages.
        kind: what it is.
        dtype: torch's name; of scalars "float32". ``apply`` gets float32 numbers, of a row or column
            of integers int32 ones.
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
        mirrors: D is symmetric: below its diagonal it is computed, and above that it is a copy.
        aux: dtype of a copy of the value that is stored as well, as it is here; None for none.
        reduces: the vector that it makes of the value, as it is here; None for none.
    """

    pairs: ClassVar[bool] = False
    splits: ClassVar[bool] = False
    mirrors: ClassVar[bool] = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        return ()

    @property
    def aux(self) -> str | None:
        return None

    @property
    def reduces(self) -> Vector | None:
        return None

    def apply(self, x: Any, *operands: Any) -> Any:
        """In a kernel, on float32 numbers."""
        raise NotImplementedError

    def reference(self, x: Any, *operands: Any) -> Any:
        """On torch tensors that broadcast against each other, in the dtype of ``x``."""
        raise NotImplementedError


class Keep(Op):
    """An op that leaves x as it is, and stores or reduces it."""

    def apply(self, x: Any, *operands: Any) -> Any:
        return x

    def reference(self, x: Any, *operands: Any) -> Any:
        return x


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


def mirrors(epilogue: tuple[Op, ...]) -> bool:
    """Whether only one half of D is computed, and stored twice.

    Raises:
        ValueError: that is not said last, or the two halves would differ.
    """
    if not any(op.mirrors for op in epilogue):
        return False
    *others, last = epilogue
    if not last.mirrors or any(op.mirrors for op in others):
        raise ValueError(f"{type(last).__name__} behind an op that mirrors D: that one comes last")
    for op in others:
        kinds = {one.kind for one in op.operands} & {Kind.ROW, Kind.COLUMN}
        if kinds or op.pairs or op.splits or op.aux or op.reduces:
            raise ValueError(
                f"{type(op).__name__} beside an op that mirrors D: there are no vectors, no pairs and "
                "no copies, nor is anything reduced"
            )
    return True


def operands(epilogue: tuple[Op, ...]) -> tuple[Operand, ...]:
    """Operands of all ops, in order."""
    return tuple(operand for op in epilogue for operand in op.operands)
