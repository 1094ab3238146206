"""Each kernel module once: few enough for every environment; the other files go through all cases.

Needs no GPU. ``QUACK_COMPILE_ARCH`` names the architecture.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quack_gemm
import quack_norm
from quack_core import arch as arches
from quack_core import env
from quack_core.jit.compile import compile_kernel
from quack_core.testing import cubin
from quack_gemm.config import GemmConfig
from quack_gemm.spec import GemmSpec
from quack_norm.ops.cross_entropy import rules as cross_entropy
from quack_norm.ops.cross_entropy.spec import CrossEntropyBwdSpec, CrossEntropyFwdSpec, RescaleSpec
from quack_norm.ops.rmsnorm import bwd_rules as rmsnorm_bwd
from quack_norm.ops.rmsnorm import rules as rmsnorm
from quack_norm.ops.rmsnorm.bwd_spec import RMSNormBwdSpec
from quack_norm.ops.rmsnorm.spec import RMSNormFwdSpec
from quack_norm.ops.row_map import rules
from quack_norm.ops.softmax import config as softmax
from quack_norm.ops.softmax.spec import SoftmaxBwdSpec, SoftmaxFwdSpec
from quack_norm.ops.topk import config as topk
from quack_norm.ops.topk.spec import TopKBwdSpec, TopKFwdSpec

F32, BF16 = "float32", "bfloat16"
ARCH = arches.get(env.get("QUACK_COMPILE_ARCH"))
OPS = Path(quack_norm.__file__).parent / "ops"
GEMM = Path(quack_gemm.__file__).parent


def of_rows(kind: type) -> Callable[[Any], Any]:
    return lambda spec: rules.choose(kind, replace(spec, align=16), ARCH)


def rms(n: int, **fields: Any) -> RMSNormFwdSpec:
    return RMSNormFwdSpec(n, BF16, BF16, **{"weight": BF16, **fields})


def rms_bwd(n: int) -> RMSNormBwdSpec:
    return RMSNormBwdSpec(n, BF16, BF16, BF16, weight=F32, dweight=True)


def rms_fwd_config(spec: RMSNormFwdSpec) -> Any:
    return rmsnorm.default_fwd(spec, ARCH)


def rms_bwd_config(spec: RMSNormBwdSpec) -> Any:
    return rmsnorm_bwd.default_bwd(spec, ARCH)


def ce_config(spec: CrossEntropyFwdSpec) -> Any:
    return cross_entropy.default_fwd(spec, ARCH)


# Module: a spec whose rule chooses it, and the rule.
KERNELS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "rmsnorm.fwd": (rms(1024, bias=F32, centred=True, rstd=True), rms_fwd_config),
    "rmsnorm.fwd_ring": (rms(131072), rms_fwd_config),
    "rmsnorm.fwd_shifted": (rms(1001, align=2), rms_fwd_config),
    "rmsnorm.fwd_staged": (rms(8192), rms_fwd_config),
    "rmsnorm.bwd": (rms_bwd(4096), rms_bwd_config),
    "rmsnorm.bwd_long": (rms_bwd(131072 if ARCH.name == "sm120" else 262144), rms_bwd_config),
    "softmax.fwd": (SoftmaxFwdSpec(512, BF16, BF16), of_rows(softmax.FwdConfig)),
    "softmax.fwd_staged": (SoftmaxFwdSpec(32000, BF16, BF16), of_rows(softmax.FwdConfig)),
    "softmax.bwd": (SoftmaxBwdSpec(512, BF16, BF16, BF16), of_rows(softmax.BwdConfig)),
    "softmax.bwd_staged": (SoftmaxBwdSpec(16384, BF16, BF16, BF16), of_rows(softmax.BwdConfig)),
    "cross_entropy.fwd_stream": (CrossEntropyFwdSpec(32000, BF16, "int64"), ce_config),
    "cross_entropy.fwd_staged": (
        CrossEntropyFwdSpec(32000, BF16, "int64", dx=True, reduction="mean"),
        ce_config,
    ),
    "cross_entropy.bwd": (
        CrossEntropyBwdSpec(32000, BF16, "int64", F32),
        lambda spec: cross_entropy.default_bwd(spec, ARCH),
    ),
    "cross_entropy.rescale": (
        RescaleSpec(BF16, F32),
        lambda spec: cross_entropy.default_rescale(spec, ARCH),
    ),
    "topk.fwd_sort": (TopKFwdSpec(64, 64, BF16), topk.default_fwd),
    "topk.fwd_groups": (TopKFwdSpec(4096, 8, BF16), topk.default_fwd),
    "topk.fwd_select": (TopKFwdSpec(50257, 1024, BF16), topk.default_fwd),
    "topk.bwd": (TopKBwdSpec(4096, 8, BF16, BF16, None), topk.default_bwd),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name: str, tmp_path: Path) -> None:
    spec, rule = KERNELS[name]
    config = rule(spec)
    assert config.module == f"quack_norm.ops.{name}"
    compiled = compile_kernel(config.module, spec, config, ARCH, dump_dir=tmp_path)
    assert not cubin.static_facts(compiled.cubin or b"", compiled.ptx).spills


# Module: a spec and a config. The architecture, for which alone it is, is the folder.
GEMM_KERNELS = {"sm90.kernel": (GemmSpec(BF16, BF16, BF16), GemmConfig())}


@pytest.mark.parametrize("name", GEMM_KERNELS)
def test_gemm_kernel(name: str, tmp_path: Path) -> None:
    spec, config = GEMM_KERNELS[name]
    if name.partition(".")[0] != ARCH.name:
        pytest.skip(f"a kernel for another architecture than {ARCH.name}")
    compiled = compile_kernel(f"quack_gemm.{name}", spec, config, ARCH, dump_dir=tmp_path)
    assert not cubin.static_facts(compiled.cubin or b"", compiled.ptx).spills


@pytest.mark.parametrize(("folder", "kernels"), [(OPS, KERNELS), (GEMM, GEMM_KERNELS)])
def test_no_kernel_is_left_out(folder: Path, kernels: dict[str, Any]) -> None:
    files = [path for path in folder.glob("*/*.py") if "\ndef build(" in path.read_text()]
    assert {f"{path.parent.name}.{path.stem}" for path in files} == set(kernels)
