"""Every cross-entropy kernel, compiled for one architecture: what holds before it ever runs.

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
from quack_norm.ops.cross_entropy import rules
from quack_norm.ops.cross_entropy.config import BwdConfig, FwdConfig, RescaleConfig, StreamConfig
from quack_norm.ops.cross_entropy.spec import (
    CrossEntropyBwdSpec,
    CrossEntropyFwdSpec,
    RescaleSpec,
)

F32, BF16, F16 = "float32", "bfloat16", "float16"
ARCH = arches.get(env.get("QUACK_COMPILE_ARCH"))
Spec = CrossEntropyFwdSpec | CrossEntropyBwdSpec | RescaleSpec
Config = FwdConfig | StreamConfig | BwdConfig | RescaleConfig


def fwd(n: int, x: str = BF16, reduction: str = "mean", **fields: object) -> Spec:
    common = {"target": "int64", "align": math.gcd(16, n * dtypes.width(x) // 8)}
    return CrossEntropyFwdSpec(n, x, reduction=reduction, **{**common, **fields})  # type: ignore[arg-type]


def bwd(n: int, x: str = BF16, **fields: object) -> Spec:
    common = {"target": "int64", "dloss": x, "align": math.gcd(16, n * dtypes.width(x) // 8)}
    return CrossEntropyBwdSpec(n, x, **{**common, **fields})  # type: ignore[arg-type]


OPTIONS = {"smoothing": True, "softcap": True, "z_loss": True}
STREAMS = [  # logits only, and short rows with the gradient
    fwd(4, F32, dx=True),
    fwd(1000, dx=True, target="int32", weight=BF16),
    fwd(1001, F16, dx=True, softcap=True),
    fwd(4096, F16, "sum", dx=True, rank=3),
    fwd(4096, dx=True, align=2, in_phase=False, z_loss=True),
    fwd(1, F32, "none"),
    fwd(1000, F16, target="int32"),
    fwd(4096, z_loss=True, rank=3),
    fwd(32000),
    fwd(32000, align=2, in_phase=False, reduction="sum"),
    fwd(50257, weight=BF16, softcap=True),
    fwd(50257, F32, "none", weight=F32, softcap=True, z_loss=True),
]
STAGED = [  # with the gradient, or label smoothing
    fwd(8192, F32, "none", **OPTIONS),
    fwd(8192, F16, "sum", dx=True, rank=3),
    fwd(32000, dx=True),
    fwd(32000, F32, dx=True, softcap=True, z_loss=True),
    fwd(32000, dx=True, weight=F32, **OPTIONS),
    fwd(32000, dx=True, align=2, in_phase=False),
    fwd(50257, dx=True),
    fwd(50257, reduction="none", smoothing=True),
    fwd(50257, F32, dx=True, weight=F32, **OPTIONS),
    fwd(50257, F16, dx=True, in_phase=False, z_loss=True),
    fwd(131072, dx=True, softcap=True),
    fwd(262144, BF16, "sum", dx=True, weight=BF16, smoothing=True),
]
BACKWARDS = [
    bwd(4, F32),
    bwd(1000, F16, target="int32", weight=F16),
    bwd(4096, dloss=F32, rank=3),
    bwd(32000, weight=F32, **OPTIONS),
    bwd(32000, align=2),
    bwd(32000, F32, align=4, in_phase=False, smoothing=True),
    bwd(50257),
    bwd(50257, F32, weight=BF16, **OPTIONS),
    bwd(50257, in_phase=False, softcap=True),
    bwd(262144, F32, z_loss=True),
]
RESCALES = [RescaleSpec(BF16, BF16), RescaleSpec(F32, F32)]


def faults(
    spec: Spec, config: Config, compiled: Compiled, facts: cubin.StaticFacts
) -> Iterator[str]:
    """What is wrong with a compiled kernel, one line each."""
    yield from kernel_faults.resource_faults(spec, config, ARCH, facts)
    loads, stores = sorted(facts.load_bits), sorted(facts.store_bits)
    if (bits := widest(spec)) not in loads:
        yield f"no {bits}-bit loads of logits: {loads}"
    if has_gradient(spec) and bits not in stores:
        yield f"no {bits}-bit stores of the gradient: {stores}"
    if facts.exchanges != (config.cluster > 1):
        yield f"a row is shared by {config.cluster} CTAs, but st.async present: {facts.exchanges}"
    text = compiled.ptx or ""
    if f".target {ARCH.target}\n" not in text:
        yield f"not compiled for {ARCH.target}"
    for instruction in ptx.wrapping_offsets(text, max(2, getattr(spec, "n", 2))):
        yield f"row offset in 32 bits: {instruction}"


def widest(spec: Spec) -> int:
    """Bits of the accesses to most of a row."""
    if isinstance(spec, CrossEntropyBwdSpec) and not spec.in_phase:  # as addresses allow
        return 8 * spec.align
    return 128


def has_gradient(spec: Spec) -> bool:
    return not isinstance(spec, CrossEntropyFwdSpec) or spec.dx


def default_config(spec: Spec, arch: Arch = ARCH) -> Config:
    if isinstance(spec, CrossEntropyFwdSpec):
        return rules.default_fwd(spec, arch)
    if isinstance(spec, CrossEntropyBwdSpec):
        return rules.default_bwd(spec, arch)
    return rules.default_rescale(spec, arch)


def named(spec: Spec) -> str:
    """The kernel's name and what sets it apart."""
    flags = ("smoothing", "softcap", "z_loss", "weight", "in_phase")
    fields = [flag for flag in flags if getattr(spec, flag, None)]
    return "-".join([spec.name, *fields, f"align{getattr(spec, 'align', 16)}"])


ALL = [*STREAMS, *STAGED, *BACKWARDS, *RESCALES]


@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", kernel_faults.in_turn(ALL, default_config), ids=named)
def test_kernel(spec: Spec, tmp_path: Path, code: MachineCode) -> None:
    config = default_config(spec)
    compiled = compile_kernel(config.module, spec, config, ARCH, dump_dir=tmp_path)
    what = functools.partial(faults, spec, config, compiled)
    kernel_faults.check(spec, config, ARCH, compiled, what, code)


@pytest.mark.parametrize(("specs", "kernel"), [(STREAMS, "fwd_stream"), (STAGED, "fwd_staged")])
def test_the_lists_reach_the_kernels(specs: list[Spec], kernel: str) -> None:
    assert {default_config(spec).module.rpartition(".")[2] for spec in specs} == {kernel}
