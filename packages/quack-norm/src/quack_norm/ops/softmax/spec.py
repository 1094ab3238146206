"""What a softmax kernel computes: frozen records that name every property the code depends on."""

from dataclasses import dataclass

from quack_core import dtypes
from quack_norm.ops.row_map.spec import Vectors, full_vector

MAX_N = 262144
"""Longest row: 16 CTAs (8 on SM120) hold it in registers."""


@dataclass(frozen=True)
class SoftmaxFwdSpec(Vectors):
    """``out = e ** (v - max v) / sum of e ** (v - max v)``, ``v = scale * x``; or its logarithm.

    Dtypes are torch's names.

    Args:
        n: elements of a row.
        log: the logarithm is wanted.
        scaled: x is multiplied by a number first.
        rank: 2 for rows ``(M, N)``, 3 for rows ``(M1, M0, N)`` whose outer strides do not merge.
        align: bytes (16, 8, 4 or 2) that divide the addresses and outer strides of all rows.
        in_phase: corresponding rows of all operands have one dtype and begin at one offset from
            multiples of 16 bytes.
    """

    n: int
    x: str
    out: str
    log: bool = False
    scaled: bool = False
    rank: int = 2
    align: int = 16
    in_phase: bool = True

    weight_align = 16
    per_head = False
    columns = ()
    kept = 1

    def __post_init__(self) -> None:
        _check(self)

    @property
    def extra_registers(self) -> int:
        """What compensated sums of many short values need, and values kept beside exponentials."""
        return 16 * (self.out == "float32" and self.x != self.out) + 4 * self.log

    @property
    def rows(self) -> tuple[str, ...]:
        """Dtypes of the rows that are read."""
        return (self.x,)

    @property
    def full_vector(self) -> int:
        """Elements in 128 bits of the narrowest operand."""
        return full_vector(self.x, self.out)

    @property
    def name(self) -> str:
        """Kernel name, as profilers show it."""
        return f"{'log_' * self.log}softmax_fwd_{dtypes.short(self.x)}_n{self.n}"


@dataclass(frozen=True)
class SoftmaxBwdSpec(Vectors):
    """``dx = scale * out * (dout - sum of dout * out)``, or of the logarithm
    ``dx = scale * (dout - e ** out * sum of dout)``; fields as in the forward.
    """

    n: int
    out: str
    dout: str
    dx: str
    log: bool = False
    scaled: bool = False
    rank: int = 2
    align: int = 16
    in_phase: bool = True

    weight_align = 16
    per_head = False
    columns = ()
    extra_registers = 0
    kept = 2  # out and dout

    def __post_init__(self) -> None:
        _check(self)

    @property
    def x(self) -> str:
        """Dtype of the first row that is read."""
        return self.out

    @property
    def rows(self) -> tuple[str, ...]:
        """Dtypes of the rows that are read."""
        return self.out, self.dout

    @property
    def full_vector(self) -> int:
        """Elements in 128 bits of the narrowest operand."""
        return full_vector(self.out, self.dout, self.dx)

    @property
    def name(self) -> str:
        """Kernel name, as profilers show it."""
        return f"{'log_' * self.log}softmax_bwd_{dtypes.short(self.out)}_n{self.n}"


def _check(spec: SoftmaxFwdSpec | SoftmaxBwdSpec) -> None:
    if not 1 <= spec.n <= MAX_N:
        raise ValueError(f"n={spec.n}: rows have 1 to {MAX_N} elements")
    if spec.rank not in (2, 3):
        raise ValueError(f"rank={spec.rank}: must be 2 or 3")
    if spec.align not in (2, 4, 8, 16):
        raise ValueError(f"align={spec.align}: must be 2, 4, 8 or 16 bytes")
