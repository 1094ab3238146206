"""From codes and scales to numbers, in registers.

All 8-bit floats have an instruction that makes a pair of them float16, on every architecture.
Elements of fewer bits become codes of their carrier first, as they were made through it.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, Int64, Uint16, const_expr

from ..formats import E4M3, E8M0, FLOAT32, BlockFormat, ElementFormat
from . import bits, convert

WORD_BYTES = 4


@cute.jit
def load(values: cute.Tensor, at: Int64, held: cute.Tensor, size: cutlass.Constexpr[int]) -> None:
    """The words that hold vector number ``at`` of so many bytes, to registers (words,).

    Of bytes that fill no whole words: the word of the first one and that of the last one, which may
    be the same.
    """
    if const_expr(size % WORD_BYTES == 0):
        cute.autovec_copy(convert.words(values, at, size), held)
    elif const_expr(size == 2):
        start = cute.recast_tensor(convert.vector(values, at, size), Uint16)
        held[0] = Int32(start[0])
    else:
        first = at * size // WORD_BYTES
        behind = (_offset(at, size) + (size - 1)) // WORD_BYTES if const_expr(size == 3) else 1
        held[0] = convert.words(values, first, WORD_BYTES)[0]
        held[1] = convert.words(values, first + behind, WORD_BYTES)[0]


def num_words(size: int) -> int:
    """Of a vector of so many bytes, as `load` holds it."""
    return 2 if size == 3 else -(-size // WORD_BYTES)


def elements(format: ElementFormat, held: cute.Tensor, at: Int64, count: int) -> list[Float32]:
    """The numbers of so many elements side by side, exactly.

    Args:
        held: words of vector number ``at``, as of `load`.
    """
    words, kind = [held[i] for i in range(cute.size(held))], f"{bits.carrier(format).name}x2"
    if format.bits == 8:
        return [number for word in words for number in _numbers(word, kind, 4)]
    if format.bits == 6:
        offset = _offset(at, count * 6 // 8)
        groups = [_group(words, offset + 3 * i) for i in range(count // 4)]
        wide = [bits.widened(bits.unquads(group), format) for group in groups]
        found = [number for word in wide for number in _numbers(word, kind, 4)]
    else:
        halves = [bits.widened(half, format) for half in bits.unpaired(words[0])]
        even, odd = (_numbers(half, kind, count // 2) for half in halves)
        found = [number for pair in zip(even, odd, strict=True) for number in pair]
    return [number * (1 / bits.shrink(format)) for number in found]  # powers of two: exact


def step(format: BlockFormat, stored: Any, whole: Float32 | None) -> Float32:
    """What the elements of a block are multiplied by.

    Args:
        stored: the scale of the block, as it is stored.
        whole: that of the tensor, if the format has one.
    """
    if format.scale == FLOAT32:
        found = stored
    elif format.scale == E8M0:
        found = convert.as_float(bits.step(Int32(stored), convert.ON))
    else:
        (found,) = _numbers(Int32(stored), f"{E4M3.name}x2", 1)
    return found if whole is None else found * whole


@cute.jit
def scale(scales: cute.Tensor, block: Int64) -> Any:
    """As it is stored: where `convert.store_scale` puts it."""
    if const_expr(cute.rank(scales) == 1):
        return scales[block]
    number, of_row = Int32(block), scales.shape[0]
    return scales[Int64(number % of_row), number // of_row]


def rounded(numbers: list[Float32], dtype: Any) -> cute.Tensor:
    """Numbers in a dtype, side by side, as words; a NaN has the bits that torch gives one.

    What an instruction makes NaN has all bits set but the sign: it is the largest of integers. So
    the smaller one of it and torch's is torch's, and nothing else changes.
    """
    wide = cute.make_rmem_tensor(len(numbers), Float32)
    for i, number in enumerate(numbers):
        wide[i] = number
    if dtype is Float32:
        words = cute.recast_tensor(wide, Int32)
        return convert.registers(
            [convert.ON.at_most(words[i], bits.NAN) for i in range(len(numbers))]
        )
    narrow = cute.make_rmem_tensor(len(numbers), dtype)
    narrow.store(wide.load().to(dtype))
    words = cute.recast_tensor(narrow, Int32)
    nan = 0x7FC07FC0 if dtype is BFloat16 else 0x7E007E00
    return convert.registers([_least_halves(words[i], nan) for i in range(cute.size(words))])


def _numbers(word: Int32, kind: str, count: int) -> list[Float32]:
    """Of codes in the bytes of a word, the lowest first."""
    halves = [Int16(word), Int16(word >> 16)][: -(-count // 2)]
    return [number for half in halves for number in _pair(kind, half)][:count]


def _pair(kind: str, codes: Int16) -> tuple[Float32, Float32]:
    """Source: PTX ISA, cvt.rn.f16x2.e4m3x2."""
    low, high = cute.arch.inline_ptx(
        f"{{ .reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.{kind} pair, {{$r0}}; "
        "mov.b32 {low, high}, pair; cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
        write_only_types=[Float32, Float32],
        read_only_args=[codes],
    )
    return low, high


def _offset(at: Int64, size: int) -> Int32:
    """Of the first byte of vector number ``at`` in its word."""
    return Int32(at) * size & WORD_BYTES - 1


def _group(words: list[Int32], first: Int32) -> Int32:
    """Three bytes of two words from byte number ``first`` on; the fourth one is any."""
    return Int32(cute.arch.prmt(words[0], words[1], 0x3210 + 0x1111 * first))


def _least_halves(a: Int32, b: int) -> Int32:
    """The smaller ones of two signed numbers of 16 bits."""
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 b; mov.b32 b, {b}; min.s16x2 {{$w0}}, {{$r0}}, b; }}",
        write_only_types=[Int32],
        read_only_args=[a],
    )
