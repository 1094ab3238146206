"""All floats, and ten million blocks of each format, through the quantisers: bits of the reference.

The reference runs on the GPU as well, in pieces, after it was compared with itself on the CPU.

* every float32 pattern through every element conversion:
  ``pytest packages/quack-blockscaled/tests/test_sweep_cuda.py --device cuda -k floats``
* ten million random blocks of each format:
  ``pytest packages/quack-blockscaled/tests/test_sweep_cuda.py --device cuda -k blocks``

That the reference's conversions are right is what ``sweep_elements.py`` shows, on the CPU.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from quack_blockscaled import quantize, reference
from quack_blockscaled.formats import E8M0, FORMATS, NVFP4, UE4M3, BlockFormat
from quack_blockscaled.scales import RULES
from quack_core.testing.compare import assert_bitwise

ALL = tuple(FORMATS.values())
ROWS = tuple(format for format in ALL if format.rows == 1)
POWERS = tuple(format for format in ALL if format.scale == E8M0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("bits", "finite bits", "window", "normal")
BLOCKS = 10_000_000
PATTERNS = 1 << 32
PIECE = 1 << 21
"""Elements that are quantised at once; of blocks of several rows eight times as many."""
EXPONENTS = {torch.float32: (1, 254), torch.bfloat16: (1, 254), torch.float16: (103, 142)}
"""Of float32, at which a dtype has numbers."""
NAME = {"ids": lambda format: format.name}

pytestmark = [
    pytest.mark.usefixtures("cuda"),
    pytest.mark.exhaustive,
    pytest.mark.timeout(900),
]


def check(x: Tensor, format: BlockFormat, **how: Any) -> None:
    """The kernel gives the bits that the reference gives, both on the device of x."""
    found, expected = quantize(x, format, **how), reference.quantize(x, format, **how)
    name = f"{format.name} of {x.dtype}, {how}"
    assert_bitwise(found.values, expected.values, f"{name}: values")
    assert_bitwise(found.scales, expected.scales, f"{name}: scales")


def draw(kind: str, rows: int, cols: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers on the GPU, (rows, cols), multiples of 128.

    Args:
        kind: ``"bits"``: any pattern of the dtype, and each as often; ``"finite bits"``: without NaN
            and Inf, of which no large block is free otherwise; ``"window"``: within 24 powers of two
            below one that changes from place to place; ``"normal"``: as activations are.
    """
    source = torch.Generator("cuda").manual_seed(seed)
    given: dict[str, Any] = {"generator": source, "device": "cuda"}
    if kind == "normal":
        return torch.randn(rows, cols, **given).to(dtype)
    bits = 8 * dtype.itemsize
    integers = {16: torch.int16, 32: torch.int32}
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    if kind != "window":
        x = torch.randint(low, high, (rows, cols), dtype=integers[bits], **given).view(dtype)
        return x if kind == "bits" else torch.where(x.isfinite(), x, 1.0)
    words = torch.randint(-(2**31), 2**31, (rows, cols), dtype=torch.int32, **given)
    first, last = EXPONENTS[dtype]
    tops = torch.randint(first, last + 1, (rows // 128, cols // 32), dtype=torch.int32, **given)
    tops = tops.repeat_interleave(128, 0).repeat_interleave(32, 1)
    below = torch.randint(0, 25, (rows, cols), dtype=torch.int32, **given)
    exponents = (tops - below).clamp(min=0)
    return (words & ~0x7F800000 | exponents << 23).view(torch.float32).to(dtype)


def choices(format: BlockFormat, pick: random.Random) -> dict[str, Any]:
    """How a piece is quantised: rule, rounding, scale of the tensor, dimension."""
    how: dict[str, Any] = {}
    if format.scale == E8M0:
        how["scale_rounding"] = pick.choice(RULES)
    if format.per_tensor:
        how["per_tensor_scale"] = torch.tensor(2.0 ** pick.uniform(-30, 30), device="cuda")
    if pick.random() < 0.3:
        return how | {"element_rounding": "stochastic", "seed": pick.randrange(2**63)}
    return how | {"dim": pick.choice((-1, -2))}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ALL, **NAME)
def test_the_reference_on_a_gpu_is_that_on_the_cpu(format: BlockFormat, dtype: torch.dtype) -> None:
    for piece in range(12):
        x = draw(KINDS[piece % len(KINDS)], 256, 512, dtype, piece)
        how = choices(format, random.Random(piece))
        found = reference.quantize(x, format, **how)
        if "per_tensor_scale" in how:
            how["per_tensor_scale"] = how["per_tensor_scale"].cpu()
        expected = reference.quantize(x.cpu(), format, **how)
        assert_bitwise(found.values.cpu(), expected.values)
        assert_bitwise(found.scales.cpu(), expected.scales)


@pytest.mark.parametrize("rule", RULES[:2])
@pytest.mark.parametrize("format", ROWS, **NAME)
def test_all_floats(format: BlockFormat, rule: str) -> None:
    """All patterns, beside the largest element in each block: the scale of those up to it is 1.

    The first rule never clips, the second one does.
    """
    if format.scale != E8M0 and rule != RULES[0]:
        pytest.skip(f"scales in {format.scale.name} follow one rule")
    free = format.cols - 1
    count = PIECE * 8 // format.cols * free
    top = torch.tensor(format.element.max, device="cuda")
    for start in range(0, PATTERNS, count):
        words = torch.arange(start, start + count, device="cuda").to(torch.int32)
        numbers = words.view(torch.float32).view(-1, free)
        x = torch.cat((top.expand(len(numbers), 1), numbers), -1)
        check(x, format, scale_rounding=rule)


@pytest.mark.parametrize("format", ALL, **NAME)
def test_random_blocks(format: BlockFormat) -> None:
    size = PIECE * (8 if format.rows > 1 else 1)
    per_piece = size // (format.rows * format.cols)
    for piece in range(-(-BLOCKS // per_piece)):
        pick = random.Random(piece)
        x = draw(pick.choice(KINDS), size // 1024, 1024, pick.choice(DTYPES), piece)
        check(x, format, **choices(format, pick))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("format", [*POWERS, NVFP4], **NAME)
def test_boundaries_with_every_scale_KQ_05(format: BlockFormat, rule: str) -> None:
    """Numbers, the ties between them, an ulp beside both: times each scale that a byte holds."""
    if format.scale != E8M0 and rule != RULES[0]:
        pytest.skip(f"scales in {format.scale.name} follow one rule")
    element = format.element
    values = torch.tensor([element.value(code) for code in range(element.max_code + 1)])
    edges = torch.cat((values, (values[1:] + values[:-1]) / 2)).view(torch.int32)
    edges = (edges[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)).flatten().clamp(min=0)
    edges = edges.view(torch.float32)
    edges = torch.cat((edges, -edges))
    free = format.cols - 1
    edges = torch.nn.functional.pad(edges, (0, -len(edges) % free)).view(-1, free).cuda()
    for top in (element.max, element.max * (1 + 1 / 64), 1.0):
        block = torch.nn.functional.pad(edges.clamp(-top, top), (1, 0), value=top)
        check(
            (block * every_scale(format).view(-1, 1, 1)).flatten(0, 1), format, scale_rounding=rule
        )


def every_scale(format: BlockFormat) -> Tensor:
    """The positive numbers that a byte of a format's scales holds."""
    codes = torch.arange(256, dtype=torch.int32, device="cuda").to(torch.uint8)
    kind = torch.float8_e4m3fn if format.scale == UE4M3 else torch.float8_e8m0fnu
    numbers = codes.view(kind).float()
    return numbers[(numbers > 0) & numbers.isfinite()]
