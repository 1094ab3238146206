"""LayerNorm as problems: data, float64 references, checks; and what it is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quack_core import arch, torch_op
from quack_norm.ops.rmsnorm import bwd_rules, rules
from quack_norm.ops.rmsnorm import launch as launches
from quack_norm.ops.rmsnorm.bwd_spec import RMSNormBwdSpec
from quack_norm.ops.rmsnorm.spec import RMSNormFwdSpec

from .norm import dtype_of, judge, poison, row_chunks, size
from .peers import ALLOCATES, compiled_for_one_shape
from .rmsnorm import alignment, workspace
from .shapes import Case
from .timing import Launch
from .variant import Variant

EPS = 1e-5


@dataclass(frozen=True)
class Fwd:
    x: Tensor  # (M, N)
    w: Tensor  # (N,)
    b: Tensor  # (N,)
    out: Tensor  # (M, N)


@dataclass(frozen=True)
class Bwd:
    """``rows`` is (M, 3), as our forward saves it; ``mean`` and ``rstd`` (M,) are for the peers."""

    x: Tensor
    w: Tensor
    b: Tensor
    dout: Tensor
    rows: Tensor
    mean: Tensor
    rstd: Tensor
    dx: Tensor
    dw: Tensor
    db: Tensor


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and rstd (M, 1), in the dtype of `x`."""
    mean = x.mean(-1, keepdim=True)
    return mean, torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + EPS)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The definition, in the dtype of the operands."""
    mean, rstd = statistics(x)
    return (x - mean) * rstd * w + b


def layer_norm_backward(
    x: Tensor, w: Tensor, dout: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """dx and the terms whose sum over rows is dw, in the dtype of `x`; those of db are `dout`."""
    xhat, wdy = (x - mean) * rstd, dout * w
    level = wdy.mean(-1, keepdim=True)
    return rstd * (wdy - level - xhat * (wdy * xhat).mean(-1, keepdim=True)), dout * xhat


def is_backward(case: Case) -> bool:
    return case.op == "layernorm_bwd"


class LayerNormFwd:
    """out = (x - mean) * rstd * w + b, rows of (M, N)."""

    flop = 0

    def __init__(self, case: Case, device: str = "cuda"):
        self.case, self.device = case, device
        self._data: Fwd | None = None
        meta = self._empty("meta")
        self.read_bytes, self.write_bytes = size(meta.x, meta.w, meta.b), size(meta.out)
        self.set_bytes = self.read_bytes + self.write_bytes

    def _empty(self, device: str) -> Fwd:
        x = torch.empty(self.case.shape, dtype=dtype_of(self.case), device=device)
        w = torch.empty(self.case.shape[-1], dtype=dtype_of(self.case, "w"), device=device)
        return Fwd(x, w, torch.empty_like(w), torch.empty_like(x))

    def make(self) -> Fwd:
        data = self._empty(self.device)
        for tensor in (data.x, data.w, data.b):
            tensor.normal_()
        return data

    def check(self, launch: Launch) -> float:
        if self._data is None:
            self._data = self.make()
        poison(self._data.out)
        (out,) = launch(self._data)
        return max(self._judge(self._data, out, rows) for rows in row_chunks(out))

    def _judge(self, data: Fwd, out: Tensor, rows: slice) -> float:
        x, w, b = data.x[rows], data.w, data.b
        ref64 = layer_norm(x.double(), w.double(), b.double())
        base = F.layer_norm(x.float(), (x.shape[-1],), w.float(), b.float(), EPS).to(x.dtype)
        return judge("out", out[rows], ref64, base, None)


class LayerNormBwd:
    """dx, dw and db of out = (x - mean) * rstd * w + b, rows of (M, N)."""

    flop = 0

    def __init__(self, case: Case, device: str = "cuda"):
        self.case, self.device = case, device
        self._data: Bwd | None = None
        meta = self._empty("meta")
        self.read_bytes = size(meta.x, meta.w, meta.dout, meta.mean, meta.rstd)
        self.write_bytes = size(meta.dx, meta.dw, meta.db)
        self.set_bytes = self.read_bytes + self.write_bytes

    def _empty(self, device: str) -> Bwd:
        m, n = self.case.shape
        x = torch.empty(m, n, dtype=dtype_of(self.case), device=device)
        w = torch.empty(n, dtype=dtype_of(self.case, "w"), device=device)
        rows = torch.empty(m, 3, device=device)
        mean, rstd = torch.empty(m, device=device), torch.empty(m, device=device)
        like_w = [torch.empty_like(w) for _ in range(3)]
        dx, dout = torch.empty_like(x), torch.empty_like(x)
        return Bwd(x, w, like_w[0], dout, rows, mean, rstd, dx, like_w[1], like_w[2])

    def make(self) -> Bwd:
        data = self._empty(self.device)
        for tensor in (data.x, data.w, data.b, data.dout):
            tensor.normal_()
        for rows in row_chunks(data.x):
            mean, rstd = statistics(data.x[rows].double())
            data.rows[rows] = torch.cat([rstd, mean, mean - mean.float()], -1).float()
        data.rstd.copy_(data.rows[:, 0])
        data.mean.copy_(data.rows[:, 1])
        return data

    def check(self, launch: Launch) -> float:
        if self._data is None:
            self._data = self.make()
        data = self._data
        poison(data.dx, data.dw, data.db)
        dx, *sums = launch(data)
        worst = max(self._judge_rows(data, dx, rows) for rows in row_chunks(data.x))
        for name, found, (right, base, terms) in zip(
            ("dw", "db"), sums, self._sums(data), strict=True
        ):
            worst = max(worst, judge(name, found, right, base, terms))
        return worst

    def _gradients(self, data: Bwd, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x, w, dout = data.x[rows].to(dtype), data.w.to(dtype), data.dout[rows].to(dtype)
        return layer_norm_backward(x, w, dout, *statistics(x))

    def _judge_rows(self, data: Bwd, dx: Tensor, rows: slice) -> float:
        right, base = (self._gradients(data, rows, d)[0] for d in (torch.float64, torch.float32))
        return judge("dx", dx[rows], right, base.to(dx.dtype), None)

    def _sums(self, data: Bwd) -> Sequence[tuple[Tensor, Tensor, Tensor]]:
        """Of dw and db: in float64, in float32 as the baseline, and of the terms' magnitudes."""
        n = self.case.shape[-1]
        right, terms = torch.zeros(2, 2, n, dtype=torch.float64, device=self.device)
        base = torch.zeros(2, n, device=self.device)
        for rows in row_chunks(data.x):
            dout = data.dout[rows]
            each = torch.stack([self._gradients(data, rows, torch.float64)[1], dout.double()])
            right, terms = right + each.sum(1), terms + each.abs().sum(1)
            base += torch.stack([self._gradients(data, rows, torch.float32)[1], dout.float()]).sum(
                1
            )
        return list(zip(right, base.to(data.w.dtype), terms, strict=True))


