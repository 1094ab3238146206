"""Swizzles of shared memory, and how many bank conflicts an access pattern has. Pure Python."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from quack_core.errors import LayoutError, ShapeError
from quack_core.layout.int_tuple import IntTuple
from quack_core.layout.layout import Layout, size

BANKS = 32
BANK_BYTES = 4
WARP = 32


@dataclass(frozen=True)
class Swizzle:
    """A permutation of offsets: ``bits`` bits are changed by exclusive or with others.

    With ``shift > 0`` the bits from ``base + shift`` up are added into those from ``base`` up:
    ``offset ^ ((offset & (2**bits - 1) << base + shift) >> shift)``; ``shift < 0`` is the other
    direction. Runs of ``2**base`` offsets stay together, and the pattern repeats after
    ``2**(bits + base + abs(shift))``.

    Args:
        bits: how many bits change; 0 is the identity.
        base: lowest bit that changes.
        shift: distance to the bits that decide.

    Raises:
        LayoutError: negative ``bits`` or ``base``, or source and target bits overlap.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0:
            raise LayoutError(f"{self}: bits and base must not be negative")
        if abs(self.shift) < self.bits:
            raise LayoutError(
                f"{self}: |shift| must be at least bits, or source and target overlap"
            )

    def apply(self, offset: int) -> int:
        """Where ``offset`` goes."""
        source = (1 << self.bits) - 1 << self.base + max(self.shift, 0)
        picked = offset & source
        return offset ^ (picked >> self.shift if self.shift >= 0 else picked << -self.shift)

    def inverse(self) -> "Swizzle":
        """The swizzle itself: the bits that decide do not change, so twice is nothing."""
        return self

    @property
    def period(self) -> int:
        """Offsets after which the pattern repeats; blocks of this size are permuted within."""
        return 1 << self.bits + self.base + abs(self.shift) if self.bits else 1 << self.base


@dataclass(frozen=True)
class ComposedLayout:
    """A swizzle over a layout: ``swizzle.apply(offset + layout(coord))``.

    Args:
        swizzle: permutes the offsets.
        layout: gives them.
        offset: added before the swizzle, in elements.
    """

    swizzle: Swizzle
    layout: Layout
    offset: int = 0

    @property
    def shape(self) -> IntTuple:
        """Shape of the layout."""
        return self.layout.shape

    def __call__(self, *coord: IntTuple) -> int:
        """The swizzled offset of a coordinate."""
        return self.swizzle.apply(self.offset + self.layout(*coord))

    def image(self) -> list[int]:
        """The offsets of all coordinates, leftmost mode fastest."""
        return [self.swizzle.apply(self.offset + value) for value in self.layout.image()]

    def __str__(self) -> str:
        swizzle = self.swizzle
        spelt = f"S<{swizzle.bits},{swizzle.base},{swizzle.shift}>"
        return f"{spelt} o {self.offset} o {self.layout}"


Access = Layout | ComposedLayout | Sequence[int]
"""Which element each thread touches: a layout of thread numbers, or the offsets themselves."""


def wavefronts(access: Access, access_bytes: int, element_bytes: int = 1) -> int:
    """Passes over shared memory that one load or store of these threads takes.

    The model: 32 banks of 4 bytes serve one word each per pass, and threads that want the same word
    share it. A warp goes through together up to 4 bytes a thread, in halves at 8 and in quarters at
    16 bytes.

    Args:
        access: element offset of each thread, in order; more than 32 threads are several warps.
        access_bytes: what each thread moves: 1, 2, 4, 8 or 16.
        element_bytes: unit of the offsets; 1 for byte addresses.

    Raises:
        ShapeError: another access size.
        LayoutError: an address is not a multiple of the access size.
    """
    together = _threads_together(access_bytes)
    addresses = _addresses(access, access_bytes, element_bytes)
    return sum(
        _passes(addresses[start : start + together], access_bytes)
        for start in range(0, len(addresses), together)
    )


def bank_conflicts(access: Access, access_bytes: int, element_bytes: int = 1) -> int:
    """Passes beyond one for each group of threads that goes through together; 0 is the best.

    Arguments and errors are those of `wavefronts`.
    """
    count = size(access.layout) if isinstance(access, ComposedLayout) else _threads(access)
    groups = -(-count // _threads_together(access_bytes))
    return wavefronts(access, access_bytes, element_bytes) - groups


def _threads(access: Layout | Sequence[int]) -> int:
    return size(access) if isinstance(access, Layout) else len(access)


def _threads_together(access_bytes: int) -> int:
    if access_bytes not in (1, 2, 4, 8, 16):
        raise ShapeError(f"access_bytes={access_bytes}: a thread moves 1, 2, 4, 8 or 16 bytes")
    return min(WARP, BANKS * BANK_BYTES // access_bytes)


def _addresses(access: Access, access_bytes: int, element_bytes: int) -> list[int]:
    offsets = access.image() if isinstance(access, (Layout, ComposedLayout)) else access
    addresses = [offset * element_bytes for offset in offsets]
    for thread, address in enumerate(addresses):
        if address % access_bytes:
            raise LayoutError(
                f"thread {thread} accesses {access_bytes} bytes at address {address}, "
                f"which must be a multiple of {access_bytes}"
            )
    return addresses


def _passes(addresses: Sequence[int], access_bytes: int) -> int:
    wanted = defaultdict(set)
    for address in addresses:
        first = address // BANK_BYTES
        for word in range(first, first + max(access_bytes // BANK_BYTES, 1)):
            wanted[word % BANKS].add(word)
    return max(map(len, wanted.values()), default=0)
