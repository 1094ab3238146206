"""The numerics page of a format, and the one that leads to them."""

import math
import textwrap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quack_blockscaled import elements, scales
from quack_blockscaled.formats import (
    E4M3,
    E8M0,
    FLOAT32,
    FORMATS,
    FP8_BLOCK_1X128,
    SMALLEST_FLOAT32,
    UE4M3,
    BlockFormat,
    ElementFormat,
)

from .facts import (
    MANTISSAS,
    back,
    binades,
    converted,
    loss,
    magnitudes,
    normal,
    reach,
    rounding,
)

ROWS, K = 128, 4096
"""Of the matrices of normal numbers."""
APART = 256
"""Columns between those that are larger than others."""
RULES = {E8M0: scales.RULES, UE4M3: scales.RULES[:1], FLOAT32: scales.RULES[:1]}
SHOWN_BINADES = 7
WIDTH = 104
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


# --- text


def number(x: float) -> str:
    """Powers of two as such where digits would be many; others in as many digits as they need."""
    if x != 0 and math.isfinite(x):
        fraction, exponent = math.frexp(abs(x))
        if fraction == 0.5 and not 2**-4 <= abs(x) <= 2**16:
            return ("−" if x < 0 else "") + "2" + str(exponent - 1).translate(SUPERSCRIPT)
    return f"{x:.6g}".replace("inf", "Inf").replace("nan", "NaN").replace("-", "−")


