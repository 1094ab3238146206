"""How a GEMM kernel computes: a frozen record. ``heuristic`` chooses one."""

import math
from dataclasses import dataclass
from enum import StrEnum

from quack_core import dtypes
from quack_core.arch import SM90
from quack_core.gemm.epilogue import PARTIALS, Kind, Vector, operands

from .spec import GemmSpec


class SplitK(StrEnum):
    """How the parts of a tile's K come together."""

    SERIAL = "serial"
    """CTAs of a cluster have them, and exchange their sums: the same bits on every run."""
    PARALLEL = "parallel"
    """Each is added to a float32 D when it is done, in no fixed order: bits vary from run to run."""
    SEPARATE = "separate"
    """Each is written to memory, and a second kernel adds them in order: the same bits on every run."""


WARPGROUP = 128
"""Threads that issue a matrix instruction together."""
WARPS = 4
"""Of a warpgroup."""
ATOM_M = 64
"""Rows of a matrix instruction."""
SWIZZLE_BYTES = 128
"""Along K in a stage: the width of the widest swizzle."""
SMEM_BYTES = SM90.smem_bytes
"""Shared memory of a CTA."""
BARRIER_BYTES = 2048
"""For barriers, and what alignment takes."""
REGISTERS = SM90.registers_per_sm
"""Of an SM."""
MOST_SUMS = {1: 192, 2: 192, 3: 96}
"""Sums of a thread, by the warpgroups that multiply: more spill."""
MOST_BUSY_SUMS = 160
"""The same beside an epilogue that reads whole tiles or reduces them."""
MOST_BUSIEST_SUMS = 128
"""The same beside one that does both."""
MOST_ONLINE_SUMS = {1: 112, 2: 64}
"""The same beside a reduction with two numbers, or with operands swapped beside any; by the instructions
of 64 rows of a warpgroup."""
MOST_PROMOTED = {1: 96, 2: 96, 3: 64}
"""The same where sums are promoted, which takes twice as many."""
MULTICAST_ROWS = 8
"""Rows that a swizzle of 128 bytes moves as a whole: CTAs load so many at least, for all that share."""
PARTS = 2
"""Of a tile's columns, where sums are promoted: one is added while the next one is multiplied."""
MOST_STAGES = 20
ENOUGH_BYTES = 176 << 10
"""In stages; more of them do not hide more latency, and what is stored has better uses for the room."""
MOST_CTAS = 8
"""Of a cluster, on every GPU of the architecture."""
LOADING_REGISTERS = {2: 56, 3: 40, 4: 32}
"""Per thread of the warpgroup that loads, by warpgroups; the others get the rest."""


