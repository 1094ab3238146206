"""What the profiler prints, as records."""

import subprocess
from types import SimpleNamespace

import pytest
from benchmarks import profile, shapes
from benchmarks.record import Record

CASE = shapes.Case("softmax", "softmax_fwd", (8192, 32000), "bf16", ())
HEADER = f'"ID","Kernel Name","{profile.NUM_BYTES}","{profile.SHARE}","{profile.DURATION}"'
PRINTED = f"""==PROF== Connected to process 7
{HEADER}
"","","Gbyte","%","us"
"0","vectorized_elementwise_kernel","0.10","50.00","60.0"
"1","softmax_fwd_bf16_n32000_0","1.04","88.25","250.0"
==PROF== Disconnected
"""


def test_counters_are_scaled_by_their_units() -> None:
    other, ours = profile.counters(PRINTED)
    assert other.kernel == "vectorized_elementwise_kernel"
    assert ours == profile.Counters("softmax_fwd_bf16_n32000_0", 88.25, 1.04e9, 250.0)
    assert profile.counters("==PROF== nothing\n") == []
    with pytest.raises(ValueError, match="furlong"):
        profile.counters(PRINTED.replace('"us"', '"furlong"'))


def test_a_record_holds_our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUACK_ARCH", "sm90")
    monkeypatch.setattr(profile.shutil, "which", lambda name: name)
    commands = []

    def run(command: list[str], **how: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0, stdout=PRINTED, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    base = Record("", "", [], "", {}, "", gpu="X", commit="c")
    (one,) = profile.run(base, "softmax", [CASE], ["profile", "softmax", "8192x32000"])
    assert (one.suite, one.op, one.dram_pct, one.rate) == (
        "softmax_profile",
        "softmax_fwd",
        88.25,
        4.16,
    )
    assert (one.us, one.note, one.gpu) == ({"median": 250.0}, "softmax_fwd_bf16_n32000_0", "X")
    assert commands[0][0] == "ncu"
    assert commands[0][-4:] == ["profile", "softmax", "8192x32000", "--profiled"]
    longer = shapes.Case("softmax", "softmax_fwd", (8192, 50257), "bf16", ())
    with pytest.raises(RuntimeError, match="n50257"):
        profile.run(base, "softmax", [longer], [])


def test_without_a_profiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile.shutil, "which", lambda name: None)
    assert profile.run(Record("", "", [], "", {}, ""), "softmax", [CASE], []) == []
    assert "Nsight Compute" in capsys.readouterr().err
