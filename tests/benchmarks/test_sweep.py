"""What a sweep over configurations looks at, and where its results go."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import gemm, shapes, sweep

from quack_gemm import heuristic
from quack_gemm.heuristic import Problem


def test_random_shapes_are_those_of_the_seed() -> None:
    found = sweep.random_shapes(2, 30)
    assert found == sweep.random_shapes(2, 40)[:30] != sweep.random_shapes(1, 30)
    assert found[:2] == [(10694, 13672, 624), (2, 9264, 6560)]
    for m, n, k in sweep.random_shapes(5, 500):
        assert 1 <= m <= 16384 and 512 <= n <= 16384 and 512 <= k <= 16384
        assert n % 8 == 0 and k % 8 == 0


def test_no_random_shape_is_in_a_suite() -> None:
    known = {case.shape for suite in shapes.SUITES for case in shapes.cases(suite)}
    assert not known & {*sweep.random_shapes(1, 30), *sweep.random_shapes(2, 30)}


def test_cases_are_those_of_linear_layers() -> None:
    assert [case.shape for case in sweep.cases_of("gemm_large", None)] == list(
        shapes.parse(shapes.GEMM_LARGE)
    )
    assert {case.opt("layout") for case in sweep.cases_of("gemm_large", None)} == {"nt"}
    drawn = sweep.cases_of("gemm_small", "random:7:4")
    assert [case.shape for case in drawn] == sweep.random_shapes(7, 4)


def test_hopeless_configurations_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = shapes.cases("gemm_small", "64x8192x8192")[0]
    spec = gemm.spec_of(case)
    question = Problem(64, 8192, 8192, 1, spec, 132)
    monkeypatch.setattr(gemm, "_question", lambda case: question)
    every = [*heuristic.candidates(spec), *heuristic.separate(question)]
    cycles = {c: heuristic.cycles(question, c) for c in every}
    kept = sweep._promising(case)
    assert min(cycles, key=lambda c: cycles[c]) in kept and 1 < len(kept) < len(cycles)
    least = min(cycles.values())
    assert set(kept) == {c for c, each in cycles.items() if each <= sweep.HOPELESS * least}


def test_results_replace_older_ones_of_their_row(tmp_path: Path) -> None:
    path = tmp_path / "h200" / "gemm_sweep.json"
    row = {"suite": "gemm_small", "shape": [1, 2, 3], "dtype": "bf16", "opts": {}}
    other = {**row, "shape": [3, 2, 1]}
    for one in ({**row, "ratio": 2.0}, {**other, "ratio": 3.0}, {**row, "ratio": 1.0}):
        sweep._merge(path, one)
    assert json.loads(path.read_text()) == [{**other, "ratio": 3.0}, {**row, "ratio": 1.0}]


def test_the_text_has_the_mean_and_the_worst() -> None:
    cases = shapes.cases("gemm_small", "64x8192x8192 16x8192x8192")
    found = [
        {"default_us": 8.0, "best_us": 4.0, "ratio": 2.0, "default": "a=1", "best": "a=2"},
        {"default_us": 8.0, "best_us": 8.0, "ratio": 1.0, "default": "a=1", "best": "a=1"},
    ]
    assert sweep.text(found, cases).endswith("geometric mean 1.4142, worst 2.000")
