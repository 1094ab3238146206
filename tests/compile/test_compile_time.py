"""What compiling a kernel of each class costs: a kernel that takes twice as long raises the alarm.

Needs no GPU. ``QUACK_COMPILE_ARCH`` names the architecture.
"""

import time
from typing import Any

import pytest
import torch

from quack_core import arch, env
from quack_core.jit import blank
from quack_core.jit.compile import compile_kernel
from quack_norm import kernels

ARCH = arch.get(env.get("QUACK_COMPILE_ARCH"))
# Tracing takes most of the time, and it is the same for all architectures.
pytestmark = [pytest.mark.exhaustive, *[pytest.mark.elsewhere] * (ARCH.name != "sm90")]


def t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    grad = dtype.is_floating_point
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


# Processor seconds of the slowest kernel of a call, forward and backward; of 2026-11-30, the first
# compilation of the process aside.
BUDGET_S: dict[str, tuple[float, Any]] = {
    "rmsnorm": (0.45, lambda: kernels.rmsnorm(t(8, 4096), t(4096), arch=ARCH)),
    "layernorm": (0.55, lambda: kernels.layernorm(t(8, 4096), t(4096), arch=ARCH)),
    "softmax": (0.25, lambda: kernels.softmax(t(8, 32000), arch=ARCH)),
    "cross_entropy": (
        0.60,
        lambda: kernels.cross_entropy(t(8, 128256), t(8, dtype=torch.int64), arch=ARCH),
    ),
    "topk": (1.50, lambda: kernels.topk(t(8, 4096), 64, arch=ARCH)),
}


@pytest.fixture(scope="module", autouse=True)
def ready() -> None:
    """The first compilation of a process imports what all need."""
    compile_kernel(blank.__name__, blank.BlankSpec(), blank.BlankConfig(), ARCH)


def compile_seconds(kernel: Any) -> float:
    started = time.process_time()
    compile_kernel(kernel.module, kernel.spec, kernel.config, kernel.arch)
    return time.process_time() - started


@pytest.mark.parametrize(("budget", "list_kernels"), BUDGET_S.values(), ids=BUDGET_S)
def test_compile_time_KC_10(budget: float, list_kernels: Any) -> None:
    for kernel in list_kernels():
        if (first := compile_seconds(kernel)) > 2 * budget:  # another process may have disturbed it
            again = compile_seconds(kernel)
            assert again <= 2 * budget, f"{kernel.name}: {first:.2f} and {again:.2f} s"
