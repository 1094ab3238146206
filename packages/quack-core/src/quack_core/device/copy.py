"""Copies between global memory, shared memory and registers, for any row length and alignment.

Two ways lead from a row in global memory to the vectors of a thread (``RowTiling``):
* directly, in accesses as wide as the alignment allows (``load_vectors``, ``store_vectors``);
* through shared memory (``fetch_hull``, ``read_shifted``, ``store_shifted``): rows whose addresses are not multiples of
  16 bytes still move in 16-byte accesses.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync

from quack_core.reduction.tiling import RowTiling

CHUNK = 16
"""Bytes of the widest access."""


def access_elements(vec: int, width: int, align: int) -> int:
    """Elements of ``width`` bits per access: the widest that vector length and alignment allow."""
    return max(1, min(vec, min(align, CHUNK) * 8 // width))


def aligned(pointer: cute.Pointer, num_bytes: int) -> cute.Pointer:
    """The same address, known to be a multiple of ``num_bytes``.

    ``Pointer.align`` would round the address up, at two instructions a time.
    """
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=num_bytes)


def vector_view(pointer: cute.Pointer, tiling: RowTiling, thread: Int32, align: int) -> cute.Tensor:
    """The vectors of one thread in a slice: ((access, 1), accesses per vector, passes)."""
    width = pointer.dtype.width
    access = access_elements(tiling.vec, width, align)
    start = aligned(pointer + thread * tiling.vec, access * width // 8)
    shape = ((access, 1), tiling.vec // access, tiling.passes)
    stride = ((1, 0), access, tiling.step)
    return cute.make_tensor(start, cute.make_layout(shape, stride=stride))


def register_view(registers: cute.Tensor, like: cute.Tensor) -> cute.Tensor:
    """Registers (vec, passes) in the shape of a ``vector_view``."""
    return cute.make_tensor(registers.iterator, cute.make_layout(like.shape))


def make_registers(tiling: RowTiling, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Registers for the vectors of one thread: (vec, passes)."""
    return cute.make_rmem_tensor(cute.make_layout((tiling.vec, tiling.passes)), dtype)


@cute.jit
def column_predicate(
    tiling: cutlass.Constexpr, thread: Int32, rank: Int32, inside: Boolean
) -> cute.Tensor:
    """Which vectors of a thread exist: (1, 1, passes); ``inside`` tells whether its row does.

    A vector is inside or outside as a whole because its length divides that of the row.
    """
    layout = cute.make_layout((1, 1, tiling.passes))
    pred = cute.make_rmem_tensor(layout, Boolean)
    first = rank * tiling.cols + thread * tiling.vec
    for p in cutlass.range_constexpr(tiling.passes):
        pred[0, 0, p] = inside & (first + p * tiling.step < tiling.n)
    return pred


def _spread(pred: cute.Tensor, like: cute.Tensor) -> cute.Tensor:
    """A predicate per vector, repeated for the accesses of each."""
    shape = (1, *like.shape[1:])
    return cute.make_tensor(pred.iterator, cute.make_layout(shape, stride=(0, 0, 1)))


def _atom(operation: object, dtype: type[cutlass.Numeric], access: int) -> cute.CopyAtom:
    return cute.make_copy_atom(operation, dtype, num_bits_per_copy=access * dtype.width)


@cute.jit
def load_vectors(
    pointer: cute.Pointer,
    tiling: cutlass.Constexpr,
    thread: Int32,
    align: cutlass.Constexpr[int],
    pred: cute.Tensor | None = None,
) -> cute.Tensor:
    """The vectors of a thread into registers (vec, passes); zeros where ``pred`` is false."""
    source = vector_view(pointer, tiling, thread, align)
    registers = make_registers(tiling, pointer.dtype)
    atom = _atom(CopyUniversalOp(), pointer.dtype, source.shape[0][0])
    if const_expr(pred is None):
        cute.copy(atom, source, register_view(registers, source))
    else:
        registers.fill(0)
        cute.copy(atom, source, register_view(registers, source), pred=_spread(pred, source))
    return registers


