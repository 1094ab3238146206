"""Tables and plots come from records alone; comparisons find what became slower."""

from pathlib import Path

import pytest
from benchmarks import __main__ as command
from benchmarks import compare, measured, quoted, record, report
from benchmarks.record import Record

VERSIONS = {"torch": "2.11", "dsl": "4.8.1", "driver": "580", "peer": "quack-norm 0.1"}


def make(variant: str, n: int, us: float | None, **more: object) -> Record:
    one = Record("norm_fwd", "rmsnorm_fwd", [8192, n], "bf16", {"w": "bf16"}, variant)
    one.gpu, one.date, one.versions = "H200", "2026-11-30", dict(VERSIONS)
    one.copy_us, one.min_bytes = 33.0, 8192 * n * 4
    if us is None:
        one.status = "unsupported"
    else:
        one.us = {"median": us, "p10": us, "p90": us}
        one.rate = round(one.min_bytes / us * 1e-6, 3)
    for name, value in more.items():
        setattr(one, name, value)
    return one


@pytest.fixture
def records() -> list[Record]:
    return [
        make("ours", 4096, 30.0, best_peer="compile", verdict="win"),
        make("compile", 4096, 36.0),
        make("liger", 4096, None, note="RuntimeError: too | wide"),
        make("ours", 8192, 80.0, best_peer="compile", verdict="loss"),
        make("compile", 8192, 60.0),
    ]


def test_headline_has_the_mean_and_the_worst_row(records: list[Record]) -> None:
    text = report.headline(measured.grouped(records, "norm_fwd"))
    # sqrt(36/30 * 60/80) = 0.949
    assert text == (
        "1 win, 1 loss of 2 rows; geometric mean 0.95x the strongest peer of each row; "
        "worst row 8192x8192 bf16 weight bf16 at 0.75x."
    )


def test_full_table_shows_every_row_losses_included(records: list[Record]) -> None:
    lines = report.full_table(measured.grouped(records, "norm_fwd")).splitlines()
    assert len(lines) == 4
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[0] == "8192x4096 bf16 weight bf16"
    assert cells[1:5] == ["30.0", "4.47", "33.0", "1.100"]
    assert cells[5:] == ["", "36.0", "unsupported", "", "win"]
    assert lines[3].rstrip(" |").endswith("loss")


def test_products_are_told_by_their_arithmetic() -> None:
    ours = Record("gemm_large", "gemm_fwd", [8, 16, 32], "bf16", {"layout": "nt"}, "ours")
    ours.us, ours.rate, ours.rate_unit = {"median": 4.0}, 812.4, "TFLOP/s"
    ours.best_peer, ours.verdict, ours.copy_us = "cublas", "win", 1.0
    peer = Record("gemm_large", "gemm_fwd", [8, 16, 32], "bf16", {"layout": "nt"}, "cublas")
    peer.us = {"median": 5.0}
    found = measured.grouped([ours, peer], "gemm_large")
    assert measured.peers_of(found) == {"cublas": "cuBLAS"}
    full, short = (table(found).splitlines() for table in (report.full_table, report.short_table))
    assert full[0] == "| M x N x K | ours us | TFLOP/s | cuBLAS | verdict |"
    assert full[2] == "| 8x16x32 bf16 layout nt | 4.0 | 812 | 5.0 | win |"
    assert short[0] == "| M x N x K | ours us | TFLOP/s | strongest peer us | verdict |"
    assert short[2] == "| 8x16x32 | 4.0 | 812 | 5.0 (cuBLAS) | win |"


def test_docs_name_the_reason_of_a_failure(records: list[Record]) -> None:
    text = report.docs_block(records)
    assert "* Liger, unsupported (8192x4096): RuntimeError: too \\| wide" in text
    assert "measured on H200, 2026-11-30, torch 2.11, DSL 4.8.1, driver 580" in text


def test_generate_replaces_what_stands_between_the_markers(
    records: list[Record], tmp_path: Path
) -> None:
    results = tmp_path / "results"
    record.merge(results / "h200" / "rmsnorm_fwd.jsonl", records)
    (tmp_path / "docs").mkdir()
    frame = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    paths = [tmp_path / "README.md", tmp_path / "docs" / "performance.md"]
    for path in paths:
        path.write_text(frame)
    assert report.generate(results, tmp_path, check=True) == paths
    assert paths[0].read_text() == frame  # a check writes nothing
    assert report.generate(results, tmp_path) == paths
    text = paths[0].read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n**RMSNorm forward**")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    assert "| 8192x4096 | 30.0 | 33.0 | 36.0 (torch.compile) | win |" in text
    assert report.generate(results, tmp_path) == []
    assert report.generate(results, tmp_path, check=True) == []
    drawn = sorted(path.name for path in (tmp_path / "docs" / "plots").iterdir())
    assert drawn == ["norm_fwd_rate.svg", "norm_fwd_speedup.svg"]
    assert "plots/norm_fwd_rate.svg" in paths[1].read_text()


def test_plots_are_reproducible(records: list[Record], tmp_path: Path) -> None:
    from benchmarks import plots

    files = []
    for name in ("a", "b"):
        plots.draw(records, tmp_path / name)
        files.append((tmp_path / name / "norm_fwd_rate.svg").read_bytes())
    assert files[0] == files[1]
    assert b"<svg" in files[0]


def test_without_results_the_markers_stay_empty() -> None:
    frame = f"a\n{report.BEGIN}\n{report.END}\nb\n"
    assert report.replace_block(frame, report.readme_block([])) == frame
    assert report.replace_block(frame, report.docs_block([])) == frame


