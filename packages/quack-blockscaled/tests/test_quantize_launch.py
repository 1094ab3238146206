"""What a quantising kernel is handed: shapes, dtypes, copies. No kernel runs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quack_blockscaled.formats import (
    E4M3,
    E8M0,
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    MXFP4,
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
        assert target is arch.SM90 and config == QuantizeConfig(native=False)
        return lambda *operands: found.append((module, spec, *operands))

    fake_cuda.stand_in(monkeypatch, load)
    monkeypatch.setattr(launch, "_kernel", launch._kernel.__wrapped__)
    return found


def quantize(x: Tensor, format: BlockFormat, **more: Any) -> tuple[Tensor, Tensor]:
    given = {"dim": -1, "scale_rounding": "rceil", "element_rounding": "nearest-even"}
    given |= {"seed": None, "tensor_scale": None}
    return launch.forward(x, format, **(given | more))


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
    ((found, spec, given, codes, to_store, whole, n, seed),) = launched
    assert (whole, seed) == (None, 0)
    assert found == f"quack_blockscaled.quantizer.{module}"
    assert spec == QuantizeSpec("bfloat16", format, "rceil")
    assert given.shape == codes.shape == (x.numel(),) and codes.dtype == torch.uint8
    assert given.data_ptr() == x.data_ptr() and codes.data_ptr() == values.data_ptr()
    shape = (2, 384) if format.by_column else (scales.numel(),)
    assert to_store.shape == shape and to_store.dtype == stored
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


def test_scales_of_the_tensor_and_seeds_are_operands(launched: list[tuple[Any, ...]]) -> None:
    x = torch.zeros(4, 64, dtype=BF16)
    more = {"element_rounding": "stochastic", "seed": 2**62 + 1}
    values, _ = quantize(x, NVFP4, tensor_scale=torch.tensor(0.5), **more)
    ((module, spec, _, codes, to_store, whole, n, seed),) = launched
    assert module == "quack_blockscaled.quantizer.rows"
    assert spec == QuantizeSpec("bfloat16", NVFP4, stochastic=True)
    assert values.shape == (4, 32) and codes.shape == (128,) and to_store.dtype == torch.uint8
    assert whole.shape == (1,) and float(whole) == 0.5 and (n, seed) == (64, 2**62 + 1)


def test_matrices_are_read_as_they_lie(launched: list[tuple[Any, ...]]) -> None:
    x = torch.zeros(2, 3, 128, 24, dtype=BF16)
    values, scales = quantize(x, FP8_BLOCK_1X128, dim=-2)
    ((module, spec, given, rows, columns, *sizes),) = launched
    assert module == "quack_blockscaled.quantizer.columns" and rows is None
    assert spec == QuantizeSpec("bfloat16", FP8_BLOCK_1X128, copies="columns")
    assert given.data_ptr() == x.data_ptr() and sizes == [6, 128, 24]
    assert values.shape == x.shape and values.mT.is_contiguous()
    assert scales.shape == (2, 3, 1, 24) and scales.mT.is_contiguous()
    assert [part.data_ptr() for part in columns] == [values.data_ptr(), scales.data_ptr()]
    assert [part.dtype for part in columns] == [torch.uint8, torch.float32]


@pytest.mark.parametrize(
    ("format", "shape", "dim"),
    [(MXFP4, (64, 24), -2), (MXFP8_E4M3, (32, 3), -2), (MXFP8_E4M3, (32, 3, 8), -3)],
    ids=["bits", "odd", "dim"],
)
def test_other_dimensions_are_copied_last(
    format: BlockFormat, shape: tuple[int, ...], dim: int, launched: list[tuple[Any, ...]]
) -> None:
    x = torch.randn(shape).to(BF16)
    values, scales = quantize(x, format, dim=dim)
    ((module, spec, given, codes, to_store, *_),) = launched
    assert module == "quack_blockscaled.quantizer.rows" and spec.copies == "rows"
    assert torch.equal(given.view(x.transpose(dim, -1).shape), x.transpose(dim, -1))
    assert values.transpose(dim, -1).is_contiguous() and scales.transpose(dim, -1).is_contiguous()
    assert (codes.data_ptr(), to_store.data_ptr()) == (values.data_ptr(), scales.data_ptr())


def test_both_copies(launched: list[tuple[Any, ...]]) -> None:
    x = torch.zeros(128, 256, dtype=BF16)
    found = launch.both(x, FP8_BLOCK_128X128, "rceil", None)
    ((module, spec, _, rows, columns, *sizes),) = launched
    assert module == "quack_blockscaled.quantizer.columns" and sizes == [1, 128, 256]
    assert spec == QuantizeSpec("bfloat16", FP8_BLOCK_128X128, copies="both")
    assert [part.data_ptr() for part in (*rows, *columns)] == [part.data_ptr() for part in found]
    launched.clear()
    launch.both(x, MXFP4, "floor", None)
    assert [(spec.copies, given.shape) for _, spec, given, *_ in launched] == [
        ("rows", (32768,))
    ] * 2


def test_what_has_no_kernel() -> None:
    x = torch.zeros(128, 128)
    tall = BlockFormat("tall", E4M3, E8M0, (64, 128))
    with pytest.raises(UnsupportedError, match=r"no kernel for tall.*\.cpu\(\)"):
        quantize(x, tall)
    more = {"element_rounding": "stochastic", "seed": 1}
    with pytest.raises(UnsupportedError, match=r"'stochastic', dim is -2.*\.cpu\(\)"):
        quantize(x, MXFP8_E4M3, dim=-2, **more)
