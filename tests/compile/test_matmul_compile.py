"""Products of blocks, compiled for one architecture: what holds before they ever run.

Needs no GPU. ``QUACK_COMPILE_ARCH`` names the architecture.
"""

import functools
import re
from pathlib import Path

import pytest

from quack_blockscaled.product.spec import MatmulConfig, MatmulSpec
from quack_core import arch as arches
from quack_core import env
from quack_core.jit.compile import compile_kernel
from quack_core.testing import cubin

ARCH = arches.get(env.get("QUACK_COMPILE_ARCH"))
exhaustive = functools.partial(pytest.param, marks=pytest.mark.exhaustive)
SPECS = [
    MatmulSpec("bfloat16"),
    exhaustive(MatmulSpec("float32")),
    exhaustive(MatmulSpec("bfloat16", rows_b=True)),
    MatmulSpec("float32", rows_b=True, accumulate=True),
    MatmulSpec("bfloat16", grouped=True),
    exhaustive(MatmulSpec("float32", grouped=True)),
]
CONFIGS = [MatmulConfig(192, 2), *map(exhaustive, (MatmulConfig(128, 2), MatmulConfig(128, 1)))]


@pytest.mark.skipif(not ARCH.wgmma, reason=f"the kernel of {ARCH.name} is not written")
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_matmul(config: MatmulConfig, spec: MatmulSpec, tmp_path: Path) -> None:
    compiled = compile_kernel(
        "quack_blockscaled.product.sm90", spec, config, ARCH, dump_dir=tmp_path
    )
    facts, text = cubin.static_facts(compiled.cubin, compiled.ptx), cubin.sass(compiled.cubin)
    assert not facts.spills
    assert not {"LDL", "STL"} & set(cubin.accesses(text))
    assert facts.usage.registers_per_cta(config.num_threads) <= ARCH.registers_per_sm
    # The products of a stage, 32 of K in each, and no thread waits between parts of its columns.
    groups = text.split("WARPGROUP.ARRIVE")[1:]
    issued = [len(re.findall(r"\bQGMMA\b", each)) for each in groups]
    assert issued == [4] * spec.parts
    assert spec.parts == 1 or "WARPGROUP.DEPBAR" not in groups[0]
    # Each sum is scaled by the addition itself; where columns have scales, also by one of these.
    sums = 64 * config.tile_n // 128
    assert len(re.findall(r"\bFFMA\b", text)) == sums
    scaled = sums if spec.rows_b else 2 * config.scales_b(spec)
    assert len(re.findall(r"\bFMUL\b", text)) == scaled
    assert bool(re.findall(r"UTMAREDG", text)) == spec.accumulate
    assert not re.findall(r"\bFADD\b", text)
    assert bool(re.findall(r"UTMALDG\.3D\.MULTICAST", text)) == (config.cluster_m > 1)
    assert "MEMBAR.ALL.GPU" not in text
    assert bool(re.findall(r"\bU?POPC\b", text)) == spec.grouped
