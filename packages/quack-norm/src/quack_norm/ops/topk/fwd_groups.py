"""Top-k forward by groups: the k groups with the largest maxima hold the k largest elements."""

import enum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Int32, const_expr

from quack_core.device import copy
from quack_core.device.barrier import NamedBarrier
from quack_core.reduction.base import Exchange
from quack_norm.ops.row_map.base import coordinates, slice_pointer

from .config import GroupsConfig
from .fwd import TopKFwd, arguments
from .keys import Keys, choose
from .spec import TopKFwdSpec

_NEGATIVE_INFINITY = -float("inf")


class Barrier(NamedBarrier):
    SORTERS = enum.auto()


class Shared(NamedTuple):
    """Shared memory of a row.

    Args:
        groups: (group_capacity,) keys of groups or bundles.
        keys: (capacity,) keys of elements.
        count: int32 (1,): keys that passed a filter.
        exchange: partial sums, with softmax.
    """

    groups: cute.Tensor
    keys: cute.Tensor
    count: cute.Tensor
    exchange: Exchange | None


class TopKGroups(TopKFwd):
    """A row is cut into groups of consecutive elements; their maxima are keys, as the elements are.

    An element of a group whose maximum is not among the k largest maxima is smaller than k others.
    So the network finds k groups first, and then sorts their elements, which are read once more.
    Groups can form bundles, for which the same holds: of long rows, those of a thread. Then the
    network finds k bundles, k groups of these, and the elements. Keys are never equal, so ties need
    no care.

    The k-th largest key of one level bounds those of the next from below. For large k these are
    filtered by that, and sorted all together only where too many are left.

    Threads: ``threads_per_row`` load a row; the first ``sorters`` of them find and sort.
    Shared memory: keys of groups and of elements of each row, and how many passed a filter;
        partial sums.
    Synchronises: warps only if a row has no more than one; else a CTA barrier, and barriers of the
        sorters.
    Traffic: x once; k groups again, with bundles the k bundles too, and the k elements, from L1 or
        L2; values and indices once.
    """

    def __init__(self, spec: TopKFwdSpec, config: GroupsConfig):
        super().__init__(spec, config, Barrier.SORTERS if config.bundled else None)
        self.groups = Keys(spec.x, config.num_groups(spec))

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mValues: cute.Tensor, mIndices: cute.Tensor, rows: Int32):
        config = const_expr(self.config)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        thread, row_in_cta = tid % config.threads_per_row, tid // config.threads_per_row
        row = block * config.rows_per_cta + row_in_cta
        valid = row < rows  # others repeat the first row and write nothing
        pX = slice_pointer(mX, coordinates(mX, row if valid else Int32(0)), 0)
        shared = self._allocate_shared(row_in_cta)
        results = mValues, mIndices
        if const_expr(config.bundled):
            shared.groups[thread] = self._bundle(pX, thread)
            cute.arch.sync_threads()
            if tid < config.sorters:
                keys = self._in_bundles(pX, shared.groups, tid)
                self._finish(keys, pX, shared, results, row, valid, tid)
        else:
            keys = self._all(pX, shared.groups, thread)
            self._finish(keys, pX, shared, results, row, valid, tid)

    def _allocate_shared(self, row_in_cta: Int32) -> Shared:
        smem, config, spec = cutlass.memory.SmemAllocator(), self.config, self.spec
        sizes = (
            (self.groups.dtype, config.group_capacity(spec)),
            (self.keys.dtype, config.capacity(spec)),
            (Int32, 1),
        )
        rows = [
            smem.allocate_tensor(
                dtype, cute.make_layout((size, config.rows_per_cta)), byte_alignment=16
            )[None, row_in_cta]
            for dtype, size in sizes
        ]
        return Shared(*rows, self.allocate(smem) if spec.softmax else None)

    def _finish(
        self, keys: list, pX, shared: Shared, results: tuple, row: Int32, valid: Boolean, tid: Int32
    ) -> None:
        """From keys of groups, and of k bundles in shared memory if there are any, to results."""
        sGroups, sKeys, sCount, exchange = shared
        thread, last = self.thread_in_row(tid), self.spec.k - 1
        if self.config.has_bound(self.spec):
            self._filter(keys, sGroups[last], sGroups, sCount, thread)
        else:
            self._find(keys, sGroups, thread)
        keys = self._elements(pX, sGroups, thread)
        if self.config.kept:
            value = self.keys.dtype(sGroups[last] >> self.groups.index_bits)
            self._filter(keys, value << self.keys.index_bits, sKeys, sCount, thread)
        else:
            self._find(keys, sKeys, thread)
        self.write(sKeys, exchange, pX, *results, row, valid, tid)

    def _find(self, keys: list, sKeys: cute.Tensor, thread: Int32) -> None:
        """The k largest keys in order, into shared memory.

        Synchronises: two barriers of the sorters, and those of the sort.
        """
        self.sync_row()  # all have read what is there
        self.publish(self.sort(keys, thread, sKeys), sKeys, thread)
        self.sync_row()

    @cute.jit
    def _filter(
        self, keys: list, bound, sKeys: cute.Tensor, sCount: cute.Tensor, thread: Int32
    ) -> None:
        """As ``_find``, of keys of which k or more are not below ``bound``.

        Where a key lies before the sort depends on the order of events, but the result does not.

        Synchronises: five barriers of the sorters, and those of the sort.
        """
        kept = const_expr(self.config.kept)
        mine = Int32(0)
        for e in cutlass.range_constexpr(len(keys)):
            mine = mine + choose(keys[e] >= bound, Int32(1), Int32(0))
        if thread == 0:
            sCount[0] = Int32(0)
        self.sync_row()  # all have read what is in sKeys, too
        place = cute.arch.atomic_add(sCount.iterator, mine, sem="relaxed", scope="cta")
        self.sync_row()
        count = sCount[0]
        if cute.arch.vote_all_sync(count <= kept):  # the rows of a warp go one way
            self._find(self._passed(keys, bound, place, count, sKeys, thread), sKeys, thread)
        else:
            self._find(keys, sKeys, thread)

    @cute.jit
    def _passed(
        self, keys: list, bound, place: Int32, count: Int32, sKeys: cute.Tensor, thread: Int32
    ) -> list:
        """This sorter's share of the keys that are not below ``bound``.

        Args:
            place: of the first of this thread's keys among them.
            count: of them.

        Synchronises: one barrier of the sorters.
        """
        for e in cutlass.range_constexpr(len(keys)):
            if keys[e] >= bound:
                sKeys[place] = keys[e]
                place = place + 1
        self.sync_row()
        sorters, none = const_expr(self.config.sorters), sKeys.element_type(0)
        places = [e * sorters + thread for e in range(self.config.kept // sorters)]
        return [choose(p < count, sKeys[p], none) for p in places]

    # --- groups

    def _all(self, pX: cute.Pointer, sGroups: cute.Tensor, thread: Int32) -> list:
        """The keys of all groups of a thread; with a filter, those of k bundles into ``sGroups``."""
        config = self.config
        vectors = [p * config.threads_per_row + thread for p in range(config.passes(self.spec))]
        keys = self._keys_of(pX, vectors)
        if config.kept:
            bundles = config.kept // config.threads_per_row
            found = [cutlass.max(self.groups.dtype(0), *keys[i::bundles]) for i in range(bundles)]
            self._find(found, sGroups, thread)
        return keys + [self.groups.dtype(0)] * (config.num_keys(self.spec) - len(keys))

    @cute.jit
    def _bundle(self, pX: cute.Pointer, thread: Int32):
        """The largest key of all groups of a thread."""
        threads, passes = const_expr(self.config.threads_per_row), self.config.passes(self.spec)
        batch = const_expr(min(passes, self.config.in_flight))
        largest = self.groups.dtype(0)
        for first in cutlass.range(0, passes, batch, unroll=1):
            vectors = [(first + i) * threads + thread for i in range(batch)]
            largest = cutlass.max(largest, *self._keys_of(pX, vectors))
        return largest

    def _in_bundles(self, pX: cute.Pointer, sGroups: cute.Tensor, thread: Int32) -> list:
        """This sorter's share of the groups of the k bundles with the largest keys."""
        config, k = self.config, self.spec.k
        sorters, passes = config.sorters, config.passes(self.spec)
        bundles = config.threads_per_row // sorters
        keys = [sGroups[e * sorters + thread] for e in range(bundles)]
        if passes == 1:  # a bundle is a group
            return keys
        self._find(keys, sGroups, thread)
        vectors, exist = [], []
        for e in range(config.num_keys(self.spec)):
            number = e * sorters + thread
            exists = number < k * passes
            bundle = choose(exists, number // passes, Int32(0))
            member = self.groups.place(sGroups[bundle]) % config.threads_per_row
            vectors.append(number % passes * config.threads_per_row + member)
            exist.append(exists)
        return [
            choose(exists, key, self.groups.dtype(0))
            for key, exists in zip(self._keys_of(pX, vectors), exist, strict=True)
        ]

    def _keys_of(self, pX: cute.Pointer, vectors: list) -> list:
        """Keys of the groups in some vectors of memory, 0 for groups that the row does not have."""
        vec, group, n = self.spec.full_vector, self.config.group, self.spec.n
        indices = [vector * vec - self._offset(pX) for vector in vectors]
        loaded = [copy.load_piece(pX, index, Int32(n), vec, copy.CHUNK) for index in indices]
        keys = []
        for vector, index, rX in zip(vectors, indices, loaded, strict=True):
            if not self.spec.whole:
                copy.clear_outside(rX, index, Int32(n), _NEGATIVE_INFINITY)
            for part in range(vec // group):
                key = self.groups.of(_maximum(rX, part, group), 0, vector * (vec // group) + part)
                exists = self._meets(index + part * group, group)
                keys.append(choose(exists, key, self.groups.dtype(0)))
        return keys

    # --- elements

    def _elements(self, pX: cute.Pointer, sGroups: cute.Tensor, thread: Int32) -> list:
        """This sorter's share of the keys of the elements of the k groups."""
        group, share = self.config.group, self.config.num_elements(self.spec)
        piece = min(group, share)
        indices, exist = [], []
        for e in range(share // piece):
            first = (e * self.config.sorters + thread) * piece  # among the elements of all groups
            exists = first < self.spec.k * group
            found = self.groups.place(sGroups[choose(exists, first // group, Int32(0))])
            indices.append(found * group + first % group - self._offset(pX))
            exist.append(exists)
        num_bytes = piece * pX.dtype.width // 8
        loaded = [copy.load_piece(pX, i, Int32(self.spec.n), piece, num_bytes) for i in indices]
        keys = []
        for rX, index, exists in zip(loaded, indices, exist, strict=True):
            for v in range(piece):
                key = self.keys.of(rX, v, index + v)
                inside = exists & self._meets(index + v, 1)
                keys.append(choose(inside, key, self.keys.dtype(0)))
        return keys

    def _offset(self, pX: cute.Pointer) -> Int32:
        """Elements of the first vector of memory that come before the row."""
        return Int32(0) if self.spec.whole else copy.vector_offset(pX, self.spec.full_vector)

    def _meets(self, index: Int32, count: int) -> Boolean:
        """Whether the row has any of ``count`` elements from ``index`` on."""
        inside = index < self.spec.n
        return inside if self.spec.whole else inside & (index > -count)


def _maximum(registers: cute.Tensor, part: int, group: int) -> cute.Tensor:
    """The maximum of a group in a vector, a NaN if there is one: registers (1,).

    As a reduction it takes two elements of 16 bits per instruction.
    """
    layout = cute.make_layout(group)
    values = cute.make_tensor(registers.iterator + part * group, layout).load()
    found = cute.make_rmem_tensor(1, registers.element_type)
    found[0] = values.reduce(cute.ReductionOp.MAX, registers.element_type(_NEGATIVE_INFINITY), 0)
    return found


def build(spec: TopKFwdSpec, config: GroupsConfig) -> tuple[TopKGroups, tuple]:
    """The kernel and its symbolic arguments."""
    return TopKGroups(spec, config), arguments(spec)
