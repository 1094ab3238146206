"""Every RMSNorm kernel, compiled for one architecture: what holds before it ever runs.

Needs no GPU. ``QUACK_COMPILE_ARCH`` names the architecture.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kernel_faults
import pytest
from machine_code import MachineCode

from quack_core import arch as arches
from quack_core import dtypes, env
from quack_core.arch import Arch
from quack_core.errors import UnsupportedError
from quack_core.jit.compile import Compiled, compile_kernel
from quack_core.testing import cubin
from quack_norm.ops.rmsnorm.bwd_config import BwdConfig
from quack_norm.ops.rmsnorm.bwd_rules import default_bwd
from quack_norm.ops.rmsnorm.bwd_spec import RMSNormBwdSpec
from quack_norm.ops.rmsnorm.config import FwdConfig
from quack_norm.ops.rmsnorm.rules import default_fwd
from quack_norm.ops.rmsnorm.spec import RMSNormFwdSpec

F32, BF16, F16 = "float32", "bfloat16", "float16"

ARCH = arches.get(env.get("QUACK_COMPILE_ARCH"))


@dataclass(frozen=True)
class Case:
    """A kernel to compile.

    Args:
        why: what this case has that no other has.
        spec: what it computes; the configuration is the default for the architecture.
    """

    why: str
    spec: RMSNormFwdSpec | RMSNormBwdSpec

    @property
    def id(self) -> str:
        direction = "fwd" if isinstance(self.spec, RMSNormFwdSpec) else "bwd"
        return f"{direction}-{self.spec.n}-{self.why.replace(' ', '_')}"


def fwd(why: str, n: int, x: str = BF16, **fields: object) -> Case:
    return Case(why, RMSNormFwdSpec(n, x, **{"out": x, "weight": F32, **fields}))


def bwd(why: str, n: int, x: str = BF16, **fields: object) -> Case:
    operands = {"dout": x, "dx": x, "weight": F32, "dweight": True}
    return Case(why, RMSNormBwdSpec(n, x, **{**operands, **fields}))


EVERYTHING = {"weight": BF16, "bias": BF16, "rstd": True, "offset": True}
PRENORM = {"residual": BF16, "residual_out": BF16}
ALL_GRADIENTS = {"weight": BF16, "dbias": BF16, "offset": True}

CASES = [
    fwd("one element", 1, F32, align=4),
    fwd("rows share a warp", 64, weight=BF16, rstd=True),
    fwd("a weight per head", 128, weight=BF16, bias=BF16, per_head=True, rank=3),
    fwd("no power of two", 1000, F16, weight=F16),
    fwd("float32 throughout", 1024, F32, rstd=True),
    fwd("no weight", 4096, weight=None),
    fwd("float32 weight", 4096, rstd=True),
    fwd("all operands", 4096, **EVERYTHING, **PRENORM),
    fwd("wider output", 4096, out=F32, residual=F32, residual_out=F32),
    fwd("odd storage offset", 4096, align=2),
    fwd("rows of a slice", 4096, align=8, rank=3),
    fwd("odd weight", 4096, weight=BF16, weight_align=2),
    fwd("odd", 4095, align=2, rstd=True, **PRENORM),
    fwd("odd and out of phase", 4095, align=2, weight_align=2, in_phase=False, **PRENORM),
    fwd("longest of one CTA in most models", 8192, rstd=True),
    fwd("odd and long", 16383, align=2),
    fwd("long", 16384, **PRENORM),
    fwd("long and float32", 16384, F32, residual=F32, residual_out=F32),
    fwd("a vocabulary", 65536, rstd=True),
    fwd("a row of 2880", 2880, weight=BF16),
    fwd("a row of 5120", 5120, **EVERYTHING),
    fwd("two more than a power of two", 4098, align=4),
    fwd("odd vocabulary", 65537, align=2, weight=BF16),
    fwd("odd and over clusters", 50257, align=2, **EVERYTHING, **PRENORM),
    fwd("clusters with misaligned rows", 65536, align=2),
    fwd("weight of half the size", 131072, weight=BF16),
    fwd("a ring of misaligned rows", 131072, align=2),
    fwd("longest", 262144),
    fwd("longest and float32", 262144, F32),
    fwd("mean subtracted", 4096, centred=True, rstd=True, **PRENORM),
    fwd("mean subtracted, ragged", 1000, centred=True, bias=F32),
    fwd("mean subtracted, odd", 1001, align=2, centred=True, rstd=True),
    fwd("mean subtracted, odd ring", 8191, align=2, centred=True),
    fwd("mean subtracted, long", 65536, centred=True, rstd=True),
    fwd("mean subtracted, odd and long", 50257, align=2, centred=True, weight=BF16, bias=BF16),
    bwd("one element", 1, F32, align=4),
    bwd("rows share a warp", 64, weight=BF16),
    bwd("a weight per head", 128, weight=BF16, dbias=BF16, per_head=True, rank=3),
    bwd("no power of two", 1000, F16, weight=F16),
    bwd("mean subtracted", 4096, centred=True, **ALL_GRADIENTS),
    bwd("mean subtracted, long", 65536, centred=True, dbias=F32),
    bwd("mean subtracted, read twice", 262144, F32, centred=True),
    bwd("float32 throughout", 1024, F32, dbias=F32),
    bwd("no weight", 4096, weight=None, dweight=False),
    bwd("float32 weight", 4096),
    bwd("all gradients", 4096, dresidual_out=BF16, dresidual=BF16, **ALL_GRADIENTS),
    bwd("odd storage offset", 4096, align=2),
    bwd("odd", 4095, align=2, dresidual_out=BF16),
    bwd("longest of one CTA in most models", 8192),
    bwd("odd and long", 16383, align=2),
    bwd("long", 16384, dresidual_out=BF16),
    bwd("long and float32", 16384, F32, dresidual_out=F32),
    bwd("a vocabulary", 65536),
    bwd("weight of half the size", 131072, weight=BF16),
    bwd("longest", 262144),
    bwd("longest and float32", 262144, F32),
]


def default_config(case: Case, arch: Arch) -> FwdConfig | BwdConfig:
    if isinstance(case.spec, RMSNormFwdSpec):
        return default_fwd(case.spec, arch)
    return default_bwd(case.spec, arch)


def narrowest(spec: RMSNormFwdSpec | RMSNormBwdSpec) -> str:
    names = [spec.x, spec.weight]
    if isinstance(spec, RMSNormFwdSpec):
        names += [spec.out, spec.bias, spec.residual, spec.residual_out]
    else:
        names += [spec.dout, spec.dx, spec.dresidual_out, spec.dresidual]
    return min((name for name in names if name), key=dtypes.width)


def faults(
    case: Case, config: FwdConfig | BwdConfig, compiled: Compiled, facts: cubin.StaticFacts
) -> Iterator[str]:
    """What is wrong with a compiled kernel, one line each."""
    return kernel_faults.faults(case.spec, narrowest(case.spec), config, ARCH, compiled, facts)


def facts_of(compiled: Compiled) -> cubin.StaticFacts:
    """What its machine code says of a kernel."""
    return cubin.static_facts(compiled.cubin or b"")


@pytest.fixture(scope="session")
def dump_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case", kernel_faults.in_turn(CASES, default_config), ids=lambda case: case.id
)
def test_kernel(case: Case, dump_dir: Path, code: MachineCode) -> None:
    if ARCH.name == "sm120" and "bwd" in case.id and case.spec.n > 131072:  # documented limit
        with pytest.raises(UnsupportedError, match="backward"):
            default_config(case, ARCH)
        return
    chosen = default_config(case, ARCH)
    found = [chosen]
    if isinstance(chosen, FwdConfig) and (crowd := chosen.crowded(case.spec, ARCH)) is not None:
        found.append(crowd)
    for config in found:
        compiled = compile_kernel(config.module, case.spec, config, ARCH, dump_dir=dump_dir)
        what = functools.partial(faults, case, config, compiled)
        kernel_faults.check(case.spec, config, ARCH, compiled, what, code)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("n", "x"), [(5, BF16), (96, F32), (1000, BF16), (4096, F32), (65536, BF16)]
)
def test_storing_statistics_changes_no_product(n: int, x: str, dump_dir: Path) -> None:
    """LayerNorm rounds the same products with and without them, or else training changes bits."""

    def products(rstd: bool) -> tuple[int, int]:
        case = fwd("", n, x, centred=True, rstd=rstd, align=16 if n > 5 else 2)
        config = default_config(case, ARCH)
        compiled = compile_kernel(config.module, case.spec, config, ARCH, dump_dir=dump_dir)
        code = cubin.sass(compiled.cubin or b"")
        return len(re.findall(r"\bFMUL2?\b", code)), len(re.findall(r"\bFFMA2?\b", code))

    assert products(False) == products(True)


def test_spills_are_found(dump_dir: Path) -> None:
    case, config = fwd("too few threads", 10240, weight=None), FwdConfig(32)
    compiled = compile_kernel(config.module, case.spec, config, ARCH, dump_dir=dump_dir)
    found = list(faults(case, config, compiled, facts_of(compiled)))
    assert any(line.startswith("spills: a frame") for line in found)


def test_narrow_accesses_are_found(dump_dir: Path) -> None:
    """Code for rows at odd addresses, judged as if they were aligned."""
    case = fwd("odd offset", 4096, weight=None, align=2)
    config = FwdConfig(128)
    compiled = compile_kernel(config.module, case.spec, config, ARCH, dump_dir=dump_dir)
    aligned = fwd("aligned", 4096, weight=None)
    found = [line.split(":")[0] for line in faults(aligned, config, compiled, facts_of(compiled))]
    assert found == [
        "narrow loads from global memory of aligned rows",
        "narrow stores to global memory of aligned rows",
        "no 128-bit loads from global memory",
        "no 128-bit stores to global memory",
    ]


def test_limits_are_found() -> None:
    """Shared memory, registers and cluster size, on numbers alone."""
    facts = cubin.StaticFacts(cubin.Usage(registers=128), {}, exchanges=False)
    case, arch = fwd("ring", 65536), arches.get("sm120")
    config = FwdConfig(512, cluster=16, stages=16)
    found = list(kernel_faults.resource_faults(case.spec, config, arch, facts))
    assert [line.split(";")[0] for line in found] == [
        "128 registers",
        "544 threads of 128 registers take 69632",
        f"{config.smem_bytes(case.spec)} bytes of shared memory",
        "a cluster of 16 CTAs",
    ]
