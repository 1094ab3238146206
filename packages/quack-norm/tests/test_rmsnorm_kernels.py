"""Each kernel once, on the smallest problem that takes every path through it.

These are the tests for compute-sanitizer (marker ``sanitizer``); see docs/guides/debugging-kernels.md.
"""

import dataclasses

import pytest
from rmsnorm_oracle import BF16, F32, Case, check

from quack_core import arch, dtypes
from quack_core.testing.inputs import Layout
from quack_norm.ops.rmsnorm import bwd_rules, rules
from quack_norm.ops.rmsnorm.bwd_spec import RMSNormBwdSpec
from quack_norm.ops.rmsnorm.spec import RMSNormFwdSpec

pytestmark = pytest.mark.sanitizer

ALL = {"weight": BF16, "bias": F32, "residual": BF16, "prenorm": True}
ADDED = {"weight": BF16, "residual": BF16, "prenorm": True}
# More rows than the GPU has room for at once, so that kernels whose CTAs stay go round.
CASES = [
    (Case("rows side by side", (70, 128)), "fwd", "bwd"),
    (Case("one row per CTA, ragged", (9, 1000), **ALL), "fwd", "bwd"),
    (Case("elements one by one", (40, 33)), "fwd", "bwd"),
    (Case("pieces of memory", (11, 1001), **ALL), "fwd_shifted", "bwd"),
    (Case("pieces of memory in fp32", (11, 1001), F32, bias=F32), "fwd_shifted", "bwd"),
    (Case("eight CTAs on an SM", (801, 4096), weight=BF16), "fwd", "bwd"),
    (Case("held", (801, 6144), weight=BF16), "fwd_staged", "bwd"),
    (Case("held in fp32", (401, 4096), F32, **ALL | {"residual": F32}), "fwd_staged", "bwd"),
    (Case("held, ragged", (1100, 4104), weight=BF16, bias=F32), "fwd_staged", "bwd"),
    (Case("held by a cluster", (70, 32768), **ADDED), "fwd_staged", "bwd"),
    (Case("by two CTAs", (70, 16384), weight=BF16), "fwd", "bwd"),
    (Case("in batches", (9, 16384)), "fwd_staged", "bwd"),
    (Case("in ragged batches", (9, 16392), weight=BF16), "fwd_staged", "bwd"),
    (Case("in ragged batches of a cluster", (9, 32776)), "fwd_staged", "bwd"),
    (Case("all in ragged batches of a cluster", (9, 32776), **ALL), "fwd_staged", "bwd"),
    (Case("odd rows held", (801, 4097)), "fwd_staged", "bwd"),
    (Case("odd rows with all", (265, 8193), **ALL), "fwd_staged", "bwd"),
    (Case("odd rows in fp32", (265, 4099), F32, bias=F32), "fwd_staged", "bwd"),
    (Case("odd rows in batches", (265, 16385)), "fwd_staged", "bwd"),
    (Case("a ring over a cluster", (19, 131072)), "fwd_ring", "bwd"),
    (Case("a ragged ring over a cluster", (19, 65544), **ADDED), "fwd_ring", "bwd"),
    (Case("the longest with bias", (9, 262144), bias=F32), "fwd_staged", "bwd_long"),
    (Case("the longest ring", (9, 262144)), "fwd_ring", "bwd_long"),
    (Case("odd rows over a cluster", (35, 50257)), "fwd_ring", "bwd"),
    (Case("rows that are not kept", (9, 262144), F32), "fwd", "bwd_long"),
    (Case("heads", (5, 6, 128), per_head=True), "fwd", "bwd"),
]
SHIFTED = [
    Case("eight CTAs on an SM, x unaligned", (801, 4096), x_layout=Layout.ODD_OFFSET),
    Case("held, x unaligned", (801, 6144), x_layout=Layout.ODD_OFFSET),
    Case(
        "held by a cluster, rows unaligned", (70, 32768), **ADDED, x_layout=Layout.ODD_ROW_STRIDED
    ),
    Case("in batches, x unaligned", (9, 16384), x_layout=Layout.ODD_OFFSET),
    Case("in batches, rows unaligned", (9, 32776), x_layout=Layout.ODD_ROW_STRIDED),
    Case("a ring, x unaligned", (19, 131072), x_layout=Layout.ODD_OFFSET),
    Case("dout unaligned", (801, 4096), dout_layout=Layout.ODD_ROW_STRIDED),
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
    chosen = (rules.default_fwd(forward, arch.SM90), bwd_rules.default_bwd(backward, arch.SM90))
    assert [c.module.rsplit(".", 1)[1] for c in chosen] == [fwd, bwd]


def test_no_kernel_is_left_out() -> None:
    reached = {name for _, *names in CASES for name in names}
    assert reached == {"fwd", "fwd_ring", "fwd_shifted", "fwd_staged", "bwd", "bwd_long"}


@pytest.mark.parametrize("cases", [[case for case, _, _ in CASES], SHIFTED], ids=["all", "shifted"])
def test_staged_rows_move_in_every_way(cases: list[Case]) -> None:
    """Held in registers or read in batches; by a CTA or a cluster."""
    reached = set()
    for forward, _ in map(specs, cases):
        chosen = rules.default_fwd(forward, arch.SM90)
        if chosen.unroll:
            reached.add((chosen.batches(forward) == 1, chosen.cluster > 1))
    assert reached == {(held, shared) for held in (True, False) for shared in (True, False)}
