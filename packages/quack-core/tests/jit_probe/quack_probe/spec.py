"""What the probe kernel computes and how."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScaleSpec:
    """``y = FACTOR * scale * x`` for rows of ``n`` elements; the scale is a run-time number."""

    n: int
    dtype: str = "float32"
    bias: str | None = None

    @property
    def name(self) -> str:
        """Kernel name."""
        return f"scale_n{self.n}"


@dataclass(frozen=True)
class ScaleConfig:
    """How many threads work on a row."""

    threads: int = 32
