"""The staircase of GEMM: what each step compiles to, and what it computes."""

import functools
import importlib
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from quack_core import arch as arches
from quack_core.testing import cubin

FOLDER = Path(__file__).parents[3] / "examples" / "gemm"
sys.path.insert(0, str(FOLDER))  # where a script finds what lies beside it
steps = importlib.import_module("steps")

LEVELS = ("tile", "pipeline", "roles", "persistent", "multicast", "pingpong")
SHARED = ("steps", "tiling", "operands")
STEPS = {level: importlib.import_module(level).STEP for level in LEVELS}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

sass = functools.cache(cubin.sass)
compiled = functools.cache(steps.compiled)


@pytest.fixture(autouse=True)
def once(monkeypatch):
    """Compiling and disassembling are what takes the time here."""
    monkeypatch.setattr(steps, "compiled", compiled)
    monkeypatch.setattr(cubin, "sass", sass)


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


def test_each_file_is_short():
    lines = {path.name: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert set(lines) == {f"{name}.py" for name in (*LEVELS, *SHARED)}
    assert max(lines.values()) < 150


def test_machine_code_shows_the_step(level):
    """Each step brings its instructions; the steps before it do without."""
    kernel = compiled(STEPS[level])
    facts, code = cubin.static_facts(kernel.cubin), sass(kernel.cubin)
    assert not facts.spills
    # What 65536 registers allow: one warpgroup, two CTAs of it per SM, or three warpgroups.
    assert facts.usage.registers <= (255 if level in ("tile", "pipeline") else 168)
    height = LEVELS.index(level)
    tiling = STEPS[level].tiling
    # Four instructions of 16 elements along K for each 64 rows; sums never leave their registers.
    atoms = tiling.tile_m // (64 * tiling.sharing)
    shape = rf"\bHGMMA\.64x{tiling.tile_n}x16\.F32\.BF16\b"
    assert len(re.findall(shape, code)) == len(re.findall(r"\bHGMMA\b", code)) == 4 * atoms
    assert cubin.has(code, "UTMALDG")
    assert cubin.has(code, "USETMAXREG") == (height >= 2)
    # From the fourth step on one stage is multiplied while the next one begins; D leaves by TMA.
    assert (re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1", code) is not None) == (height >= 3)
    assert cubin.has(code, "UTMASTG") == cubin.has(code, "STSM") == (height >= 3)
    assert cubin.has(code, "STG") == (height < 3)
    assert ("UTMALDG.2D.MULTICAST" in code) == ("mapa" in kernel.ptx) == (height >= 4)
    # Whose turn it is: a barrier at which some arrive and others wait.
    assert ("barrier.cta.arrive" in kernel.ptx or "bar.arrive" in kernel.ptx) == (height >= 5)


def test_shared_memory_is_enough(level):
    """The compiler does not check it."""
    tiling = STEPS[level].tiling
    per_cta = tiling.smem_bytes * (2 if level == "pipeline" else 1)
    assert per_cta <= arches.get("sm90").smem_per_sm
    assert tiling.smem_bytes <= arches.get("sm90").smem_bytes


def test_without_gpu_kernels_are_inspected(monkeypatch, capsys, level):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    steps.main(STEPS[level])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["target", "registers", "spills", "instructions"]
    width = STEPS[level].tiling.tile_n
    assert re.fullmatch(rf" +sm_90a +\d+ +no  HGMMA\.64x{width}x16, .*UTMALDG\.2D.*", row)


def test_the_page_shows_what_the_files_say(root):
    """Each block stands in a file as it is, but for its indentation."""
    page = (root / "docs" / "tutorials" / "gemm.md").read_text()
    source = "\n".join((FOLDER / f"{level}.py").read_text() for level in LEVELS)
    blocks = BLOCK.findall(page)
    assert len(blocks) >= len(LEVELS)
    for block in blocks:
        assert any(textwrap.indent(block, " " * k) in source for k in (0, 4, 8, 12)), block


def test_the_op_of_the_reference_runs(root, tmp_path):
    """The epilogue of one's own, as the page shows it, on the CPU."""
    pytest.importorskip("quack_gemm")
    page = (root / "docs" / "reference" / "gemm.md").read_text()
    (block,) = (block for block in BLOCK.findall(page) if "(Op)" in block)
    script = tmp_path / "op_of_the_reference.py"
    script.write_text(block)
    sys.path.insert(0, str(tmp_path))
    try:
        found = vars(
            importlib.import_module("op_of_the_reference")
        )  # ops are found by the name of their module
    finally:
        sys.path.remove(str(tmp_path))
    x = found["a"].double() @ found["b"].double() + found["bias"]
    right = 30 * torch.tanh(x / 30) + found["shift"][:, None]
    # bfloat16 has 8 bits; what float32 sums and tanh are off by is far less, but for values near 0.
    assert ((found["out"].double() - right).abs() <= 2.0**-8 * right.abs() + 1e-4).all()


@pytest.mark.parametrize("size", steps.CHECKED)
def test_products_are_right(cuda, level, size):
    """Compared with float64, of integers, to the bit."""
    steps.check(STEPS[level], *size)


def test_a_wrong_product_is_found(cuda, monkeypatch):
    """One element of A counted twice."""
    right = steps.multiplier

    def multiplier(step):
        def call(a, b, d):
            a[0, 0] += 1
            right(step)(a, b, d)
            a[0, 0] -= 1

        return call

    monkeypatch.setattr(steps, "multiplier", multiplier)
    with pytest.raises(AssertionError, match="tile, 128 x 256 x 64: "):
        steps.check(STEPS["tile"], 128, 256, 64)


def test_speed(cuda, capsys, level):
    steps.main(STEPS[level])
    _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(STEPS[level].shapes)
    for row in rows:
        assert float(row.split()[-1]) > 1
