"""Products of blocks as problems: data, float64 references, checks; and what they are compared with.

A case's shape is M x N x K: activations in blocks of 1x128 along K, weights in blocks of 128x128.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quack_blockscaled import FP8_BLOCK_1X128, FP8_BLOCK_128X128, BlockScaledTensor, quantize
from quack_blockscaled import matmul as public_matmul
from quack_blockscaled.product.spec import ROUND_COST, MatmulConfig, MatmulSpec, choose
from quack_core import driver

from .norm import judge, size
from .shapes import Case
from .timing import Launch
from .variant import Variant

ROWS = 1024
"""That are judged at a time."""


@dataclass(frozen=True)
class Buffers:
    """``a`` (M, K) and ``b`` (K, N)."""

    a: BlockScaledTensor
    b: BlockScaledTensor


class Matmul:
    """One product; the result is bfloat16."""

    def __init__(self, case: Case, device: str = "cuda"):
        self.case, self.device = case, device
        m, n, k = case.shape
        self._data: Buffers | None = None
        meta = self._make("meta")
        parts = (meta.a.values, meta.a.scales, meta.b.values, meta.b.scales)
        self.read_bytes, self.write_bytes = size(*parts), 2 * m * n
        self.set_bytes = self.read_bytes + self.write_bytes
        self.flop = 2 * m * n * k

    def _make(self, device: str) -> Buffers:
        m, n, k = self.case.shape
        x, weight = (torch.randn(rows, k, dtype=torch.bfloat16, device=device) for rows in (m, n))
        a, b = quantize(x, FP8_BLOCK_1X128), quantize(weight, FP8_BLOCK_128X128)
        return Buffers(a, b.mT)

    def make(self) -> Buffers:
        return self._make(self.device)

    def check(self, launch: Launch) -> float:
        if self._data is None:
            self._data = self.make()
        data = self._data
        (out,) = launch(data)
        worst, a, b = 0.0, numbers(data.a), numbers(data.b.mT).mT
        b64 = b.double()
        for first in range(0, out.shape[0], ROWS):
            rows = slice(first, first + ROWS)
            right, base = a[rows].double() @ b64, (a[rows] @ b).to(out.dtype)
            worst = max(worst, judge("out", out[rows], right, base, None))
        return worst


def numbers(x: BlockScaledTensor) -> Tensor:
    """What values and scales of (rows, K) stand for, in float32."""
    scales = x.scales.repeat_interleave(x.format.rows, 0).repeat_interleave(x.format.cols, 1)
    return x.values.float() * scales


def problem(case: Case, device: str = "cuda") -> Matmul:
    """The problem of a case."""
    return Matmul(case, device)


# --- ours


def spec_of(case: Case) -> MatmulSpec:
    """The spec that the public function makes."""
    return MatmulSpec("bfloat16")


def default_config(case: Case) -> MatmulConfig:
    """The configuration that the rule chooses here."""
    return choose(*case.shape, driver.multiprocessors(0))


def candidates(case: Case) -> list[MatmulConfig]:
    """Configurations to compare it with."""
    return [MatmulConfig(tile_n) for tile_n in ROUND_COST]


def public(case: Case) -> Launch:
    """What a caller gets."""
    return lambda b: (public_matmul(b.a, b.b),)


def explicit(case: Case, config: Any, run: Any, state: Tensor | None, groups: int) -> Launch:
    """The public function with a configuration."""
    raise NotImplementedError("matmul takes no configuration yet")


# --- peers


def _cublas(case: Case) -> Launch:
    def launch(b: Buffers) -> tuple[Tensor, ...]:
        given = (b.a.values, b.b.values, b.a.scales, b.b.scales)
        return (torch._scaled_mm(*given, out_dtype=torch.bfloat16),)

    return launch


def peers(case: Case) -> list[Variant]:
    """cuBLAS with the same scales."""
    return [Variant("cublas", _cublas, "torch")]
