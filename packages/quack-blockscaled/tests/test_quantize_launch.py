"""What a quantising kernel is handed: shapes, dtypes, copies. No kernel runs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quack_blockscaled.formats import (
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
)
from quack_blockscaled.quantizer import launch
from quack_blockscaled.quantizer.spec import QuantizeConfig, QuantizeSpec
from quack_core import arch
from quack_core.errors import UnsupportedError
from quack_core.testing import fake_cuda

BF16 = torch.bfloat16


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Kernels that were found, and what they were called with."""
    found: list[tuple[Any, ...]] = []

    def load(module: str, spec: QuantizeSpec, config: QuantizeConfig, target: arch.Arch) -> Any:
        assert target is arch.SM90 and config == QuantizeConfig()
        return lambda *operands: found.append((module, spec, *operands))

    fake_cuda.stand_in(monkeypatch, load)
    monkeypatch.setattr(launch, "_kernel", launch._kernel.__wrapped__)
    return found


def quantize(x: Tensor, format: BlockFormat, **more: Any) -> tuple[Tensor, Tensor]:
    given = {"dim": -1, "scale_rounding": "rceil", "element_rounding": "nearest-even"} | more
    return launch.forward(x, format, tensor_scale=None, **given)


@pytest.mark.parametrize(
    ("format", "module", "blocks", "stored"),
    [
        (MXFP8_E4M3, "rows", (3, 128, 8), torch.uint8),
        (FP8_BLOCK_1X128, "rows", (3, 128, 2), torch.float32),
        (FP8_BLOCK_128X128, "tiles", (3, 1, 2), torch.float32),
    ],
    ids=["mxfp8", "1x128", "128x128"],
)
def test_operands(
    format: BlockFormat,
    module: str,
    blocks: tuple[int, ...],
    stored: torch.dtype,
    launched: list[tuple[Any, ...]],
) -> None:
    x = torch.zeros(3, 128, 256, dtype=BF16)
    values, scales = quantize(x, format)
    ((found, spec, given, codes, to_store, n),) = launched
    assert found == f"quack_blockscaled.quantizer.{module}"
    assert spec == QuantizeSpec("bfloat16", format, "rceil")
    assert given.shape == codes.shape == (x.numel(),) and codes.dtype == torch.uint8
    assert given.data_ptr() == x.data_ptr() and codes.data_ptr() == values.data_ptr()
    assert to_store.shape == (scales.numel(),) and to_store.dtype == stored
    assert to_store.data_ptr() == scales.data_ptr()
    assert values.shape == x.shape and scales.shape == blocks and n == 256


def test_other_memory_orders_and_addresses_are_copied(launched: list[tuple[Any, ...]]) -> None:
    x = torch.randn(64, 520).to(BF16)
    for view in (x[:, 4:132], x.mT[:512].mT, x.flatten()[1 : 1 + 64 * 512].view(64, 512)):
        quantize(view, MXFP8_E4M3)
        given = launched[-1][2]
        assert given.is_contiguous() and given.data_ptr() % 16 == 0
        assert torch.equal(given.view(view.shape), view)


def test_nothing_is_launched_for_nothing(launched: list[tuple[Any, ...]]) -> None:
    values, scales = quantize(torch.zeros(0, 64), MXFP8_E4M3)
    assert (values.shape, scales.shape, launched) == ((0, 64), (0, 2), [])


def test_rules_are_kernels_of_their_own(launched: list[tuple[Any, ...]]) -> None:
    for rule in ("rceil", "floor"):
        quantize(torch.zeros(2, 32), MXFP8_E4M3, scale_rounding=rule)
    assert [spec.scale_rounding for _, spec, *_ in launched] == ["rceil", "floor"]


def test_what_has_no_kernel() -> None:
    x = torch.zeros(128, 128)
    with pytest.raises(UnsupportedError, match=r"no kernel for nvfp4.*\.cpu\(\)"):
        quantize(x, NVFP4)
    with pytest.raises(UnsupportedError, match=r"dim is -2.*x\.mT\.contiguous\(\)"):
        quantize(x, MXFP8_E4M3, dim=-2)
    with pytest.raises(UnsupportedError, match=r"'stochastic'.*\.cpu\(\)"):
        quantize(x, MXFP8_E4M3, element_rounding="stochastic")
