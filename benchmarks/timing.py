"""GPU time of calls: CUDA graphs over rotating buffers, variants interleaved."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Launch = Callable[[Any], Sequence[torch.Tensor]]
"""One call on one set of buffers; returns its outputs."""

COLD_BYTES = 240_000_000
"""Four times the L2 cache of an H200: what the rotation has to cover."""
MAX_SETS = 256
LONG_US = 200.0
"""From here on a call is timed without a graph: its launch is hidden anyway."""
REPLAY_US = 2000.0
"""A replay takes at least about this long, so that the resolution of events does not matter."""
MIN_LAUNCHES = 4
WARM_ROUNDS = 2
SPIN_CYCLES = 2_000_000
"""About 1 ms: time for the host to queue replays ahead of the GPU."""


@dataclass(frozen=True)
class Plan:
    """How a row is timed: `laps` times through `sets` sets of buffers per replay."""

    sets: int
    laps: int
    method: str

    @property
    def launches(self) -> int:
        return self.sets * self.laps


def plan(set_bytes: int, floor_us: float) -> Plan:
    """Choose by the bytes of a set, outputs included, and the least time of a call."""
    sets = min(MAX_SETS, max(2, math.ceil(COLD_BYTES / set_bytes)))
    laps = max(math.ceil(REPLAY_US / (sets * floor_us)), math.ceil(MIN_LAUNCHES / sets))
    return Plan(sets, laps, "events" if floor_us >= LONG_US else "graph-cold")


def rotated(names: Sequence[str], turn: int) -> Iterator[str]:
    """The names, starting one further each turn."""
    first = turn % len(names)
    yield from names[first:]
    yield from names[:first]


class Clock(Protocol):
    """Marks begin and end of work that is queued, and tells its time when all is done."""

    def settle(self) -> None: ...
    def start(self, name: str) -> None: ...
    def stop(self, name: str) -> None: ...
    def read(self) -> dict[str, list[float]]:
        """Microseconds by name, in the order of the marks."""
        ...


class CudaClock:
    """Events on the current stream."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._open: torch.cuda.Event | None = None

    def settle(self) -> None:
        """Keep the GPU busy for a moment, so that what follows is queued without gaps."""
        torch.cuda._sleep(SPIN_CYCLES)

    def start(self, name: str) -> None:
        self._open = torch.cuda.Event(enable_timing=True)
        self._open.record()

    def stop(self, name: str) -> None:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        if self._open is None:
            raise RuntimeError(f"stop({name!r}) without start")
        self._marks.append((name, self._open, end))
        self._open = None

    def read(self) -> dict[str, list[float]]:
        torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for name, start, end in self._marks:
            times.setdefault(name, []).append(start.elapsed_time(end) * 1e3)
        return times


def interleave(
    replays: Mapping[str, Callable[[], None]],
    rounds: int,
    clock: Clock,
    before_read: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Time every replay once per round, in an order that rotates.

    Args:
        replays: by name; each queues work and returns.
        rounds: samples of each.
        clock: measures them.
        before_read: called when all is queued and the GPU is still at work (to read its clocks).

    Returns:
        Microseconds of the replays, by name.
    """
    names = list(replays)
    for turn in range(-WARM_ROUNDS, rounds):
        for name in rotated(names, turn):
            clock.settle()  # for each: the replay before may have waited for the GPU
            if turn < 0:
                replays[name]()
                continue
            clock.start(name)
            replays[name]()
            clock.stop(name)
    before_read()
    return clock.read()


def replay(launch: Launch, sets: Sequence[Any], chosen: Plan) -> Callable[[], None]:
    """Warm up a launch and return what plays it through the rotation.

    Outputs that a call allocates are held until its set comes round again, so they rotate through
    as many buffers as those that are handed in.
    """
    held: list[Sequence[torch.Tensor]] = [()] * len(sets)

    def lap() -> None:
        for i, buffers in enumerate(sets):
            held[i] = launch(buffers)

    lap()
    torch.cuda.synchronize()
    if chosen.method == "events":
        return lambda: _repeat(lap, chosen.laps)
    held[:] = [()] * len(sets)
    graph = torch.cuda.CUDAGraph()
    # the outer context restores the stream should the capture fail
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        _repeat(lap, chosen.laps)
    held[:] = [()] * len(sets)
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def _repeat(lap: Callable[[], None], laps: int) -> None:
    for _ in range(laps):
        lap()
