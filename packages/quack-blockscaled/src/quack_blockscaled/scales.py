"""The scale of a block, from its largest magnitude; and the number that a stored scale stands for."""

import math

import torch
from torch import Tensor

from quack_core.errors import UnsupportedError

from . import elements
from .formats import E4M3, E8M0, FLOAT32, SMALLEST_FLOAT32, UE4M3, BlockFormat, ElementFormat

RULES = ("rceil", "floor", "ceil", "even")
"""Rules for scales that are powers of two, as torchao names them; the first is the default.

The scale of a block whose largest magnitude is ``amax``, for elements up to ``max``, is 2**k with

* rceil: the smallest k for which ``amax <= max * 2**k``; nothing is clipped (NVIDIA's);
* floor: ``floor(log2(amax)) - floor(log2(max))``; above ``max * 2**k`` it clips (OCP's);
* ceil: ``ceil(log2(amax)) - floor(log2(max))``; nothing is clipped;
* even: as floor, of ``amax`` rounded to the mantissa bits of an element; a tie goes up.

k is then clamped to -127..127. All are exact: there is neither a logarithm nor a division.
"""


def check_rule(format: BlockFormat, rule: str) -> None:
    """Check that the scales of a format may follow a rule.

    Raises:
        UnsupportedError: there is no such rule, or scales are no powers of two.
    """
    if rule not in RULES:
        raise UnsupportedError(
            f"quantize: scale_rounding is {rule!r}", f"it must be one of {', '.join(RULES)}"
        )
    if format.scale != E8M0 and rule != RULES[0]:
        raise UnsupportedError(
            f"quantize: scale_rounding is {rule!r}, scales of {format.name} are {format.scale.name}",
            "rules other than the default are for e8m0, whose scales are powers of two",
            "leave scale_rounding out",
        )


def encode(amax: Tensor, format: BlockFormat, rule: str = "rceil") -> Tensor:
    """Scales in the dtype of the format.

    e8m0 follows the rule. Others are ``amax / max`` in float32: ue4m3 rounds that to the nearest,
    ties to even, and stops at 448; float32 is at least 2**-126. The scale of zero is the smallest
    that there is. Of NaN and Inf it is NaN.

    Args:
        amax: float32, the largest magnitude of each block, divided by the per-tensor scale.

    Raises:
        UnsupportedError: as of `check_rule`.
    """
    check_rule(format, rule)
    if format.scale == E8M0:
        return _e8m0(amax, format.element, rule).view(torch.float8_e8m0fnu)
    lost = ~amax.isfinite()
    ratio = amax / amax.new_full((), format.element.max)  # by a number, GPUs would multiply
    if format.scale == UE4M3:
        codes = torch.where(lost, E4M3.nan_code, elements.encode(ratio, E4M3))
        return codes.to(torch.uint8).view(torch.float8_e4m3fn)
    ratio = torch.where(amax > 0, ratio.clamp(min=SMALLEST_FLOAT32), ratio)
    return torch.where(lost, math.nan, ratio)


def decode(scales: Tensor, format: BlockFormat) -> Tensor:
    """The numbers of scales, float32 and exact."""
    if format.scale == FLOAT32:
        return scales
    codes = scales.view(torch.uint8)
    if format.scale == UE4M3:
        return elements.decode(codes, E4M3)
    # 2**-127 is subnormal in float32: the upper bit of the mantissa.
    powers = [2.0 ** (code - 127) for code in range(255)] + [math.nan]
    return torch.tensor(powers, dtype=torch.float32, device=scales.device)[codes.int()]


def _e8m0(amax: Tensor, element: ElementFormat, rule: str) -> Tensor:
    """Biased exponents, uint8."""
    # In float64 all float32 numbers are normal: fraction * 2**exponent, the fraction in [0.5, 1).
    fraction, exponent = torch.frexp(amax.double())
    max_fraction, max_exponent = math.frexp(element.max)
    if rule == "rceil":
        up = fraction > max_fraction
    elif rule == "ceil":
        up = fraction > 0.5
    elif rule == "even":
        up = fraction >= 1 - 2.0 ** -(element.mantissa_bits + 2)
    else:
        up = torch.zeros_like(fraction, dtype=torch.bool)
    code = (exponent - max_exponent + up.int() + 127).clamp(0, 254)
    code = torch.where(amax == 0, 0, code)
    return torch.where(amax.isfinite(), code, 255).to(torch.uint8)
