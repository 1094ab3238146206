"""Quantisers as problems: data, a bound of the error, checks; and what they are compared with."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import quack_blockscaled as blockscaled
from quack_blockscaled import BlockFormat
from quack_blockscaled.quantizer.spec import QuantizeConfig, QuantizeSpec
from quack_core import torch_op

from .norm import dtype_of, row_chunks, size
from .peers import ALLOCATES, compiled_for_one_shape
from .shapes import Case
from .timing import Launch
from .variant import Variant, Wrong

FORMATS: dict[str, BlockFormat] = {
    format.name: format
    for format in (
        blockscaled.FP8_BLOCK_1X128,
        blockscaled.FP8_BLOCK_128X128,
        blockscaled.MXFP8_E4M3,
    )
}


@dataclass(frozen=True)
class Buffers:
    """What is quantised; results are allocated by the call."""

    x: Tensor


class Quantize:
    """A matrix (M, N) in the format of the case's options."""

    flop = 0

    def __init__(self, case: Case, device: str = "cuda"):
        self.case, self.device = case, device
        self.format = format_of(case)
        self._data: Buffers | None = None
        x = torch.empty(case.shape, dtype=dtype_of(case), device="meta")
        found = blockscaled.quantize(x, self.format)
        self.read_bytes, self.write_bytes = size(x), size(found.values, found.scales)
        self.set_bytes = self.read_bytes + self.write_bytes

    def make(self) -> Buffers:
        return Buffers(torch.randn(self.case.shape, dtype=dtype_of(self.case), device=self.device))

    def check(self, launch: Launch) -> float:
        if self._data is None:
            self._data = self.make()
        x = self._data.x
        values, scales = launch(self._data)
        return max(self._judge(x[rows], values[rows], scales, rows) for rows in row_chunks(x))

    def _judge(self, x: Tensor, values: Tensor, scales: Tensor, rows: slice) -> float:
        """Each number is one of the nearest to x: half a step of its magnitude, or of the least."""
        height, width = self.format.block
        there = torch.arange(x.shape[1], device=x.device) // width
        each = torch.arange(rows.start, rows.stop, device=x.device) // height
        scale = scales[each].double()[:, there]
        element = self.format.element
        half = 2.0 ** -(element.mantissa_bits + 1)
        least = half * 2.0 ** (1 - element.bias)
        allowed = torch.maximum(x.double().abs() * half, scale * least) * (1 + 2.0**-20)
        worst = float(((values.double() * scale - x).abs() / allowed).max())
        if not worst <= 1:
            raise Wrong(f"an element is {worst:.3f} times as far off as rounding to nearest allows")
        return worst


def problem(case: Case, device: str = "cuda") -> Quantize:
    """The problem of a case."""
    return Quantize(case, device)


def format_of(case: Case) -> BlockFormat:
    """The format that a case names."""
    return FORMATS[str(case.opt("format"))]


# --- ours


def spec_of(case: Case) -> QuantizeSpec:
    """The spec that the public function makes."""
    return QuantizeSpec(torch_op.dtype_name(dtype_of(case)), format_of(case))


def default_config(case: Case) -> QuantizeConfig:
    """There is one."""
    return QuantizeConfig()


def candidates(case: Case) -> list[QuantizeConfig]:
    """Nothing to compare it with yet."""
    return []


def public(case: Case) -> Launch:
    """What a caller gets."""
    format = format_of(case)

    def launch(b: Buffers) -> tuple[Tensor, Tensor]:
        found = blockscaled.quantize(b.x, format)
        return found.values, found.scales

    return launch


def explicit(case: Case, config: Any, run: Any, state: Tensor | None, groups: int) -> Launch:
    """The public function, whatever the configuration: there is one."""
    return public(case)


# --- peers


def _compile(case: Case) -> Launch:
    format = format_of(case)
    height, width = format.block
    kind, top = getattr(torch, format.element.dtype), format.element.max

    def formula(x: Tensor) -> tuple[Tensor, Tensor]:
        m, n = x.shape
        blocks = x.float().view(m // height, height, n // width, width)
        amax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-30)
        scale = amax / top
        if format.scale.dtype != "float32":
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        values = (blocks / scale).clamp(-top, top).to(kind).view(m, n)
        stored = scale.view(m // height, n // width)
        return values, stored.to(getattr(torch, format.scale.dtype))

    compiled = compiled_for_one_shape(formula)
    return lambda b: compiled(b.x)


def peers(case: Case) -> list[Variant]:
    """The definition through torch.compile."""
    return [Variant("compile", _compile, "torch", note=ALLOCATES)]
