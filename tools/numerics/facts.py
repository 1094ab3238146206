"""What is known of formats: computed from them, or by quantising with the reference."""

import random
from collections.abc import Iterable

import torch
from torch import Tensor

from quack_blockscaled import elements, reference, scales
from quack_blockscaled.formats import BlockFormat, ElementFormat

MANTISSAS = 1 << 16
"""Of a binade, that scales are tried with; each with its neighbours."""


def tensor(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float32)


# --- elements


def converted(x: Iterable[float], element: ElementFormat) -> list[float]:
    """What numbers become, as the reference converts them."""
    found: list[float] = elements.decode(elements.encode(tensor(x), element), element).tolist()
    return found


def rounding(element: ElementFormat) -> float:
    """The largest relative error of a number that becomes a normal element, and is not clipped."""
    x = 1 + torch.arange(MANTISSAS, dtype=torch.float32) / MANTISSAS
    found = elements.decode(elements.encode(x, element), element)
    return float(((found - x).abs() / x).double().max())


def magnitudes(element: ElementFormat) -> list[float]:
    """Finite ones, ascending."""
    return [element.value(code) for code in range(element.max_code + 1)]


def binades(element: ElementFormat) -> list[tuple[float, float, float]]:
    """(smallest, largest, step) of each exponent, the largest first; at last the subnormals."""
    values, size = magnitudes(element), 2**element.mantissa_bits
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    return [(part[0], part[-1], part[1] - part[0]) for part in reversed(parts)]


# --- scales


def reach(format: BlockFormat, rule: str) -> tuple[float, float]:
    """The smallest and the largest that a block's largest magnitude divided by its step can be.

    Over all mantissas at an exponent where scales are neither clamped nor subnormal.
    """
    x = (1 + torch.arange(MANTISSAS, dtype=torch.float64) / MANTISSAS).float() * format.element.max
    x = torch.cat((x, *(torch.nextafter(x, x * by) for by in (0, 2))))
    steps = scales.decode(scales.encode(x, format, rule), format)
    ratio = x.double() / steps.double()
    return float(ratio.min()), float(ratio.max())


def back(x: Tensor, format: BlockFormat, rule: str = "rceil") -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales and numbers again of a tensor in blocks along its last dimension."""
    parts = reference.quantize(x, format, scale_rounding=rule)
    return parts.values, parts.scales, reference.dequantize(parts.values, parts.scales, format)


def normal(rows: int, columns: int, seed: int) -> Tensor:
    """Normal numbers that every version of every library makes alike."""
    draw = random.Random(seed)
    uniform = torch.tensor([draw.random() for _ in range(rows * columns)], dtype=torch.float64)
    return torch.special.ndtri(uniform).float().view(rows, columns)


def loss(x: Tensor, y: Tensor) -> float:
    """The rms of the error divided by that of x."""
    return float((y.double() - x.double()).norm() / x.double().norm())
