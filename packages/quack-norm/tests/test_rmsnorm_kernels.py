"""Each kernel once, on the smallest problem that takes every path through it.

These are the tests for compute-sanitizer (marker ``sanitizer``); see docs/guides/debugging-kernels.md.
"""

import dataclasses

import pytest
from rmsnorm_oracle import BF16, F32, Case, check

from quack_core import arch, dtypes
from quack_core.testing.inputs import Layout
from quack_norm.ops.rmsnorm import rules
from quack_norm.ops.rmsnorm.spec import RMSNormBwdSpec, RMSNormFwdSpec

pytestmark = pytest.mark.sanitizer

ALL = {"weight": BF16, "bias": F32, "residual": BF16, "prenorm": True}
# More rows than the GPU has room for at once, so that kernels whose CTAs stay go round.
CASES = [
    (Case("rows side by side", (70, 128)), "fwd", "bwd"),
    (Case("one row per CTA, ragged", (9, 1000), **ALL), "fwd", "bwd"),
    (Case("elements one by one", (40, 33)), "fwd", "bwd"),
    (Case("pieces of memory", (11, 1001), **ALL), "fwd_shifted", "bwd"),
    (Case("pieces of memory in fp32", (11, 1001), F32, bias=F32), "fwd_shifted", "bwd"),
    (Case("a ring", (801, 4096), weight=BF16), "fwd_ring", "bwd"),
    (Case("a ring in fp32", (401, 4096), F32, **ALL | {"residual": F32}), "fwd", "bwd"),
    (Case("a ring of odd rows", (801, 4097)), "fwd_ring", "bwd"),
    (Case("a ring of odd rows with all", (265, 8193), **ALL), "fwd_ring", "bwd"),
    (Case("a ring of odd rows in fp32", (265, 4099), F32, bias=F32), "fwd_ring", "bwd"),
    (Case("a ring over a cluster", (70, 32768), **ALL), "fwd_ring", "bwd"),
    (Case("a ragged ring over a cluster", (70, 32776)), "fwd_ring", "bwd"),
    (Case("odd rows over a cluster", (35, 50257)), "fwd_ring", "bwd"),
    (Case("rows that are not kept", (9, 262144), F32), "fwd", "bwd_long"),
    (Case("heads", (5, 6, 128), per_head=True), "fwd", "bwd"),
]
SHIFTED = [
    Case("a ring, x unaligned", (801, 4096), x_layout=Layout.ODD_OFFSET),
    Case("a ring, dout unaligned", (801, 4096), dout_layout=Layout.ODD_ROW_STRIDED),
]


@pytest.mark.parametrize("case", [*(case for case, _, _ in CASES), *SHIFTED], ids=lambda c: c.id)
@pytest.mark.usefixtures("cuda")
def test_every_kernel(case: Case) -> None:
    check(case, "cuda")


def specs(case: Case) -> tuple[RMSNormFwdSpec, RMSNormBwdSpec]:
    def name(dtype: object) -> str | None:
        return None if dtype is None else str(dtype).removeprefix("torch.")

    n, rank = case.shape[-1], len(case.shape)
    x, weight, bias, residual = map(name, (case.x, case.weight, case.bias, case.residual))
    stored = name(case.stored_dtype) if case.prenorm else None
    assert x is not None
    common = {"weight": weight, "per_head": case.per_head, "rank": rank}
    forward = RMSNormFwdSpec(
        n, x, x, bias=bias, residual=residual, residual_out=stored, rstd=True, **common
    )
    backward = RMSNormBwdSpec(n, stored or x, x, x, dweight=True, dbias=bias, **common)
    backward = dataclasses.replace(backward, dresidual_out=stored, dresidual=residual)
    aligned = n * dtypes.width(x) // 8 % 16 == 0
    return forward, dataclasses.replace(backward, align=16 if aligned else 2)


@pytest.mark.parametrize(("case", "fwd", "bwd"), CASES, ids=lambda v: getattr(v, "id", v))
def test_the_cases_reach_the_kernels(case: Case, fwd: str, bwd: str) -> None:
    """On SM90: what the list is for."""
    forward, backward = specs(case)
    chosen = (rules.default_fwd(forward, arch.SM90), rules.default_bwd(backward, arch.SM90))
    assert [c.module.rsplit(".", 1)[1] for c in chosen] == [fwd, bwd]


def test_no_kernel_is_left_out() -> None:
    reached = {name for _, *names in CASES for name in names}
    assert reached == {"fwd", "fwd_ring", "fwd_shifted", "bwd", "bwd_long"}
