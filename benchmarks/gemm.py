"""GEMM as problems: data, float64 references, checks; and what it is compared with.

A case's shape is M x N x K; with pairs of columns N counts gates and what they gate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quack_core import arch, torch_op
from quack_core.gemm.epilogue import Gate, Op
from quack_gemm import launch as launches
from quack_gemm.api import gemm
from quack_gemm.config import GemmConfig
from quack_gemm.heuristic import Problem as Question
from quack_gemm.heuristic import candidates as all_candidates
from quack_gemm.heuristic import cycles, default, separate
from quack_gemm.spec import GemmSpec

from .norm import judge, poison, size
from .peers import ALLOCATES, compiled_for_one_shape
from .shapes import Case
from .timing import Launch
from .variant import Variant

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
ROWS = 1024
"""That are judged at a time."""


@dataclass(frozen=True)
class Buffers:
    """``out`` of ``a`` (M, K) and ``b`` (K, N), with scales of both where they have 8 bits."""

    a: Tensor
    b: Tensor
    out: Tensor
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None


class Gemm:
    """One product, by the case's options: ``layout`` (of A and B: n or t), ``act``, ``scale``."""

    def __init__(self, case: Case, device: str = "cuda"):
        self.case, self.device = case, device
        m, n, k = case.shape
        self.gated = case.opt("act") == "swiglu"
        self._data: Buffers | None = None
        meta = self._empty(torch.device("meta"))
        self.read_bytes, self.write_bytes = size(meta.a, meta.b), size(meta.out)
        self.set_bytes = self.read_bytes + self.write_bytes
        self.flop = 2 * m * n * k

    def _empty(self, device: torch.device) -> Buffers:
        (m, n, k), dtype = self.case.shape, DTYPES[self.case.dtype]
        layout = self.case.opt("layout") or "nt"

        def matrix(rows: int, cols: int, transposed: bool) -> Tensor:
            shape = (cols, rows) if transposed else (rows, cols)
            found = torch.empty(shape, dtype=dtype, device=device)
            return found.t() if transposed else found

        a, b = matrix(m, k, layout[0] == "t"), matrix(k, n, layout[1] == "t")
        out = torch.empty(m, n // (1 + self.gated), dtype=torch.bfloat16, device=device)
        if dtype.itemsize > 1:
            return Buffers(a, b, out)
        by_row = self.case.opt("scale") == "row"
        shapes = ((m, 1), (1, n)) if by_row else ((1,), (1,))
        scales = [torch.empty(shape, device=device) for shape in shapes]
        return Buffers(a, b, out, *scales)

    def make(self) -> Buffers:
        data = self._empty(torch.device(self.device))
        for tensor in (data.a, data.b):
            tensor.copy_(torch.randn(tensor.shape, device=self.device))
        for scale in (data.scale_a, data.scale_b):
            if scale is not None:
                scale.uniform_(0.5, 2.0)
        return data

    def check(self, launch: Launch) -> float:
        if self._data is None:
            self._data = self.make()
        data = self._data
        poison(data.out)
        (out,) = launch(data)
        worst, b64 = 0.0, data.b.double()
        for first in range(0, out.shape[0], ROWS):
            rows = slice(first, first + ROWS)
            right = self._finish(data, rows, data.a[rows].double() @ b64)
            base = self._finish(data, rows, data.a[rows].float() @ data.b.float()).to(out.dtype)
            worst = max(worst, judge("out", out[rows], right, base, None))
        return worst

    def _finish(self, data: Buffers, rows: slice, x: Tensor) -> Tensor:
        """Scales and activation."""
        if data.scale_a is not None and data.scale_b is not None:
            scale_a = data.scale_a[rows] if data.scale_a.dim() == 2 else data.scale_a
            x = x * scale_a.to(x.dtype) * data.scale_b.to(x.dtype)
        return F.silu(x[:, ::2]) * x[:, 1::2] if self.gated else x


def problem(case: Case, device: str = "cuda") -> Gemm:
    """The problem of a case."""
    return Gemm(case, device)


# --- ours


def _ops(case: Case) -> tuple[Op, ...]:
    return (Gate("silu"),) if case.opt("act") == "swiglu" else ()


def spec_of(case: Case) -> GemmSpec:
    """The spec that the public function makes for fresh operands."""
    layout = case.opt("layout") or "nt"
    majors = ["column" if letter == "t" else "row" for letter in layout]
    name = torch_op.name_of(DTYPES[case.dtype])
    return GemmSpec(name, name, "bfloat16", *majors, epilogue=_ops(case))  # type: ignore[arg-type]


def _question(case: Case) -> Question:
    m, n, k = case.shape
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return Question(m, n, k, 1, spec_of(case), sms)


def default_config(case: Case) -> GemmConfig:
    """The configuration that the rule chooses here."""
    return default(_question(case), arch.detect())


def candidates(case: Case) -> list[GemmConfig]:
    """Configurations to compare it with."""
    question = _question(case)
    return [*all_candidates(question.spec), *separate(question)]


def predicted(case: Case, configs: Sequence[GemmConfig]) -> list[float]:
    """Cycles that the rule expects of configurations."""
    return [cycles(_question(case), config) for config in configs]


def public(case: Case) -> Launch:
    """What a caller gets."""
    return _with(case, None)


def explicit(case: Case, config: Any, run: Any, state: Tensor | None, groups: int) -> Launch:
    """The public function with a configuration."""
    return _with(case, config)


def _with(case: Case, config: GemmConfig | None) -> Launch:
    ops = _ops(case)
    if case.dtype != "e4m3":
        steps = [(op, ()) for op in ops]

        def plain(b: Buffers) -> tuple[Tensor, ...]:
            launches.forward(b.a, b.b, steps, [b.out.dtype], out=b.out, config=config)
            return (b.out,)

        return plain

    def scaled(b: Buffers) -> tuple[Tensor, ...]:
        gemm(b.a, b.b, out=b.out, scale_a=b.scale_a, scale_b=b.scale_b, config=config)
        return (b.out,)

    return scaled


# --- peers


def _cublas(case: Case) -> Launch:
    if case.dtype == "e4m3":

        def scaled(b: Buffers) -> tuple[Tensor, ...]:
            return (
                torch._scaled_mm(b.a, b.b, b.scale_a, b.scale_b, out_dtype=b.out.dtype, out=b.out),
            )

        return scaled
    if case.opt("act") == "swiglu":

        def gated(b: Buffers) -> tuple[Tensor, ...]:
            x = torch.mm(b.a, b.b)
            return (F.silu(x[:, ::2]) * x[:, 1::2],)

        return gated

    def plain(b: Buffers) -> tuple[Tensor, ...]:
        torch.mm(b.a, b.b, out=b.out)
        return (b.out,)

    return plain


def _compile(case: Case) -> Launch:
    def gated(a: Tensor, b: Tensor) -> Tensor:
        x = a @ b
        return (F.silu(x[:, ::2].float()) * x[:, 1::2].float()).to(x.dtype)

    compiled = compiled_for_one_shape(gated)
    return lambda b: (compiled(b.a, b.b),)


def _quack(case: Case) -> Launch:
    from quack.gemm_interface import gemm as theirs

    def plain(b: Buffers) -> tuple[Tensor, ...]:
        theirs(b.a, b.b, out=b.out, tuned=False)
        return (b.out,)

    return plain


def peers(case: Case) -> list[Variant]:
    """cuBLAS through torch, torch.compile where there is something to fuse, quack-kernels, whose
    function takes no scales."""
    found = [Variant("cublas", _cublas, "torch")]
    if case.opt("act"):
        found.append(Variant("compile", _compile, "torch", note=ALLOCATES))
    elif case.dtype != "e4m3":
        found.append(Variant("quack-kernels", _quack, "quack-kernels", note="untuned"))
    return found
