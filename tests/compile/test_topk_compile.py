"""Every top-k kernel, compiled for one architecture: what holds before it ever runs.

Needs no GPU. ``QUACK_COMPILE_ARCH`` names the architecture.
"""

import functools
import math
from collections.abc import Iterator
from pathlib import Path

import kernel_faults
import pytest
from machine_code import MachineCode

from quack_core import arch as arches
from quack_core import dtypes, env
from quack_core.arch import Arch
from quack_core.jit.compile import Compiled, compile_kernel
from quack_core.testing import cubin, ptx
from quack_norm.ops.topk.config import (
    BwdConfig,
    FwdConfig,
    SortConfig,
    default_bwd,
    default_fwd,
)
from quack_norm.ops.topk.spec import MAX_K, MAX_N, TopKBwdSpec, TopKFwdSpec

F32, BF16, F16 = "float32", "bfloat16", "float16"
ARCH = arches.get(env.get("QUACK_COMPILE_ARCH"))
Spec = TopKFwdSpec | TopKBwdSpec
Config = FwdConfig | BwdConfig
MAX_REGISTERS = 128
"""Of a thread of a forward kernel: half of an SM's threads, or more, fit beside each other."""


def fwd(n: int, k: int, x: str = BF16, **fields: object) -> Spec:
    align = math.gcd(16, n * dtypes.width(x) // 8)
    return TopKFwdSpec(n, k, x, **{"align": align, **fields})  # type: ignore[arg-type]


def bwd(n: int, k: int, x: str = BF16, softmax: bool = False) -> Spec:
    return TopKBwdSpec(n, k, x, x, x if softmax else None)


SPECS = [
    fwd(1, 1, F32),
    fwd(8, 2, softmax=True),
    fwd(33, 8, F16),
    fwd(64, 8, align=2),
    fwd(128, 8, F32, softmax=True, rank=3),
    fwd(256, 128, F32),
    fwd(256, 128),
    fwd(511, 511, F32, softmax=True),
    fwd(128, 8),
    fwd(160, 8),
    fwd(256, 8),
    fwd(256, 8, align=2),
    fwd(512, 8, F16, softmax=True, rank=3),
    fwd(513, 1),
    fwd(1001, 8, F32),
    fwd(1024, 8),
    fwd(1024, 64),
    fwd(4096, 8),
    fwd(4096, 64, softmax=True),
    fwd(4096, 128, F32, softmax=True, rank=3),
    fwd(32000, 8),
    fwd(50257, 100, softmax=True),
    fwd(262144, 64),
    fwd(2**20, 8, F32),
    fwd(16385, 300, F16, rank=3),
    fwd(50257, 1024, F32, softmax=True),
    fwd(MAX_N, MAX_K, softmax=True),
    bwd(1, 1, F32),
    bwd(8, 2, softmax=True),
    bwd(256, 128, F32, softmax=True),
    bwd(4095, 300),
    bwd(262144, MAX_K, softmax=True),
    bwd(MAX_N, MAX_K, F32, softmax=True),
]


def faults(
    spec: Spec, config: Config, compiled: Compiled, facts: cubin.StaticFacts
) -> Iterator[str]:
    """What is wrong with a compiled kernel, one line each."""
    if facts.spills:
        yield f"spills: a frame of {facts.usage.frame_bytes} bytes, {facts.accesses}"
    if facts.usage.registers > MAX_REGISTERS and not isinstance(config, BwdConfig):
        yield f"{facts.usage.registers} registers of a thread"
    registers = facts.usage.registers_per_cta(config.num_threads)
    if registers > ARCH.registers_per_sm:
        yield f"{registers} registers of a CTA; an SM has {ARCH.registers_per_sm}"
    smem_bytes = config.smem_bytes(spec)  # type: ignore[arg-type]
    if smem_bytes > ARCH.smem_bytes:
        yield f"{smem_bytes} bytes of shared memory; a CTA has {ARCH.smem_bytes}"
    found = facts.store_bits if isinstance(spec, TopKBwdSpec) else facts.load_bits
    wanted = 128
    if isinstance(config, SortConfig):
        wanted = min(8 * spec.align, spec.vec * dtypes.width(spec.x))  # type: ignore[union-attr]
    if wanted not in found:
        yield f"no {wanted}-bit accesses of rows: {found}"
    text = compiled.ptx or ""
    if not isinstance(config, BwdConfig) and config.threads_per_row <= 32 and "bar.sync" in text:
        yield "a barrier, where warps have rows of their own"
    if f".target {ARCH.target}\n" not in text:
        yield f"not compiled for {ARCH.target}"
    if isinstance(config, BwdConfig):
        rows = config.tile(spec) // spec.n + 1  # type: ignore[arg-type]
    else:
        rows = config.rows_per_cta
    for instruction in ptx.wrapping_offsets(text, max(2, spec.n), rows):
        yield f"row offset in 32 bits: {instruction}"


def default_config(spec: Spec, arch: Arch = ARCH) -> Config:
    return default_fwd(spec) if isinstance(spec, TopKFwdSpec) else default_bwd(spec)


@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", kernel_faults.in_turn(SPECS, default_config), ids=lambda s: s.name)
def test_kernel(spec: Spec, tmp_path: Path, code: MachineCode) -> None:
    config = default_config(spec)
    compiled = compile_kernel(config.module, spec, config, ARCH, dump_dir=tmp_path)
    what = functools.partial(faults, spec, config, compiled)
    kernel_faults.check(spec, config, ARCH, compiled, what, code)
