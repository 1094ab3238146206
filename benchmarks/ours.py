"""Our own variants: the public functions with their default configuration, and explicit ones."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quack_core import arch, occupancy, torch_op
from quack_core.jit import cache
from quack_norm.ops.rmsnorm import launch as launches
from quack_norm.ops.rmsnorm import rules
from quack_norm.ops.rmsnorm.spec import RMSNormBwdSpec, RMSNormFwdSpec

from . import softmax
from .families import is_softmax
from .norm import EPS, BwdBuffers, FwdBuffers, dtype_of
from .shapes import Case
from .timing import Launch
from .variant import Failure, Variant, attempt

PACKAGE = "quack-norm"
ALIGN = 16
"""Bytes that divide the addresses torch allocates."""


def spec_of(case: Case) -> RMSNormFwdSpec | RMSNormBwdSpec:
    """The spec that the public function makes for fresh contiguous operands."""
    x, w = (torch_op.dtype_name(dtype_of(case, opt)) for opt in (None, "w"))
    n = case.shape[-1]
    align = ALIGN
    while n * dtype_of(case).itemsize % align:
        align //= 2
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
    if is_softmax(case):
        return softmax.default_config(case)
    rule = rules.default_bwd if case.op == "rmsnorm_bwd" else rules.default_fwd
    return rule(spec_of(case), arch.detect())  # type: ignore[arg-type]


def public(case: Case) -> Launch:
    """What a caller gets."""
    if is_softmax(case):
        return softmax.public(case)
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


def with_config(chosen: Any, case: Case) -> Launch:
    """The compiled kernel itself with an explicit configuration; scratch is allocated once."""
    spec: Any = softmax.spec_of(case) if is_softmax(case) else spec_of(case)
    target, device = arch.detect(), torch.cuda.current_device()
    run = cache.load(chosen.module, spec, chosen, target)
    groups, work = 0, None
    if chosen.persistent:
        smem_bytes = chosen.smem_bytes(spec)
        args = (device, chosen.cluster, chosen.num_threads, smem_bytes)
        resident = occupancy.resident_clusters(*args)
        if resident == 0:
            raise ValueError(f"{chosen} does not fit on an SM: {smem_bytes} bytes of shared memory")
        groups = chosen.groups(spec, case.shape[0], 1, resident)
    state = None
    if chosen.state_ints:
        state = torch.zeros(chosen.state_ints, dtype=torch.int32, device="cuda")
    if is_softmax(case):
        return softmax.explicit(case, run, state, groups)
    if isinstance(spec, RMSNormFwdSpec):

        def forward(b: FwdBuffers) -> tuple[Tensor, ...]:
            outputs = (b.out, b.residual_out, None)
            run(b.x, b.w, None, b.residual, *outputs, state, EPS, 0.0, groups)
            return (b.out,) if b.residual_out is None else (b.out, b.residual_out)

        return forward
    elements = chosen.work_elements(spec, groups, 1)
    if elements:
        work = torch.empty(elements, dtype=torch.float32, device="cuda")

    def backward(b: BwdBuffers) -> tuple[Tensor, ...]:
        outputs = (b.dx, None, b.dw, None)
        run(b.x, b.w, b.dout, b.rstd, None, *outputs, work, state, 0.0, groups)
        return b.dx, b.dw

    return backward


def variants(case: Case) -> list[Variant]:
    """The public function, as it is."""
    found = attempt(lambda: str(default_config(case)))  # a failure shows again when the row runs
    text = found.note if isinstance(found, Failure) else found
    return [Variant("ours", public, PACKAGE, role="ours", config=text)]


def _candidates(case: Case) -> list[Any]:
    if is_softmax(case):
        return [default_config(case), *softmax.candidates(case)]
    return list(rules.candidates(spec_of(case), arch.detect()))


def config_variants(
    case: Case,
    tries: Sequence[Mapping[str, object]] = (),
    wanted: Sequence[str] = (),
    limit: int = 0,
) -> list[Variant]:
    """The default configuration, and those to compare it with.

    Args:
        case: what to compute.
        tries: fields to change in the default; without any, the candidates of the operator.
        wanted: keep only configurations whose text has all of these, such as ``"cluster=4"``.
        limit: at most so many; 0 is all.
    """
    default = default_config(case)
    if tries:
        found = [made for fields in tries if (made := _changed(default, fields)) is not None]
    else:
        found = _candidates(case)
    kept = [c for c in dict.fromkeys(found) if all(piece in str(c) for piece in wanted)]
    chosen = list(dict.fromkeys([default, *kept]))[: limit or None]
    return [
        Variant(
            short(c) + (" (default)" if c == default else ""),
            functools.partial(with_config, c),
            PACKAGE,
            role="config",
            config=str(c),
        )
        for c in chosen
    ]


def _changed(default: Any, fields: Mapping[str, object]) -> Any:
    """The default with other values, or None where the configuration itself refuses them."""
    made = attempt(lambda: dataclasses.replace(default, **fields))
    if isinstance(made, Failure):
        print(f"{dict(fields)}: {made.note}", flush=True)
        return None
    return made


def short(chosen: Any) -> str:
    """A configuration in few characters: the class name left away."""
    return str(chosen).partition("(")[2].removesuffix(")").replace(", ", " ")
