"""The protocol of stages and turns, simulated: clusters that share loads, and ping-pong.

A model of ``gemm.sm90.ring`` and of the kernels that use it: which mbarriers are waited for and
arrived at, in which order. The scheduler lets any agent, or any copy under way, take the next step.
A copy of a part into a stage must find the stage read by all who read it before; a reader must find
what it expects, as long as it reads. Agents are generators that yield what they wait for, or None;
when nobody can go on, that is a deadlock.
"""

import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

PROBE = Path(__file__).parent / "device_probe"


class Mbarrier:
    """Completes a phase when its arrivals, and the parts that were announced, have come."""

    def __init__(self, arrivals):
        self.arrivals, self.pending, self.parts, self.phase = arrivals, arrivals, 0, 0

    def update(self, arrivals=0, parts=0):
        self.pending -= arrivals
        self.parts += parts
        assert self.pending >= 0, "an arrival of the next phase came in this one"
        if self.pending == 0 and self.parts == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals

    def passed(self, parity):
        """What try_wait.parity sees: not which phase is complete, only its parity."""
        return (self.phase - 1) % 2 == parity


class Simulation:
    """Clusters of (rows, cols) CTAs with ``stages`` stages; ``groups`` warpgroups multiply."""

    scaled = False

    def __init__(self, shape, stages, groups, pingpong, counts, seed):
        rows, cols = self.shape = shape
        self.stages, self.groups, self.pingpong, self.counts = stages, groups, pingpong, counts
        self.random = random.Random(seed)
        self.ctas = [(row, col) for row in range(rows) for col in range(cols)]
        readers = (rows + cols - 1) * (1 if pingpong else groups)  # a warp stands for a warpgroup
        self.full = {c: [Mbarrier(1) for _ in range(stages)] for c in self.ctas}
        self.empty = {c: [Mbarrier(readers) for _ in range(stages)] for c in self.ctas}
        self.stage = {c: [{} for _ in range(stages)] for c in self.ctas}  # part: contents
        self.reading = {c: [0] * stages for c in self.ctas}
        self.turn = {c: [0, 0] for c in self.ctas}  # arrivals at the two named barriers
        self.copies, self.read = [], 0
        self.working = dict.fromkeys(self.ctas, 1 + groups)  # agents

    def row(self, cta):
        return [c for c in self.ctas if c[0] == cta[0]]

    def column(self, cta):
        return [c for c in self.ctas if c[1] == cta[1]]

    def copied(self, cta):
        """What a CTA loads, and for whom."""
        return [("A", self.row(cta)), ("B", self.column(cta))]

    def load(self, cta):
        """The warp that loads its part of A for its row, and of B for its column."""
        stage, parity = 0, 1
        for tile, count in enumerate(self.counts):
            for k in range(count):
                yield partial(self.empty[cta][stage].passed, parity)
                parts = self.shape[0] + self.shape[1]  # of a whole A and a whole B
                self.full[cta][stage].update(arrivals=1, parts=parts)
                yield
                for name, receivers in self.copied(cta):
                    for receiver in receivers:
                        self.copies.append((receiver, stage, (name, cta), (tile, k)))
                    yield
                stage, parity = self.next(stage, parity)
        for _ in range(self.stages):  # the CTA may leave when all peers have read what it loaded
            yield partial(self.empty[cta][stage].passed, parity)
            stage, parity = self.next(stage, parity)

    def land(self, receiver, stage, part, contents):
        assert not self.reading[receiver][stage], "a stage is overwritten while it is read"
        self.stage[receiver][stage][part] = contents
        self.full[receiver][stage].update(parts=-1)

    def next(self, stage, parity):
        return (stage + 1, parity) if stage + 1 < self.stages else (0, parity ^ 1)

    def skip(self, stage, parity, count):
        place = stage + count
        return place % self.stages, parity ^ (place // self.stages & 1)

    def release(self, cta, stage):
        self.reading[cta][stage] -= 1
        for loader in {*self.row(cta), *self.column(cta)}:
            assert self.working[loader], "a CTA is told something that has left"
            self.empty[loader][stage].update(arrivals=1)
            yield

    def is_turn(self, cta, group):
        return self.turn[cta][group] > 0

    def multiply(self, cta, group):
        """A warpgroup: its tiles, with turns if the other one has the tiles between."""
        stage, parity, own = 0, 0, range(len(self.counts))
        if self.pingpong:
            own = own[group::2]
            if group == 1:
                stage, parity = self.skip(stage, parity, self.counts[0])
                self.turn[cta][0] += 1
        for tile in own:
            if self.pingpong:
                yield partial(self.is_turn, cta, group)
                self.turn[cta][group] -= 1
            before = None
            for k in range(self.counts[tile]):
                yield partial(self.full[cta][stage].passed, parity)
                self.reading[cta][stage] += 1
                yield
                parts = self.stage[cta][stage]
                assert len(parts) == sum(self.shape) + self.scaled
                assert set(parts.values()) == {(tile, k)}, "a stage holds another tile's part"
                self.read += 1
                if before is not None:
                    yield from self.release(cta, before)
                before = stage
                stage, parity = self.next(stage, parity)
            if before is not None:
                yield from self.release(cta, before)
            if self.pingpong:
                self.turn[cta][1 - group] += 1
                assert self.turn[cta][1 - group] == 1, "a named barrier counts two turns at once"
                stage, parity = self.skip(stage, parity, self.counts[tile])
            for _ in range(self.random.choice((0, 3, 30))):  # the epilogue
                yield
        if self.pingpong and group == len(self.counts) % 2:
            yield partial(self.is_turn, cta, group)
            self.turn[cta][group] -= 1

    def run(self):
        owners = {self.load(c): c for c in self.ctas}
        owners |= {self.multiply(c, g): c for c in self.ctas for g in range(self.groups)}
        agents = list(owners)
        speed = {agent: self.random.choice((1, 1, 5, 25)) for agent in agents}
        waiting = dict.fromkeys(agents)
        while waiting or self.copies:
            ready = [agent for agent, until in waiting.items() if until is None or until()]
            assert ready or self.copies, "deadlock"
            if self.copies and (not ready or self.random.random() < 0.3):
                self.land(*self.copies.pop(self.random.randrange(len(self.copies))))
                continue
            (agent,) = self.random.choices(ready, [speed[one] for one in ready])
            try:
                waiting[agent] = next(agent)
            except StopIteration:
                del waiting[agent]
                self.working[owners[agent]] -= 1
        assert all(turns == [0, 0] for turns in self.turn.values())
        assert self.read == sum(self.counts) * len(self.ctas) * (
            1 if self.pingpong else self.groups
        )


SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pingpong", [False, True])
@pytest.mark.parametrize("tiles, count", [(1, 1), (2, 5), (3, 3), (4, 1), (3, 0), (5, 7)])
def test_no_stage_is_overwritten_and_nobody_waits_for_ever(shape, pingpong, tiles, count):
    """More parts than stages, fewer, none; an odd and an even number of tiles."""
    for seed, stages in enumerate((2, 3, 4)):
        groups = 2 if pingpong else 1 + seed
        Simulation(shape, stages, groups, pingpong, [count] * tiles, seed).run()


class Scaled(Simulation):
    """With scales, copied by the threads of the loading warp for their own CTA: each arrives at the
    mbarrier of the stage when its copies are there."""

    scaled = True

    def __init__(self, *args):
        super().__init__(*args)
        self.full = {c: [Mbarrier(2) for _ in range(self.stages)] for c in self.ctas}

    def copied(self, cta):
        return [*super().copied(cta), ("scales", [cta])]

    def land(self, receiver, stage, part, contents):
        assert part[0] != "scales" or self.working[receiver], "a CTA leaves before its copies"
        super().land(receiver, stage, part, contents)
        if part[0] == "scales":  # no bytes that were announced
            self.full[receiver][stage].update(arrivals=1, parts=1)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("tiles, count", [(1, 1), (2, 5), (4, 1), (5, 7)])
def test_scales_come_with_their_stage(shape, tiles, count):
    for seed, stages in enumerate((2, 4, 6)):
        Scaled(shape, stages, 2, False, [count] * tiles, seed).run()


def test_the_model_notices_a_stage_that_is_released_too_early():
    class Early(Simulation):
        def release(self, cta, stage):
            self.reading[cta][stage] -= 1
            for loader in self.row(cta):  # those that load its B do not know
                self.empty[loader][stage].update(arrivals=1)
                yield

    with pytest.raises(AssertionError, match="deadlock"):
        Early((2, 1), 2, 1, False, [6], 0).run()


def test_the_model_notices_a_cta_that_leaves_too_early():
    class Early(Simulation):
        def load(self, cta):
            steps = super().load(cta)
            for _ in range(sum(self.counts) * 4):  # all but the waits at the end
                yield next(steps)

    with pytest.raises(AssertionError, match="that has left"):
        for seed in range(20):
            Early((2, 1), 4, 1, False, [6], seed).run()


def test_the_model_notices_a_missing_turn():
    class Hasty(Simulation):
        def multiply(self, cta, group):
            self.turn[cta] = [10**6, 10**6]
            return super().multiply(cta, group)

    with pytest.raises(AssertionError):
        for seed in range(20):
            Hasty((1, 1), 2, 2, True, [5] * 4, seed).run()


STEPS = [(stages, count) for stages in (2, 3, 4, 7) for count in (0, 1, 2, 3, 4, 5, 9, 100)]


@pytest.mark.exhaustive
def test_skip_is_as_many_steps_of_a_walk_over_the_ring():
    requests = [("skipped", f"{stages} {count}", [None] * 6) for stages, count in STEPS]
    result = subprocess.run(
        [sys.executable, "-m", "quack_device_probe.host"],
        input=json.dumps(requests),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(PROBE), *filter(None, sys.path)]),
            "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for (stages, count), found in zip(STEPS, json.loads(result.stdout), strict=True):
        steps = [i * count for i in range(6)]
        assert found == [[n % stages, n // stages % 2] for n in steps]
