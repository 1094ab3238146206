"""A suite from end to end without a GPU: problems on the CPU, replays that take a set time."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from benchmarks import copies, device, norm, record, runner, shapes, timing
from benchmarks.timing import Launch
from benchmarks.variant import Variant

CASES = [shapes.Case("norm_fwd", "rmsnorm_fwd", (6, n), "bf16", (("w", "bf16"),)) for n in (32, 40)]
US = {"ours": 10.0, "fast": 11.0, "slow": 30.0, "copy-torch": 9.5, "copy-slow": 20.0}


def right(b: norm.FwdBuffers) -> Sequence[torch.Tensor]:
    b.out.copy_(norm.rms_norm(b.x.float(), b.w.float())[0])
    return (b.out,)


def wrong(b: norm.FwdBuffers) -> Sequence[torch.Tensor]:
    b.out.zero_()
    return (b.out,)


def named(name: str, launch: Launch) -> Callable[[shapes.Case], Launch]:
    """A preparation whose launch the fake timer recognises."""

    def call(b: norm.FwdBuffers) -> Sequence[torch.Tensor]:
        return launch(b)

    call.name = name  # type: ignore[attr-defined]
    return lambda case: call


def refuse(case: shapes.Case) -> Launch:
    raise NotImplementedError(f"no {case.shape[1]}")


def variants(case: shapes.Case) -> list[Variant]:
    return [
        Variant("ours", named("ours", right), "quack-norm", role="ours", config="a config"),
        Variant("fast", named("fast", right), "torch", note="allocates"),
        Variant("slow", named("slow", right), "torch"),
        Variant("liar", named("liar", wrong), "torch"),
        Variant("picky", refuse, "torch"),
    ]


class SteppedClock:
    """Every launch of a replay takes the time in US."""

    def __init__(self, launches: int) -> None:
        self.times: dict[str, list[float]] = {}
        self.launches = launches

    def settle(self) -> None: ...

    def start(self, name: str) -> None: ...

    def stop(self, name: str) -> None:
        us = US[name.removesuffix(" again")]
        self.times.setdefault(name, []).append(us * self.launches)

    def read(self) -> dict[str, list[float]]:
        return self.times


def named_copy(name: str) -> Callable[[], copies.CopyLaunch]:
    def make() -> copies.CopyLaunch:
        if name == "copy-broken":
            raise RuntimeError("ptxas")
        return copies._torch

    return make


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[record.Record]]:
    """Runs the cases with options; returns the records."""
    names = ("copy-torch", "copy-slow", "copy-broken")
    plan = timing.Plan(2, 3, "graph-cold")
    make_copy = copies.make
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(device, "try_out", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(device, "gpu_name", lambda: "Test GPU")
    monkeypatch.setattr(device, "clock_and_power", lambda: (1980, 600.0))
    monkeypatch.setattr(timing, "plan", lambda set_bytes, floor: plan)
    monkeypatch.setattr(timing, "replay", lambda launch, sets, chosen: lambda: None)
    monkeypatch.setattr(timing, "CudaClock", lambda: SteppedClock(plan.launches))
    monkeypatch.setattr(copies, "make", lambda total, inputs: make_copy(total, inputs, "cpu"))
    monkeypatch.setattr(copies, "launches", lambda i: {name: named_copy(name) for name in names})

    def go(**options: object) -> list[record.Record]:
        chosen = runner.Options(out=tmp_path, rounds=5, commit="abc", **options)  # type: ignore[arg-type]
        one = runner.Runner(chosen, lambda case: norm.NormFwd(case, "cpu"), variants)
        one.run("norm_fwd", CASES)
        return record.read(tmp_path / "test-gpu" / "rmsnorm_fwd.jsonl")

    return go


def by_name(records: Sequence[record.Record], n: int) -> dict[str, record.Record]:
    return {one.variant: one for one in records if one.shape[1] == n}


def test_every_variant_is_a_record(run: Callable[..., list[record.Record]]) -> None:
    found = by_name(run(), 40)
    assert {name: one.status for name, one in found.items()} == {
        "ours": "ok",
        "fast": "ok",
        "slow": "ok",
        "liar": "wrong",
        "picky": "unsupported",
    }
    ours = found["ours"]
    assert ours.us == {"median": 10.0, "p10": 10.0, "p90": 10.0}
    assert (ours.best_peer, ours.verdict, ours.spread) == ("fast", "win", 0.0)
    assert (ours.copy_us, ours.copy_kernel) == (9.5, "copy-torch")  # the fastest of those that work
    assert (ours.sets, ours.launches, ours.rounds, ours.method) == (2, 6, 5, "graph-cold")
    assert (ours.clock_mhz, ours.power_w, ours.gpu, ours.commit) == (1980, 600.0, "Test GPU", "abc")
    assert ours.min_bytes == 2 * 6 * 40 * 2 + 80
    assert 0 < ours.err <= 1
    assert ours.config == "a config"
    assert found["liar"].us == {}
    assert found["picky"].note == "NotImplementedError: no 40"
    assert found["fast"].note == "allocates"


def test_a_failed_row_of_ours_is_a_loss(
    run: Callable[..., list[record.Record]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = named("ours", wrong)
    ours = dataclasses.replace(variants(CASES[0])[0], prepare=prepared)
    monkeypatch.setitem(globals(), "variants", lambda case: [ours, *ALL[1:]])
    found = by_name(run(), 40)
    assert (found["ours"].status, found["ours"].verdict) == ("wrong", "loss")


ALL = variants(CASES[0])


def test_noise_makes_a_row_void(
    run: Callable[..., list[record.Record]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: SteppedClock, name: str) -> None:
        us = US[name.removesuffix(" again")] * (1.1 if name.endswith(" again") else 1)
        self.times.setdefault(name, []).append(us * self.launches)

    monkeypatch.setattr(SteppedClock, "stop", stop)
    ours = by_name(run(), 40)["ours"]
    assert ours.verdict == "void"
    assert ours.spread == pytest.approx(1 / 10.5, abs=1e-4)


def test_what_crashed_before_is_left_out(run: Callable[..., list[record.Record]]) -> None:
    records = run(first=1, exclude={(1, "ours"): "hang"})
    assert {one.shape[1] for one in records} == {40}
    found = by_name(records, 40)
    assert (found["ours"].status, found["ours"].verdict) == ("hang", "loss")
    assert found["fast"].median == 11.0


def test_a_case_whose_timing_crashed_still_has_records(
    run: Callable[..., list[record.Record]],
) -> None:
    found = by_name(run(exclude={(0, ""): "crash"}), 32)
    assert {one.status for one in found.values()} == {"crash"}
    assert len(found) == 5


def test_only_some_variants(run: Callable[..., list[record.Record]]) -> None:
    records = run(only=("ours",))
    assert {one.variant for one in records} == {"ours"}
    assert {one.verdict for one in records} == {""}  # nothing to compare with


def test_a_spent_budget_stops_before_the_next_case(
    run: Callable[..., list[record.Record]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(budget_s=1.0) == []
    assert "budget used up: stopped before 6x32" in capsys.readouterr().out


def test_the_table_at_the_end(
    run: Callable[..., list[record.Record]], capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == [
        *("6x40", "bf16", "w=bf16"),
        *("ours", "10.00", "9.50", "0.950", "fast", "11.00", "win"),
    ]


def test_a_lost_context_ends_the_process(
    run: Callable[..., list[record.Record]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(device, "try_out", lost)
    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code == runner.STICKY
