"""What a top-k kernel computes: frozen records that name every property the code depends on."""

import math
from dataclasses import dataclass

from quack_core import dtypes

MAX_N = 2**30
"""Longest row of the kernels."""
MAX_K = 4096
"""Largest k of the kernels: twice as many keys lie in the shared memory of a CTA."""


@dataclass(frozen=True)
class TopKFwdSpec:
    """The k largest of each row, and where they are; or the softmax of these k.

    A key is an integer made of an element's value and its index: keys are ordered as the elements
    are, and no two of a row are equal. Dtypes are torch's names.

    Args:
        n: elements of a row.
        k: of them that are wanted.
        x: dtype of the rows and of the values.
        softmax: the values are normalised.
        rank: 2 for rows ``(M, N)``, 3 for rows ``(M1, M0, N)`` whose outer strides do not merge.
        align: bytes (16, 8, 4 or 2) that divide the addresses and outer strides of all rows.
    """

    n: int
    k: int
    x: str
    softmax: bool = False
    rank: int = 2
    align: int = 16

    def __post_init__(self) -> None:
        _check(self.n, self.k)
        if self.rank not in (2, 3):
            raise ValueError(f"rank={self.rank}: must be 2 or 3")
        if self.align not in (2, 4, 8, 16) or 8 * self.align < dtypes.width(self.x):
            raise ValueError(
                f"align={self.align}: must be 2, 4, 8 or 16 bytes, and at least an element"
            )

    @property
    def full_vector(self) -> int:
        """Elements in 128 bits."""
        return 128 // dtypes.width(self.x)

    @property
    def vec(self) -> int:
        """Elements in 128 bits, or fewer if those do not divide a row."""
        return math.gcd(self.full_vector, self.n)

    @property
    def whole(self) -> bool:
        """Whether rows are whole 128-bit vectors, and begin with one."""
        return self.align == 16 and self.vec == self.full_vector

    @property
    def key_bits(self) -> int:
        """Bits of an element's key: value and index."""
        return dtypes.width(self.x) + (self.n - 1).bit_length()

    @property
    def key_bytes(self) -> int:
        """Bytes of the integer that holds an element's key."""
        return key_bytes(self.x, self.n)

    @property
    def name(self) -> str:
        """Kernel name, as profilers show it."""
        kind = "topk_softmax" if self.softmax else "topk"
        return f"{kind}_fwd_{dtypes.short(self.x)}_n{self.n}_k{self.k}"


@dataclass(frozen=True)
class TopKBwdSpec:
    """``dx = 0`` but at the indices: there ``dvalues``, or with softmax
    ``values * (dvalues - sum of values * dvalues)``.

    Args:
        n: elements of a row of dx.
        k: indices of a row.
        dvalues: dtype of the incoming gradient.
        dx: dtype of the outgoing one.
        values: dtype of the softmax; None without it.
    """

    n: int
    k: int
    dvalues: str
    dx: str
    values: str | None = None

    def __post_init__(self) -> None:
        _check(self.n, self.k)

    @property
    def softmax(self) -> bool:
        return self.values is not None

    @property
    def name(self) -> str:
        """Kernel name, as profilers show it."""
        kind = "topk_softmax" if self.softmax else "topk"
        return f"{kind}_bwd_{dtypes.short(self.dx)}_n{self.n}_k{self.k}"


def key_bytes(x: str, places: int) -> int:
    """Bytes of the integer that holds a value and which of ``places`` places it comes from."""
    return 4 if dtypes.width(x) + (places - 1).bit_length() <= 32 else 8


def _check(n: int, k: int) -> None:
    if not 1 <= n <= MAX_N:
        raise ValueError(f"n={n}: rows have 1 to {MAX_N} elements")
    if not 1 <= k <= min(n, MAX_K):
        raise ValueError(f"k={k}: must be 1 to {min(n, MAX_K)}")
