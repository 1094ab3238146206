"""Softmax as problems: data, float64 references, checks; and what it is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quack_core import arch, torch_op
from quack_norm.ops.row_map import rules
from quack_norm.ops.softmax import launch as launches
from quack_norm.ops.softmax.config import BwdConfig, FwdConfig
from quack_norm.ops.softmax.spec import SoftmaxBwdSpec, SoftmaxFwdSpec

from .norm import dtype_of, judge, poison, row_chunks, size
from .peers import ALLOCATES, compiled_for_one_shape
from .rmsnorm import alignment
from .shapes import Case
from .timing import Launch
from .variant import Variant


@dataclass(frozen=True)
class Buffers:
    """Forward: ``out`` of ``x``. Backward: ``dx`` of ``out`` and ``dout``."""

    x: Tensor | None
    out: Tensor
    dout: Tensor | None = None
    dx: Tensor | None = None


class Softmax:
    """Rows of (M, N), forward or backward by the case's ``op``."""

    flop = 0

    def __init__(self, case: Case, device: str = "cuda"):
        self.case, self.device = case, device
        self.backward = case.op == "softmax_bwd"
        self._data: Buffers | None = None
        meta = self._empty(torch.device("meta"))
        written = meta.dx if self.backward else meta.out
        self.write_bytes = size(written)
        self.read_bytes = size(meta.x, meta.out, meta.dout, meta.dx) - self.write_bytes
        self.set_bytes = self.read_bytes + self.write_bytes

    def _empty(self, device: torch.device) -> Buffers:
        def one() -> Tensor:
            return torch.empty(self.case.shape, dtype=dtype_of(self.case), device=device)

        return Buffers(None, one(), one(), one()) if self.backward else Buffers(one(), one())

    def make(self) -> Buffers:
        data = self._empty(torch.device(self.device))
        if data.x is not None:
            data.x.normal_()
        if data.dout is not None:
            data.dout.normal_()
            for rows in row_chunks(data.out):
                logits = torch.randn(data.out[rows].shape, device=self.device)
                data.out[rows] = torch.softmax(logits, -1).to(data.out.dtype)
        return data

    def check(self, launch: Launch) -> float:
        if self._data is None:
            self._data = self.make()
        data = self._data
        poison(data.dx if self.backward else data.out)
        outputs = launch(data)
        return max(self._judge(data, outputs, rows) for rows in row_chunks(outputs[0]))

    def _judge(self, data: Buffers, outputs: Sequence[Tensor], rows: slice) -> float:
        if data.x is not None:
            x = data.x[rows]
            right, base = torch.softmax(x.double(), -1), torch.softmax(x.float(), -1)
            return judge("out", outputs[0][rows], right, base.to(x.dtype), None)
        assert data.dout is not None
        out, dout = data.out[rows], data.dout[rows]
        right, base = (gradient(out.to(d), dout.to(d)) for d in (torch.float64, torch.float32))
        return judge("dx", outputs[0][rows], right, base.to(out.dtype), None)


def gradient(out: Tensor, dout: Tensor) -> Tensor:
    """The definition, in the dtype of the operands."""
    return out * (dout - (dout * out).sum(-1, keepdim=True))


def problem(case: Case, device: str = "cuda") -> Softmax:
    """The problem of a case."""
    return Softmax(case, device)


# --- ours


def spec_of(case: Case) -> SoftmaxFwdSpec | SoftmaxBwdSpec:
    """The spec that the public function makes for fresh contiguous operands."""
    n, align, name = case.shape[-1], alignment(case), torch_op.dtype_name(dtype_of(case))
    if case.op == "softmax_bwd":
        return SoftmaxBwdSpec(n, name, name, name, align=align)
    return SoftmaxFwdSpec(n, name, name, align=align)


def kind_of(case: Case) -> type[FwdConfig | BwdConfig]:
    return BwdConfig if case.op == "softmax_bwd" else FwdConfig


def default_config(case: Case) -> Any:
    """The configuration that the rule chooses here."""
    return rules.choose(kind_of(case), spec_of(case), arch.detect())


def candidates(case: Case) -> list[Any]:
    """Configurations to compare it with."""
    return rules.tries(kind_of(case), spec_of(case), arch.detect())


def public(case: Case) -> Launch:
    """What a caller gets."""
    if case.op == "softmax_bwd":
        return lambda b: (launches.backward(b.out, b.dout, False, 1.0, b.out.dtype),)
    return lambda b: (launches.forward(b.x, False, 1.0, b.x.dtype),)


def explicit(case: Case, config: Any, run: Any, state: Tensor | None, groups: int) -> Launch:
    """A compiled kernel as a launch on buffers."""
    if case.op == "softmax_bwd":

        def backward(b: Buffers) -> tuple[Tensor, ...]:
            run(b.out, b.dout, b.dx, 1.0)
            return (b.dx,)  # type: ignore[return-value]

        return backward

    def forward(b: Buffers) -> tuple[Tensor, ...]:
        run(b.x, b.out, 1.0)
        return (b.out,)

    return forward


# --- peers


def _compile(case: Case) -> Launch:
    if case.op == "softmax_bwd":

        def backward(out: Tensor, dout: Tensor) -> Tensor:
            return gradient(out.float(), dout.float()).to(out.dtype)

        compiled = compiled_for_one_shape(backward)
        return lambda b: (compiled(b.out, b.dout),)

    def forward(x: Tensor) -> Tensor:
        return torch.softmax(x.float(), -1).to(x.dtype)

    both = compiled_for_one_shape(forward)
    return lambda b: (both(b.x),)


def _eager(case: Case) -> Launch:
    if case.op == "softmax_bwd":
        backward = torch.ops.aten._softmax_backward_data
        return lambda b: (backward(b.dout, b.out, -1, b.out.dtype),)
    return lambda b: (torch.softmax(b.x, -1),)


def _liger(case: Case) -> Launch:
    from liger_kernel.ops.softmax import _softmax_backward, _softmax_forward

    if case.op == "softmax_bwd":
        *_, block, warps, many = _softmax_forward(torch.empty_like(_probe(case)))
        return lambda b: (_softmax_backward(b.dout, b.out, block, warps, many),)
    return lambda b: _softmax_forward(b.x)[:1]


def _quack(case: Case) -> Launch:
    if case.op == "softmax_bwd":
        from quack.softmax import softmax_bwd

        return lambda b: (softmax_bwd(b.dout, b.out),)
    from quack.softmax import softmax_fwd

    return lambda b: (softmax_fwd(b.x),)


def _probe(case: Case) -> Tensor:
    return torch.empty(min(case.shape[0], 2), case.shape[-1], dtype=dtype_of(case), device="cuda")


def peers(case: Case) -> list[Variant]:
    """Torch eager, torch.compile, Liger, quack-kernels."""
    return [
        Variant("eager", _eager, "torch", note=ALLOCATES),
        Variant("compile", _compile, "torch", note=ALLOCATES),
        Variant("liger", _liger, "liger-kernel", note=ALLOCATES),
        Variant("quack-kernels", _quack, "quack-kernels", note=ALLOCATES),
    ]