def percent(x: float) -> str:
    """Three digits."""
    return f"{100 * x:.3g} %" if x > 1e-7 else "0"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """As Markdown has it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def prose(text: str) -> str:
    """A paragraph, in lines that can be read."""
    joined = " ".join(text.split())
    return textwrap.fill(joined, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


# --- parts of a page


def title(format: BlockFormat) -> str:
    rows, cols = format.block
    whole = ", and a float32 scale of the whole tensor" if format.per_tensor else ""
    return f"# Numerics of `{format.name.upper()}`\n\n" + prose(f"""
        Elements {format.element.name}, a scale in {format.scale.name} for each block of
        {rows}×{cols}{whole}. Written by `python -m tools.numerics`; every figure is computed. How
        scales and elements are made, step by step:
        [block-scaled formats](../../concepts/block-scaled-formats.md). Other formats:
        [overview](README.md).
    """)


def glance(format: BlockFormat) -> str:
    element = format.element
    stored = element.bits + format.scale.bits / (format.rows * format.cols)
    lowest, highest = 2.0**element.min_exponent, element.max
    rows = [
        ("bits of an element, its share of the scale included", f"{stored:.6g}"),
        ("different finite numbers of an element", str(2 * len(magnitudes(element)) - 1)),
        ("largest element", number(highest)),
        ("smallest normal, smallest positive element", both(lowest, element.smallest)),
        ("smallest positive number, scales included", number(element.smallest * least(format))),
        (
            "largest element divided by those two",
            both(highest / lowest, highest / element.smallest),
        ),
        ("relative error of a normal element, at most", percent(rounding(element))),
    ]
    return "## At a glance\n\n" + table(("", ""), rows)


def least(format: BlockFormat) -> float:
    """The smallest positive scale."""
    return {E8M0: E8M0.min, UE4M3: E4M3.smallest, FLOAT32: SMALLEST_FLOAT32}[format.scale]


def both(a: float, b: float) -> str:
    return f"{number(a)}, {number(b)}"


def element_part(format: BlockFormat) -> str:
    element = format.element
    found = binades(element)
    lines = [
        (number(low), number(high), number(step), percent(step / 2 / (low + step / 2)))
        for low, high, step in found[:-1]
    ]
    if len(lines) > SHOWN_BINADES:
        lines = [*lines[:3], ("…", "…", "…", "…"), *lines[-2:]]
    low, high, step = found[-1]
    lines.append((number(low), number(high), number(step), "100 %: subnormal"))
    text = "## Elements\n\n" + table(("from", "to", "step", "relative error at most"), lines)
    if element.bits < 8:
        listed = ", ".join(number(x) for x in magnitudes(element))
        text += f"\nAll magnitudes: {listed}.\n"
    return text + "\n" + conversions(element)


def conversions(element: ElementFormat) -> str:
    """Ties and ends, as converted."""
    values = magnitudes(element)
    one = values.index(1.0)
    ties = [(values[i] + values[i + 1]) / 2 for i in (one, one + 1)]
    half = element.smallest / 2
    shown = [
        ("half-way", ties[0]),
        ("half-way, above it", ties[1]),
        ("half of the smallest", half),
        ("a little more than that", half * (1 + 2**-23)),
        ("its negative half", -half),
        ("a little more than the largest", element.max * (1 + 2**-10)),
        ("−Inf", -math.inf),
        ("NaN", math.nan),
    ]
    results = converted([x for _, x in shown], element)
    rows = [(name, number(x), number(y)) for (name, x), y in zip(shown, results, strict=True)]
    text = prose("""
        Ties go to the number whose last bit is 0, what is too large becomes the largest, subnormal
        elements are numbers like others. Stochastic rounding errs by less than a step, and in the
        mean by less than 2⁻¹⁶ of one.
    """)
    return text + "\n" + table(("", "x", "becomes"), rows)


def scale_part(format: BlockFormat) -> str:
    element, rows = format.element, []
    for rule in RULES[format.scale]:
        low, high = reach(format, rule)
        clipped = max(0.0, 1 - element.max / high)
        exact = 2.0**element.min_exponent / low
        zero = element.smallest / 2 / low
        rows.append(
            (
                f"`{rule}`",
                f"{low:.4g} to {high:.4g}",
                percent(clipped),
                f"{exact:.3g}",
                f"{zero:.3g}",
            )
        )
    head = ("rule", "amax / step", "clipped by at most", "normal from", "zero up to")
    text = prose("""
        The step is what elements are multiplied by, `amax` the largest magnitude of a block.
        Divided by the step it lies within the second column; above the largest element it is
        clipped, by up to the third. The last two columns are parts of `amax`: what is neither
        smaller than the one nor clipped has the relative error above, whatever else the block
        holds; what is up to the other may become zero. This holds wherever scales are neither
        clamped nor subnormal.
    """)
    parts = [table(head, rows), ends(format), *([of_tensor(format)] if format.per_tensor else [])]
    return "\n".join(["## Scales\n", text, *parts])


def of_tensor(format: BlockFormat) -> str:
    """What a scale of the whole tensor is for: scales of blocks that are small floats."""
    smallest, top = 2.0**E4M3.min_exponent, format.scale.max
    x = torch.linspace(E4M3.smallest / 2, smallest, MANTISSAS)[1:] * format.element.max
    steps = scales.decode(scales.encode(x, format), format)
    ratio = float((x / steps).max())
    return prose(f"""
        All of that is with a scale of the tensor of 1. If that is the largest magnitude of the
        tensor divided by {number(top)} · {number(format.element.max)}, no block is clipped at the
        end of the range. A block whose maximum is less than {smallest / top:.3g} of the tensor's
        has a subnormal scale, whose rounding alone clips by up to
        {percent(1 - format.element.max / ratio)}; from {E4M3.smallest / 2 / top:.3g} of it
        downwards the scale is 0 and so are the numbers.
    """)


def ends(format: BlockFormat) -> str:
    """Blocks of maxima of all sizes."""
    element = format.element
    smallest = element.max * least(format)
    maxima = [0.0, smallest / 2**8, smallest, 1.0, element.max]
    maxima += [element.max * (1 + 2**-10), 65504.0, 3.3e38]
    rows = []
    for amax in maxima:
        x = torch.zeros(format.block)
        x[0, 0] = amax
        _, found, numbers = back(x, format)
        step = scales.decode(found, format).item()
        scale, again = stored(found.view(-1)[0]), number(numbers[0, 0].item())
        rows.append((number(amax), scale, number(step), again))
    text = "Blocks with one number that is not zero, by the default rule:\n\n"
    return text + table(("the number", "scale stored", "step", "back"), rows)


def stored(part: Tensor) -> str:
    """A scale or a value as it lies in memory."""
    if part.dtype == torch.float32:
        return number(part.item())
    return f"`0x{part.view(torch.uint8).item():02x}`"


def policy(format: BlockFormat) -> str:
    """What special numbers do to a block, by quantising such blocks."""
    tiny = 2.0**-149
    cases = {
        "a NaN, else ones": (math.nan, 1.0),
        "an Inf, else ones": (math.inf, 1.0),
        "zeros": (0.0, 0.0),
        "zeros, the first one negative": (-0.0, 0.0),
        "2⁻¹⁴⁹, the smallest of float32, else zeros": (tiny, 0.0),
        "one, else 2⁻¹⁴⁹": (1.0, tiny),
    }
    rows = []
    for name, (first, rest) in cases.items():
        x = torch.full(format.block, rest)
        x[0, 0] = first
        values, found, numbers = back(x, format)
        codes = elements.unpack(values.view(torch.uint8), format.element)[0]
        codes_text = f"`0x{codes[0].item():02x}`, `0x{codes[1].item():02x}`"
        out = both(numbers[0, 0].item(), numbers[0, 1].item())
        rows.append((name, stored(found.view(-1)[0]), codes_text, out))
    holder = "have a NaN" if format.element.has_nan else "have no NaN: the scale has it"
    head = ("the block", "scale", "first two elements", "back")
    text = prose(f"""
        Elements {holder}. A block with a NaN or an Inf is lost as a whole, and no other one is;
        what comes back as NaN has the bits of `torch.nan`.
    """)
    return "\n".join(["## NaN, Inf, zeros, subnormal numbers\n", text, table(head, rows)])


def padding(format: BlockFormat) -> str:
    rows, cols = format.block
    across = f", and the other one of the last two a multiple of {rows}" if rows > 1 else ""
    text = f"""
        The quantised dimension is a multiple of {cols}{across}; other sizes are refused. Zeros that
        fill a block up change none of its other numbers, and blocks of zeros add exactly 0 to a
        product with finite numbers.
    """
    if format.scale != FLOAT32:
        zero = scales.decode(torch.zeros(1, dtype=torch.uint8), format).item()
        text += f"""
            In the order of tensor cores (`scale_layout.pack`) scales are padded with zero bytes to
            128 rows and 4 columns; such a byte stands for {number(zero)}.
        """
    return "## Padding\n\n" + prose(text)


def loss_part(format: BlockFormat) -> str:
    a, b = normal(ROWS, K, 1), normal(ROWS, K, 2)
    others = torch.arange(K) % APART != 0
    spiky = torch.where(others, a, 100 * a)
    rows = []
    for rule in RULES[format.scale]:
        y, yb, outliers = (back(each, format, rule)[2] for each in (a, b, spiky))
        ya = y if format.rows == 1 else back(a, FP8_BLOCK_1X128, rule)[2]
        right, product = a.double() @ b.double().mT, ya.double() @ yb.double().mT
        error = float((product - right).norm() / right.norm())
        bound = ((product - right).abs() / (a.abs().double() @ b.abs().double().mT)).max()
        rows.append(
            (
                f"`{rule}`",
                percent(loss(a, y)),
                f"{-20 * math.log10(loss(a, y)):.1f}",
                percent(float((y == 0).double().mean())),
                percent(loss(a[:, others], outliers[:, others])),
                percent(error),
                percent(float(bound)),
            )
        )
    return losses(format, rows)


def losses(format: BlockFormat, rows: list[tuple[str, ...]]) -> str:
    head = (
        "rule",
        "error, rms",
        "dB below",
        "zeros",
        "error beside outliers",
        "error of a product",
        "at most, of Σ\\|a\\|\\|b\\|",
    )
    u = rounding(format.element)
    other = (
        "the first operand in `FP8_BLOCK_1X128`, the second" if format.rows > 1 else "both operands"
    )
    text = prose(f"""
        {ROWS}×{K} normal numbers, quantised along K. Errors are relative to the rms of what is
        quantised: of all numbers; and, where every {APART}th is a hundred times as large, of those
        that are not. Products are with another such matrix along K, {other} in this format, summed
        in float64:
    """)
    bound = prose(f"""
        Where elements are normal and not clipped, a product of two vectors is off by at most
        {percent(2 * u + u * u)} of the sum of its terms' magnitudes. Signs of errors differ, so
        that it is far less, as the last column shows.
    """)
    return "\n".join(["## What is lost\n", text, table(head, rows), bound, going_back(format)])


def going_back(format: BlockFormat) -> str:
    """What comes on top: when numbers are made again, and when Hopper multiplies."""
    if format.scale == E8M0:
        return prose(f"""
            Going back adds nothing: an element has {format.element.mantissa_bits + 1} significant
            bits and steps are powers of two, so float32 and bfloat16 hold every number exactly
            unless it is outside their range, and float16 those within its own.
        """)
    text = """
        Going back, the product of an element and its step is rounded to float32, and then to the
        dtype that was asked for.
    """
    if format.scale == FLOAT32:
        text += """
            `matmul` on Hopper also loses bits of sums of 128 in the tensor cores:
            [products](../blockscaled.md#products).
        """
    return prose(text)


def page(format: BlockFormat) -> str:
    """The whole page of a format."""
    parts = (title, glance, element_part, scale_part, policy, padding, loss_part)
    return "\n".join(part(format) for part in parts)


def overview() -> str:
    """The page that leads to the others, and compares them."""
    rows = []
    x = normal(ROWS, K, 1)
    for format in FORMATS.values():
        element = format.element
        bits = element.bits + format.scale.bits / (format.rows * format.cols)
        link = f"[`{format.name.upper()}`]({format.name}.md)"
        error = loss(x, back(x, format)[2])
        rows.append((link, f"{bits:.4g}", percent(rounding(element)), percent(error)))
    head = (
        "format",
        "bits an element",
        "relative error of a normal element",
        "rms error of normal numbers",
    )
    text = prose("""
        A page for each: ranges, steps and errors of its elements, what its scales reach and clip,
        what becomes of special numbers, and what is lost. Written by `python -m tools.numerics`.
    """)
    return "\n".join(["# Numerics of the formats\n", text, table(head, rows)])


def pages() -> dict[str, str]:
    """File names and what is in them."""
    found = {f"{format.name}.md": page(format) for format in FORMATS.values()}
    return {"README.md": overview(), **found}
