"""Top-k forward of rows of any length: digit by digit the keys that can be among the k largest."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32, Uint32, const_expr

from quack_core.device import copy
from quack_core.reduction.tiling import WARP
from quack_norm.ops.row_map.base import coordinates, slice_pointer

from .config import SelectConfig
from .fwd import TopKFwd, arguments
from .keys import choose
from .spec import TopKFwdSpec


class Counters(NamedTuple):
    """Shared memory of the selection.

    Args:
        bins: int32 (num_bins,): keys with each value of a digit, the largest first; 0 between uses.
        warps: int32 (warps,): keys that each warp counts.
        found: int32 (3,): the bin of the k-th key; keys before it; keys up to its end.
        slot: int32 (1,): candidates that were written.
    """

    bins: cute.Tensor
    warps: cute.Tensor
    found: cute.Tensor
    slot: cute.Tensor


class TopKSelect(TopKFwd):
    """Each CTA reads a row once per digit, from the highest, and counts the values of the digit.

    The bin that holds the k-th largest key then bounds the candidates from below: keys above the
    bin's lower end. When ``candidates`` holds them all they are read once more and sorted. Keys
    differ, so the last digit leaves exactly k. Where a candidate is written depends on the order of
    events, but the sorted keys do not.

    Threads: all for a row.
    Shared memory: a counter for each value of a digit; the candidates.
    Synchronises: four CTA barriers per digit, and those of the sort.
    Traffic: x once per digit and once for the candidates, after the first time mostly from L2;
        values and indices once.
    """

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mValues: cute.Tensor, mIndices: cute.Tensor, rows: Int32):
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        pX = slice_pointer(mX, coordinates(mX, row), 0)
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout(self.config.candidates)
        sKeys = smem.allocate_tensor(self.keys.dtype, layout, byte_alignment=16)
        counters = self._allocate_counters(smem)
        exchange = self.allocate(smem) if const_expr(self.spec.softmax) else None

        lowest, count = self.keys.dtype(0), Int32(self.spec.n)
        self._clear(counters, tid)
        if const_expr(self.spec.n > self.config.candidates):
            lowest, count = self._select(pX, counters, tid)
        keys = self._gather(pX, lowest, count, counters.slot, sKeys, tid)
        keys = self.sort(keys, tid, sKeys)
        self.publish(keys, sKeys, tid)
        self.write(sKeys, exchange, pX, mValues, mIndices, row, row < rows, tid)

    def _allocate_counters(self, smem: cutlass.memory.SmemAllocator) -> Counters:
        sizes = self.config.num_bins, self.config.num_threads // WARP, 3, 1
        return Counters(
            *(smem.allocate_tensor(Int32, cute.make_layout(n), byte_alignment=16) for n in sizes)
        )

    @cute.jit
    def _clear(self, counters: Counters, tid: Int32) -> None:
        """Synchronises: one CTA barrier."""
        for i in cutlass.range_constexpr(self.config.num_bins // self.config.num_threads):
            counters.bins[i * self.config.num_threads + tid] = Int32(0)
        if tid == 0:
            counters.slot[0] = Int32(0)
        cute.arch.sync_threads()

    @cute.jit
    def _select(self, pX: cute.Pointer, counters: Counters, tid: Int32):
        """The smallest key that may be a candidate, and the number of candidates."""
        digit = const_expr(self.config.digit_bits)
        top = const_expr(self.spec.key_bits - digit)
        self._count(pX, self.keys.dtype(0), top, self.config.num_bins, counters.bins, tid)
        bin_idx, before, count = self._find(counters, Int32(0), tid)
        lowest, shift = self.keys.dtype(bin_idx) << top, Int32(top)
        while count > self.config.candidates:  # the same in all threads
            lower = choose(shift > digit, shift - digit, Int32(0))
            self._count(pX, lowest, lower, Int32(1) << (shift - lower), counters.bins, tid)
            bin_idx, before, count = self._find(counters, before, tid)
            lowest, shift = lowest + (self.keys.dtype(bin_idx) << lower), lower
        return lowest, count

    @cute.jit
    def _count(
        self, pX: cute.Pointer, lowest, shift, values, bins: cute.Tensor, tid: Int32
    ) -> None:
        """Count the digits from bit ``shift`` of the keys that exceed ``lowest`` in it only.

        Args:
            values: that the digit may have.
        """
        last = const_expr(self.config.num_bins - 1)
        step = const_expr(self._pieces() * self.config.num_threads)
        for first in cutlass.range(0, self._num_pieces(), step, unroll=1):
            keys, exist = self._load(pX, first + tid)
            for i in cutlass.range_constexpr(len(keys)):
                bin_idx = (keys[i] - lowest) >> shift  # wraps to a large one below lowest
                if exist[i] & (bin_idx < values):
                    counter = bins.iterator + (last - Int32(bin_idx))
                    cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="cta")
        cute.arch.sync_threads()

    @cute.jit
    def _find(self, counters: Counters, before: Int32, tid: Int32):
        """The bin of the k-th largest key, the number of keys above it, and with it.

        Args:
            before: keys above all bins.

        Synchronises: two CTA barriers; the bins are clear again after them.
        """
        k, num_bins = const_expr(self.spec.k), const_expr(self.config.num_bins)
        own = const_expr(num_bins // self.config.num_threads)
        bins = cute.make_tensor(
            copy.aligned(counters.bins.iterator + tid * own, min(16, 4 * own)),
            cute.make_layout(own),
        )
        counts = cute.make_rmem_tensor(own, Int32)
        cute.autovec_copy(bins, counts)
        zeros = cute.make_rmem_tensor(own, Int32)
        zeros.fill(0)
        cute.autovec_copy(zeros, bins)
        total = counts.load().reduce(cute.ReductionOp.ADD, Int32(0), 0)
        above = before + self._before(total, counters.warps, tid)
        for i in cutlass.range_constexpr(own):
            upto = above + counts[i]
            if (above < k) & (upto >= k):  # in one bin of one thread
                counters.found[0] = num_bins - 1 - (tid * own + i)
                counters.found[1] = above
                counters.found[2] = upto
            above = upto
        cute.arch.sync_threads()
        return counters.found[0], counters.found[1], counters.found[2]

    @cute.jit
    def _before(self, total: Int32, warps: cute.Tensor, tid: Int32) -> Int32:
        """The sum of the totals of all threads before this one.

        Synchronises: one CTA barrier.
        """
        lane, warp, upto = tid % WARP, tid // WARP, total
        for i in cutlass.range_constexpr(WARP.bit_length() - 1):
            other = cute.arch.shuffle_sync_up(upto, offset=1 << i)
            upto = upto + choose(lane >= 1 << i, other, Int32(0))
        if lane == WARP - 1:
            warps[warp] = upto
        cute.arch.sync_threads()
        before = upto - total
        for i in cutlass.range_constexpr(self.config.num_threads // WARP):
            before = before + choose(warp > i, warps[i], Int32(0))
        return before

    @cute.jit
    def _gather(
        self,
        pX: cute.Pointer,
        lowest,
        count: Int32,
        slot: cute.Tensor,
        sKeys: cute.Tensor,
        tid: Int32,
    ) -> list:
        """This thread's share of the keys from ``lowest`` on; 0 where there is none.

        Synchronises: two CTA barriers.
        """
        step = const_expr(self._pieces() * self.config.num_threads)
        for first in cutlass.range(0, self._num_pieces(), step, unroll=1):
            keys, exist = self._load(pX, first + tid)
            for i in cutlass.range_constexpr(len(keys)):
                if exist[i] & (keys[i] >= lowest):
                    place = cute.arch.atomic_add(
                        slot.iterator, Int32(1), sem="relaxed", scope="cta"
                    )
                    sKeys[place] = keys[i]
        cute.arch.sync_threads()
        threads = const_expr(self.config.num_threads)
        places = [e * threads + tid for e in range(self.config.num_keys(self.spec))]
        none = self.keys.dtype(0)
        found = [choose(place < count, sKeys[place], none) for place in places]
        cute.arch.sync_threads()
        return found

    def _pieces(self) -> int:
        """16-byte pieces that a thread loads together."""
        return self.config.in_flight // self.spec.full_vector

    def _num_pieces(self) -> int:
        """Of the row, wherever in a piece of memory it begins."""
        vec = self.spec.full_vector
        return (self.spec.n + 2 * vec - 2) // vec

    def _load(self, pX: cute.Pointer, first: Int32) -> tuple[list, list]:
        """Keys in pieces of memory from number ``first`` on, and whether they belong to the row."""
        vec, n, keys, exist = self.spec.full_vector, self.spec.n, [], []
        offset = copy.vector_offset(pX, vec)
        indices = [
            (first + i * self.config.num_threads) * vec - offset for i in range(self._pieces())
        ]
        loaded = [copy.load_piece(pX, index, Int32(n), vec, copy.CHUNK) for index in indices]
        for rX, index in zip(loaded, indices, strict=True):
            for v in range(vec):
                keys.append(self.keys.of(rX, v, index + v))
                exist.append(Uint32(index + v) < Uint32(n))  # also false before the row
        return keys, exist


def build(spec: TopKFwdSpec, config: SelectConfig) -> tuple[TopKSelect, tuple]:
    """The kernel and its symbolic arguments."""
    return TopKSelect(spec, config), arguments(spec)
