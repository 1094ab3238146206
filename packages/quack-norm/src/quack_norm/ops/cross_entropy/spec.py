"""What cross-entropy kernels compute: frozen records that name every property their code depends on."""

from dataclasses import dataclass

from quack_core import dtypes
from quack_norm.ops.row_map.spec import Vectors, full_vector

TARGETS = ("int32", "int64")
REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class CrossEntropyFwdSpec(Vectors):
    """Losses of rows of logits, their sum or mean, and the gradient for an incoming one of 1.

    Dtypes are torch's names.

    Args:
        n: classes.
        x: dtype of the logits, and of the gradient.
        target: dtype of the labels.
        weight: dtype of the class weights, or None.
        dx: the gradient is wanted; of a sum or mean only.
        reduction: "none", "mean" or "sum".
        smoothing: label smoothing is not zero.
        softcap: logits are bounded by a tanh.
        z_loss: the square of lse is added.
        rank: 2 for logits ``(M, V)``, 3 for ``(M1, M0, V)`` whose outer strides do not merge.
        align: bytes (16, 8, 4 or 2) that divide addresses and outer strides of logits and gradient.
        in_phase: their rows begin at one offset from multiples of 16 bytes.
    """

    n: int
    x: str
    target: str
    weight: str | None = None
    dx: bool = False
    reduction: str = "none"
    smoothing: bool = False
    softcap: bool = False
    z_loss: bool = False
    rank: int = 2
    align: int = 16
    in_phase: bool = True

    weight_align = 16
    per_head = False
    kept = 1

    def __post_init__(self) -> None:
        _check(self)
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"reduction={self.reduction!r}: must be one of {', '.join(REDUCTIONS)}"
            )
        if self.dx and self.reduction == "none":
            raise ValueError("dx=True: a gradient for all losses needs the incoming ones")

    @property
    def rows(self) -> tuple[str, ...]:
        """Dtypes of the rows that are read."""
        return (self.x,)

    @property
    def extra_registers(self) -> int:
        """What options need beyond the plain loss."""
        weights = 32 * bool(self.columns) * (1 + self.odd)
        return weights + 16 * self.softcap + 24 * self.smoothing

    @property
    def columns(self) -> tuple[str, ...]:
        """Dtypes of the operands that all rows share and read whole."""
        return (self.weight,) if self.weight and self.smoothing else ()

    @property
    def full_vector(self) -> int:
        """Elements in 128 bits of the logits."""
        return full_vector(self.x)

    @property
    def name(self) -> str:
        """Kernel name, as profilers show it."""
        return f"cross_entropy_fwd{'_dx' * self.dx}_{dtypes.short(self.x)}_n{self.n}"


@dataclass(frozen=True)
class CrossEntropyBwdSpec(Vectors):
    """Gradient of logits from what the forward kept of each row; fields as in the forward.

    Args:
        dloss: dtype of the incoming gradient.
    """

    n: int
    x: str
    target: str
    dloss: str
    weight: str | None = None
    smoothing: bool = False
    softcap: bool = False
    z_loss: bool = False
    rank: int = 2
    align: int = 16
    in_phase: bool = True

    def __post_init__(self) -> None:
        _check(self)

    @property
    def full_vector(self) -> int:
        """Elements in 128 bits of the logits."""
        return full_vector(self.x)

    @property
    def name(self) -> str:
        """Kernel name, as profilers show it."""
        return f"cross_entropy_bwd_{dtypes.short(self.x)}_n{self.n}"


@dataclass(frozen=True)
class RescaleSpec:
    """``x = factor * x`` in place.

    Args:
        x: dtype of the numbers.
        factor: dtype of the factor.
    """

    x: str
    factor: str

    @property
    def name(self) -> str:
        """Kernel name, as profilers show it."""
        return f"rescale_{dtypes.short(self.x)}"


def _check(spec: CrossEntropyFwdSpec | CrossEntropyBwdSpec) -> None:
    if spec.n < 1:
        raise ValueError(f"n={spec.n}: there must be a class")
    if spec.target not in TARGETS:
        raise ValueError(f"target={spec.target!r}: must be one of {', '.join(TARGETS)}")
    if spec.rank not in (2, 3):
        raise ValueError(f"rank={spec.rank}: must be 2 or 3")
    if spec.align not in (2, 4, 8, 16):
        raise ValueError(f"align={spec.align}: must be 2, 4, 8 or 16 bytes")
