"""The pages on numerics say what the reference does, and what they say holds."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quack_blockscaled.formats import E8M0, FORMATS, UE4M3, BlockFormat
from quack_blockscaled.scales import RULES

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tools are a folder, not a package

from tools.numerics import facts, page

NAME = {"ids": lambda format: format.name}
CASES = [
    pytest.param(format, rule, id=f"{format.name}-{rule}")
    for format in FORMATS.values()
    for rule in (RULES if format.scale == E8M0 else RULES[:1])
]


def test_pages_are_what_the_tool_makes(root: Path) -> None:
    folder = root / "docs" / "reference" / "numerics"
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert found == page.pages(), "write them again: python -m tools.numerics"


@pytest.mark.parametrize("format", FORMATS.values(), **NAME)
def test_relative_errors_are_those_of_half_a_step(format: BlockFormat) -> None:
    half = 2.0 ** -(format.element.mantissa_bits + 1)
    assert facts.rounding(format.element) == pytest.approx(half / (1 + half), rel=1e-6)


def expected_reach(format: BlockFormat, rule: str) -> tuple[float, float]:
    """By the definitions of the rules; of ue4m3 the ties beside 1, of which those to even go down."""
    top, power = format.element.max, 2.0 ** (len(bin(int(format.element.max))) - 3)
    if format.scale == UE4M3:
        return top * 17 / 18, top * 17 / 16
    if format.scale != E8M0:
        return top, top
    even = 1 - 2.0 ** -(format.element.mantissa_bits + 2)
    return {
        "rceil": (top / 2, top),
        "floor": (power, 2 * power),
        "ceil": (power / 2, power),
        "even": (power * even, 2 * power * even),
    }[rule]


@pytest.mark.parametrize(("format", "rule"), CASES)
def test_scales_reach_what_their_rules_say(format: BlockFormat, rule: str) -> None:
    assert facts.reach(format, rule) == pytest.approx(expected_reach(format, rule), rel=1e-4)


def of_all_sizes(format: BlockFormat) -> Tensor:
    """Blocks one below the other, whose numbers spread over 2**20; scales are what no range ends."""
    draw = torch.Generator().manual_seed(1)
    blocks = 4 if format.rows > 1 else 2000
    x = torch.randn(blocks * format.rows, format.cols, generator=draw)
    x *= 2.0 ** (-20 * torch.rand(x.shape, generator=draw))
    x[:, 0] = 1 + torch.rand(len(x), generator=draw)
    sizes = 2.0 ** torch.linspace(0 if format.scale == UE4M3 else -20, 8, blocks)
    return x * sizes.repeat_interleave(format.rows)[:, None]


@pytest.mark.parametrize(("format", "rule"), CASES)
def test_errors_stay_within_what_the_page_says(format: BlockFormat, rule: str) -> None:
    x = of_all_sizes(format)
    _, _, y = facts.back(x, format, rule)
    blocks = x.view(-1, format.rows * format.cols)
    amax = blocks.abs().amax(1, keepdim=True).double()
    size, error = blocks.abs().double(), (y.view_as(blocks).double() - blocks.double()).abs()
    low, high = facts.reach(format, rule)
    element, slack = format.element, 1 + 2.0**-20  # the inverse of a step is rounded
    bound = size * max(facts.rounding(element), 1 - element.max / high)
    normal = size >= amax * 2.0**element.min_exponent / low
    assert (error <= bound * slack)[normal].all()
    zero = size > amax * element.smallest / 2 / low * slack
    assert (y.view_as(blocks) != 0)[zero].all()


@pytest.mark.parametrize("format", FORMATS.values(), **NAME)
def test_zeros_that_fill_a_block_change_nothing(format: BlockFormat) -> None:
    x = of_all_sizes(format)
    half = format.cols // 2
    x[:, half:] = x[:, :half]
    filled = torch.where(torch.arange(format.cols) < half, x, 0.0)
    whole, part = (facts.back(each, format)[2] for each in (x, filled))
    assert torch.equal(whole[:, :half], part[:, :half]) and not part[:, half:].any()
