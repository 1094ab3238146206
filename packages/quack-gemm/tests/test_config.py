"""Configurations: what they refuse, and that what a kernel takes of an SM is there."""

import dataclasses
import itertools
from typing import Any

import pytest

from quack_core import arch, dtypes
from quack_core.gemm.epilogue import (
    ActivationGrad,
    AddVector,
    ColumnReduce,
    Gate,
    GateGrad,
    Kind,
    Mirror,
    RowReduce,
    Scale,
    StoreAux,
    operands,
)
from quack_gemm import heuristic
from quack_gemm.config import GemmConfig
from quack_gemm.spec import GemmSpec

B, F, E = "bfloat16", "float32", "float8_e4m3fn"
ATOM_M, SWIZZLE_BYTES = 64, 128
MOST_STAGES = 20
ENOUGH_BYTES = 176 * 1024
WIDTHS = (16, 32, 64, 128)


def plain(d: str = B) -> GemmSpec:
    return GemmSpec(B, B, d)


def fused(*ops: object, d: str = B) -> GemmSpec:
    return GemmSpec(B, B, d, epilogue=ops)  # type: ignore[arg-type]


SPECS = [
    plain(),
    plain(F),
    GemmSpec(E, E, B),
    fused(AddVector(B)),
    fused(Scale(Kind.COLUMN, "x"), Scale(Kind.ROW, "y")),
    fused(StoreAux(B)),
    fused(StoreAux(F), d=F),
    fused(Gate("silu")),
    fused(AddVector(B), StoreAux(B), Gate("silu")),
    fused(StoreAux(F), Gate("silu")),
    fused(ActivationGrad("gelu", B)),
    fused(GateGrad("silu", B)),
    fused(RowReduce("lse")),
    fused(ColumnReduce("sum")),
    fused(AddVector(B), ColumnReduce("lse"), RowReduce("max")),
]
CONFIGS = [
    GemmConfig(),
    GemmConfig(64, 64, 1, 1),
    GemmConfig(64, 256, 1, 2, pingpong=True),
    GemmConfig(128, 32, 1, 1),
    GemmConfig(128, 128, 1, 1, pingpong=True),
    GemmConfig(128, 192, 1, 1, pingpong=True),
    GemmConfig(128, 224, 1, 1),
    GemmConfig(192, 160, 1, 1),
    GemmConfig(256, 128, 2, 2),
    GemmConfig(256, 192, 2, 1),
]


def most(spec: GemmSpec, config: GemmConfig) -> int:
    """Sums of a thread that a spec leaves registers for."""
    if spec.a == E:
        return {1: 96, 2: 96, 3: 64}[config.groups] if config.atoms == 1 else 0
    kinds = [operand.kind for op in spec.epilogue for operand in op.operands]
    if any(one.name == "lse" for one in spec.reductions):
        return {1: 112, 2: 64}[config.atoms]
    tiles = Kind.TILE in kinds or Kind.PAIRS in kinds
    return 128 if spec.reductions and tiles else 160 if spec.reductions or tiles else 192


PAIRS = [
    (spec, config)
    for spec, config in itertools.product(SPECS, CONFIGS)
    if config.accumulators <= most(spec, config)
]


def named(value: GemmSpec | GemmConfig) -> str:
    if isinstance(value, GemmSpec):
        return value.name
    pingpong = "-pingpong" if value.pingpong else ""
    return f"{value.tile_m}x{value.tile_n}{pingpong}"


each_pair = pytest.mark.parametrize(("spec", "config"), PAIRS, ids=named)


# --- what is refused