def test_missing_markers_are_named() -> None:
    with pytest.raises(ValueError, match="benchmarks:begin"):
        report.replace_block("no markers", "x")


@pytest.mark.parametrize(
    ("old", "new", "spread", "word", "regressed"),
    [
        (10.0, 10.1, 0.0, "same", False),
        (10.0, 10.3, 0.0, "slower", True),
        (10.0, 10.3, 0.018, "same", False),
        (10.0, 9.0, 0.0, "faster", False),
        (10.0, 20.0, 0.03, "void", False),
        (10.0, None, 0.0, "ok -> unsupported", True),
        (None, 10.0, 0.0, "unsupported -> ok", False),
    ],
)
def test_compare(
    old: float | None, new: float | None, spread: float, word: str, regressed: bool
) -> None:
    before, after = make("ours", 4096, old), make("ours", 4096, new, spread=spread)
    (change,) = compare.changes([before, make("eager", 4096, 5.0)], [after])
    assert (change.word, change.regressed) == (word, regressed)
    assert word in compare.text([change])


def test_compare_on_the_command_line_fails_on_a_regression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    record.merge(old, [make("ours", 4096, 10.0)])
    record.merge(new, [make("ours", 4096, 12.0)])
    assert command.main(["compare", str(old), str(old)]) == 0
    assert command.main(["compare", str(old), str(new)]) == 1
    assert "1.200" in capsys.readouterr().out


def test_dry_run_and_list_need_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["norm_bwd", "--list", "--smoke"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert command.main(["norm_fwd", "--dry-run", "--shapes", "8192x4096", "--opts", "w=bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "8192x4096 bf16 w=bf16",
        "8192x4096 bf16 w=bf16 residual=bf16",
    ]


def of(suite: str, variant: str, us: float | None, **opts: str) -> Record:
    one = make(variant, 32000, us)
    one.suite, one.op, one.opts = suite, suite, opts
    return one


def test_plain_rows_and_the_peers_that_a_suite_has() -> None:
    kinds = [{}, {"w": "bf16"}, {"grad": "1"}, {"w": "fp32"}, {"grad": "0.375"}]
    kinds.append({"w": "bf16", "residual": "bf16"})
    plain = [measured.is_plain(of("ce", "ours", 1.0, **opts)) for opts in kinds]
    assert plain == [True, True, True, False, False, False]
    rows = measured.grouped([of("ce", "ours", 1.0), of("ce", "liger-cute", 2.0)], "ce")
    assert list(measured.peers_of(rows)) == [*measured.PEERS, "liger-cute"]
    text = report.full_table(rows)
    assert "| Liger CuTe |" in text and "| 2.0 | " in text
    assert "Liger CuTe" not in report.full_table(
        measured.grouped([make("ours", 8, 1.0)], "norm_fwd")
    )


def test_short_tables_have_operators_without_a_weight_too() -> None:
    rows = measured.grouped([of("softmax", "ours", 30.0), of("softmax", "eager", 60.0)], "softmax")
    rows[0]["ours"].best_peer = "eager"
    assert report.short_table(rows).splitlines()[2:] == [
        "| 8192x32000 | 30.0 | 33.0 | 60.0 (torch) |  |"
    ]


def test_plots_stand_with_their_own_suite() -> None:
    found = [of("softmax", "ours", 30.0), of("softmax_bwd", "ours", 30.0)]
    names = [f"plots/{suite}_rate.svg" for suite in ("softmax", "softmax_bwd")]
    assert report.docs_block(found, names).count("![") == 2


def test_quoted_figures_stand_beside_ours_or_say_that_ours_are_missing() -> None:
    found = [
        *(of("ce", "ours", 100.0), of("ce", "eager", 400.0), of("ce", "compile", 200.0)),
        *(make("ours", 4096, 30.0), make("eager", 4096, 45.0)),
        *(make("ours", 8192, 10.0, verdict="void"), make("eager", 8192, 900.0)),
    ]
    cells = [line.strip("| ").split(" | ") for line in quoted.table(found).splitlines()[2:]]
    ours = {what: (theirs, measured) for what, theirs, measured in cells}
    assert ours["Cross-entropy against torch"][0] == "1.8x"
    assert ours["Cross-entropy against torch"][1] == (
        "up to 4.0x torch (at 8192x32000), mean 4.0x of 1 row; "
        "up to 2.0x torch.compile (at 8192x32000), mean 2.0x of 1 row"
    )
    assert ours["RMSNorm forward against torch"][1].startswith("up to 1.5x torch (at 8192x4096)")
    assert ours["Memory at 1024 rows"] == ("35 % less", "not measured")
    assert ours["Softmax against torch"] == ("2.3x", "not measured")
    assert ours["Share of the bandwidth, in a profiler"] == ("89.7 %", "not measured")
    seen = [
        make("ours", n, 10.0, suite="norm_fwd_profile", dram_pct=share, rate=4.0)
        for n, share in ((4096, 90.25), (8192, 91.5))
    ]
    assert "91.5 % (at 8192x8192)" in quoted.table(seen)
    assert report.profile_table(seen).splitlines()[-1] == (
        "| rmsnorm_fwd | 8192x8192 w=bf16 | 10.0 | 4.00 | 91.5 |"
    )
    assert "## In a profiler" in report.docs_block([*found, *seen])
    assert report.profile_table(found) == ""
