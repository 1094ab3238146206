"""What ours is compared with: torch eager, torch.compile, Liger, quack-kernels.

Each function prepares one launch for a case. A library that is missing or refuses the case raises;
the row then holds its error. Only the work that a step needs is in a launch: a backward gets rstd
as its forward saved it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import norm
from .norm import EPS, BwdBuffers, FwdBuffers
from .shapes import Case
from .timing import Launch
from .variant import Variant

ALLOCATES = "allocates its outputs, which rotate too"


def eager_fwd(case: Case) -> Launch:
    same = case.dtype == case.opt("w")

    def launch(b: FwdBuffers) -> tuple[Tensor, ...]:
        h = b.x if b.residual is None else b.x + b.residual
        y = F.rms_norm(h, (h.shape[-1],), b.w, EPS)
        y = y if same else y.to(b.x.dtype)  # torch promotes to the weight's dtype
        return (y,) if b.residual is None else (y, h)

    return launch


def compile_fwd(case: Case) -> Launch:
    def plain(x: Tensor, w: Tensor) -> Tensor:
        return norm.rms_norm(x.float(), w.float())[0].to(x.dtype)

    def fused(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x.float() + residual.float()
        return norm.rms_norm(h, w.float())[0].to(x.dtype), h.to(residual.dtype)

    if case.opt("residual") is None:
        compiled = compiled_for_one_shape(plain)
        return lambda b: (compiled(b.x, b.w),)
    both = compiled_for_one_shape(fused)
    return lambda b: both(b.x, b.residual, b.w)


def liger_fwd(case: Case) -> Launch:
    if case.opt("residual") is not None:
        from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

        return lambda b: fused_add_rms_norm_forward(b.x, b.residual, b.w, EPS, 0.0, "gemma")[:2]
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return lambda b: rms_norm_forward(b.x, b.w, EPS, 0.0, "gemma", None)[:1]


def quack_fwd(case: Case) -> Launch:
    from quack.rmsnorm import rmsnorm_fwd

    if case.opt("residual") is not None:
        return lambda b: rmsnorm_fwd(b.x, b.w, residual=b.residual, eps=EPS)[:2]
    return lambda b: rmsnorm_fwd(b.x, b.w, eps=EPS)[:1]


def eager_bwd(case: Case) -> Launch:
    backward = torch.ops.aten._fused_rms_norm_backward

    def launch(b: BwdBuffers) -> tuple[Tensor, ...]:
        n = b.x.shape[-1]
        return backward(b.dout, b.x, [n], b.rstd.unsqueeze(-1), b.w, [True, True])

    return launch


def compile_bwd(case: Case) -> Launch:
    def formula(x: Tensor, w: Tensor, dout: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        row = rstd.unsqueeze(-1)
        dx, terms = norm.rms_norm_backward(x.float(), w.float(), dout.float(), row)
        return dx.to(x.dtype), terms.sum(0).to(w.dtype)

    compiled = compiled_for_one_shape(formula)
    return lambda b: compiled(b.x, b.w, b.dout, b.rstd)


def liger_bwd(case: Case) -> Launch:
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

    m, n = case.shape
    dtype = norm.dtype_of(case)
    probe = torch.empty(min(m, 2), n, dtype=dtype, device="cuda")
    w = torch.empty(n, dtype=norm.dtype_of(case, "w"), device="cuda")
    *_, block, num_warps, mode = rms_norm_forward(probe, w, EPS, 0.0, "gemma", None)

    own: dict[int, tuple[BwdBuffers, Tensor]] = {}

    def launch(b: BwdBuffers) -> tuple[Tensor, ...]:
        # As the library's module calls it, dx replaces dout: it works on copies, made when warming
        # up. The other way first clears a new dx, which takes longer.
        if id(b) not in own:
            own[id(b)] = b, b.dout.clone()
        args = (own[id(b)][1], b.x, b.w, b.rstd, 0.0, mode, block, num_warps, True, None)
        return rms_norm_backward(*args)[:2]

    return launch


def quack_bwd(case: Case) -> Launch:
    from quack.rmsnorm import rmsnorm_bwd

    return lambda b: rmsnorm_bwd(b.x, b.w, b.dout, b.rstd)[:2]


def compiled_for_one_shape(function: Callable) -> Callable:
    """torch.compile with static shapes, in this process, forgetting what it compiled before."""
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    inductor.compile_threads = 1  # a pool of workers starts slower than one small kernel compiles
    return torch.compile(function, dynamic=False, fullgraph=True)


def _torch_note() -> str:
    """From torch 2.13 on, F.rms_norm may itself run kernels of the quack project."""
    import sys

    vendored = any(name.startswith("torch._vendor.quack") for name in sys.modules)
    return "torch's vendored kernels are loaded" if vendored else ""


def variants(case: Case) -> list[Variant]:
    """The peers of a case."""
    if case.op == "rmsnorm_fwd":
        return [
            Variant("eager", eager_fwd, "torch", note=_torch_note() or ALLOCATES),
            Variant("compile", compile_fwd, "torch", note=ALLOCATES),
            Variant("liger", liger_fwd, "liger-kernel", note=f"gemma casting; {ALLOCATES}"),
            Variant("quack-kernels", quack_fwd, "quack-kernels", note=ALLOCATES),
        ]
    return [
        Variant("eager", eager_bwd, "torch", note=f"fused backward kernels; {ALLOCATES}"),
        Variant("compile", compile_bwd, "torch", note=f"formula from rstd; {ALLOCATES}"),
        Variant(
            "liger",
            liger_bwd,
            "liger-kernel",
            note="gemma casting; dx replaces its own copies of dout",
        ),
        Variant("quack-kernels", quack_bwd, "quack-kernels", note=ALLOCATES),
    ]
