"""The staircase of reductions: what each step compiles to, and what it computes."""

import dataclasses
import functools
import importlib
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from quack_core import arch as arches
from quack_core.testing import cubin, ptx
from quack_core.testing.compare import assert_bitwise

FOLDER = Path(__file__).parents[3] / "examples" / "reductions"
sys.path.insert(0, str(FOLDER))  # where a script finds what lies beside it
staircase = importlib.import_module("staircase")

LEVELS = ("thread", "warp", "cta", "cluster", "grid")
STEPS = {level: importlib.import_module(level).STEP for level in LEVELS}
RAGGED = {"thread": 36, "warp": 1000, "cta": 5000, "cluster": 20000, "grid": 1000}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

sass = functools.cache(cubin.sass)


@functools.cache
def compiled(level, target, n):
    return staircase.compiled(STEPS[level], n, arches.get(target))


@pytest.fixture(autouse=True)
def disassembled_once(monkeypatch):
    """That is what takes the time here."""
    monkeypatch.setattr(cubin, "sass", sass)


@pytest.fixture(params=staircase.TARGETS)
def target(request):
    return request.param


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


def test_each_file_is_short():
    lines = {path.name: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert set(lines) == {f"{name}.py" for name in (*LEVELS, "staircase")}
    assert max(lines.values()) < 150


def test_machine_code_shows_the_level(level, target):
    """Each level brings its instruction; the steps before it do without."""
    kernel = compiled(level, target, STEPS[level].lengths[-1])
    facts, code = cubin.static_facts(kernel.cubin), sass(kernel.cubin)
    assert not facts.spills
    # The last CTA of the grid reads single partial sums as well.
    assert facts.load_bits == ({32, 128} if level == "grid" else {128})
    assert facts.store_bits == {32}
    height = LEVELS.index(level)
    # Five shuffles for 32 lanes; the grid's last CTA has a butterfly of its own.
    assert len(re.findall(r"\bSHFL\.BFLY\b", code)) == (0, 5, 5, 5, 10)[height]
    for instruction in ("LDS", "STS", "BAR"):
        assert cubin.has(code, instruction) == (height >= 2)
    assert facts.exchanges == (level == "cluster")
    assert cubin.has(code, "ATOMG") == (level == "grid")


def test_any_length_and_any_number_of_rows(level):
    """Rows that are no whole number of passes; offsets that do not wrap at 2**32."""
    n, step = RAGGED[level], STEPS[level]
    assert step.tiling(n).ragged == (level != "thread")
    kernel = compiled(level, "sm_90a", n)
    facts = cubin.static_facts(kernel.cubin, kernel.ptx)
    assert not facts.spills
    assert 128 in facts.load_bits
    assert ptx.wrapping_offsets(kernel.ptx, n, step.tiling(n).rows_per_cta) == []


def test_the_longest_way_is_short():
    """Each level spreads a row further: fewer additions one after another, and less rounding."""
    ways = [step.additions(step.tiling(8192), 1) for step in STEPS.values()]
    assert ways[:4] == [2048 + 4, 256 + 5, 32 + 5 + 8, 8 + 5 + 8 + 4]


def test_without_gpu_kernels_are_inspected(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    staircase.main(dataclasses.replace(STEPS["warp"], lengths=(1024,)))
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["target", "n", "registers"]
    for row, target in zip(rows, staircase.TARGETS, strict=True):
        assert re.fullmatch(rf" +{target} +1024 +\d+  LDG 128, STG 32; shfl", row)


def test_the_page_shows_what_the_files_say(root):
    """Each block stands in a file as it is, but for its indentation."""
    page = (root / "docs" / "tutorials" / "reductions.md").read_text()
    source = "\n".join((FOLDER / f"{level}.py").read_text() for level in LEVELS)
    blocks = BLOCK.findall(page)
    assert len(blocks) >= len(LEVELS)
    for block in blocks:
        assert any(textwrap.indent(block, " " * k) in source for k in (0, 4, 8)), block


@pytest.mark.parametrize("rows", [1, 1003])
def test_sums_are_right(cuda, level, rows):
    """Compared with float64; the last CTA of the first two steps has rows to spare."""
    for n in (RAGGED[level], STEPS[level].lengths[-1]):
        _, share = staircase.check(STEPS[level], n, rows)
        assert 0 <= share <= 1


def test_a_wrong_sum_is_found(cuda, monkeypatch):
    """Every element counted as if it were there twice."""
    right = staircase.cache.load

    def load(*args):
        return lambda x, out: right(*args)(x + x, out)

    monkeypatch.setattr(staircase.cache, "load", load)
    with pytest.raises(AssertionError, match="warp, 64 x 1024: "):
        staircase.check(STEPS["warp"], 1024, 64)


def test_the_grid_repeats_its_bits_and_clears_its_counter(cuda):
    step, n = STEPS["grid"], 1024
    function = staircase.cache.load(
        "grid", staircase.Sum("grid", n), step.tiling(n), arches.detect()
    )
    x, partials, counter, out = step.operands(torch.randn(5000, n, device=cuda))
    function(x, partials, counter, out)
    first = out.clone()
    for _ in range(50):
        function(x, partials, counter, out)
        assert_bitwise(out, first)
    assert counter.item() == 0


def test_speed(cuda, monkeypatch, capsys, level):
    monkeypatch.setattr(staircase, "BYTES", 2**26)
    staircase.main(STEPS[level])
    _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(STEPS[level].lengths)
    for row in rows:
        _, _, share, rate = map(float, row.split())
        assert share <= 1
        assert rate > 1
