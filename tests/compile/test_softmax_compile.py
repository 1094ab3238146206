"""Every softmax kernel, compiled for one architecture: what holds before it ever runs.

Needs no GPU. ``QUACK_COMPILE_ARCH`` names the architecture.
"""

import functools
import math
from dataclasses import replace
from pathlib import Path

import kernel_faults
import pytest
from machine_code import MachineCode

from quack_core import arch as arches
from quack_core import dtypes, env
from quack_core.arch import Arch
from quack_core.jit.compile import compile_kernel
from quack_norm.ops.row_map import rules
from quack_norm.ops.softmax.config import BwdConfig, FwdConfig
from quack_norm.ops.softmax.spec import SoftmaxBwdSpec, SoftmaxFwdSpec

F32, BF16, F16 = "float32", "bfloat16", "float16"
ARCH = arches.get(env.get("QUACK_COMPILE_ARCH"))
Spec = SoftmaxFwdSpec | SoftmaxBwdSpec


def fwd(n: int, x: str = BF16, out: str | None = None, **fields: object) -> Spec:
    align = math.gcd(16, n * dtypes.width(x) // 8)
    return SoftmaxFwdSpec(n, x, out or x, **{"align": align, **fields})  # type: ignore[arg-type]


def bwd(n: int, x: str = BF16, **fields: object) -> Spec:
    align = math.gcd(16, n * dtypes.width(x) // 8)
    return SoftmaxBwdSpec(n, x, x, x, **{"align": align, **fields})  # type: ignore[arg-type]


SPECS = [
    fwd(1, F32),
    fwd(33, F16, log=True),
    fwd(128, scaled=True),
    fwd(1000),
    fwd(1001, F32, log=True),
    fwd(4095),
    fwd(4096, out=F32, log=True),
    fwd(4096, align=2),
    fwd(8192, F32),
    fwd(16384, rank=3),
    fwd(32000, log=True, scaled=True),
    fwd(50257),
    fwd(131072),
    fwd(262144),
    fwd(262144, F32),
    bwd(1, F32),
    bwd(128, log=True),
    bwd(1001),
    bwd(4095, F32, log=True),
    bwd(4096, scaled=True),
    bwd(16384),
    bwd(50257),
    bwd(131072, log=True),
    bwd(262144),
    bwd(262144, F32),
]


def default_config(spec: Spec, arch: Arch = ARCH) -> FwdConfig | BwdConfig | None:
    kind = FwdConfig if isinstance(spec, SoftmaxFwdSpec) else BwdConfig
    return rules.choose(kind, replace(spec, align=16), arch)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "spec",
    kernel_faults.in_turn(SPECS, default_config),
    ids=lambda s: f"{s.name}-align{s.align}",
)
def test_kernel(spec: Spec, tmp_path: Path, code: MachineCode) -> None:
    names = [spec.x, *spec.rows, spec.dx if isinstance(spec, SoftmaxBwdSpec) else spec.out]
    config = default_config(spec)
    if config is None:  # documented limit
        assert ARCH.name == "sm120" and isinstance(spec, SoftmaxBwdSpec) and spec.n > 131072
        return
    compiled = compile_kernel(config.module, spec, config, ARCH, dump_dir=tmp_path)
    narrowest = min(names, key=dtypes.width)
    faults = functools.partial(kernel_faults.faults, spec, narrowest, config, ARCH, compiled)
    kernel_faults.check(spec, config, ARCH, compiled, faults, code)
