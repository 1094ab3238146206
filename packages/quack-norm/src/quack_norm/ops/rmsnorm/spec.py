"""What a forward kernel computes: a frozen record that names every property the code depends on."""

from dataclasses import dataclass

from quack_core import dtypes
from quack_norm.ops.row_map.spec import Vectors, full_vector

MAX_N = 262144
"""Longest row: 16 CTAs (8 on SM120) hold it in registers."""

STATISTICS = 3
"""float32 values that describe a row of LayerNorm: rstd, mean, and what float32 lacks of the mean,
which the backward needs where the mean is large. A row of RMSNorm has rstd alone."""


@dataclass(frozen=True)
class RMSNormFwdSpec(Vectors):
    """Forward: ``out = h * rsqrt(mean(h^2) + eps) * (weight + offset) + bias`` with ``h = x + residual``.

    Dtypes are torch's names; ``None`` means that the operand is absent.

    Args:
        n: elements of a row.
        rank: 2 for rows ``(M, N)``, 3 for rows ``(M1, M0, N)`` whose outer strides do not merge.
        per_head: weight and bias are ``(M0, N)``; needs rank 3.
        align: bytes (16, 8, 4 or 2) that divide the addresses and outer strides of all rows.
        weight_align: the same for weight and bias (and their gradients).
        in_phase: whether corresponding rows of all operands begin at the same offset, in elements,
            from a multiple of ``full_vector`` elements; matters if ``n`` is no multiple of it.
        centred: LayerNorm: the mean of h is subtracted first, and rstd is that of the rest.
    """

    n: int
    x: str
    out: str
    weight: str | None = None
    bias: str | None = None
    residual: str | None = None
    residual_out: str | None = None
    rstd: bool = False
    offset: bool = False
    per_head: bool = False
    rank: int = 2
    align: int = 16
    weight_align: int = 16
    in_phase: bool = True
    centred: bool = False

    kept = 1  # float32 values of each column in a kernel that takes rows piece by piece

    def __post_init__(self) -> None:
        check_rows(self.n, self.rank, self.per_head, self.align, self.weight_align)

    @property
    def extra_registers(self) -> int:
        """What a thread of LayerNorm needs beyond one of RMSNorm."""
        if not self.centred:
            return 0
        return 40 if self.odd else 2 if self.columns else 6  # the rules spare some for columns

    @property
    def rows(self) -> tuple[str, ...]:
        """Dtypes of the rows that are read."""
        return (self.x,) if self.residual is None else (self.x, self.residual)

    @property
    def columns(self) -> tuple[str, ...]:
        """Dtypes of weight and bias."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def full_vector(self) -> int:
        """Elements in 128 bits of the narrowest operand."""
        return full_vector(
            self.x, self.out, self.weight, self.bias, self.residual, self.residual_out
        )

    @property
    def name(self) -> str:
        """Kernel name, as profilers show it."""
        return f"{'layer' if self.centred else 'rms'}norm_fwd_{dtypes.short(self.x)}_n{self.n}"


def check_rows(n: int, rank: int, per_head: bool, *alignments: int) -> None:
    """Check what forward and backward have in common.

    Raises:
        ValueError: a field is out of range; names it.
    """
    if not 1 <= n <= MAX_N:
        raise ValueError(f"n={n}: rows have 1 to {MAX_N} elements")
    if rank not in (2, 3):
        raise ValueError(f"rank={rank}: must be 2 or 3")
    if per_head and rank != 3:
        raise ValueError("per_head=True needs rank=3")
    for name, align in zip(("align", "weight_align"), alignments, strict=True):
        if align not in (2, 4, 8, 16):
            raise ValueError(f"{name}={align}: must be 2, 4, 8 or 16 bytes")
