"""What a backward kernel computes. Its modules are apart: a forward alone does not load them."""

import math
from dataclasses import dataclass

from quack_core import dtypes
from quack_norm.ops.row_map.spec import full_vector

from .spec import check_rows


@dataclass(frozen=True)
class RMSNormBwdSpec:
    """Backward: dh for the normalised rows and, in the same launch, dweight and dbias.

    ``dh = rstd * (wdy - xhat * mean(wdy * xhat)) + dresidual_out``, ``wdy = dout * (weight + offset)``.
    ``dx`` and ``dresidual`` are dh in their own dtypes; the other fields are as in the forward.
    """

    n: int
    x: str
    dout: str
    dx: str
    weight: str | None = None
    dweight: bool = False
    dbias: str | None = None
    dresidual_out: str | None = None
    dresidual: str | None = None
    offset: bool = False
    per_head: bool = False
    rank: int = 2
    align: int = 16
    weight_align: int = 16
    centred: bool = False

    def __post_init__(self) -> None:
        check_rows(self.n, self.rank, self.per_head, self.align, self.weight_align)
        if self.dweight and self.weight is None:
            raise ValueError("dweight=True needs the dtype of the weight")

    @property
    def vec(self) -> int:
        """Elements that one thread reads together; it depends on N and the dtypes only."""
        operands = (self.x, self.dout, self.dx, self.weight, self.dresidual_out, self.dresidual)
        return math.gcd(full_vector(*operands), self.n)

    @property
    def column_sums(self) -> int:
        """How many sums over rows the kernel returns: dweight, dbias."""
        return int(self.dweight) + int(self.dbias is not None)

    @property
    def name(self) -> str:
        """Kernel name, as profilers show it."""
        return f"{'layer' if self.centred else 'rms'}norm_bwd_{dtypes.short(self.x)}_n{self.n}"
