"""Records survive a round trip; partial runs merge."""

import json
from pathlib import Path

import pytest
from benchmarks import record
from benchmarks.record import Record


def make(variant: str = "ours", n: int = 4096, us: float = 10.0, **more: object) -> Record:
    values = {"us": {"median": us, "p10": us, "p90": us}, **more}
    return Record("norm_fwd", "rmsnorm_fwd", [8, n], "bf16", {"w": "bf16"}, variant, **values)  # type: ignore[arg-type]


def test_round_trip() -> None:
    one = make(versions={"torch": "2"}, spread=0.01, verdict="win", note='a "quoted" note')
    assert Record.from_json(one.to_json()) == one


def test_the_documented_fields_are_there() -> None:
    wanted = """suite op shape dtype opts variant method status us rounds sets set_bytes min_bytes flop
        rate rate_unit floor_us copy_us best_peer verdict err err_peer config clock_mhz power_w gpu
        date commit note versions"""
    assert set(wanted.split()) <= set(json.loads(make().to_json()))


def test_unknown_fields_are_refused() -> None:
    line = make().to_json().replace('"suite"', '"sweet": 1, "suite"')
    with pytest.raises(ValueError, match="sweet"):
        Record.from_json(line)


def test_a_record_without_ok_has_no_time() -> None:
    assert make().median == 10.0
    assert make(status="wrong").median is None


def test_merge_replaces_by_key_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "h200" / "rmsnorm_fwd.jsonl"
    record.merge(path, [make(), make("eager"), make(n=8192)])
    record.merge(path, [make(us=5.0), make("liger")])
    found = record.read(path)
    assert [(r.variant, r.shape[1], r.us["median"]) for r in found] == [
        ("ours", 4096, 5.0),
        ("eager", 4096, 10.0),
        ("ours", 8192, 10.0),
        ("liger", 4096, 10.0),
    ]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_options_are_part_of_the_key() -> None:
    other = make()
    other.opts = {"w": "bf16", "residual": "bf16"}
    assert make().key != other.key
    assert make().row == make("eager").row


def test_merge_folder(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    record.merge(source / "h200" / "x.jsonl", [make()])
    record.merge(target / "h200" / "x.jsonl", [make("eager")])
    assert record.merge_folder(source, target) == 1
    assert {r.variant for r in record.read(target)} == {"ours", "eager"}


def test_missing_file_is_empty(tmp_path: Path) -> None:
    assert record.read(tmp_path / "none.jsonl") == []
