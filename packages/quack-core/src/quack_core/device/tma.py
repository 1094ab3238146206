"""Copies by the tensor memory accelerator: contiguous bytes, and tiles of tensors.

Rules that all of them share:

* All lanes of one warp call a function, converged; the copy is issued once. Never call it under
  ``elect_one``: it elects a lane itself, and electing twice hangs. (The DSL elects a lane for tiles,
  but none for one-dimensional copies; here both are called alike.)
* A load completes on an mbarrier, whose phase expects its bytes (``barrier.expect_bytes``) before
  the copy is issued. A store belongs to a group (``bulk_commit``, ``bulk_wait_read``,
  ``bulk_wait_written``), and commit and waits are for the warp that issued it.
* Threads that wrote shared memory which a copy will read call ``publish_shared``, then a barrier,
  before the warp issues the copy. No fence is needed before a load overwrites shared memory that
  was only read.
* Addresses and sizes of one-dimensional copies are multiples of 16 bytes. A tile needs 128 bytes of
  alignment in shared memory (1024 with a swizzle of 128 bytes), 16 in global memory, and strides
  between rows that are multiples of 16 bytes. A tile begins at a multiple of 16 bytes in a row as well:
  else the instruction is illegal.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

ALIGNMENT = 16
"""Bytes that divide every address and size of a one-dimensional copy."""


# --- contiguous bytes


@cute.jit
def bulk_load(
    source: cute.Pointer,
    target: cute.Pointer,
    num_bytes: Int32,
    mbar: cute.Pointer,
    receivers: Int32 | None = None,
    policy: Int64 | None = None,
) -> None:
    """Start a copy from global to shared memory; completes on ``mbar``.

    Threads: all lanes of one warp.

    Args:
        receivers: ranks in the cluster, a bit each: the bytes arrive at the same place, and on the
            same mbarrier, of every CTA among them. None: of this CTA. sm_120 has no such copies;
            the compiler calls a routine in their place.
        policy: of L2, as of ``l2.streamed``; not with ``receivers``.

    Source: PTX ISA, cp.async.bulk (global to shared::cluster, .multicast::cluster, .L2::cache_hint).
    """
    args = [_address(target), source.toint(), _size(num_bytes), _address(mbar)]
    with cute.arch.elect_one():
        if const_expr(policy is not None):
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                ".L2::cache_hint [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
                read_only_args=[*args, policy],
            )
        elif const_expr(receivers is None):
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=args,
            )
        else:
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                ".multicast::cluster [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
                read_only_args=[*args, Int16(receivers)],
            )


@cute.jit
def bulk_send(
    source: cute.Pointer, target: cute.Pointer, num_bytes: Int32, mbar: cute.Pointer, peer: Int32
) -> None:
    """Start a copy from this CTA's shared memory to a peer's; completes on the peer's ``mbar``.

    Threads: all lanes of one warp.

    Args:
        target: this CTA's address of the place that is written in the peer.
        mbar: likewise; the peer expects the bytes.
        peer: rank in the cluster.

    ``source`` must not change, and this CTA must not leave, until the peer has received the bytes.

    Source: PTX ISA, cp.async.bulk (shared::cta to shared::cluster).
    """
    there, signal = cute.arch.map_dsmem_ptr(target, peer), cute.arch.map_dsmem_ptr(mbar, peer)
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
            "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[_address(there), _address(source), _size(num_bytes), _address(signal)],
        )


@cute.jit
def bulk_store(source: cute.Pointer, target: cute.Pointer, num_bytes: Int32) -> None:
    """Start a copy from shared to global memory; belongs to the group committed next.

    Threads: all lanes of one warp.

    Source: PTX ISA, cp.async.bulk (shared::cta to global).
    """
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
            read_only_args=[target.toint(), _address(source), _size(num_bytes)],
        )


@cute.jit
def bulk_add(source: cute.Pointer, target: cute.Pointer, count: Int32) -> None:
    """Start adding ``count`` float32 values in shared memory to those in global memory.

    Each addition is atomic; their order varies from run to run, and the sums with it. Belongs to
    the group committed next.

    Threads: all lanes of one warp.

    Args:
        count: a multiple of 4.

    Source: PTX ISA, cp.reduce.async.bulk (.add.f32).
    """
    if const_expr(source.dtype is not Float32 or target.dtype is not Float32):
        raise TypeError(f"bulk_add takes float32, found {source.dtype} and {target.dtype}")
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
            read_only_args=[target.toint(), _address(source), _size(count * 4)],
        )


def bulk_commit() -> None:
    """Make a group of the stores that this warp has started since the last one.

    Source: PTX ISA, cp.async.bulk.commit_group.
    """
    cute.arch.cp_async_bulk_commit_group()


def bulk_wait_read(pending: int = 0) -> None:
    """Wait until at most ``pending`` groups still read shared memory: the others' may be reused.

    Source: PTX ISA, cp.async.bulk.wait_group.read.
    """
    cute.arch.cp_async_bulk_wait_group(pending, read=True)
    cute.arch.sync_warp()


def bulk_wait_written(pending: int = 0) -> None:
    """Wait until the writes of all but the last ``pending`` groups are visible to the thread.

    Needed before a CTA tells others that it has written; at the end of a kernel
    ``bulk_wait_read`` is enough.

    Source: PTX ISA, cp.async.bulk.wait_group.
    """
    cute.arch.cp_async_bulk_wait_group(pending, read=False)
    cute.arch.sync_warp()


def publish_shared() -> None:
    """Let copies that are issued behind the next barrier see what this thread wrote to shared memory.

    Source: PTX ISA, fence.proxy.async.
    """
    cute.arch.fence_proxy("async.shared", space="cta")


def _size(num_bytes: int | Int32) -> Int32:
    """A number of bytes; checked if it is known while tracing."""
    if isinstance(num_bytes, int) and num_bytes % ALIGNMENT:
        raise ValueError(f"num_bytes={num_bytes}: bulk copies take multiples of {ALIGNMENT} bytes")
    return Int32(num_bytes)


def _address(pointer: cute.Pointer) -> Int32:
    """An address in shared memory, which has 32 bits."""
    return Int32(pointer.toint())


# --- tiles of tensors


def load_atom(
    tensor: cute.Tensor, smem_layout: cute.Layout, tile: tuple[int, ...], sharers: int = 1
) -> cpasync.TmaInfo:
    """How tiles of a tensor in global memory are loaded; made in ``__call__``, passed to the kernel.

    Args:
        tensor: any rank up to 5, one stride of which is 1.
        smem_layout: of a tile in shared memory, or (*tile, stages); possibly swizzled.
        tile: extents.
        sharers: CTAs of the cluster that load a part of a tile each, for all of them; not on sm_120,
            as for ``bulk_load``.

    Returns:
        A pair: the copy atom, and the tensor of coordinates that stands for ``tensor``.

    Source: PTX ISA, cp.async.bulk.tensor (global to shared::cluster).
    """
    single, multicast = cpasync.CopyBulkTensorTileG2SOp, cpasync.CopyBulkTensorTileG2SMulticastOp
    operation = multicast() if sharers > 1 else single()
    return cpasync.make_tiled_tma_atom(operation, tensor, smem_layout, tile, num_multicast=sharers)


def store_atom(
    tensor: cute.Tensor, smem_layout: cute.Layout, tile: tuple[int, ...]
) -> cpasync.TmaInfo:
    """How tiles are stored; arguments and result as for ``load_atom``.

    Source: PTX ISA, cp.async.bulk.tensor (shared::cta to global).
    """
    operation = cpasync.CopyBulkTensorTileS2GOp()
    return cpasync.make_tiled_tma_atom(operation, tensor, smem_layout, tile)


def add_atom(
    tensor: cute.Tensor, smem_layout: cute.Layout, tile: tuple[int, ...]
) -> cpasync.TmaInfo:
    """How tiles are added to those in global memory, atomically per element and in no fixed order.

    Source: PTX ISA, cp.reduce.async.bulk.tensor (.add).
    """
    operation = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
    return cpasync.make_tiled_tma_atom(operation, tensor, smem_layout, tile)


@dataclass(frozen=True)
class Tiles:
    """A tensor's tiles and the stages in shared memory that they go through, seen by one CTA.

    Args:
        atom: of ``load_atom``, ``store_atom`` or ``add_atom``.
        shared: (elements of a tile, stages).
        tiles: (elements of a tile, tile coordinates...).
        receivers: ranks of the cluster that a load of this CTA's part reaches, a bit each.
    """

    atom: cute.CopyAtom
    shared: cute.Tensor
    tiles: cute.Tensor
    receivers: Int16 | None = None


def bind(
    atom: cute.CopyAtom, tensor: cute.Tensor, shared: cute.Tensor, tile: tuple[int, ...]
) -> Tiles:
    """The tiles of a tensor for copies that concern this CTA alone.

    Args:
        tensor: of coordinates, that came with ``atom``.
        shared: (*tile, stages).
    """
    return _bind(atom, tensor, shared, tile, 0, cute.make_layout(1), None)


def bind_shared(
    atom: cute.CopyAtom,
    tensor: cute.Tensor,
    shared: cute.Tensor,
    tile: tuple[int, ...],
    cluster: cute.Layout,
    at: tuple[Int32, ...],
    mode: int,
) -> Tiles:
    """The tiles of a tensor for loads that the CTAs along ``mode`` of the cluster share.

    Each loads a part of every tile into all of them, so each expects the bytes of a whole tile, and
    a stage is free when every one of them has read it.

    Args:
        tensor: of coordinates, that came with ``atom``.
        shared: (*tile, stages).
        cluster: from coordinates to ranks.
        at: this CTA's coordinates in ``cluster``.
        mode: of the cluster's layout; its extent is the number of ``sharers`` of the atom.
    """
    receivers = cute.make_layout_image_mask(cluster, at, mode=mode)
    ranks = cute.make_layout(cluster.shape[mode])
    return _bind(atom, tensor, shared, tile, at[mode], ranks, receivers)


def _bind(atom, tensor, shared, tile, rank, ranks, receivers) -> Tiles:
    rank_of_tile = len(tile)
    divided = cute.zipped_divide(tensor, tile)  # (tile, tile coordinates)
    grouped = cute.group_modes(shared, 0, rank_of_tile)  # (tile, stages)
    in_shared, in_global = cpasync.tma_partition(atom, rank, ranks, grouped, divided)
    return Tiles(atom, in_shared, in_global, receivers)


def tile_bytes(dtype: type[cutlass.Numeric], tile: tuple[int, ...]) -> int:
    """Bytes that one tile brings to each CTA; for ``expect_bytes``."""
    return cute.size(tile) * dtype.width // 8


def load_tile(tiles: Tiles, at: tuple[Int32, ...], stage: Int32, mbar: cute.Pointer) -> None:
    """Start loading the tile with coordinates ``at`` into a stage; completes on ``mbar``.

    What lies outside of the tensor arrives as zeros, and counts as bytes.

    Threads: all lanes of one warp.
    """
    source, target = tiles.tiles[None, at], tiles.shared[None, stage]
    if tiles.receivers is None:
        cute.copy(tiles.atom, source, target, tma_bar_ptr=mbar)
    else:
        cute.copy(tiles.atom, source, target, tma_bar_ptr=mbar, mcast_mask=tiles.receivers)


def store_tile(tiles: Tiles, stage: Int32, at: tuple[Int32, ...]) -> None:
    """Start storing (or adding, by the atom) a stage to the tile with coordinates ``at``.

    Nothing outside of the tensor is written. Belongs to the group committed next.

    Threads: all lanes of one warp.
    """
    cute.copy(tiles.atom, tiles.shared[None, stage], tiles.tiles[None, at])


def prefetch_descriptors(atoms: tuple[cute.CopyAtom, ...]) -> None:
    """Bring the descriptors of copies into the cache, before the first of the copies.

    Threads: all lanes of one warp.

    Source: PTX ISA, prefetch.tensormap.
    """
    for atom in atoms:
        cpasync.prefetch_descriptor(atom)
