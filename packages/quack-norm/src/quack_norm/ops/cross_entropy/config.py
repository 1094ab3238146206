"""How a cross-entropy kernel computes: frozen configurations. ``rules`` chooses them."""

from dataclasses import dataclass

from quack_core.arch import most_registers
from quack_core.reduction.tiling import WARP, RowTiling
from quack_norm.ops.row_map.config import REGISTERS, RowConfig

from .spec import CrossEntropyFwdSpec

CHUNKS = WARP
"""Parts of all rows whose losses are added up on their own."""
WEIGHT_CHUNKS = 256
"""The same of label weights: all CTAs wait for them, and as many as there are can help."""
COPIES = 32
"""Of the sum of label weights: if all CTAs read one, they wait for one another."""
COPY_INTS = 32
"""From one copy to the next: they lie in cache lines of their own."""
STATE_INTS = COPIES * COPY_INTS + 4 + CHUNKS
"""Counters of a forward that reduces."""


class FwdConfig(RowConfig):
    """Forward with the gradient, or with label smoothing."""

    waits = True

    @property
    def num_threads(self) -> int:
        """Threads of a CTA, with the warp that keeps the accounts."""
        return self.threads_per_row + WARP


@dataclass(frozen=True)
class StreamConfig:
    """Forward that reads logits only: CTAs that stay, each with one row after the other.

    Args:
        threads: of a CTA.
        unroll: vectors of a thread that are under way while as many are reduced.
        ctas_per_sm: CTAs that should be on an SM together.
    """

    threads: int
    unroll: int = 4
    ctas_per_sm: int = 4

    cluster = 1
    persistent = True
    state_ints = 0
    module = f"{__package__}.fwd_stream"

    @property
    def num_threads(self) -> int:
        return self.threads

    def groups(self, spec: CrossEntropyFwdSpec, rows: int, heads: int, resident: int) -> int:
        """CTAs to launch."""
        return min(resident, rows)

    @property
    def registers(self) -> int:
        """Registers that a thread may have, so that ``ctas_per_sm`` fit."""
        return most_registers(REGISTERS, self.threads, self.ctas_per_sm)

    def tiling(self, spec: CrossEntropyFwdSpec) -> RowTiling:
        """A batch: what a CTA reduces at a time."""
        vec = spec.full_vector
        return RowTiling(self.threads * vec * self.unroll, vec, self.threads)

    def smem_bytes(self, spec: CrossEntropyFwdSpec) -> int:
        """Shared memory of a CTA."""
        return self.tiling(spec).shared_bytes(width=3, buffers=2) + 1024


@dataclass(frozen=True)
class FlatConfig:
    """A kernel without a reduction: each thread takes some vectors, far from the next ones.

    Args:
        num_threads: of a CTA.
        unroll: vectors of a thread.
        ctas_per_sm: CTAs that should be on an SM together.
    """

    num_threads: int = 256
    unroll: int = 4
    ctas_per_sm: int = 4

    cluster = 1

    @property
    def registers(self) -> int:
        """Registers that a thread may have, so that ``ctas_per_sm`` fit."""
        return most_registers(REGISTERS, self.num_threads, self.ctas_per_sm)

    def smem_bytes(self, spec: object) -> int:
        """Shared memory of a CTA."""
        return 1024


class BwdConfig(FlatConfig):
    """Backward."""

    module = f"{__package__}.bwd"


class RescaleConfig(FlatConfig):
    """Gradient times a number."""

    module = f"{__package__}.rescale"
    most_ctas = 2048  # the kernel often has nothing to do: it must be quick then
