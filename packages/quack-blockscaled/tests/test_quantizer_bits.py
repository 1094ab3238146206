"""The integer arithmetic of kernels, against the reference; and which formats have a kernel."""

import pytest
import torch
from torch import Tensor

from quack_blockscaled import formats, scales
from quack_blockscaled.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    BlockFormat,
    ElementFormat,
)
from quack_blockscaled.quantizer import bits
from quack_blockscaled.quantizer.spec import QuantizeSpec, is_built
from quack_core.errors import UnsupportedError

MAGNITUDES = 1 << 31


def around_powers() -> Tensor:
    """Magnitudes, as float32 bits: all exponents, with the mantissas where a rule may change its mind."""
    exponents = torch.arange(256, dtype=torch.int32) << 23
    tops = torch.arange(1 << 7, dtype=torch.int32) << 16
    near = torch.tensor([-2, -1, 0, 1, 2], dtype=torch.int32)
    found = (exponents[:, None, None] + tops[None, :, None] + near).flatten()
    return found[found >= 0]


@pytest.mark.parametrize("rule", scales.RULES)
@pytest.mark.parametrize("element", [E4M3, E5M2, E3M2, E2M3, E2M1], ids=lambda e: e.name)
def test_codes_are_those_of_the_reference(element: ElementFormat, rule: str) -> None:
    drawn = torch.randint(MAGNITUDES, (100_000,), generator=torch.Generator().manual_seed(1))
    words = torch.cat((around_powers(), drawn.to(torch.int32)))
    format = BlockFormat("any", element, E8M0, (1, 32))
    expected = scales.encode(words.view(torch.float32), format, rule).view(torch.uint8)
    found = bits.e8m0(words, element, rule, torch.where)
    assert torch.equal(found, expected.to(torch.int32))


def test_inverses_are_those_of_the_reference() -> None:
    codes = torch.arange(256, dtype=torch.int32)
    steps = scales.decode(codes.to(torch.uint8).view(torch.float8_e8m0fnu), formats.MXFP8_E4M3)
    found = bits.inverse(codes, torch.where).view(torch.float32)
    expected = torch.ones(256) / steps
    assert expected[:-1].isfinite().all()
    assert torch.equal(found[:-1], expected[:-1]) and found[-1].isnan()


def test_which_formats_have_a_kernel() -> None:
    built = {name for name, format in FORMATS.items() if is_built(format)}
    assert built == {"mxfp8_e4m3", "mxfp8_e5m2", "fp8_block_1x128", "fp8_block_128x128"}
    odd = BlockFormat("odd", E4M3, E8M0, (1, 48))
    wide = BlockFormat("wide", E4M3, E8M0, (1, 512))
    tall = BlockFormat("tall", E4M3, E8M0, (64, 128))
    for format in (odd, wide, tall, formats.MXFP4, formats.NVFP4):
        with pytest.raises(UnsupportedError, match=rf"no kernel for {format.name}.*call \.cpu"):
            QuantizeSpec("bfloat16", format)


def test_names_tell_kernels_apart() -> None:
    names = {
        QuantizeSpec(x, format, rule).name
        for x in ("bfloat16", "float32")
        for format in (formats.MXFP8_E4M3, formats.FP8_BLOCK_128X128)
        for rule in ("rceil", "floor")
    }
    assert len(names) == 8
