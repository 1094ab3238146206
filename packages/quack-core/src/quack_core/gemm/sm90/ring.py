"""Parts of A and B on their way to the tensor cores: stages in shared memory, filled by TMA."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from quack_core.device import barrier, tma
from quack_core.device.barrier import Phase

TWO_WARPGROUPS = 256
"""Threads."""

Factors = Callable[[Int32], Callable[[int], list[tuple[Float32, ...]]]]
"""Of a stage: of a part of its columns: what each sum is multiplied by, one after the other."""


class Rota(NamedTuple):
    """Whose turn it is to multiply a stage or a tile: numbers of named barriers, this warpgroup's and
    that of the other one."""

    mine: Int32
    next: Int32


class Ring(NamedTuple):
    """Stages, each with a part of A and one of B.

    Args:
        full: an mbarrier per stage, on which its bytes complete.
        empty: an mbarrier per stage, at which the warps that have read it arrive, those of every CTA
            whose part of it comes from here.
    """

    full: cute.Pointer
    empty: cute.Pointer


class Cluster(NamedTuple):
    """Where a CTA is in its cluster.

    Args:
        row, col, part: its coordinates; its rank is ``row + rows * (col + cols * part)``.
    """

    row: Int32
    col: Int32
    part: Int32 | int = 0


def allocate(smem: cutlass.memory.SmemAllocator, stages: int) -> Ring:
    """Room for the mbarriers."""
    return Ring(*(barrier.allocate_mbarriers(smem, stages) for _ in range(2)))


@cute.jit
def init(
    ring: Ring,
    stages: cutlass.Constexpr[int],
    sharers: cutlass.Constexpr[int],
    warps: cutlass.Constexpr[int],
    tid: Int32,
) -> None:
    """Initialise the mbarriers; the CTA, or the cluster, synchronises before their first use.

    Args:
        sharers: CTAs that read what this one loads, itself included.
        warps: of each of them that read a stage.
    """
    barrier.init_mbarriers(ring.full, stages, 1, tid)
    barrier.init_mbarriers(ring.empty, stages, sharers * warps, tid)


@cute.jit
def fill(
    ring: Ring,
    phase: Phase,
    a: tma.Tiles,
    b: tma.Tiles,
    at_a: tuple[Int32, ...],
    at_b: tuple[Int32, ...],
    num_bytes: cutlass.Constexpr[int],
) -> None:
    """Start loading a stage, once it is free.

    Threads: all lanes of one warp.

    Args:
        at_a, at_b: coordinates of the tiles.
        num_bytes: of both.
    """
    barrier.wait(ring.empty, phase)
    barrier.expect_bytes(ring.full, phase, Int32(num_bytes))
    mbar = ring.full + phase.stage
    tma.load_tile(a, at_a, phase.stage, mbar)
    tma.load_tile(b, at_b, phase.stage, mbar)


@cute.jit
def drain(ring: Ring, phase: Phase, stages: cutlass.Constexpr[int]) -> None:
    """Wait until all that this CTA has loaded is read, by its peers as well: then none of them signals
    it any more, and it may leave.

    Threads: all lanes of the warp that filled the stages.

    Args:
        phase: behind the last stage.
    """
    for _ in cutlass.range(stages, unroll=1):
        barrier.wait(ring.empty, phase)
        phase = barrier.next_phase(phase, stages)


@cute.jit
def fill_ahead(
    ring: Ring,
    early: tma.Tiles,
    late: tma.Tiles,
    at_early: tuple[Int32, Int32],
    at_late: tuple[Int32, Int32],
    first: Int32,
    count: Int32,
    num_bytes: cutlass.Constexpr[int],
) -> None:
    """Start loading the first stages: one operand at once, the other one when the kernel before this
    one has ended.

    Threads: all lanes of one warp.

    Args:
        early: of the operand that the kernel before does not write.
        at_early, at_late: row or column of the tile, and matrix.
        first: step along K.
        count: stages, at most as many as there are.

    Source: PTX ISA, griddepcontrol.wait.
    """
    for i in cutlass.range(count, unroll=1):
        stage = Int32(i)
        barrier.expect_bytes(ring.full, Phase(stage, Int32(0)), Int32(num_bytes))
        tma.load_tile(early, (at_early[0], first + i, at_early[1]), stage, ring.full + stage)
    cute.arch.griddepcontrol_wait()
    for i in cutlass.range(count, unroll=1):
        stage = Int32(i)
        tma.load_tile(late, (at_late[0], first + i, at_late[1]), stage, ring.full + stage)


@cute.jit
def multiply(
    mma: cute.TiledMma,
    sums: cute.Tensor,
    rA: cute.Tensor,
    rB: cute.Tensor,
    ring: Ring,
    phase: Phase,
    count: Int32,
    stages: cutlass.Constexpr[int],
    shape: cutlass.Constexpr[tuple[int, int]],
    at: Cluster,
    turn: Int32 | None = None,
) -> Phase:
    """Add the product of ``count`` stages to ``sums``; one stage is read while the next one begins.

    Threads: warpgroups that share a tile.

    Args:
        rA, rB: descriptors of the stages: (instruction, m or n, k, stages).
        shape: rows and columns of the cluster.
        turn: number of the named barrier of two warpgroups at which to say that the other one may
            begin, as soon as everything is issued; None: there is none.

    Returns:
        The phase behind the last stage.
    """
    before = phase
    for k in cutlass.range(count, unroll=1):
        barrier.wait(ring.full, phase)
        warpgroup.fence()
        for i in cutlass.range_constexpr(cute.size(rA, mode=[2])):
            at_k = (None, None, i, phase.stage)
            cute.gemm(mma, sums, rA[at_k], rB[at_k], sums)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if k > 0:
            release(ring, before, shape, at)
        before = phase
        phase = barrier.next_phase(phase, stages)
    if const_expr(turn is not None):
        barrier.arrive_numbered(Int32(turn), TWO_WARPGROUPS)
    warpgroup.wait_group(0)
    if count > 0:
        release(ring, before, shape, at)
    return phase


@cute.jit
def multiply_promoted(
    mma: cute.TiledMma,
    sums: cute.Tensor,
    parts: tuple[cute.Tensor, ...],
    rA: cute.Tensor,
    rB: cute.Tensor,
    ring: Ring,
    phase: Phase,
    count: Int32,
    stages: cutlass.Constexpr[int],
    shape: cutlass.Constexpr[tuple[int, int]],
    at: Cluster,
    turn: Int32 | None = None,
    factors: cutlass.Constexpr[Factors | None] = None,
    rota: Rota | None = None,
    at_once: cutlass.Constexpr[int] = 1,
) -> Phase:
    """``multiply``, with the sum of each stage added in full float32: the tensor cores of Hopper keep
    about 14 bits of sums of 8-bit products.

    While some sums are added, others keep the tensor cores busy: those of another part of the tile's
    columns, of the next stage, or of another warpgroup, where they take turns. Parts of columns are
    faster where sums are added as they are, turns where they are multiplied by factors. No instruction
    is under way from one turn to the next, or else the compiler makes all of them wait for one another.

    Args:
        sums: of all columns, part after part.
        parts: registers for a stage's sums, of a part of the columns each; and so on for each stage of
            a turn.
        rB: (instruction, parts of columns, k, stages).
        factors: what sums are multiplied by before they are added; None: nothing. Asked for a stage
            once that is full, and for each part while the tensor cores are busy with it.
        rota: of warpgroups that share the tile; None: they take no turns.
        at_once: stages of a turn; what is left over is multiplied one by one.
    """
    how = (ring, stages, shape, at, factors, rota)
    last = count % at_once
    for _ in cutlass.range(count // at_once, unroll=1):
        phase, mma = _turn(mma, sums, parts, rA, rB, phase, *how, at_once)
    if const_expr(at_once > 1):
        few = parts[: len(parts) // at_once]
        for _ in cutlass.range(last, unroll=1):
            phase, mma = _turn(mma, sums, few, rA, rB, phase, *how, 1)
    if const_expr(turn is not None):
        barrier.arrive_numbered(Int32(turn), TWO_WARPGROUPS)
    return phase


@cute.jit
def _turn(
    mma: cute.TiledMma,
    sums: cute.Tensor,
    parts: tuple[cute.Tensor, ...],
    rA: cute.Tensor,
    rB: cute.Tensor,
    phase: Phase,
    ring: Ring,
    stages: cutlass.Constexpr[int],
    shape: cutlass.Constexpr[tuple[int, int]],
    at: Cluster,
    factors: cutlass.Constexpr[Factors | None],
    rota: Rota | None,
    at_once: cutlass.Constexpr[int],
) -> tuple[Phase, cute.TiledMma]:
    """So many stages of `multiply_promoted`; returns the phase behind them, and the instruction."""
    size, columns = const_expr(cute.size(parts[0])), const_expr(len(parts) // at_once)
    phases = [phase]
    for _ in cutlass.range_constexpr(at_once - 1):
        phases.append(barrier.next_phase(phases[-1], stages))
    for s in cutlass.range_constexpr(at_once):
        barrier.wait(ring.full, phases[s])
        stage = phases[s].stage
        if const_expr(factors is not None):  # or else descriptors are moved one by one
            stage = cute.arch.make_warp_uniform(stage)
        if const_expr(rota is not None and s == 0):
            barrier.sync_numbered(rota.mine, TWO_WARPGROUPS)
        for c in cutlass.range_constexpr(columns):
            _multiply_part(mma, parts[s * columns + c], rA, rB, c, stage)
    if const_expr(rota is not None):
        barrier.arrive_numbered(rota.next, TWO_WARPGROUPS)
    of_stages = [factors(one.stage) for one in phases] if const_expr(factors is not None) else None
    for p in cutlass.range_constexpr(len(parts)):
        s, c = const_expr(p // columns), const_expr(p % columns)
        scales = of_stages[s](c) if const_expr(of_stages is not None) else [()] * size
        warpgroup.wait_group(len(parts) - 1 - p)
        if const_expr(c == columns - 1):
            release(ring, phases[s], shape, at)
        for i in cutlass.range_constexpr(size):
            total: Any = sums[c * size + i]
            sums[c * size + i] = total + math.prod(scales[i], start=parts[p][i])
    return barrier.next_phase(phases[-1], stages), mma


@cute.jit
def begin_turns(first: cutlass.Constexpr[int], group: Int32) -> Rota:
    """Two warpgroups take turns, the first one to begin with. Called once, before the first turn.

    Args:
        first: of two named barriers.
        group: 0 or 1.
    """
    rota = Rota(first + group, first + 1 - group)
    if group == 1:
        barrier.arrive_numbered(Int32(first), TWO_WARPGROUPS)
    return rota


@cute.jit
def end_turns(rota: Rota, is_mine: Boolean) -> None:
    """Take the turn that nobody needs any more. Called once, behind the last turn.

    Args:
        is_mine: whether it would be this warpgroup's.
    """
    if is_mine:
        barrier.sync_numbered(rota.mine, TWO_WARPGROUPS)


@cute.jit
def _multiply_part(
    mma: cute.TiledMma,
    part: cute.Tensor,
    rA: cute.Tensor,
    rB: cute.Tensor,
    which: cutlass.Constexpr[int],
    stage: Int32,
) -> None:
    """Start the product of a stage with a part of its columns."""
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, False)  # the first instruction overwrites
    for i in cutlass.range_constexpr(cute.size(rA, mode=[2])):
        b: Any = cute.append_ones(rB[None, which, i, stage], up_to_rank=2)  # type: ignore[arg-type]
        cute.gemm(mma, part, rA[None, None, i, stage], b, part)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def release(
    ring: Ring, phase: Phase, shape: cutlass.Constexpr[tuple[int, int]], at: Cluster
) -> None:
    """Tell all CTAs that load a part of a stage that this warp has read it.

    Threads: all lanes of one warp.
    """
    rows, cols = shape
    if const_expr(rows * cols == 1):
        barrier.arrive(ring.empty, phase)
    else:
        first = at.part * (rows * cols)
        for row in cutlass.range_constexpr(rows):
            barrier.arrive(ring.empty, phase, first + row + rows * at.col)
        for i in cutlass.range_constexpr(cols - 1):  # all columns but its own
            col = i + 1 if i >= at.col else Int32(i)
            barrier.arrive(ring.empty, phase, first + at.row + rows * col)


@cute.jit
def skip(phase: Phase, count: Int32, stages: cutlass.Constexpr[int]) -> Phase:
    """The phase ``count`` stages further on: those that another warpgroup reads."""
    place = phase.stage + count
    return Phase(place % stages, phase.parity ^ ((place // stages) & 1))
