"""How parts of K come together: what each mode refuses, which part a CTA has, what is launched."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import cutlass
import numpy as np
import pytest
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack
from torch import Tensor

from quack_core import arch
from quack_core.gemm.epilogue import (
    Activation,
    AddC,
    AddVector,
    ColumnReduce,
    Gate,
    Kind,
    Mirror,
    Op,
    RowReduce,
    Scale,
    SelectRow,
    StoreAux,
)
from quack_core.gemm.sm90.ring import Cluster
from quack_core.testing import fake_cuda
from quack_gemm import autograd, heuristic, launch, repeat
from quack_gemm.api import gemm
from quack_gemm.config import GemmConfig, SplitK, SumConfig
from quack_gemm.heuristic import Problem
from quack_gemm.sm90.places import Sizes, Walk
from quack_gemm.spec import GemmSpec, SumSpec

B, F = "bfloat16", "float32"
BF16, F32 = torch.bfloat16, torch.float32
SERIAL, PARALLEL, SEPARATE = SplitK
PLAIN = GemmSpec(B, B, B)


def apart(ranges: int, **fields: Any) -> GemmConfig:
    given = {"tile_m": 128, "tile_n": 128, "cluster_m": 1} | fields
    return GemmConfig(**given, split_k=ranges, split_mode=SEPARATE)


def added(ranges: int, **fields: Any) -> GemmConfig:
    given = {"tile_m": 128, "tile_n": 128, "cluster_m": 1} | fields
    return GemmConfig(**given, split_k=ranges, split_mode=PARALLEL)


# --- what is refused


@pytest.mark.parametrize(
    ("fields", "found", "needed"),
    [
        ({"split_mode": "both"}, "split_mode=both", "serial, parallel, separate"),
        ({"split_mode": SEPARATE}, "split_k=1 with split_mode=separate", "at least 2"),
        ({"split_mode": PARALLEL}, "split_k=1 with split_mode=parallel", "at least 2"),
        ({"split_k": 8}, "cluster_m * cluster_n * split_k is 16", "split_mode=separate"),
        (
            {"split_k": 8, "split_mode": SEPARATE, "cluster_m": 4, "cluster_n": 4},
            "cluster_m * cluster_n is 16",
            "at most 8",
        ),
        (
            {"split_k": 64, "split_mode": SEPARATE, "tile_n": 128, "pingpong": True},
            "split_k=64 with pingpong=True",
            "share a tile",
        ),
        (
            {"split_k": 2, "tile_m": 256, "tile_n": 128},
            "split_k=2 with tile_m=256",
            "serial parts need 64 rows",
        ),
    ],
)
def test_fields_out_of_range(fields: dict[str, Any], found: str, needed: str) -> None:
    with pytest.raises(ValueError) as error:
        GemmConfig(**fields)
    assert found in str(error.value)
    assert needed in str(error.value)


def test_parts_in_memory_are_no_ctas_of_a_cluster() -> None:
    config = GemmConfig(256, 128, split_k=1000, split_mode=SEPARATE)
    assert (config.cluster, config.peers, config.ranges) == (2, 1, 1000)
    assert config.store_bytes(PLAIN) == GemmConfig(256, 128).store_bytes(PLAIN)
    serial = GemmConfig(128, 128, split_k=4)
    assert (serial.cluster, serial.peers, serial.ranges) == (8, 4, 1)


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (PLAIN, "D is bfloat16, parts are added to float32 only"),
        (GemmSpec(B, B, F, epilogue=(Activation("relu"),)), "holds Activation"),
        (GemmSpec(B, B, F, epilogue=(AddVector(B),)), "holds AddVector"),
        (GemmSpec(B, B, F, epilogue=(AddC(F), Scale())), "holds AddC"),
        (GemmSpec(B, B, F, epilogue=(AddC(F), AddC(F))), "holds AddC"),
        (GemmSpec(B, B, F, epilogue=(Scale(), StoreAux(F))), "holds StoreAux"),
        (GemmSpec(B, B, F, epilogue=(Gate("silu"),)), "holds Gate"),
    ],
)
def test_what_cannot_be_added_part_by_part(spec: GemmSpec, found: str) -> None:
    with pytest.raises(ValueError) as error:
        added(4).check(spec)
    assert found in str(error.value)
    assert "split_mode=separate" in str(error.value)  # the way out
    apart(4).check(spec)


def test_what_can_be_added_part_by_part() -> None:
    scales = Scale(), Scale(Kind.COLUMN, "a"), Scale(Kind.DEVICE_SCALAR, "b")
    for ops, kept in (
        ((), ()),
        (scales, scales),
        ((AddC(B),), ()),
        ((*scales, AddC(F, Kind.SCALAR)), scales),
    ):
        spec = GemmSpec(B, B, F, epilogue=ops)
        added(4).check(spec)
        assert added(4).product(spec).epilogue == kept


@pytest.mark.parametrize("config", [apart(4), added(4)], ids=["separate", "parallel"])
def test_rows_are_not_reduced_over_parts(config: GemmConfig) -> None:
    for op in (RowReduce("sum"), ColumnReduce("max"), SelectRow()):
        with pytest.raises(ValueError, match="without split_k, whatever split_mode"):
            config.check(GemmSpec(B, B, F, epilogue=(op,)))


def test_half_of_a_symmetric_product_is_split_in_clusters_only() -> None:
    spec = GemmSpec(B, B, F, epilogue=(Mirror(),))
    for config in (apart(4, cluster_m=1, tile_n=128), added(4, cluster_m=1, tile_n=128)):
        with pytest.raises(ValueError, match="without split_k, or with split_mode=serial"):
            config.check(spec)
    GemmConfig(128, 128, 1, 1, split_k=4).check(spec)
    few = heuristic.Problem(128, 128, 131072, 1, spec, 132)
    assert heuristic.separate(few) == ()
    assert heuristic.default(few, arch.SM90).split_mode == SERIAL


def test_epilogues_do_not_limit_the_tiles_of_parts() -> None:
    """The product has none."""
    gated = GemmSpec(B, B, B, epilogue=(Gate("silu"),), concat=True)
    config = apart(4, tile_n=48, swap=True)
    config.check(gated)
    assert config.product(gated) == GemmSpec(B, B, F)
    with pytest.raises(ValueError, match="no swap"):
        GemmConfig(128, 48, 1, swap=True).check(gated)


@pytest.mark.parametrize("config", [apart(48), added(3)], ids=["separate", "parallel"])
def test_modes_pass_through_the_dispatcher(config: GemmConfig) -> None:
    text = autograd.arguments(t(8, 64), t(64, 8), [], [BF16], False, config)[-1]
    again = autograd.config_of(text)
    assert again == config and hash(again) == hash(config)


# --- which part a CTA has


class Launch:
    """Where the clusters of a launch are, one after the other."""

    def __init__(self, spec: GemmSpec, config: GemmConfig):
        self.config, self.walk = config, Walk(config.product(spec), config)

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,  # (tiles, CTAs of a cluster, 5)
        sizes: cutlass.Constexpr[tuple[int, int, int, int]],  # clusters down, across, L, steps
    ):
        config = self.config
        down, across, batches, steps = sizes
        rows = down * config.cluster_m * config.tile_m
        cols = across * config.cluster_n * config.tile_n
        stored = batches * config.ranges if config.split_mode == SEPARATE else batches
        made = self.walk.make_order(Int32(rows), Int32(cols), Int32(stored))
        sizes_of = Sizes(Int32(0), Int32(0), Int32(steps))
        for work in range(made.total):
            for rank in cutlass.range_constexpr(config.cluster):
                row, rest = rank % config.cluster_m, rank // config.cluster_m
                col, part = rest % config.cluster_n, rest // config.cluster_n
                at = Cluster(Int32(row), Int32(col), Int32(part))
                place, first, count = self.walk.locate(made, Int32(work), at, sizes_of)
                found = (place.row, place.col, place.matrix, first, count)
                for i in cutlass.range_constexpr(5):
                    out[work, rank, i] = found[i]


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("steps", [1, 5, 64, 67])
@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(128, 128, split_k=4),
        apart(2),
        apart(6, cluster_m=2, group=1),
        apart(96, group=2),
        added(7, cluster_m=2),
    ],
    ids=lambda config: f"{config.split_mode}{config.split_k}",
)
def test_each_step_of_each_tile_once(config: GemmConfig, steps: int, batches: int) -> None:
    down, across, total = 3, 2, 3 * 2 * batches * config.ranges
    out = np.full((total, config.cluster, 5), -1, np.int32)
    Launch(GemmSpec(B, B, F), config)(from_dlpack(out), (down, across, batches, steps))
    seen: Counter[tuple[int, ...]] = Counter()
    parts: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for row, col, matrix, first, count in out.reshape(-1, 5).tolist():
        place = matrix
        if config.split_mode == SEPARATE:  # a matrix of D's for each part
            place = matrix // config.ranges
            assert (matrix, row, col) not in parts
        parts.setdefault((matrix, row, col), []).append((first, count))
        assert 0 <= first and 0 <= count and first + count <= steps
        seen.update((place, row, col, k) for k in range(first, first + count))
    rows, cols = down * config.cluster_m, across * config.cluster_n
    every = itertools.product(range(batches), range(rows), range(cols), range(steps))
    assert seen == Counter(every)
    each = 1 if config.split_mode == SEPARATE else config.split_k
    assert {len(found) for found in parts.values()} == {each}


# --- what is launched


class Launched(list[tuple[Any, tuple[Any, ...]]]):
    """Kernels and what they were called with."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """CPU tensors go where CUDA tensors go; nothing is computed."""
    found = Launched()

    def load(module: str, spec: Any, config: Any, target: arch.Arch) -> Callable[..., None]:
        return lambda *operands: found.append(((module, spec, config), operands))

    fake_cuda.stand_in(monkeypatch, load)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(launch, "_launchers", {})
    monkeypatch.setattr(repeat, "_calls", {})
    monkeypatch.setattr(launch, "_kernel", launch._kernel.__wrapped__)
    return found


def t(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize("turned", [False, True])
def test_parts_go_through_memory_of_the_launch(launched: Launched, turned: bool) -> None:
    a, b, bias = t(72, 512), t(134, 512).mT, t(134)
    out = t(136, 72).mT[:, :134] if turned else t(72, 136)[:, :134]
    for _ in range(2):  # the second one as a call that is known
        gemm(a, b, bias=bias, out=out, config=apart(20))
    assert len(launched) == 4
    memory = set()
    for product, behind in (launched[:2], launched[2:]):
        (module, spec, config), (first, second, (parts,), *rest) = product
        assert (module, config) == (launch.MODULE, apart(20))
        major = "column" if turned else "row"
        assert spec == GemmSpec(B, B, F, d_major=major)
        assert first is a and second is b and rest[:2] == [None, None]
        assert parts.dtype == F32
        assert parts.shape == ((20, 72, 134) if turned else (20, 72, 136))
        assert parts.stride() == ((134 * 72, 1, 72) if turned else (72 * 136, 136, 1))
        (module, spec, config), (same, outputs, operands) = behind
        assert module == launch.SUM_MODULE
        asked = GemmSpec(B, B, B, d_major=major, epilogue=(AddVector(B),))
        assert (spec, config) == (SumSpec(asked), SumConfig(2))
        assert same is parts and outputs[0] is out and operands == (bias,)
        memory.add(parts.data_ptr())
    assert len(memory) == 2  # both are alive here


def test_clusters_are_counted_for_the_kernel_of_the_product(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its D is float32, and has no epilogue beside it."""
    asked: list[tuple[Any, ...]] = []

    def resident(*given: Any) -> int:
        asked.append(given[1:])
        return 132

    monkeypatch.setattr(launch.occupancy, "resident_clusters", resident)
    config = apart(4)
    gemm(t(72, 512), t(136, 512).mT, c=t(72, 136), bias=t(136), config=config)
    (_, spec, _), _ = launched[0]
    assert asked == [(1, config.num_threads, config.smem_bytes(spec))]