@dataclass(frozen=True)
class GemmConfig:
    """A persistent kernel of SM90: one warpgroup loads, the others multiply.

    Args:
        tile_m, tile_n: of the product, that a CTA works on at a time.
        cluster_m, cluster_n: CTAs of a cluster; those along M share tiles of B, along N those of A.
        pingpong: two warpgroups have a tile each, and one stores while the other multiplies; else
            all of them share a tile.
        group: rows of clusters whose tiles are worked on together, for L2.
        stages: parts of K under way; 0: as many as fit.
        swap: B^T A^T is computed instead, so that few rows of A are columns of an instruction.
        split_k: parts of a tile's K.
        split_mode: where they are added, see `SplitK`; without parts it is ``SERIAL``.
        prefetch: B is loaded while the kernel before this one on the stream ends, which must not write
            B, and the kernel behind may start early as well.
    """

    tile_m: int = 128
    tile_n: int = 256
    cluster_m: int = 2
    cluster_n: int = 1
    pingpong: bool = False
    group: int = 8
    stages: int = 0
    swap: bool = False
    split_k: int = 1
    split_mode: SplitK = SplitK.SERIAL
    prefetch: bool = False

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128, 192, 256):
            raise ValueError(f"tile_m={self.tile_m}: must be 64, 128, 192 or 256")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ValueError(f"tile_n={self.tile_n}: must be a multiple of 16 from 16 to 256")
        if self.pingpong and self.tile_m > 128:
            raise ValueError(f"tile_m={self.tile_m} with pingpong: must be 64 or 128")
        for name in ("cluster_m", "cluster_n"):
            if getattr(self, name) not in (1, 2, 4):
                raise ValueError(f"{name}={getattr(self, name)}: must be 1, 2 or 4")
        if self.group < 1:
            raise ValueError(f"group={self.group}: must be at least 1")
        if self.split_k < 1:
            raise ValueError(f"split_k={self.split_k}: must be at least 1")
        self._check_split()
        if self.stages < 0 or self.stages == 1:
            raise ValueError(f"stages={self.stages}: must be 0 or at least 2")
        most = MOST_SUMS[self.groups]
        if self.accumulators > most:
            raise ValueError(
                f"tile_m={self.tile_m}, tile_n={self.tile_n}: {self.accumulators} sums per thread, "
                f"at most {most} fit its registers"
            )

    def _check_split(self) -> None:
        if self.split_mode not in tuple(SplitK):
            raise ValueError(f"split_mode={self.split_mode}: must be one of {', '.join(SplitK)}")
        if self.split_mode != SplitK.SERIAL and self.split_k < 2:
            raise ValueError(
                f"split_k={self.split_k} with split_mode={self.split_mode}: must be at least 2"
            )
        if self.cluster > MOST_CTAS:
            factors = "cluster_m * cluster_n" + " * split_k" * (self.peers > 1)
            way_out = f"; split_mode={SplitK.SEPARATE} has any number of parts" * (self.peers > 1)
            raise ValueError(
                f"{factors} is {self.cluster}: at most {MOST_CTAS} is portable{way_out}"
            )
        if self.split_k > 1 and self.pingpong:
            raise ValueError(
                f"split_k={self.split_k} with pingpong={self.pingpong}: needs warpgroups that share a "
                "tile"
            )
        if self.peers > 1 and self.atoms > 1:
            raise ValueError(
                f"split_k={self.split_k} with tile_m={self.tile_m}: {SplitK.SERIAL} parts need 64 rows "
                "for each warpgroup"
            )

    @property
    def peers(self) -> int:
        """CTAs of a cluster that have parts of a tile's K and exchange their sums."""
        return self.split_k if self.split_mode == SplitK.SERIAL else 1

    @property
    def ranges(self) -> int:
        """Parts of K that are tiles of their own: clusters have them one after the other."""
        return 1 if self.split_mode == SplitK.SERIAL else self.split_k

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n * self.peers

    def product(self, spec: GemmSpec) -> GemmSpec:
        """What the kernel of the product computes, where ``spec`` is asked for."""
        if self.split_mode == SplitK.SEPARATE:
            return spec.sums
        return spec.into_c if self.split_mode == SplitK.PARALLEL else spec

    @property
    def groups(self) -> int:
        """Warpgroups that multiply."""
        return 2 if self.pingpong or self.tile_m == 256 else self.tile_m // ATOM_M

    @property
    def sharing(self) -> int:
        """Warpgroups that share a tile."""
        return 1 if self.pingpong else self.groups

    @property
    def atoms(self) -> int:
        """Instructions of 64 rows, one below the other, of a warpgroup."""
        return self.tile_m // (ATOM_M * self.sharing)

    @property
    def accumulators(self) -> int:
        """Sums of a thread."""
        return self.atoms * self.tile_n * ATOM_M // WARPGROUP

    @property
    def num_threads(self) -> int:
        return WARPGROUP * (1 + self.groups)

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread: of those that load, and of the others."""
        few = LOADING_REGISTERS[1 + self.groups]
        of_all = REGISTERS // WARPGROUP
        return few, min(240, (of_all - few) // self.groups // 8 * 8)

    def down(self, vector: Vector) -> bool:
        """Whether the kernel reduces over the rows of its tiles, and not over their columns."""
        return (vector.kind == Kind.ROW) != self.swap

    def partials(self, vector: Vector, m: int, n: int) -> int:
        """Numbers from which each one of a vector is made: of a tile, or of a warpgroup's rows of it,
        those of whole clusters."""
        rows, cols = (n, m) if self.swap else (m, n)
        if self.down(vector):
            return -(-rows // (self.tile_m * self.cluster_m)) * self.cluster_m * self.sharing
        return -(-cols // (self.tile_n * self.cluster_n)) * self.cluster_n

    def tile_k(self, spec: GemmSpec) -> int:
        """Elements along K of a stage."""
        return SWIZZLE_BYTES * 8 // dtypes.width(spec.a)

    def piece_cols(self, spec: GemmSpec) -> int:
        """Columns of the product that a warpgroup stores at a time: many, if enough stages are left."""
        tiles = [one for one in operands(spec.epilogue) if one.kind in (Kind.TILE, Kind.PAIRS)]
        online = any(PARTIALS[one.name] > 1 for one in spec.reductions)
        most = 32 if tiles or online or len(spec.outputs) > 1 else 128  # more would spill
        least = 16 * (1 + spec.gated)  # an stmatrix has 16 columns
        fitting = [c for c in (128, 64, 32, 16) if self.tile_n % c == 0 and least <= c <= most]
        outputs = range(len(spec.outputs))
        narrow = [
            cols
            for cols in fitting
            if all(
                spec.cols(i, cols) * dtypes.width(spec.outputs[i]) <= SWIZZLE_BYTES * 8
                for i in outputs
            )
        ]
        fitting = narrow or fitting[-1:]
        enough = -(-ENOUGH_BYTES // self.stage_bytes(spec))
        return max(fitting, key=lambda cols: (min(self._depth(spec, cols), enough), cols))

    def pieces(self, spec: GemmSpec) -> int:
        """How many such parts a warpgroup has of a tile."""
        return self._pieces(self.piece_cols(spec))

    def _pieces(self, cols: int) -> int:
        return self.atoms * (self.tile_n // cols)

    def shares(self, spec: GemmSpec) -> int:
        """CTAs with parts of a tile's K that store a share of its columns, as many pieces each."""
        return self._shares(self.piece_cols(spec))

    def _shares(self, cols: int) -> int:
        return math.gcd(self._pieces(cols), self.peers)

    def buffers(self, spec: GemmSpec) -> int:
        """Parts of a warpgroup on their way out: two, if a share has more than one."""
        return self._buffers(self.piece_cols(spec))

    def _buffers(self, cols: int) -> int:
        return min(2, self._pieces(cols) // self._shares(cols))

    def stage_bytes(self, spec: GemmSpec) -> int:
        return (self.tile_m + self.tile_n) * SWIZZLE_BYTES

    def store_bytes(self, spec: GemmSpec) -> int:
        """Shared memory of what is on its way out, of row operands and of what is reduced over rows,
        and of sums that come in."""
        return self._store_bytes(spec, self.piece_cols(spec))

    def _store_bytes(self, spec: GemmSpec, cols: int) -> int:
        elements = self.groups * self._buffers(cols) * ATOM_M * cols
        found = (self.peers - 1) * self.tile_m * self.tile_n * 4 // self._shares(cols)
        for i, name in enumerate(spec.outputs):
            found += spec.cols(i, elements) * dtypes.width(name) // 8 * (1 + spec.symmetric)
        shared = Kind.COLUMN if self.swap else Kind.ROW
        numbers = sum(one.kind == shared for one in operands(spec.epilogue))
        numbers += sum(WARPS * PARTIALS[one.name] for one in spec.reductions if self.down(one))
        return found + self.groups * numbers * 4 * self.tile_n

    def depth(self, spec: GemmSpec) -> int:
        """Stages: as asked for, or as many as fit."""
        return self.stages or self._depth(spec, self.piece_cols(spec))

    def _depth(self, spec: GemmSpec, cols: int) -> int:
        room = SMEM_BYTES - BARRIER_BYTES - self._store_bytes(spec, cols)
        return min(MOST_STAGES, room // self.stage_bytes(spec))

    def smem_bytes(self, spec: GemmSpec) -> int:
        """Shared memory of a CTA."""
        return BARRIER_BYTES + self.store_bytes(spec) + self.depth(spec) * self.stage_bytes(spec)

    def check(self, spec: GemmSpec) -> None:
        """Raise if the kernel of ``spec`` cannot be built so.

        Raises:
            ValueError: too little shared memory, or an epilogue that the tile does not suit.
        """
        self._check_parts(spec)
        spec = self.product(spec)
        if (spec.gated or spec.doubled) and (self.tile_n % 32 or self.swap):
            raise ValueError(f"{self}: pairs need a tile_n that is a multiple of 32, and no swap")
        side = self.tile_m * self.cluster_m, self.tile_n * self.cluster_n
        if spec.symmetric and (self.swap or side[0] != side[1]):
            raise ValueError(
                f"{self}: half of a symmetric D is computed without swap, in square clusters; those "
                f"have {side[0]} rows and {side[1]} columns"
            )
        blocks = self.tile_n // 16  # of pairs, which the CTAs along M divide among them to load
        if spec.gated and blocks % self.cluster_m and self.cluster_m % blocks:
            raise ValueError(
                f"{self}: {self.cluster_m} CTAs cannot share {blocks} blocks of 16 columns of pairs; "
                "take another tile_n or cluster_m"
            )
        if self.smem_bytes(spec) > SMEM_BYTES or self.depth(spec) < 2:
            raise ValueError(
                f"{self}: {self.depth(spec)} stages take {self.smem_bytes(spec)} bytes of shared "
                f"memory: {SMEM_BYTES} are there, and at least 2 stages needed"
            )
        self._check_promoted(spec)
        most = self._most_busy(spec)
        if most and self.accumulators > most:
            raise ValueError(
                f"{self}: {self.accumulators} sums per thread; beside such an epilogue at most "
                f"{most} fit its registers"
            )
        for rows, sharers in ((self.tile_m, self.cluster_n), (self.tile_n, self.cluster_m)):
            if rows % (MULTICAST_ROWS * sharers):
                raise ValueError(
                    f"{self}: {sharers} CTAs share the loads of {rows} rows: it must be a multiple of "
                    f"{MULTICAST_ROWS * sharers}"
                )

    def _check_parts(self, spec: GemmSpec) -> None:
        if spec.reductions and self.split_k > 1:
            raise ValueError(
                f"{self}: rows and columns are reduced without split_k, whatever split_mode is"
            )
        if spec.symmetric and self.ranges > 1:
            raise ValueError(
                f"{self}: half of a symmetric D is computed without split_k, or with split_mode="
                f"{SplitK.SERIAL}"
            )
        if self.split_mode == SplitK.PARALLEL:
            spec.check_linear(str(self))

    def _check_promoted(self, spec: GemmSpec) -> None:
        if dtypes.width(spec.a) != 8:
            return
        if self.tile_n % (16 * PARTS) or self.atoms > 1:
            raise ValueError(
                f"{self}: 8-bit operands need a tile_n that is a multiple of {16 * PARTS}, and "
                "64 rows for each warpgroup"
            )
        most = MOST_PROMOTED[self.groups]
        if self.accumulators > most:
            raise ValueError(
                f"{self}: {self.accumulators} sums per thread, twice that are needed, and "
                f"{2 * most} fit its registers"
            )

    def _most_busy(self, spec: GemmSpec) -> int:
        """Sums of a thread that an epilogue leaves registers for; 0 if it takes none to speak of."""
        tiles = [one for one in operands(spec.epilogue) if one.kind in (Kind.TILE, Kind.PAIRS)]
        online = any(PARTIALS[one.name] > 1 for one in spec.reductions)
        if online or (spec.reductions and self.swap):
            return MOST_ONLINE_SUMS[self.atoms]
        if tiles and spec.reductions:
            return MOST_BUSIEST_SUMS
        return MOST_BUSY_SUMS if tiles or spec.reductions else 0


MOST_SLICES = 8
LOADS = 8
"""Parts that a thread takes at a time."""


@dataclass(frozen=True)
class SumConfig:
    """The kernel behind one with ``SplitK.SEPARATE``, which adds the parts; any architecture.

    Args:
        slices: of the parts; different threads add them up, and one thread what they found.
    """

    slices: int = 1

    def __post_init__(self) -> None:
        if self.slices not in (1, 2, 4, 8):
            raise ValueError(f"slices={self.slices}: must be 1, 2, 4 or 8")

    @classmethod
    def of(cls, parts: int) -> "SumConfig":
        """For so many parts: as many slices as have loads enough to hide their latency."""
        return cls(min(MOST_SLICES, 1 << max(0, (parts // LOADS).bit_length() - 1)))
