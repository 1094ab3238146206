"""Quantising kernels, compiled for one architecture: what holds before they ever run.

Needs no GPU. ``QUACK_COMPILE_ARCH`` names the architecture.
"""

import re
from pathlib import Path

import pytest

from quack_blockscaled.formats import (
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    MXFP8_E4M3,
    MXFP8_E5M2,
    BlockFormat,
)
from quack_blockscaled.quantizer.spec import VECTOR, QuantizeConfig, QuantizeSpec
from quack_core import arch as arches
from quack_core import env
from quack_core.jit.compile import compile_kernel
from quack_core.testing import cubin

ARCH = arches.get(env.get("QUACK_COMPILE_ARCH"))
NATIVE = {"e4m3": r"cvt\.rn\.satfinite\.e4m3x2\.f32", "e5m2": r"cvt\.rn\.satfinite\.e5m2x2\.f32"}


@pytest.mark.parametrize("x", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "format",
    [MXFP8_E4M3, MXFP8_E5M2, FP8_BLOCK_1X128, FP8_BLOCK_128X128],
    ids=lambda f: f.name,
)
def test_quantize(format: BlockFormat, x: str, tmp_path: Path) -> None:
    spec, config = QuantizeSpec(x, format), QuantizeConfig()
    compiled = compile_kernel(spec.module, spec, config, ARCH, dump_dir=tmp_path)
    facts = cubin.static_facts(compiled.cubin, compiled.ptx)
    assert not facts.spills
    # 1024 threads of an SM, or 512 that hold 64 elements each.
    one_row = format.rows == 1
    assert facts.usage.registers <= ARCH.registers_per_sm // (1024 if one_row else 512)
    assert facts.load_bits == {128}
    assert facts.store_bits == {8 * VECTOR, format.scale.bits}
    text = compiled.ptx or ""
    vectors = config.unroll if one_row else format.rows * format.cols // VECTOR // config.threads
    assert len(re.findall(NATIVE[format.element.name], text)) == vectors * VECTOR // 2
    # One float32 operation of IEEE 754 each: nothing flushes subnormals, nothing is approximate.
    assert not re.findall(r"\.ftz|\.approx|\bdiv\.full|\bfma\.", text)
    divisions = re.findall(r"\b(?:div|rcp)\.rn\.f32", text)
    scales = config.unroll if one_row else 1
    assert len(divisions) == (2 * scales if format.scale.name == "float32" else 0)