def test_batches_have_parts_each(launched: Launched) -> None:
    gemm(t(3, 72, 512), t(136, 512).mT, config=apart(4))
    (_, (_, _, (parts,), *_)), _ = launched
    assert parts.shape == (12, 72, 136)


def test_d_is_zero_or_c_before_parts_are_added(launched: Launched) -> None:
    a, b = t(72, 512), t(136, 512).mT
    c = torch.arange(72 * 136, dtype=F32).reshape(72, 136) % 64
    for given, expected in (
        ({}, torch.zeros_like(c)),
        ({"c": c}, c),
        ({"c": c.to(BF16), "beta": 0.5}, c / 2),
        ({"c": c, "beta": torch.tensor([4.0])}, c * 4),
        ({"c": c, "beta": 0.0}, torch.zeros_like(c)),
    ):
        out = torch.full_like(c, torch.nan)
        gemm(a, b, out=out, alpha=3.0, config=added(4), **given)  # type: ignore[arg-type]
        assert torch.equal(out, expected)
        (_, spec, _), (_, _, outputs, operands, *_) = launched[-1]
        assert spec == GemmSpec(B, B, F, epilogue=(Scale(),))
        assert outputs[0] is out and operands == (3.0,)
    gemm(a, b, c=c, out=c, config=added(4))
    assert torch.equal(c, torch.arange(72 * 136, dtype=F32).reshape(72, 136) % 64)
    assert launched[-1][1][2][0] is c and launched[-1][1][3] is None