@cute.jit
def store_vectors(
    registers: cute.Tensor,
    pointer: cute.Pointer,
    tiling: cutlass.Constexpr,
    thread: Int32,
    align: cutlass.Constexpr[int],
    pred: cute.Tensor | None = None,
) -> None:
    """Registers (vec, passes) to the vectors of a thread."""
    target = vector_view(pointer, tiling, thread, align)
    atom = _atom(CopyUniversalOp(), pointer.dtype, target.shape[0][0])
    if const_expr(pred is None):
        cute.copy(atom, register_view(registers, target), target)
    else:
        cute.copy(atom, register_view(registers, target), target, pred=_spread(pred, target))


@cute.jit
def fetch_vectors(
    pointer: cute.Pointer,
    shared: cute.Pointer,
    tiling: cutlass.Constexpr,
    thread: Int32,
    align: cutlass.Constexpr[int],
    pred: cute.Tensor | None = None,
) -> None:
    """Start cp.async of the vectors of a thread into a row in shared memory.

    The alignment must allow accesses of 4, 8 or 16 bytes. Commit and wait are the caller's; a
    thread that reads only its own vectors needs no barrier. Where ``pred`` is false nothing is
    written.
    """
    source = vector_view(pointer, tiling, thread, align)
    target = vector_view(shared, tiling, thread, align)
    wide = const_expr(source.shape[0][0] * pointer.dtype.width == 8 * CHUNK)
    mode = cpasync.LoadCacheMode.GLOBAL if wide else cpasync.LoadCacheMode.ALWAYS
    atom = _atom(cpasync.CopyG2SOp(cache_mode=mode), pointer.dtype, source.shape[0][0])
    if const_expr(pred is None):
        cute.copy(atom, source, target)
    else:
        cute.copy(atom, source, target, pred=_spread(pred, source))


def can_fetch(vec: int, width: int, align: int) -> bool:
    """Whether ``fetch_vectors`` applies: cp.async moves 4, 8 or 16 bytes."""
    return access_elements(vec, width, align) * width >= 32


