"""Sweeps: the grid of a command line, the configurations it means, the table."""

import pytest
from benchmarks import ours, rmsnorm, shapes, tune
from benchmarks.record import Record

from quack_norm.ops.rmsnorm import config

CASE = shapes.Case("norm_fwd", "rmsnorm_fwd", (8, 4096), "bf16", (("w", "bf16"),))


def test_grid_is_every_combination() -> None:
    assert tune.grid(["a=1/2 b=True", "c=3"]) == [
        {"a": 1, "b": True},
        {"a": 2, "b": True},
        {"c": 3},
    ]


@pytest.mark.parametrize("line", ["a", "a=", "=1", "1a=2"])
def test_grid_names_what_it_cannot_read(line: str) -> None:
    with pytest.raises(ValueError, match="name=value"):
        tune.grid([line])


def test_tries_change_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUACK_ARCH", "sm90")
    default = ours.default_config(CASE)
    assert isinstance(default, config.FwdConfig)
    tries = tune.grid(["threads_per_row=32/64", "no_such_field=1"])
    found = ours.config_variants(CASE, tries)
    assert found[0].config == str(default)
    assert found[0].name.endswith("(default)")
    threads = {v.config.partition("threads_per_row=")[2].partition(",")[0] for v in found[1:]}
    assert threads == {"32", "64"} - {str(default.threads_per_row)}
    assert "no_such_field" in capsys.readouterr().out
    assert len(ours.config_variants(CASE, tries, limit=1)) == 1
    only = ours.config_variants(CASE, tries, wanted=("threads_per_row=32",))
    assert {v.config for v in only[1:]} <= {
        v.config for v in found if "threads_per_row=32" in v.config
    }


@pytest.mark.parametrize(
    ("shape", "dtype", "align"),
    [
        ((8, 4096), "bf16", 16),
        ((8, 4095), "bf16", 2),
        ((8, 1000), "bf16", 16),
        ((8, 33), "fp32", 4),
    ],
)
def test_spec_has_the_alignment_of_rows(shape: tuple[int, int], dtype: str, align: int) -> None:
    case = shapes.Case("norm_fwd", "rmsnorm_fwd", shape, dtype, (("w", "fp32"),))
    assert rmsnorm.spec_of(case).align == align


def test_table_is_sorted_and_keeps_failures() -> None:
    records = []
    for name, us in (("slow", 20.0), ("fast", 10.0), ("broken", None)):
        one = Record("norm_fwd", "rmsnorm_fwd", [8, 8], "bf16", {}, name, copy_us=9.0)
        if us is None:
            one.status, one.note = "wrong", "out is nan"
        else:
            one.us = {"median": us, "p10": us, "p90": us}
        records.append(one)
    lines = tune.text(records).splitlines()[2:]
    assert [line.split()[:2] for line in lines] == [
        ["fast", "10.00"],
        ["slow", "20.00"],
        ["broken", "wrong"],
    ]
    assert lines[0].split()[3] == "0.900"