def problem(case: Case, device: str = "cuda") -> LayerNormFwd | LayerNormBwd:
    """The problem of a case."""
    return (LayerNormBwd if is_backward(case) else LayerNormFwd)(case, device)


# --- ours


def spec_of(case: Case) -> RMSNormFwdSpec | RMSNormBwdSpec:
    """The spec that the public function makes for fresh contiguous operands."""
    x, w = (torch_op.dtype_name(dtype_of(case, opt)) for opt in (None, "w"))
    n, align = case.shape[-1], alignment(case)
    if is_backward(case):
        spec = RMSNormBwdSpec(n=n, x=x, dout=x, dx=x, weight=w, dweight=True, dbias=w, align=align)
        return replace(spec, centred=True)
    return RMSNormFwdSpec(n=n, x=x, out=x, weight=w, bias=w, align=align, centred=True)


def default_config(case: Case) -> Any:
    """The configuration that the rule chooses here."""
    rule = bwd_rules.default_bwd if is_backward(case) else rules.default_fwd
    return rule(spec_of(case), arch.detect())  # type: ignore[arg-type]


def candidates(case: Case) -> list[Any]:
    """Configurations to compare it with."""
    all_of = bwd_rules.candidates if is_backward(case) else rules.candidates
    return list(all_of(spec_of(case), arch.detect()))  # type: ignore[arg-type]


