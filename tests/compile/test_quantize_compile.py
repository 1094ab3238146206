"""Kernels that quantise, and back, compiled for one architecture: what holds before they ever run.

Needs no GPU. ``QUACK_COMPILE_ARCH`` names the architecture.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kernel_faults
import pytest

from quack_blockscaled.formats import (
    E4M3,
    E8M0,
    FLOAT32,
    FORMATS,
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    BlockFormat,
)
from quack_blockscaled.quantizer.bits import carrier
from quack_blockscaled.quantizer.spec import TILE, VECTOR, WIDEST, DequantizeSpec, QuantizeSpec
from quack_core import arch as arches
from quack_core import env
from quack_core.jit.compile import Compiled, compile_kernel
from quack_core.testing import cubin

ARCH = arches.get(env.get("QUACK_COMPILE_ARCH"))
CONFIG = QuantizeSpec("bfloat16", FP8_BLOCK_1X128).configure(ARCH)
DTYPES = ["bfloat16", "float16", "float32"]
NAME = {"ids": lambda format: format.name}
TILES = FP8_BLOCK_128X128
ROWS = [
    QuantizeSpec(x, format, stochastic=stochastic)
    for format in FORMATS.values()
    for stochastic in (False, True)
    for x in DTYPES
]
COLUMNS = [
    QuantizeSpec(x, format, copies=copies)
    for format in (MXFP8_E4M3, MXFP8_E5M2, FP8_BLOCK_1X128, TILES)
    for copies in ("columns", "both")
    for x in DTYPES
]
NUMBERS = [DequantizeSpec(out, format) for format in FORMATS.values() for out in DTYPES]
HELD = TILE[0] * TILE[1] // CONFIG.threads
"""Elements of a thread, of a tile."""


def cases(specs: Sequence[QuantizeSpec | DequantizeSpec]) -> list[Any]:
    """As parameters of a test; where each kernel is compiled but once, a few are enough."""
    found = kernel_faults.in_turn(specs, lambda spec, arch: spec.configure(arch))
    for i, (spec, case) in enumerate(zip(specs, found, strict=True)):
        dtype = spec.x if isinstance(spec, QuantizeSpec) else spec.out
        if dtype != DTYPES[0] or spec.format not in (MXFP8_E4M3, NVFP4, TILES):
            found[i] = pytest.param(spec, marks=[*case.marks, pytest.mark.exhaustive])
    return found


def compiled(
    spec: QuantizeSpec | DequantizeSpec, folder: Path
) -> tuple[Compiled, cubin.StaticFacts]:
    """A kernel that does not spill, and what is seen of it."""
    found = compile_kernel(spec.module, spec, spec.configure(ARCH), ARCH, dump_dir=folder)
    facts = cubin.static_facts(found.cubin, found.ptx)
    assert not facts.spills
    return found, facts


def conversions(text: str, kind: str) -> int:
    """Instructions that make two codes each."""
    return len(re.findall(rf"cvt\.rn\.satfinite\.{kind}x2\.f32", text))


@pytest.mark.parametrize("spec", cases(ROWS), ids=lambda spec: spec.name)
def test_quantize(spec: QuantizeSpec, tmp_path: Path) -> None:
    format, stochastic = spec.format, spec.stochastic
    kernel, facts = compiled(spec, tmp_path)
    # 1024 threads of an SM, or 512 that hold 64 elements each.
    one_row = format.rows == 1
    assert facts.usage.registers <= ARCH.registers_per_sm // (1024 if one_row else 512)
    assert facts.load_bits == ({32, 128} if format.per_tensor else {128})
    codes = {4: 64, 6: 32, 8: 128}[format.element.bits] if one_row else 8 * VECTOR
    assert facts.store_bits == {codes, format.scale.bits}
    text = kernel.ptx or ""
    count = CONFIG.unroll * WIDEST if one_row else HELD
    own = not stochastic and (CONFIG.native or format.element.bits == 8)
    element = format.element if own else carrier(format.element)
    # Scales in e4m3 take a conversion each.
    other = CONFIG.unroll if format.scale.name == "ue4m3" and element.name == "e4m3" else 0
    assert conversions(text, element.name) == count // 2 + other
    # One float32 operation of IEEE 754 each: nothing flushes subnormals, nothing is approximate.
    assert not re.findall(r"\.ftz|\.approx|\bdiv\.full|\bfma\.", text)
    divisions = re.findall(r"\b(?:div|rcp)\.rn\.f32", text)
    scales = CONFIG.unroll if one_row else 1
    each = {"e8m0": 0, "ue4m3": 3, "float32": 2}[format.scale.name]
    assert len(divisions) == each * scales


@pytest.mark.skipif(not CONFIG.native, reason="has no conversion to 4 and 6 bits")
@pytest.mark.parametrize("format", [f for f in FORMATS.values() if f.element.bits < 8], **NAME)
def test_conversions_are_in_the_machine_code(format: BlockFormat, tmp_path: Path) -> None:
    found, _ = compiled(QuantizeSpec("bfloat16", format), tmp_path)
    text = cubin.sass(found.cubin or b"")
    kind = format.element.name.upper()
    count = CONFIG.unroll * WIDEST // 2
    assert len(re.findall(rf"\bF2FP\.SATFINITE\.{kind}\.F32", text)) == count


@pytest.mark.parametrize("spec", cases(COLUMNS), ids=lambda spec: spec.name)
def test_columns(spec: QuantizeSpec, tmp_path: Path) -> None:
    format, copies = spec.format, spec.copies
    found, facts = compiled(spec, tmp_path)
    assert facts.usage.registers <= ARCH.registers_per_sm // 512
    assert facts.load_bits == {128}
    both = copies == "both"
    assert facts.store_bits == {128, format.scale.bits} | ({64} if both else set())
    text = found.ptx or ""
    assert conversions(text, format.element.name) == HELD // 2 * (2 if both else 1)
    assert not re.findall(r"\.ftz|\.approx|\bdiv\.full|\bfma\.", text)
    # Codes are turned in shared memory by accesses of 8 and 16 bytes.
    assert facts.accesses["STS"][64] == VECTOR
    assert facts.accesses["LDS"][128] >= TILE[0] * TILE[1] // CONFIG.threads // 16


@pytest.mark.parametrize("spec", cases(NUMBERS), ids=lambda spec: spec.name)
def test_dequantize(spec: DequantizeSpec, tmp_path: Path) -> None:
    format = spec.format
    kernel, facts = compiled(spec, tmp_path)
    # As many threads as an SM takes, each with four vectors on their way.
    assert facts.usage.registers <= ARCH.registers_per_sm // ARCH.max_threads_per_sm
    # Numbers are 16 bytes a thread, and codes as many; of 6 bits two words that hold them.
    assert facts.store_bits == {128}
    codes = 32 if format.element.bits == 6 else spec.vector * format.element.bits
    whole = {32} if format.per_tensor else set()
    assert facts.load_bits == {codes, format.scale.bits} | whole
    text = kernel.ptx or ""
    count = spec.configure(ARCH).unroll * spec.vector
    element = carrier(format.element).name
    # Scales in e4m3 take a conversion each.
    other = spec.configure(ARCH).unroll if format.scale.name == "ue4m3" else 0
    assert len(re.findall(rf"cvt\.rn\.f16x2\.{element}x2", text)) == count // 2 + other
    # One float32 operation of IEEE 754 for each product, one rounding.
    factors = (format.element.bits < 8) + 1
    assert len(re.findall(r"\bmul\.(?:rn\.)?f32", text)) == factors * count + bool(whole) * other
    assert not re.findall(r"\.ftz|\.approx|\bdiv\.(?:full|rn)|\bfma\.", text)


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("cols", [8, 512])
def test_dequantize_blocks_of_your_own(cols: int, out: str, tmp_path: Path) -> None:
    for scale in (E8M0, FLOAT32):
        compiled(DequantizeSpec(out, BlockFormat("mine", E4M3, scale, (1, cols))), tmp_path)


@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
@pytest.mark.parametrize("format", [MXFP4, MXFP8_E4M3], **NAME)
def test_rules(format: BlockFormat, rule: str, tmp_path: Path) -> None:
    compiled(QuantizeSpec("bfloat16", format, rule), tmp_path)
