"""A worker that crashes or hangs is started again without what caused it."""

import json
import sys
from pathlib import Path

import pytest
from benchmarks import marker, supervisor
from benchmarks.__main__ import excluded

# Runs cases 0..3; what it does is told by the first argument, what it saw goes to the second.
WORKER = """
import json, os, sys, time
behaviour, log, *args = sys.argv[1:]
options = [a.split("=", 1) for a in args]
path = next(v for k, v in options if k == "--worker")
first = int(next(v for k, v in options if k == "--first"))
skip = [v for k, v in options if k == "--exclude"]
with open(log, "a") as f:
    f.write(json.dumps({"first": first, "skip": skip}) + "\\n")
if behaviour == "usage":
    sys.exit(2)
for index in range(first, 4):
    if any(s.startswith(f"{index}:bad") for s in skip):
        continue
    with open(path, "w") as f:
        json.dump({"index": index, "variant": "bad", "compiling": behaviour == "compile"}, f)
    if index == 2 and behaviour == "hang":
        time.sleep(60)
    if index == 2 and behaviour != "fine":
        os._exit(139)
os.unlink(path)
"""


def run(behaviour: str, tmp_path: Path, timeout: float = 20.0) -> tuple[int, list[dict]]:
    log = tmp_path / "log"
    code = supervisor.supervise(
        [behaviour, str(log)], timeout, 0, command=(sys.executable, "-c", WORKER)
    )
    return code, [json.loads(line) for line in log.read_text().splitlines()]


def test_a_good_worker_runs_once(tmp_path: Path) -> None:
    assert run("fine", tmp_path) == (0, [{"first": 0, "skip": []}])


def test_a_crash_goes_on_at_its_case_without_the_variant(tmp_path: Path) -> None:
    code, seen = run("crash", tmp_path)
    assert code == 0
    assert seen == [{"first": 0, "skip": []}, {"first": 2, "skip": ["2:bad:crash"]}]


def test_a_hang_is_killed(tmp_path: Path) -> None:
    code, seen = run("hang", tmp_path, timeout=2.0)
    assert code == 0
    assert seen[-1] == {"first": 2, "skip": ["2:bad:hang"]}


def test_a_crash_while_compiling_ahead_starts_from_the_front(tmp_path: Path) -> None:
    _, seen = run("compile", tmp_path)
    assert seen[-1] == {"first": 0, "skip": ["2:bad:crash"]}


def test_a_worker_that_never_starts_is_not_repeated(tmp_path: Path) -> None:
    code, seen = run("usage", tmp_path)
    assert (code, len(seen)) == (2, 1)


def test_marker_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    one = marker.Marker(path)
    assert marker.read(path) is None
    one.set(3, "ours", compiling=True)
    assert marker.read(path) == marker.Trying(3, "ours", True)
    one.clear()
    assert marker.read(path) is None
    marker.Marker(None).set(1, "x")  # without a path nothing is written
    assert list(tmp_path.iterdir()) == []


def test_excluded_entries() -> None:
    assert excluded(["2:ours:hang", "3::crash", "4:a:b=1:crash"]) == {
        (2, "ours"): "hang",
        (3, ""): "crash",
        (4, "a:b=1"): "crash",
    }
    with pytest.raises(ValueError):
        excluded(["x:ours:hang"])
