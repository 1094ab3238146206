"""RMSNorm as problems: data, float64 references, checks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quack_core.testing.compare import assert_accurate

from .shapes import Case
from .timing import Launch
from .variant import Wrong

EPS = 1e-6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHUNK = 1 << 25
"""Elements that are judged at a time: float64 copies of a whole tensor would not fit."""


@dataclass(frozen=True)
class FwdBuffers:
    x: Tensor
    w: Tensor
    out: Tensor
    residual: Tensor | None = None
    residual_out: Tensor | None = None


@dataclass(frozen=True)
class BwdBuffers:
    x: Tensor
    w: Tensor
    dout: Tensor
    rstd: Tensor
    dx: Tensor
    dw: Tensor


def size(*tensors: Tensor | None) -> int:
    """Bytes of the tensors that are there."""
    return sum(t.nbytes for t in tensors if t is not None)


def dtype_of(case: Case, opt: str | None = None) -> torch.dtype:
    name = case.dtype if opt is None else case.opt(opt)
    if name is None:
        raise ValueError(f"case {case.label} has no {opt!r}")
    return DTYPES[name]


def rms_norm(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, in the dtype of `x`: out and rstd (M, 1)."""
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return x * rstd * w, rstd


def rms_norm_backward(x: Tensor, w: Tensor, dout: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx and the terms whose sum over rows is dw, in the dtype of `x`; `rstd` is (M, 1)."""
    xhat, wdy = x * rstd, dout * w
    return rstd * (wdy - xhat * (wdy * xhat).mean(-1, keepdim=True)), dout * xhat


def row_chunks(x: Tensor) -> list[slice]:
    """Slices of rows with at most CHUNK elements each."""
    rows, n = x.shape
    step = max(1, CHUNK // n)
    return [slice(first, min(rows, first + step)) for first in range(0, rows, step)]


def poison(*tensors: Tensor | None) -> None:
    """NaN into outputs, and into memory that a launch may allocate next."""
    for tensor in tensors:
        if tensor is not None:
            tensor.fill_(torch.nan)
            torch.full_like(tensor, torch.nan)  # freed at once: the allocator hands it out again


def judge(name: str, actual: Tensor, ref64: Tensor, base: Tensor, terms: Tensor | None) -> float:
    """`assert_accurate`, as a check of a launch."""
    if actual.shape != ref64.shape or actual.dtype != base.dtype:
        found = f"{tuple(actual.shape)} {actual.dtype}"
        raise Wrong(f"{name} is {found}, needed {tuple(ref64.shape)} {base.dtype}")
    kind = "rows" if terms is None else "columns"
    try:
        return assert_accurate(actual, ref64, base, kind=kind, terms=terms, name=name)  # type: ignore[arg-type]
    except AssertionError as error:
        raise Wrong(str(error)) from error


class NormFwd:
    """out = (x + residual) * rstd * w, rows of (M, N)."""

    flop = 0

    def __init__(self, case: Case, device: str = "cuda"):
        self.case, self.device = case, device
        self._data: FwdBuffers | None = None
        shapes = self._empty(torch.device("meta"))
        self.read_bytes = size(shapes.x, shapes.w, shapes.residual)
        self.write_bytes = size(shapes.out, shapes.residual_out)
        self.set_bytes = self.read_bytes + self.write_bytes

    def _empty(self, device: torch.device) -> FwdBuffers:
        m, n = self.case.shape
        x = torch.empty(m, n, dtype=dtype_of(self.case), device=device)
        w = torch.empty(n, dtype=dtype_of(self.case, "w"), device=device)
        if self.case.opt("residual") is None:
            return FwdBuffers(x, w, torch.empty_like(x))
        residual = torch.empty(m, n, dtype=dtype_of(self.case, "residual"), device=device)
        return FwdBuffers(x, w, torch.empty_like(x), residual, torch.empty_like(residual))

    def make(self) -> FwdBuffers:
        buffers = self._empty(torch.device(self.device))
        for tensor in (buffers.x, buffers.w, buffers.residual):
            if tensor is not None:
                tensor.normal_()
        return buffers

    def check(self, launch: Launch) -> float:
        if self._data is None:
            self._data = self.make()
        data = self._data
        poison(data.out, data.residual_out)
        outputs = launch(data)
        return max(self._judge(data, outputs, rows) for rows in row_chunks(data.x))

    def _judge(self, data: FwdBuffers, outputs: Sequence[Tensor], rows: slice) -> float:
        x, dtype = data.x[rows], data.x.dtype
        h64, h = x.double(), x.float()
        worst = 0.0
        if data.residual is not None:
            h64, h = h64 + data.residual[rows].double(), h + data.residual[rows].float()
            stored = h.to(data.residual.dtype)
            worst = judge("residual_out", outputs[1][rows], h64, stored, None)
        ref64, _ = rms_norm(h64, data.w.double())
        # Torch's own kernel is the baseline in float32, where the order of a sum shows.
        base = F.rms_norm(h, (h.shape[-1],), data.w.float(), EPS).to(dtype)
        return max(worst, judge("out", outputs[0][rows], ref64, base, None))


class NormBwd:
    """dx and dw of out = x * rstd * w, rows of (M, N)."""

    flop = 0

    def __init__(self, case: Case, device: str = "cuda"):
        self.case, self.device = case, device
        self._data: BwdBuffers | None = None
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None
        meta = self._empty(torch.device("meta"))
        self.read_bytes = size(meta.x, meta.w, meta.dout, meta.rstd)
        self.write_bytes = size(meta.dx, meta.dw)
        self.set_bytes = self.read_bytes + self.write_bytes

    def _empty(self, device: torch.device) -> BwdBuffers:
        m, n = self.case.shape
        x = torch.empty(m, n, dtype=dtype_of(self.case), device=device)
        w = torch.empty(n, dtype=dtype_of(self.case, "w"), device=device)
        rstd = torch.empty(m, dtype=torch.float32, device=device)
        return BwdBuffers(x, w, torch.empty_like(x), rstd, torch.empty_like(x), torch.empty_like(w))

    def make(self) -> BwdBuffers:
        data = self._empty(torch.device(self.device))
        for tensor in (data.x, data.w, data.dout):
            tensor.normal_()
        for rows in row_chunks(data.x):
            data.rstd[rows] = (
                rms_norm(data.x[rows].double(), data.w.double())[1].squeeze(-1).float()
            )
        return data

    def check(self, launch: Launch) -> float:
        if self._data is None:
            self._data = self.make()
        data = self._data
        if self._sums is None:
            self._sums = self._reference_sums(data)
        poison(data.dx, data.dw)
        dx, dw = launch(data)
        worst = max(self._judge_rows(data, dx, rows) for rows in row_chunks(data.x))
        dw64, base, terms = self._sums
        return max(worst, judge("dw", dw, dw64, base, terms))

    def _operands(self, data: BwdBuffers, rows: slice, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, w, dout = data.x[rows].to(dtype), data.w.to(dtype), data.dout[rows].to(dtype)
        return x, w, dout, rms_norm(x, w)[1]

    def _reference_sums(self, data: BwdBuffers) -> tuple[Tensor, Tensor, Tensor]:
        n = self.case.shape[-1]
        dw64, terms = (torch.zeros(n, dtype=torch.float64, device=self.device) for _ in range(2))
        dw32 = torch.zeros(n, device=self.device)
        for rows in row_chunks(data.x):
            each = rms_norm_backward(*self._operands(data, rows, torch.float64))[1]
            dw64, terms = dw64 + each.sum(0), terms + each.abs().sum(0)
            dw32 += rms_norm_backward(*self._operands(data, rows, torch.float32))[1].sum(0)
        return dw64, dw32.to(data.w.dtype), terms

    def _judge_rows(self, data: BwdBuffers, dx: Tensor, rows: slice) -> float:
        ref64 = rms_norm_backward(*self._operands(data, rows, torch.float64))[0]
        base = rms_norm_backward(*self._operands(data, rows, torch.float32))[0].to(data.x.dtype)
        return judge("dx", dx[rows], ref64, base, None)


def problem(case: Case, device: str = "cuda") -> NormFwd | NormBwd:
    """The problem of a case."""
    return (NormBwd if case.op == "rmsnorm_bwd" else NormFwd)(case, device)