def test_a_call_that_is_refused_leaves_c_alone(launched: Launched) -> None:
    wide = torch.zeros(72 * 512 + 8, dtype=BF16)
    c = t(72, 136, dtype=F32)
    b = t(136, 512).mT
    gemm(wide[: 72 * 512].view(72, 512), b, c=c, out=c, beta=2.0, config=added(4))
    assert torch.equal(c, t(72, 136, dtype=F32) * 2)
    with pytest.raises(ValueError, match="address of a"):
        gemm(wide[1:][: 72 * 512].view(72, 512), b, c=c, out=c, beta=2.0, config=added(4))
    assert torch.equal(c, t(72, 136, dtype=F32) * 2)


# --- what is chosen


def problem(m: int, n: int, k: int, *ops: Op, d: str = B, sms: int = 132) -> Problem:
    return Problem(m, n, k, 1, GemmSpec(B, B, d, epilogue=ops), sms)


@pytest.mark.parametrize("ops", [(), (AddVector(B), Gate("silu"))], ids=["plain", "gated"])
@pytest.mark.parametrize("d", [B, F])
@pytest.mark.parametrize("sizes", [(128, 128, 131072), (64, 64, 65536), (256, 256, 65536)])
def test_few_tiles_and_a_long_K_go_through_memory(
    sizes: tuple[int, int, int], d: str, ops: tuple[Op, ...]
) -> None:
    one = problem(*sizes, *ops, d=d)
    chosen = heuristic.default(one, arch.SM90)
    assert chosen.split_mode == SEPARATE
    chosen.check(one.spec)
    others = min(heuristic.cycles(one, config) for config in heuristic.candidates(one.spec))
    assert heuristic.cycles(one, chosen) * heuristic.CLEARLY < others


