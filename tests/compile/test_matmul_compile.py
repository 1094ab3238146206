"""Products of blocks, compiled for one architecture: what holds before they ever run.

Needs no GPU. ``QUACK_COMPILE_ARCH`` names the architecture.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine_code import MachineCode

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
CONFIGS = [MatmulConfig(128), *map(exhaustive, (MatmulConfig(192), MatmulConfig(64)))]


@pytest.mark.skipif(not ARCH.wgmma, reason=f"the kernel of {ARCH.name} is not written")
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_matmul(config: MatmulConfig, spec: MatmulSpec, tmp_path: Path, code: MachineCode) -> None:
    compiled = compile_kernel(
        "quack_blockscaled.product.sm90", spec, config, ARCH, dump_dir=tmp_path
    )
    facts = cubin.static_facts(compiled.cubin or b"", compiled.ptx)
    assert not facts.spills
    assert facts.usage.registers_per_cta(config.num_threads) <= ARCH.registers_per_sm
    code.later(compiled, config, functools.partial(faults_of_code, config, spec))


def faults_of_code(config: MatmulConfig, spec: MatmulSpec, text: str) -> Iterator[str]:
    """What differs from what the instructions of a kernel must be."""

    def count(pattern: str, part: str = text) -> int:
        return len(re.findall(pattern, part))

    groups, at_once = text.split("WARPGROUP.ARRIVE")[1:], config.at_once(spec)
    together, sums = spec.parts * at_once, 64 * config.tile_n // 128
    stages = at_once + (
        at_once > 1
    )  # of turns of two there is a loop for the last of an odd number
    found = {
        "spills": ([name for name in ("LDL", "STL") if cubin.has(text, name)], []),
        # The products of a stage, 32 of K in each; no thread waits between what is multiplied at once.
        "QGMMA": ([count(r"\bQGMMA\b", each) for each in groups], [4] * spec.parts * stages),
        "waits": (any("WARPGROUP.DEPBAR" in each for each in groups[: together - 1]), False),
        # Each sum is scaled by the addition itself; where columns have scales, also by one of these.
        "FFMA": (count(r"\bFFMA\b"), sums * stages),
        "FMUL": (
            count(r"\bFMUL\b"),
            stages * (sums if spec.rows_b else 2 * config.scales_b(spec)),
        ),
        "FADD": (count(r"\bFADD\b"), 0),
        "UTMAREDG": (cubin.has(text, "UTMAREDG"), spec.accumulate),
        "fences of the GPU": (count(r"MEMBAR\.ALL\.GPU"), 0),
        "bits counted": (count(r"\bU?POPC\b") > 0, spec.grouped),
    }
    for what, (is_there, wanted) in found.items():
        if is_there != wanted:
            yield f"{spec}: {what}: {is_there}, not {wanted}"