def public(case: Case) -> Launch:
    """What a caller gets."""
    if is_backward(case):

        def backward(b: Bwd) -> tuple[Tensor, ...]:
            options = (b.x.dtype, None, True, b.w.dtype, False, True)
            dx, _, dw, db = launches.backward(b.x, b.w, b.dout, b.rows, None, 0.0, *options)
            return dx, dw, db  # type: ignore[return-value]

        return backward

    def forward(b: Fwd) -> tuple[Tensor, ...]:
        from quack_norm.ops.layernorm.api import layernorm

        layernorm(b.x, b.w, b.b, eps=EPS, out=b.out)
        return (b.out,)

    return forward


def explicit(case: Case, config: Any, run: Any, state: Tensor | None, groups: int) -> Launch:
    """A compiled kernel as a launch on buffers."""
    if is_backward(case):
        work = workspace(case, config, groups)

        def backward(b: Bwd) -> tuple[Tensor, ...]:
            outputs = (b.dx, None, b.dw, b.db)
            run(b.x, b.w, b.dout, b.rows, None, *outputs, work, state, 0.0, groups)
            return b.dx, b.dw, b.db

        return backward

    def forward(b: Fwd) -> tuple[Tensor, ...]:
        run(b.x, b.w, b.b, None, b.out, None, None, state, EPS, 0.0, groups)
        return (b.out,)

    return forward


# --- peers


def _eager(case: Case) -> Launch:
    n = [case.shape[-1]]
    if is_backward(case):
        backward = torch.ops.aten.native_layer_norm_backward

        def launch(b: Bwd) -> tuple[Tensor, ...]:
            row = (b.mean.unsqueeze(-1), b.rstd.unsqueeze(-1))
            return backward(b.dout, b.x, n, *row, b.w, b.b, [True, True, True])

        return launch
    same = case.dtype == case.opt("w")

    def forward(b: Fwd) -> tuple[Tensor, ...]:
        x = b.x if same else b.x.to(b.w.dtype)  # torch takes operands of one dtype
        return (F.layer_norm(x, n, b.w, b.b, EPS).to(b.x.dtype),)

    return forward


def _compile(case: Case) -> Launch:
    if is_backward(case):

        def formula(
            x: Tensor, w: Tensor, dout: Tensor, mean: Tensor, rstd: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            row = (mean.unsqueeze(-1), rstd.unsqueeze(-1))
            dx, terms = layer_norm_backward(x.float(), w.float(), dout.float(), *row)
            return dx.to(x.dtype), terms.sum(0).to(w.dtype), dout.float().sum(0).to(w.dtype)

        backward = compiled_for_one_shape(formula)
        return lambda b: backward(b.x, b.w, b.dout, b.mean, b.rstd)

    def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return layer_norm(x.float(), w.float(), b.float()).to(x.dtype)

    forward = compiled_for_one_shape(plain)
    return lambda b: (forward(b.x, b.w, b.b),)


def _liger(case: Case) -> Launch:
    from liger_kernel.ops.layer_norm import layer_norm_backward as backward
    from liger_kernel.ops.layer_norm import layer_norm_forward as forward

    if is_backward(case):
        return lambda b: backward(b.dout, b.x, b.w, b.b, b.mean, b.rstd)[:3]
    return lambda b: forward(b.x, b.w, b.b, EPS)[:1]


def _quack(case: Case) -> Launch:
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    if is_backward(case):
        return lambda b: layernorm_bwd(b.x, b.w, b.dout, b.rstd, b.mean)  # type: ignore[no-any-return]
    return lambda b: (layernorm_fwd(b.x, b.w, b.b, EPS),)


def peers(case: Case) -> list[Variant]:
    """Torch eager, torch.compile, Liger, quack-kernels."""
    return [
        Variant("eager", _eager, "torch", note=ALLOCATES),
        Variant("compile", _compile, "torch", note=ALLOCATES),
        Variant("liger", _liger, "liger-kernel", note=ALLOCATES),
        Variant("quack-kernels", _quack, "quack-kernels", note=ALLOCATES),
    ]
