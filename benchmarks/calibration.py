"""What the machine can do in this run: copies, a read-only sum, empty kernels, cuBLAS."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import copies, device, judge, record, timing
from .progress import Progress
from .timing import Plan
from .variant import Failure, attempt

COPY_BYTES = tuple(1 << shift for shift in (22, 23, 24, 25, 26, 27, 28, 29, 30, 31))
SUM_BYTES = 1 << 31
EMPTY = Plan(sets=1, laps=256, method="graph-hot")
GEMM = Plan(sets=1, laps=4, method="events")
GEMM_SIZE = 8192


@dataclass(frozen=True)
class Item:
    """Something to time by itself or beside others of the same op and shape."""

    op: str
    shape: tuple[int, ...]
    variant: str
    plan: Plan
    make_sets: Callable[[], Sequence[Any]]
    make_launch: Callable[[], Callable[[Any], Sequence[Tensor]]]
    dtype: str
    read_bytes: int = 0
    write_bytes: int = 0
    flop: int = 0
    package: str = ""


def copy_items() -> Iterator[Item]:
    """Copies and two-to-one kernels that move 4 MB to 2 GB in all."""
    for inputs, op in ((1, "copy"), (2, "xor")):
        for total in COPY_BYTES:
            read, write = total * inputs // (inputs + 1), total // (inputs + 1)
            chosen = timing.plan(total, judge.floor_us(read, write))

            def sets(total: int = total, inputs: int = inputs, n: int = chosen.sets) -> list[Any]:
                return [copies.make(total, inputs) for _ in range(n)]

            for name, make in copies.launches(inputs).items():
                yield Item(op, (total,), name, chosen, sets, make, "int32", read, write)


def other_items() -> Iterator[Item]:
    """Read-only sum, empty kernels, matrix products."""
    chosen = Plan(1, 4, "events")
    words = SUM_BYTES // 4
    yield Item(
        "sum",
        (SUM_BYTES,),
        "torch",
        chosen,
        lambda: [torch.randn(words, device="cuda")],
        lambda: lambda x: (x.sum(),),
        "fp32",
        SUM_BYTES,
        4,
        package="torch",
    )
    for dependent in (False, True):
        name = "dependent" if dependent else "plain"
        yield Item("empty", (1,), name, EMPTY, _one_word, _empty(dependent), "int32")
    flop = 2 * GEMM_SIZE**3
    shape = (GEMM_SIZE,) * 3
    yield Item(
        "gemm", shape, "cublas", GEMM, _bf16, lambda: _mm, "bf16", flop=flop, package="torch"
    )
    yield Item(
        "gemm", shape, "cublas", GEMM, _fp8, lambda: _scaled_mm, "fp8", flop=flop, package="torch"
    )


def _one_word() -> list[Tensor]:
    return [torch.zeros(4, dtype=torch.int32, device="cuda")]


def _empty(dependent: bool) -> Callable[[], Callable[[Tensor], tuple[Tensor, ...]]]:
    def make() -> Callable[[Tensor], tuple[Tensor, ...]]:
        from .copy_kernel import compile_empty

        run = compile_empty(dependent)

        def launch(out: Tensor) -> tuple[Tensor, ...]:
            run(out)
            return (out,)

        return launch

    return make


def _bf16() -> list[tuple[Tensor, Tensor]]:
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda").bfloat16() for _ in "ab")
    return [(a, b.t())]


def _fp8() -> list[tuple[Tensor, Tensor]]:
    (a, b), *_ = _bf16()
    scale = 448 / 6  # six deviations use the range of e4m3
    return [tuple((t * scale).clamp(-448, 448).to(torch.float8_e4m3fn) for t in (a, b))]  # type: ignore[list-item]


def _mm(ab: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return (torch.mm(*ab),)


def _scaled_mm(ab: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    one = _ONES.setdefault(ab[0].device, torch.ones((), device=ab[0].device))
    return (torch._scaled_mm(*ab, scale_a=one, scale_b=one, out_dtype=torch.bfloat16),)


_ONES: dict[torch.device, Tensor] = {}


def run(base: record.Record, rounds: int, smoke: bool = False) -> list[record.Record]:
    """Time everything; items of the same op and shape are interleaved.

    Args:
        base: a record with what all share (GPU, date, commit).
        rounds: samples of each.
        smoke: three sizes and no matrix products.
    """
    items = [*copy_items(), *other_items()]
    if smoke:
        kept = COPY_BYTES[::4]
        items = [i for i in items if i.op != "gemm" and (len(i.shape) > 1 or i.shape[0] in kept)]
    groups: dict[tuple[Any, ...], list[Item]] = {}
    for item in items:
        groups.setdefault((item.op, item.shape, item.dtype), []).append(item)
    records = []
    with torch.no_grad(), Progress("calibration", len(groups)) as progress:
        for group in groups.values():
            found = _group(base, group, rounds)
            records += found
            parts = [f"{r.variant} {r.median or 0:.2f} us {r.rate} {r.rate_unit}" for r in found]
            progress.step(f"{group[0].op} {group[0].shape} {group[0].dtype}: {', '.join(parts)}")
            torch.cuda.empty_cache()
    return records


def _group(base: record.Record, group: Sequence[Item], rounds: int) -> list[record.Record]:
    chosen = group[0].plan
    found = {item.variant: _blank(base, item) for item in group}
    replays = {}
    sets = attempt(group[0].make_sets)
    if isinstance(sets, Failure):
        return [replace(one, status=sets.status, note=sets.note) for one in found.values()]
    for item in group:
        made = attempt(lambda i=item: timing.replay(i.make_launch(), sets, chosen))  # type: ignore[misc]
        if isinstance(made, Failure):
            found[item.variant].status, found[item.variant].note = made.status, made.note
        else:
            replays[item.variant] = made
    clocks = [(0, 0.0)]
    times: dict[str, list[float]] = {}
    if replays:
        read_clocks = lambda: clocks.append(device.clock_and_power())
        times = timing.interleave(replays, rounds, timing.CudaClock(), read_clocks)
    for item in group:
        if item.variant in times:
            _fill(found[item.variant], item, times[item.variant], clocks[-1])
    return list(found.values())


def _blank(base: record.Record, item: Item) -> record.Record:
    total = item.read_bytes + item.write_bytes
    return replace(
        base,
        suite="calibration",
        op=item.op,
        shape=list(item.shape),
        dtype=item.dtype,
        opts={},
        variant=item.variant,
        method=item.plan.method,
        sets=item.plan.sets,
        launches=item.plan.launches,
        min_bytes=total,
        set_bytes=total,
        flop=item.flop,
        floor_us=round(judge.floor_us(item.read_bytes, item.write_bytes), 2),
        versions=device.versions(item.package),
    )


def _fill(
    one: record.Record, item: Item, times: Sequence[float], clocks: tuple[int, float]
) -> None:
    found = judge.summarise([t / item.plan.launches for t in times])
    one.us = found.rounded()
    one.spread, one.rounds = round(found.spread, 4), len(times)
    one.clock_mhz, one.power_w = clocks
    if item.flop:
        one.rate, one.rate_unit = round(item.flop / found.median * 1e-6, 1), "TFLOP/s"
    else:
        one.rate = round(one.min_bytes / found.median * 1e-6, 3)