@pytest.mark.parametrize(
    ("fields", "found", "needed"),
    [
        ({"tile_m": 96}, "tile_m=96", "64, 128, 192 or 256"),
        ({"tile_m": 0}, "tile_m=0", "64, 128, 192 or 256"),
        ({"tile_n": 8}, "tile_n=8", "multiple of 16 from 16 to 256"),
        ({"tile_n": 100}, "tile_n=100", "multiple of 16 from 16 to 256"),
        ({"tile_n": 0}, "tile_n=0", "multiple of 16 from 16 to 256"),
        ({"tile_n": 272}, "tile_n=272", "multiple of 16 from 16 to 256"),
        ({"tile_m": 192, "tile_n": 64, "pingpong": True}, "tile_m=192 with pingpong", "64 or 128"),
        ({"tile_m": 256, "tile_n": 64, "pingpong": True}, "tile_m=256 with pingpong", "64 or 128"),
        ({"cluster_m": 3}, "cluster_m=3", "1, 2 or 4"),
        ({"cluster_m": 0}, "cluster_m=0", "1, 2 or 4"),
        ({"cluster_n": 8}, "cluster_n=8", "1, 2 or 4"),
        ({"cluster_m": 4, "cluster_n": 4}, "is 16", "at most 8"),
        ({"group": 0}, "group=0", "at least 1"),
        ({"split_k": 0}, "split_k=0", "at least 1"),
        ({"split_k": 5}, "is 10", "at most 8"),
        (
            {"tile_n": 128, "split_k": 2, "pingpong": True},
            "split_k=2 with pingpong",
            "share a tile",
        ),
        ({"stages": 1}, "stages=1", "0 or at least 2"),
        ({"stages": -2}, "stages=-2", "0 or at least 2"),
        ({"tile_m": 256, "tile_n": 256}, "tile_m=256, tile_n=256: 256 sums", "at most"),
        ({"tile_m": 128, "pingpong": True}, "tile_m=128, tile_n=256: 256 sums", "at most"),
        ({"tile_m": 192, "tile_n": 208}, "tile_m=192, tile_n=208: 104 sums", "at most 96"),
    ],
)
def test_fields_out_of_range(fields: dict, found: str, needed: str) -> None:
    with pytest.raises(ValueError) as error:
        GemmConfig(**fields)
    assert found in str(error.value)
    assert needed in str(error.value)


def test_a_config_is_frozen_and_is_a_key() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GemmConfig().tile_m = 64  # type: ignore[misc]
    assert len({GemmConfig(), GemmConfig(128, 256), GemmConfig(128, 128)}) == 2


def test_more_stages_than_fit() -> None:
    config = GemmConfig(stages=5)
    with pytest.raises(ValueError, match="5 stages take 280576 bytes .* 232448 are there"):
        config.check(plain())
    GemmConfig(stages=4).check(plain())


@pytest.mark.parametrize(
    "config",
    [GemmConfig(128, 144, 1, 1), GemmConfig(128, 16, 1, 1), GemmConfig(128, 64, 1, 1, swap=True)],
)
def test_pairs_do_not_suit_a_tile(config: GemmConfig) -> None:
    for op in (Gate("silu"), GateGrad("silu", B)):
        with pytest.raises(ValueError, match="multiple of 32, and no swap"):
            config.check(fused(op))
    config.check(plain())


@pytest.mark.parametrize("op", [RowReduce("sum"), ColumnReduce("sum")])
def test_nothing_is_reduced_with_parts_of_k(op: RowReduce | ColumnReduce) -> None:
    with pytest.raises(ValueError, match="reduced without split_k"):
        GemmConfig(128, 64, 1, 1, split_k=2).check(fused(op))
    for swap in (False, True):
        GemmConfig(128, 64, 1, 1, swap=swap).check(fused(op))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    ("config", "across", "down"),
    [
        (GemmConfig(128, 64, 1, 1), 5, 6),  # tiles of columns; warpgroups' rows: two of a tile
        (GemmConfig(128, 128, 1, 1, pingpong=True), 3, 3),  # one
        (GemmConfig(64, 96, 2, 1), 4, 6),  # whole clusters
        (GemmConfig(64, 96, 1, 2), 4, 5),
        (GemmConfig(256, 64, 1, 1), 5, 4),
    ],
)
def test_numbers_of_a_reduction(config: GemmConfig, across: int, down: int, swap: bool) -> None:
    """A D of 300 x 300 in tiles."""
    config = dataclasses.replace(config, swap=swap)
    row, column = (op.reduces for op in (RowReduce("max"), ColumnReduce("max")))
    assert row is not None and column is not None
    assert (config.down(row), config.down(column)) == (swap, not swap)
    found = config.partials(row, 300, 300), config.partials(column, 300, 300)
    assert found == ((down, across) if swap else (across, down))
    of_warps = 4 * 4 * config.tile_n * config.groups
    for op in (RowReduce("lse"), ColumnReduce("lse")):
        assert op.reduces is not None
        spec, more = fused(op), 2 * of_warps if config.down(op.reduces) else 0
        out = config.groups * config.buffers(spec) * 64 * config.piece_cols(spec) * 2
        assert config.store_bytes(spec) == out + more