@pytest.mark.parametrize(
    "sizes",
    [
        (4096, 4096, 4096),
        (128, 128, 4096),
        (16, 7168, 16384),
        (1, 28672, 4096),
        (8192, 8192, 131072),
    ],
)
def test_others_do_not(sizes: tuple[int, int, int]) -> None:
    assert heuristic.default(problem(*sizes), arch.SM90).split_mode == SERIAL


def test_a_number_of_parts_is_of_those_in_a_cluster() -> None:
    for parts in heuristic.SPLITS:
        chosen = heuristic.default(problem(128, 128, 131072), arch.SM90, split_k=parts)
        assert (chosen.split_k, chosen.split_mode) == (parts, SERIAL)


def test_nothing_that_varies_is_chosen() -> None:
    for d in (B, F):
        one = problem(128, 128, 131072, d=d)
        modes = {config.split_mode for config in heuristic.candidates(one.spec)}
        assert modes == {SERIAL}
        assert {config.split_mode for config in heuristic.separate(one)} == {SEPARATE}


@pytest.mark.parametrize("sms", [78, 114, 132])
def test_parts_are_of_one_wave(sms: int) -> None:
    for m, n, k in ((128, 128, 131072), (300, 200, 20000), (1000, 1000, 9000), (64, 64, 640)):
        one = problem(m, n, k, sms=sms)
        for config in heuristic.separate(one):
            tiles = heuristic._clusters(one, config)
            clusters = tiles[0] * tiles[1] * config.split_k
            assert clusters <= heuristic.RESIDENT[config.cluster] * sms // heuristic.SMS
            assert config.split_k <= -(-k // 64)  # each has a step
    assert not heuristic.separate(problem(4096, 4096, 65536, sms=sms))
    for free in range(2, 133):  # as many SMs are left to a tile
        most = max(ranges for ranges in heuristic.RANGES if ranges <= free)
        assert 3 * most >= 2 * free
