"""RMSNorm as a family: what `ours` and the runner ask of it."""

from typing import Any

import torch
from torch import Tensor

from quack_core import arch, torch_op
from quack_norm.ops.rmsnorm import bwd_rules, rules
from quack_norm.ops.rmsnorm import launch as launches
from quack_norm.ops.rmsnorm.bwd_spec import RMSNormBwdSpec
from quack_norm.ops.rmsnorm.spec import RMSNormFwdSpec

from .norm import EPS, BwdBuffers, FwdBuffers, dtype_of, problem
from .peers import variants as peers
from .shapes import Case
from .timing import Launch

__all__ = ["candidates", "default_config", "explicit", "peers", "problem", "public", "spec_of"]
ALIGN = 16
"""Bytes that divide the addresses torch allocates."""


def alignment(case: Case) -> int:
    """Bytes that divide the addresses of all rows of fresh contiguous operands."""
    align = ALIGN
    while case.shape[-1] * dtype_of(case).itemsize % align:
        align //= 2
    return align


def spec_of(case: Case) -> RMSNormFwdSpec | RMSNormBwdSpec:
    """The spec that the public function makes for fresh contiguous operands."""
    x, w = (torch_op.dtype_name(dtype_of(case, opt)) for opt in (None, "w"))
    n, align = case.shape[-1], alignment(case)
    if case.op == "rmsnorm_bwd":
        return RMSNormBwdSpec(n=n, x=x, dout=x, dx=x, weight=w, dweight=True, align=align)
    residual = None
    if case.opt("residual") is not None:
        residual = torch_op.dtype_name(dtype_of(case, "residual"))
    return RMSNormFwdSpec(
        n=n, x=x, out=x, weight=w, residual=residual, residual_out=residual, align=align
    )


def default_config(case: Case) -> Any:
    """The configuration that the rule chooses here."""
    rule = bwd_rules.default_bwd if case.op == "rmsnorm_bwd" else rules.default_fwd
    return rule(spec_of(case), arch.detect())  # type: ignore[arg-type]


def candidates(case: Case) -> list[Any]:
    """Configurations to compare it with."""
    all_of = bwd_rules.candidates if case.op == "rmsnorm_bwd" else rules.candidates
    return list(all_of(spec_of(case), arch.detect()))  # type: ignore[arg-type]


def public(case: Case) -> Launch:
    """What a caller gets."""
    if case.op == "rmsnorm_bwd":
        return _public_bwd
    return _public_fwd if case.opt("residual") is None else _public_add


def _public_fwd(b: FwdBuffers) -> tuple[Tensor, ...]:
    from quack_norm import rmsnorm

    rmsnorm(b.x, b.w, eps=EPS, out=b.out)
    return (b.out,)


def _public_add(b: FwdBuffers) -> tuple[Tensor, ...]:
    from quack_norm import rmsnorm

    return rmsnorm(b.x, b.w, residual=b.residual, eps=EPS, prenorm=True, out=b.out)  # type: ignore[return-value]


def _public_bwd(b: BwdBuffers) -> tuple[Tensor, ...]:
    options = (b.x.dtype, None, True, None, False)
    dx, _, dw, _ = launches.backward(b.x, b.w, b.dout, b.rstd, None, 0.0, *options)
    return dx, dw  # type: ignore[return-value]


def explicit(case: Case, config: Any, run: Any, state: Tensor | None, groups: int) -> Launch:
    """A compiled kernel as a launch on buffers."""
    if case.op == "rmsnorm_bwd":
        work = workspace(case, config, groups)

        def backward(b: BwdBuffers) -> tuple[Tensor, ...]:
            outputs = (b.dx, None, b.dw, None)
            run(b.x, b.w, b.dout, b.rstd, None, *outputs, work, state, 0.0, groups)
            return b.dx, b.dw

        return backward

    def forward(b: FwdBuffers) -> tuple[Tensor, ...]:
        outputs = (b.out, b.residual_out, None)
        run(b.x, b.w, None, b.residual, *outputs, state, EPS, 0.0, groups)
        return (b.out,) if b.residual_out is None else (b.out, b.residual_out)

    return forward


def workspace(case: Case, config: Any, groups: int) -> Tensor | None:
    """Memory for the column sums of a backward, or None if the kernel needs none."""
    elements = config.work_elements(spec_of(case), groups, 1)
    return torch.empty(elements, dtype=torch.float32, device="cuda") if elements else None
