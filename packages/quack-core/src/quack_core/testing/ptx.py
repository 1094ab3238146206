"""What PTX says about a kernel, without a disassembler.

:func:`accesses` counts memory instructions by width. The rest is about address arithmetic: does the
offset of a row wrap at 2**32?

A row number times the length of a row does not fit in 32 bits for large tensors. Compiled code
that multiplies there in 32 bits is right in every small test and reads the wrong row in a large
one. :func:`wrapping_offsets` finds such code by following row numbers through the registers.
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^\s*(?:\{\s*)?(?:@!?%\w+\s+)?([a-z][\w.:]*)\s+([^;]*);", re.MULTILINE)
_REGISTER = re.compile(r"%[a-z]+\d+\b")
_GLOBAL = re.compile(r"^(?:ld|st|red|atom)\.(?:\w+\.)*global\b|^cp\.async\b|^cp\.async\.bulk\b")
_ROW_SOURCE = re.compile(r"^(?:ld\.(?:\w+\.)*shared|atom\.(?:\w+\.)*global)\b.*32$")
_KEEPS = ("mov", "add", "sub", "cvt", "selp", "min", "max", "shr", "div", "or", "xor")
_UNBOUNDED = 1 << 32


_ACCESS = re.compile(
    r"^(ld|st)\.(?:[\w:]+\.)*?(global|shared|local)\b(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z]+(\d+)$"
)
_SASS = {("ld", "global"): "LDG", ("st", "global"): "STG", ("ld", "shared"): "LDS"}
_SASS |= {("st", "shared"): "STS", ("ld", "local"): "LDL", ("st", "local"): "STL"}
_CHUNK_BITS = 128  # of bulk copies, and of cp.async.cg


def accesses(ptx: str) -> dict[str, Counter[int]]:
    """Memory instructions: {instruction: {bits of one access: count}}, under their names in SASS.

    LDG, LDGSTS, STG (global), LDS, STS (shared), LDL, STL (local), UBLKCP.S.G (bulk copies from
    global to shared memory), STAS (sends within a cluster). The compiler merges no narrow accesses
    and splits no wide ones; how often an instruction stands in the machine code may differ.
    """
    found: dict[str, Counter[int]] = defaultdict(Counter)
    for op, rest in _INSTRUCTION.findall(ptx):
        if match := _ACCESS.match(op):
            name = _SASS[match[1], match[2]]
            found[name][int(match[3] or 1) * int(match[4])] += 1
        elif op.startswith("cp.async.bulk.shared") and ".global" in op:
            found["UBLKCP.S.G"][_CHUNK_BITS] += 1
        elif op.startswith(("cp.async.ca.", "cp.async.cg.")):
            found["LDGSTS"][8 * int(rest.split(",")[2])] += 1
        elif op.startswith("st.async."):
            found["STAS"][int(op.rpartition("b")[2])] += 1
    return dict(found)


@dataclass(frozen=True)
class _Instruction:
    op: str
    operands: tuple[str, ...]

    @property
    def target(self) -> str:
        return self.operands[0]

    @property
    def sources(self) -> tuple[str, ...]:
        return self.operands[1:]

    def __str__(self) -> str:
        return f"{self.op} {', '.join(self.operands)}"


def wrapping_offsets(ptx: str, row_length: int, rows_per_cta: int = 1) -> list[str]:
    """Instructions that multiply a row number by the length of a row in 32 bits, for an address.

    Row numbers are the CTA's index, what a counter in global memory returns, and integers from
    shared memory. Numbers cut down by a mask are bounded, as the rank in a cluster, and may be
    multiplied.

    Args:
        ptx: the assembly of a kernel.
        row_length: elements of a row; 2 or more.
        rows_per_cta: rows that a CTA (or a cluster that shares out its rows) works on at a time:
            the CTA's index times this is a row number, and fits in 32 bits.

    Returns:
        The instructions whose result reaches the address of an access to global memory.
    """
    instructions = [
        _Instruction(op, tuple(part.strip() for part in rest.split(",")))
        for op, rest in _INSTRUCTION.findall(ptx)
    ]
    factors = _row_factors(instructions)
    reaching = _address_registers(instructions)
    return [
        str(instruction)
        for instruction in instructions
        if _is_32_bit_product(instruction)
        and instruction.target in reaching
        and factors[instruction.target] >= row_length * rows_per_cta
    ]


def _is_32_bit_product(instruction: _Instruction) -> bool:
    name, *kinds = instruction.op.split(".")
    exact = "wide" in kinds or "hi" in kinds  # the upper half of a product does not wrap
    return name in ("mul", "mad", "shl") and not exact and kinds[-1].endswith("32")


def _row_factors(instructions: list[_Instruction]) -> dict[str, int]:
    """By how much at most each 32-bit register multiplies a row number; 0: it holds none."""
    factors: dict[str, int] = defaultdict(int)
    defined = {i.target: i for i in instructions if _REGISTER.fullmatch(i.target)}
    changed = True
    while changed:  # registers that a loop carries get their factor in a later round
        changed = False
        for instruction in instructions:
            if not _REGISTER.fullmatch(instruction.target):
                continue
            factor = min(_factor(instruction, factors, defined), _UNBOUNDED)
            if factor > factors[instruction.target]:
                factors[instruction.target] = factor
                changed = True
    return factors


def _factor(
    instruction: _Instruction, factors: dict[str, int], defined: dict[str, _Instruction]
) -> int:
    op, sources = instruction.op, instruction.sources
    name = op.split(".")[0]
    if "%ctaid.x" in sources or _ROW_SOURCE.match(op):
        return 1
    if not op.endswith("32"):
        return 0  # a product in 64 bits is exact
    of = [factors[source] for source in sources]
    if name == "and" and sources[-1].isdigit():
        return 0
    if name == "shl":
        return of[0] << int(sources[1]) if sources[1].isdigit() else of[0] * _UNBOUNDED
    if op.startswith("mul.hi"):
        return max(of)  # at most either factor
    if name in ("mul", "mad"):
        if dividend := _undone_division(sources, defined):
            return factors[dividend]
        constant = next((abs(int(s)) for s in sources[:2] if re.fullmatch(r"-?\d+", s)), _UNBOUNDED)
        product = max(of[:2]) * constant
        return max(product, of[2]) if name == "mad" else product
    if name in _KEEPS:
        return max(of, default=0)
    return 0


def _undone_division(sources: tuple[str, ...], defined: dict[str, _Instruction]) -> str | None:
    """``a`` if the product is ``a / b * b``, a step towards a remainder and no larger than ``a``."""
    for quotient, divisor in (sources[:2], sources[1::-1]):
        division = defined.get(quotient)
        if division is None:
            continue
        if division.op.startswith("div") and division.sources[1] == divisor:
            return division.sources[0]
        if divisor.isdigit() and (dividend := _dividend(division, int(divisor), defined)):
            return dividend
    return None


def _dividend(division: _Instruction, divisor: int, defined: dict[str, _Instruction]) -> str | None:
    """``a`` if this is ``a / divisor``, written as ``(a * factor) >> (32 + shift)``."""
    product, shift = division, 0
    if division.op == "shr.u32" and division.sources[1].isdigit():
        product, shift = defined.get(division.sources[0], division), int(division.sources[1])
    if product.op != "mul.hi.u32" or not re.fullmatch(r"-?\d+", product.sources[1]):
        return None
    factor = int(product.sources[1]) % _UNBOUNDED
    return product.sources[0] if round(2 ** (32 + shift) / factor) == divisor else None


def _address_registers(instructions: list[_Instruction]) -> set[str]:
    """Registers from which an address in global memory is computed."""
    feeds: dict[str, set[str]] = defaultdict(set)
    reaching: set[str] = set()
    for instruction in instructions:
        text = ", ".join(instruction.operands)
        if _GLOBAL.match(instruction.op):
            for address in re.findall(r"\[([^\]]*)\]", text):
                reaching.update(_REGISTER.findall(address))
        if instruction.op.startswith("ld."):
            continue  # what was loaded does not depend on the row's offset by arithmetic
        if instruction.op.startswith("and.") and instruction.sources[-1].isdigit():
            continue  # the bits that a mask leaves are right even if others overflowed
        feeds[instruction.target].update(_REGISTER.findall(", ".join(instruction.sources)))
    pending = list(reaching)
    while pending:
        for source in feeds[pending.pop()]:
            if source not in reaching:
                reaching.add(source)
                pending.append(source)
    return reaching
