"""What a kernel on rows depends on, whichever the operator: read by configurations and rules."""

import math
from typing import Protocol

from quack_core import dtypes

MAX_ROWS = 2**31 - 2**21
"""Kernels count rows in 32 bits; offsets of elements have 64.

The number of a row that would follow the last one is computed too, about 2**20 rows behind it at
most: it must not wrap around.
"""


class RowSpec(Protocol):
    """Properties of an operator's frozen spec. Dtypes are torch's names.

    Args:
        n: elements of a row.
        align: bytes that divide the addresses and outer strides of all rows.
        in_phase: whether corresponding rows of all operands begin at the same offset from a multiple
            of ``full_vector`` elements.
        per_head: column operands are ``(M0, N)``.
    """

    @property
    def n(self) -> int: ...
    @property
    def x(self) -> str:
        """Dtype of the first row operand."""

    @property
    def align(self) -> int: ...
    @property
    def weight_align(self) -> int: ...
    @property
    def in_phase(self) -> bool: ...
    @property
    def per_head(self) -> bool: ...
    @property
    def rows(self) -> tuple[str, ...]:
        """Dtypes of the row operands that are read."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Dtypes of the operands that all rows share."""

    @property
    def extra_registers(self) -> int:
        """What a thread needs beyond what most operators need."""

    @property
    def kept(self) -> int:
        """float32 values that a thread keeps of each column where rows are taken piece by piece."""

    @property
    def full_vector(self) -> int:
        """Elements in 128 bits of the narrowest operand."""

    @property
    def vec(self) -> int:
        """Elements that one thread reads together; it depends on N and the dtypes only."""

    @property
    def odd(self) -> bool:
        """Whether a row is no whole number of full vectors."""


class Vectors:
    """How a row divides into vectors: for specs with ``n`` and ``full_vector``."""

    n: int

    @property
    def full_vector(self) -> int:
        """Elements in 128 bits of the narrowest operand."""
        raise NotImplementedError

    @property
    def vec(self) -> int:
        """Elements that one thread reads together; it depends on N and the dtypes only."""
        return math.gcd(self.full_vector, self.n)

    @property
    def odd(self) -> bool:
        """Whether a row is no whole number of full vectors."""
        return self.vec < self.full_vector


def full_vector(*operands: str | None) -> int:
    """Elements in 128 bits of the narrowest operand."""
    return 128 // min(dtypes.width(name) for name in operands if name is not None)