def hull_bytes(cols: int, width: int) -> int:
    """Shared memory for ``cols`` elements at any offset within a chunk."""
    return (cols * width // 8 + 2 * CHUNK - 1) // CHUNK * CHUNK


def chunk_offset(pointer: cute.Pointer) -> Int32:
    """Bytes between the 16-byte chunk that holds the address and the address."""
    return Int32(pointer.toint() & Int64(CHUNK - 1))


@cute.jit
def fetch_hull(
    pointer: cute.Pointer,
    count: Int32,
    shared: cute.Pointer,
    thread: Int32,
    num_threads: cutlass.Constexpr[int],
) -> Int32:
    """Start cp.async of ``count`` elements from any address, in 16-byte chunks.

    The first chunk begins up to 14 bytes before the address: in the same 16-byte block as a byte
    of the row, hence inside the allocation. The last one reads no byte behind the row. Commit,
    wait and barrier are the caller's: threads read what others fetched.

    Returns:
        The offset in bytes at which the row begins in ``shared`` (16-byte aligned,
        ``hull_bytes`` long).
    """
    offset = chunk_offset(pointer)
    num_bytes = offset + count * const_expr(pointer.dtype.width // 8)
    source = pointer.toint() - Int64(offset)
    target = shared.toint()
    for at in cutlass.range(thread * CHUNK, num_bytes, num_threads * CHUNK, unroll=4):
        rest = num_bytes - at
        size = rest if rest < CHUNK else Int32(CHUNK)
        cute.arch.inline_ptx(
            "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
            read_only_args=[Int32(target) + at, source + Int64(at), size],
        )
    return offset


def _words(shared: cute.Pointer, chunk: Int32, count: int) -> list[Uint32]:
    """``count`` 16-byte chunks of shared memory as 32-bit words."""
    registers = cute.make_rmem_tensor(cute.make_layout((4, count)), Uint32)
    for i in range(count):
        start = cute.recast_ptr(shared, dtype=Uint32) + (chunk + i) * 4
        source = cute.make_tensor(aligned(start, CHUNK), cute.make_layout(4))
        cute.autovec_copy(source, registers[None, i])
    return [registers[i] for i in range(4 * count)]


def _shift(words: list[Uint32], offset: Int32, sub_word: bool) -> list[Uint32]:
    """The words that begin ``offset`` (0 to 15, the same for all threads) bytes further on."""
    for bit, distance in ((8, 2), (4, 1)):
        far = (offset & bit) != 0
        words = [
            _select(far, after, word)
            for word, after in zip(words, words[distance:], strict=False)
        ]
    if sub_word:  # two 16-bit elements per word
        selector = _select((offset & 2) != 0, Uint32(0x5432), Uint32(0x3210))
        words = [
            Uint32(cute.arch.prmt(word, after, selector))
            for word, after in zip(words, words[1:], strict=False)
        ]
    return words


@cute.jit
def _select(condition: Boolean, a: Uint32, b: Uint32) -> Uint32:
    return a if condition else b


@cute.jit
def read_shifted(
    shared: cute.Pointer,
    offset: Int32,
    index: Int32,
    count: Int32,
    vec: cutlass.Constexpr[int],
    dtype: cutlass.Constexpr,
) -> cute.Tensor:
    """A vector of a row that ``fetch_hull`` brought, from element ``index`` on: registers (vec,).

    16-byte reads and a shift in registers; zeros from element ``count`` on. The vector must be a
    multiple of 16 bytes and ``index`` one of ``vec``.
    """
    size = const_expr(dtype.width // 8)
    chunks = const_expr(vec * size // CHUNK)
    registers = cute.make_rmem_tensor(vec, dtype)
    words = cute.recast_tensor(registers, Uint32)
    found = _shift(_words(shared, index * size // CHUNK, chunks + 1), offset, size == 2)
    for i in cutlass.range_constexpr(4 * chunks):
        words[i] = found[i]
    if index + vec > count:
        for v in cutlass.range_constexpr(vec):
            if index + v >= count:
                registers[v] = dtype(0)
    return registers


@cute.jit
def load_vector(
    pointer: cute.Pointer,
    index: Int32,
    count: Int32,
    vec: cutlass.Constexpr[int],
    align: cutlass.Constexpr[int],
) -> cute.Tensor:
    """Elements ``index`` to ``index + vec`` of a row in memory: registers (vec,).

    Zeros from element ``count`` on, which are not read; ``index`` is a multiple of ``vec``.
    """
    registers = cute.make_rmem_tensor(vec, pointer.dtype)
    access = const_expr(access_elements(vec, pointer.dtype.width, align))
    start = pointer + index
    if index + vec <= count:
        begin = aligned(start, access * const_expr(pointer.dtype.width // 8))
        cute.autovec_copy(cute.make_tensor(begin, cute.make_layout(vec)), registers)
    else:
        registers.fill(0)
        for v in cutlass.range_constexpr(vec):
            if index + v < count:
                registers[v] = cute.make_tensor(start + v, cute.make_layout(1))[0]
    return registers


@cute.jit
def store_shifted(
    pointer: cute.Pointer,
    count: Int32,
    shared: cute.Pointer,
    thread: Int32,
    num_threads: cutlass.Constexpr[int],
) -> None:
    """Write ``count`` elements to any address: whole 16-byte chunks, single elements at the ends.

    They lie in ``shared`` from its beginning on, behind a barrier; chunks are put together from
    two 16-byte reads and a shift in registers.
    """
    dtype = pointer.dtype
    size = const_expr(dtype.width // 8)
    per_chunk = const_expr(CHUNK // size)
    head = (Int32(CHUNK) - chunk_offset(pointer)) % CHUNK // size  # elements before the first chunk
    head = head if head < count else count
    whole = (count - head) // per_chunk
    target = cute.recast_ptr(pointer + head, dtype=Uint32)
    offset = head * size
    for c in cutlass.range(thread, whole, num_threads, unroll=4):
        words = _shift(_words(shared, c, 2), offset, size == 2)
        registers = cute.make_rmem_tensor(4, Uint32)
        for i in cutlass.range_constexpr(4):
            registers[i] = words[i]
        there = aligned(target + Int64(c) * 4, CHUNK)
        cute.autovec_copy(registers, cute.make_tensor(there, cute.make_layout(4)))
    element = thread  # single elements: before the first chunk, then behind the last one
    if thread >= head:
        element = thread + whole * per_chunk
    if element < count and thread < 2 * per_chunk:
        source = cute.make_tensor(cute.recast_ptr(shared, dtype=dtype) + element, cute.make_layout(1))
        cute.make_tensor(pointer + element, cute.make_layout(1))[0] = source[0]