def test_numbers_of_d_as_the_kernel_sees_it() -> None:
    column = ColumnReduce("sum").reduces
    assert column is not None
    assert GemmConfig(128, 64, 1, 1).partials(column, 1000, 5) == 16
    assert GemmConfig(128, 64, 1, 1, swap=True).partials(column, 1000, 5) == 16
    assert GemmConfig(128, 64, 1, 1, swap=True).partials(column, 65, 5) == 2


def test_pairs_are_shared_in_whole_blocks() -> None:
    with pytest.raises(ValueError, match="4 CTAs cannot share 6 blocks"):
        GemmConfig(128, 96, 4, 1).check(fused(Gate("silu")))
    GemmConfig(128, 96, 4, 1).check(plain())


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (GemmConfig(128, 144, 1, 1), "multiple of 32"),
        (GemmConfig(256, 64, 1, 1), "64 rows for each warpgroup"),
        (GemmConfig(128, 128, 1, 1, pingpong=True), "64 rows for each warpgroup"),
        (GemmConfig(128, 224, 1, 1), "112 sums per thread"),
    ],
)
def test_sums_in_parts_do_not_suit_a_tile(config: GemmConfig, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        config.check(GemmSpec(E, E, B))
    config.check(plain())


# --- threads and registers


@pytest.mark.parametrize(
    ("config", "groups", "sharing", "atoms", "sums"),
    [
        (GemmConfig(64, 64, 1, 1), 1, 1, 1, 32),
        (GemmConfig(128, 256), 2, 2, 1, 128),
        (GemmConfig(192, 160, 1, 1), 3, 3, 1, 80),
        (GemmConfig(256, 128), 2, 2, 2, 128),
        (GemmConfig(64, 256, 1, 1, pingpong=True), 2, 1, 1, 128),
        (GemmConfig(128, 128, 1, 1, pingpong=True), 2, 1, 2, 128),
    ],
    ids=lambda value: named(value) if isinstance(value, GemmConfig) else "",
)
def test_warpgroups(config: GemmConfig, groups: int, sharing: int, atoms: int, sums: int) -> None:
    assert (config.groups, config.sharing, config.atoms) == (groups, sharing, atoms)
    assert config.accumulators == sums
    assert config.accumulators * 128 * sharing == config.tile_m * config.tile_n
    assert config.num_threads == 128 * (1 + groups)


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_registers_are_there(config: GemmConfig) -> None:
    few, many = config.registers
    assert few % 8 == many % 8 == 0  # what the instruction takes
    assert 24 <= few < many <= arch.SM90.max_registers
    assert 128 * (few + config.groups * many) <= arch.SM90.registers_per_sm
    # What the CTA starts with, a whole number of 8 for each thread, is all that it has to share out.
    at_start = (
        min(arch.SM90.registers_per_sm // config.num_threads, arch.SM90.max_registers) // 8 * 8
    )
    assert few + config.groups * many <= at_start * (1 + config.groups)
    assert config.accumulators < many


def test_shares_of_split_k() -> None:
    """As many CTAs store as the pieces of a tile can be dealt to; what comes in takes memory."""
    plain = GemmSpec("bfloat16", "bfloat16", "bfloat16")
    for config, pieces, shares in (
        (GemmConfig(128, 128, 1, 1, split_k=2), 2, 2),
        (GemmConfig(128, 128, 1, 1, split_k=3), 2, 1),
        (GemmConfig(128, 64, 1, 1, split_k=8), 4, 4),
        (GemmConfig(64, 16, 1, 1, split_k=4), 1, 1),
        (GemmConfig(128, 256, 1, 1), 4, 1),
    ):
        assert (config.pieces(plain), config.shares(plain)) == (pieces, shares)
        out = config.groups * config.buffers(plain) * 64 * config.piece_cols(plain) * 2
        came = (config.split_k - 1) * config.tile_m * config.tile_n * 4 // shares
        assert config.store_bytes(plain) == out + came


# --- shared memory


@each_pair
def test_shared_memory_is_there(spec: GemmSpec, config: GemmConfig) -> None:
    config.check(spec)
    assert config.depth(spec) >= 2
    assert config.smem_bytes(spec) <= arch.SM90.smem_bytes
    parts = config.depth(spec) * config.stage_bytes(spec) + config.store_bytes(spec)
    assert config.smem_bytes(spec) >= parts + 16 * config.depth(spec)  # two barriers of a stage
    assert config.stage_bytes(spec) == (config.tile_m + config.tile_n) * SWIZZLE_BYTES
    assert config.tile_k(spec) * dtypes.width(spec.a) == SWIZZLE_BYTES * 8


@each_pair
def test_no_stage_more_would_fit(spec: GemmSpec, config: GemmConfig) -> None:
    depth = config.depth(spec)
    more = dataclasses.replace(config, stages=depth + 1)
    assert depth == MOST_STAGES or more.smem_bytes(spec) > arch.SM90.smem_bytes
    assert dataclasses.replace(config, stages=depth).smem_bytes(spec) == config.smem_bytes(spec)


@each_pair
def test_pieces_make_up_a_tile(spec: GemmSpec, config: GemmConfig) -> None:
    cols = config.piece_cols(spec)
    assert config.tile_n % cols == 0
    assert cols in WIDTHS
    assert config.pieces(spec) * cols * ATOM_M * config.sharing == config.tile_m * config.tile_n
    assert suits(spec, cols)


@each_pair
def test_two_buffers_for_more_than_one_piece(spec: GemmSpec, config: GemmConfig) -> None:
    assert config.pieces(spec) % config.shares(spec) == 0
    own = config.pieces(spec) // config.shares(spec)
    assert config.buffers(spec) == (2 if own > 1 else 1)


@each_pair
def test_wide_pieces_cost_no_stage_that_is_needed(spec: GemmSpec, config: GemmConfig) -> None:
    """No other width leaves room for more stages, but for more than enough; no wider one for as many."""
    chosen = config.piece_cols(spec)
    enough = next(n for n in range(1, 99) if n * config.stage_bytes(spec) >= ENOUGH_BYTES)
    depth = min(config.depth(spec), enough)
    for cols in WIDTHS:
        if config.tile_n % cols or not suits(spec, cols):
            continue
        other = min(stages_beside(spec, config, cols), enough)
        assert other <= depth
        assert cols <= chosen or other < depth


def suits(spec: GemmSpec, cols: int) -> bool:
    """Whether pieces may have so many columns: at least those of a store instruction, no more than a
    swizzle, and few if a thread holds more."""
    holds = len(spec.outputs) > 1 or any(
        one.kind in (Kind.TILE, Kind.PAIRS) for one in operands(spec.epilogue)
    )
    holds = holds or any(one.name == "lse" for one in spec.reductions)
    least = min(spec.cols(i, cols) for i in range(len(spec.outputs)))
    most = max(row_bytes(spec, cols))
    return least >= 16 and cols <= (32 if holds else 128) and most <= SWIZZLE_BYTES


def stages_beside(spec: GemmSpec, config: GemmConfig, cols: int) -> int:
    """Stages that fit beside pieces of so many columns."""
    # The vectors of the epilogue and the barriers are the same whatever the width.
    taken = config.smem_bytes(spec) - config.depth(spec) * config.stage_bytes(spec)
    taken += buffer_bytes(spec, config, cols) - buffer_bytes(spec, config, config.piece_cols(spec))
    return min(MOST_STAGES, (arch.SM90.smem_bytes - taken) // config.stage_bytes(spec))


def buffer_bytes(spec: GemmSpec, config: GemmConfig, cols: int) -> int:
    """Shared memory of pieces of so many columns: two of a warpgroup, if it has as many."""
    buffers = config.groups * min(2, config.atoms * config.tile_n // cols)
    return buffers * ATOM_M * sum(row_bytes(spec, cols))


def row_bytes(spec: GemmSpec, cols: int) -> list[int]:
    """Of a row of a piece, for each output."""
    outputs = zip(spec.outputs, spec.ratios, strict=True)
    return [cols * top // bottom * dtypes.width(name) // 8 for name, (top, bottom) in outputs]


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (GemmSpec(E, E, B), GemmConfig(128, 256, 1, 1)),
        (GemmSpec(E, E, B), GemmConfig(192, 160, 1, 1)),
        (fused(ActivationGrad("silu", B)), GemmConfig(128, 192, 1, 1, pingpong=True)),
        (fused(ColumnReduce("lse")), GemmConfig(128, 256, 1, 1)),
        (fused(RowReduce("lse")), GemmConfig(256, 96, 1, 1)),
        (fused(RowReduce("sum")), GemmConfig(128, 256, 1, 1, swap=True)),
        (
            fused(ActivationGrad("silu", B), ColumnReduce("sum")),
            GemmConfig(128, 160, 1, 1, pingpong=True),
        ),
    ],
    ids=named,
)
def test_sums_that_would_spill(spec: GemmSpec, config: GemmConfig) -> None:
    with pytest.raises(ValueError, match=f"{config.accumulators} sums per thread"):
        config.check(spec)


def test_half_of_a_symmetric_product_is_made_of_squares() -> None:
    spec = fused(Mirror())
    for config in (GemmConfig(), GemmConfig(256, 128, 1, 2), GemmConfig(128, 128, 1, 1, split_k=2)):
        config.check(spec)
        twice = config.groups * config.buffers(spec) * 64 * config.piece_cols(spec) * 2 * 2
        came = (config.split_k - 1) * config.tile_m * config.tile_n * 4 // config.shares(spec)
        assert config.store_bytes(spec) == twice + came
        assert 64 % config.piece_cols(spec) == 0  # a block of 64 rows is a whole number of parts
    with pytest.raises(ValueError, match="those have 128 rows and 256 columns"):
        GemmConfig(128, 256, 1, 1).check(spec)
    with pytest.raises(ValueError, match="computed without swap"):
        GemmConfig(128, 128, 1, 1, swap=True).check(spec)


def test_loads_are_shared_in_whole_swizzles() -> None:
    with pytest.raises(ValueError, match="4 CTAs share the loads of 48 rows: .* multiple of 32"):
        GemmConfig(128, 48, 4, 1).check(plain())
    GemmConfig(128, 64, 4, 1).check(plain())


@pytest.mark.parametrize("a_major", ["row", "column"])
@pytest.mark.parametrize("b_major", ["row", "column"])
def test_columns_across_memory_come_in_whole_swizzles(a_major: Any, b_major: Any) -> None:
    """Of operands whose K is strided, wide tiles are read 64 elements at a time, or slowly."""
    spec = GemmSpec(B, B, B, a_major, b_major)
    strided = {
        False: b_major == "row",
        True: a_major == "column",
    }  # by whether operands are swapped
    widths: dict[bool, set[int]] = {swap: set() for swap in strided}
    for config in heuristic.candidates(spec):
        widths[config.swap].add(config.tile_n)
    for swap, across in strided.items():
        odd = {n for n in widths[swap] if n > 64 and n % 64}
        assert bool(odd) != across
        assert {64, 128, 192, 256} <= widths[swap]
