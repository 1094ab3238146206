"""What L2 keeps: the policy of operands that are read once, while as much is written.

A kernel that streams more than L2 holds is faster if what it has read leaves L2 behind what it has
written: an H200 then moves 2 to 4 % more bytes in a second. Where all of it fits, what is written
stays for the kernel that comes next, and so nothing is asked for.

Source: PTX ISA, createpolicy.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp

ACCESS_BITS = 128
"""Of the accesses that take a policy; narrower ones go without."""
STREAMED_BYTES = 32 << 20
"""Of an operand: with as many written, more than an L2 of 50 MB holds."""


@cute.jit
def streamed(num_bytes: Int64) -> Int64:
    """The policy of an operand that is read once, while about as much is written.

    Args:
        num_bytes: of the whole operand.
    """
    policy = _policy("evict_normal")
    if num_bytes > STREAMED_BYTES:
        policy = _policy("evict_last")
    return policy


def _policy(priority: str) -> Int64:
    return cute.arch.inline_ptx(
        f"createpolicy.fractional.L2::{priority}.b64 {{$w0}}, 1.0;",
        write_only_types=[Int64],
    )


@cute.jit
def load(
    source: cute.Tensor, target: cute.Tensor, pred: cute.Tensor | None, policy: Int64 | None
) -> None:
    """Global memory to registers, access by access.

    Args:
        source: ((elements of an access, 1), accesses...).
        target: registers in the same shape.
        pred: which accesses take place: (1, accesses...); None for all.
        policy: None for none.
    """
    dtype = source.element_type
    bits = const_expr(source.shape[0][0] * dtype.width)
    if const_expr(policy is None or bits != ACCESS_BITS):
        atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=bits)
        cute.copy(atom, source, target, pred=pred)
    else:
        sources, targets = (cute.group_modes(t, 1, cute.rank(t)) for t in (source, target))
        wanted = None if const_expr(pred is None) else cute.group_modes(pred, 1, cute.rank(pred))
        for i in cutlass.range_constexpr(cute.size(sources, mode=[1])):
            if const_expr(wanted is None):
                _load_access(sources[None, i], targets[None, i], policy)
            else:
                if wanted[0, i]:
                    _load_access(sources[None, i], targets[None, i], policy)


@cute.jit
def _load_access(source: cute.Tensor, target: cute.Tensor, policy: Int64) -> None:
    """16 bytes.

    Source: PTX ISA, ld.global (.L2::cache_hint).
    """
    words = cute.recast_tensor(target, Int32)
    found = cute.arch.inline_ptx(
        "ld.global.L2::cache_hint.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}], {$r1};",
        write_only_types=[Int32] * 4,
        read_only_args=[source.iterator.toint(), policy],
    )
    for i in cutlass.range_constexpr(4):
        words[i] = found[i]
