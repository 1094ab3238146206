"""What each unit kernel does; plain values, so that a spec is a key of the cache."""

from dataclasses import dataclass
from typing import Any

from quack_core import dtypes
from quack_core.reduction.tiling import RowTiling


@dataclass(frozen=True)
class Probe:
    """A kernel to compile: its module in this package, and its spec."""

    module: str
    spec: Any

    @property
    def id(self) -> str:
        """For test names."""
        return str(self.spec.name)


@dataclass(frozen=True)
class ProbeConfig:
    """The kernels have no choices."""


@dataclass(frozen=True)
class VectorSpec:
    """Rows are copied: ``registers``, through shared memory (``fetch``)."""

    n: int
    vec: int
    threads_per_row: int
    rows_per_cta: int
    align: int
    dtype: str = "bfloat16"
    path: str = "registers"

    @property
    def name(self) -> str:
        """Kernel name."""
        return f"probe_{self.path}_n{self.n}_a{self.align}_{self.dtype}"


@dataclass(frozen=True)
class UnalignedSpec:
    """Rows that begin anywhere are copied to others: ``piece``, ``shift``, ``vectors``."""

    n: int
    dtype: str
    path: str

    @property
    def tiling(self) -> RowTiling:
        """Vectors of 16 bytes; room for a row that begins anywhere within one."""
        vec = 128 // dtypes.width(self.dtype)
        return RowTiling((self.n + 2 * (vec - 1)) // vec * vec, vec, 64, 1)

    @property
    def name(self) -> str:
        """Kernel name."""
        return f"probe_unaligned_{self.path}_n{self.n}_{self.dtype}"


@dataclass(frozen=True)
class BulkSpec:
    """One-dimensional bulk copies: ``store``, ``add``, ``send`` or ``multicast``.

    ``n`` values per CTA, which a cluster passes on from CTA to CTA.
    """

    path: str
    n: int
    cluster: int = 1
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Kernel name."""
        return f"probe_bulk_{self.path}_n{self.n}"


@dataclass(frozen=True)
class TileSpec:
    """Tiles of a matrix go through a ring of stages: ``store``, ``add`` or ``multicast``."""

    path: str
    tile: tuple[int, int] = (32, 64)
    stages: int = 3
    swizzled: bool = False
    dtype: str = "bfloat16"
    cluster: int = 1

    @property
    def name(self) -> str:
        """Kernel name."""
        return f"probe_tile_{self.path}{'_swizzled' * self.swizzled}_{self.dtype}"


@dataclass(frozen=True)
class ReduceSpec:
    """Rows of float32 are reduced, by the name of the reduction in ``reduction.py``."""

    reduction: str
    n: int
    vec: int
    threads_per_row: int
    rows_per_cta: int = 1
    cluster: int = 1
    rounds: int = 1

    @property
    def name(self) -> str:
        """Kernel name."""
        return f"probe_{self.reduction}_n{self.n}_c{self.cluster}"

    @property
    def width(self) -> int:
        """Float32 values of a result."""
        return {"sum": 1, "max": 1, "compensated": 3}.get(self.reduction, 2)


@dataclass(frozen=True)
class GridSpec:
    """CTAs wait for one another: ``last`` arrival, ``turns`` by semaphore, ``groups`` of warps."""

    path: str
    threads: int = 128

    @property
    def name(self) -> str:
        """Kernel name."""
        return f"probe_grid_{self.path}"


@dataclass(frozen=True)
class MathsSpec:
    """Functions of ``fast_math``, each applied to every element."""

    functions: tuple[str, ...] = (
        "rsqrt",
        "rsqrt_rest",
        "exp2",
        "exp",
        "log2",
        "log",
        "reciprocal",
    )
    name: str = "probe_maths"


UNALIGNED = ("piece", "shift", "vectors")
F32, BF16, F16 = "float32", "bfloat16", "float16"

PROBES = (
    *(Probe("vectors", VectorSpec(1000, 8, 32, 4, align)) for align in (16, 8, 4, 2)),
    Probe("vectors", VectorSpec(1024, 4, 128, 1, 16, F32)),  # whole passes: no predicate
    Probe("vectors", VectorSpec(1000, 4, 128, 1, 4, F32)),
    *(Probe("vectors", VectorSpec(1000, 8, 32, 4, align, F16, "fetch")) for align in (16, 8, 4)),
    *(Probe("unaligned", UnalignedSpec(1001, d, p)) for d in (BF16, F32) for p in UNALIGNED),
    Probe("bulk", BulkSpec("store", 512)),
    Probe("bulk", BulkSpec("add", 512)),
    Probe("bulk", BulkSpec("send", 512, cluster=4)),
    Probe("bulk", BulkSpec("multicast", 512, cluster=4)),
    Probe("tiles", TileSpec("store")),
    Probe("tiles", TileSpec("store", swizzled=True)),
    Probe("tiles", TileSpec("add", (32, 32), dtype=F32)),
    Probe("tiles", TileSpec("multicast", cluster=2)),
    Probe("reduction", ReduceSpec("sum", 96, 4, 8, 16)),  # rows share a warp
    Probe("reduction", ReduceSpec("sum2", 100, 4, 32, 4)),  # lanes without columns
    Probe("reduction", ReduceSpec("sum2", 1000, 4, 128, 2)),
    Probe("reduction", ReduceSpec("max", 8192, 4, 1024, rounds=3)),  # 32 warps: shuffles
    Probe("reduction", ReduceSpec("online", 6000, 4, 128)),
    Probe("reduction", ReduceSpec("sum", 8192, 4, 128, cluster=2, rounds=5)),
    Probe("reduction", ReduceSpec("max", 8000, 4, 128, cluster=4)),
    Probe("reduction", ReduceSpec("online", 8192, 4, 128, cluster=8, rounds=3)),
    Probe("reduction", ReduceSpec("softmax", 6000, 4, 128)),
    Probe("reduction", ReduceSpec("compensated", 100, 4, 8, 16)),
    Probe("reduction", ReduceSpec("compensated", 6000, 4, 128)),
    Probe("reduction", ReduceSpec("compensated", 8192, 4, 512, cluster=4, rounds=3)),
    *(Probe("grid", GridSpec(path)) for path in ("last", "turns", "groups")),
    Probe("maths", MathsSpec()),
)
