"""The plan of a row and the order of its samples, with a clock that only counts."""

from benchmarks import timing


class FakeClock:
    """Time advances by what each replay adds."""

    def __init__(self) -> None:
        self.now, self.began = 0.0, 0.0
        self.marks: list[tuple[str, float]] = []
        self.settled = 0

    def settle(self) -> None:
        self.settled += 1
        self.now += 1000

    def start(self, name: str) -> None:
        self.began = self.now

    def stop(self, name: str) -> None:
        self.marks.append((name, self.now - self.began))

    def read(self) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {}
        for name, time in self.marks:
            times.setdefault(name, []).append(time)
        return times


def test_interleave_gives_each_variant_its_own_time_and_turn() -> None:
    clock = FakeClock()

    def adds(us: float):  # type: ignore[no-untyped-def]
        def replay() -> None:
            clock.now += us

        return replay

    reads: list[int] = []
    replays = {"a": adds(1), "b": adds(2), "c": adds(3)}
    times = timing.interleave(replays, 4, clock, lambda: reads.append(len(clock.marks)))
    assert times == {"a": [1.0] * 4, "b": [2.0] * 4, "c": [3.0] * 4}
    order = [name for name, _ in clock.marks]
    assert order == [*"abc", *"bca", *"cab", *"abc"]
    assert clock.settled == 3 * (4 + timing.WARM_ROUNDS)  # nobody starts on an idle GPU
    assert reads == [12]  # once, when all is queued


def test_plan_covers_the_cache_and_the_resolution() -> None:
    small = timing.plan(set_bytes=49_152, floor_us=2.2)
    assert (small.sets, small.laps, small.method) == (256, 4, "graph-cold")
    assert small.launches * 2.2 >= timing.REPLAY_US
    middle = timing.plan(set_bytes=16_785_408, floor_us=6.1)
    assert middle.sets * 16_785_408 >= timing.COLD_BYTES
    assert middle.launches * 6.1 >= timing.REPLAY_US
    assert middle.launches % middle.sets == 0
    large = timing.plan(set_bytes=1 << 30, floor_us=253.0)
    assert (large.method, large.sets) == ("events", 2)
    assert large.launches >= timing.MIN_LAUNCHES and large.launches * 253.0 >= timing.REPLAY_US


def test_allocated_outputs_are_held_for_a_lap(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A call that allocates must not write over the same memory again and again."""
    import torch

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    results: list[torch.Tensor] = []

    def launch(buffers: int) -> list[torch.Tensor]:
        results.append(torch.full((4,), buffers))
        return results[-1:]

    replay = timing.replay(launch, [10, 11, 12], timing.Plan(3, 2, "events"))
    assert [int(r[0]) for r in results] == [10, 11, 12]
    replay()
    assert [int(r[0]) for r in results] == [10, 11, 12] * 3
