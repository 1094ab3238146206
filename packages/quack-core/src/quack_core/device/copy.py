"""Copies between global memory, shared memory and registers, for any row length and alignment.

* Rows of whole vectors (``RowTiling``): ``load_vectors``, ``store_vectors`` and, through shared
  memory, ``fetch_vectors``, in accesses as wide as the alignment allows.
* Rows that are no whole number of vectors and begin anywhere: ``load_piece``,
  ``load_shifted`` and ``store_piece`` work on 16-byte pieces of memory that cover the row. Where
  the vectors of a row move to or from such pieces, ``read_shifted`` and ``store_shifted`` do it.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync

from quack_core.reduction.tiling import WARP, RowTiling

from . import l2

CHUNK = 16
"""Bytes of the widest access."""
WORDS = CHUNK // 4
"""32-bit words of the widest access."""


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
    start = aligned(pointer + tiling.start(thread), access * width // 8)
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
def widen(registers: cute.Tensor) -> cute.TensorSSA:
    """Values of registers as float32.

    bfloat16 is the upper half of a float32: one operation for each of a pair, where a conversion
    takes two for the upper one.
    """
    if const_expr(registers.element_type is not BFloat16 or cute.size(registers, mode=[0]) % 2):
        return registers.load().to(Float32)
    words = cute.recast_tensor(registers, Uint32)
    found = cute.make_rmem_tensor(registers.shape, Float32)
    for i in cutlass.range_constexpr(cute.size(words)):
        found[2 * i] = (words[i] << 16).bitcast(Float32)
        found[2 * i + 1] = (words[i] & Uint32(0xFFFF0000)).bitcast(Float32)
    return found.load()


@cute.jit
def column_predicate(
    tiling: cutlass.Constexpr, thread: Int32, rank: Int32, inside: Boolean
) -> cute.Tensor:
    """Which vectors of a thread exist: (1, 1, passes); ``inside`` tells whether its row does.

    A vector is inside or outside as a whole because its length divides that of the row.
    """
    layout = cute.make_layout((1, 1, tiling.passes))
    pred = cute.make_rmem_tensor(layout, Boolean)
    first = rank * tiling.cols + tiling.start(thread)
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
    fill: cutlass.Constexpr[float] = 0,
    policy: Int64 | None = None,
) -> cute.Tensor:
    """The vectors of a thread into registers (vec, passes); ``fill`` where ``pred`` is false.

    Args:
        policy: of ``l2``, for global memory.
    """
    source = vector_view(pointer, tiling, thread, align)
    registers = make_registers(tiling, pointer.dtype)
    if const_expr(pred is not None):
        registers.fill(fill)
        pred = _spread(pred, source)
    l2.load(source, register_view(registers, source), pred, policy)
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


def vector_offset(pointer: cute.Pointer, vec: int) -> Int32:
    """Elements between the last multiple of ``vec`` elements in memory and the address.

    Args:
        vec: a power of two.

    Raises:
        ValueError: it is none.
    """
    _check_power_of_two(vec)
    shift = (pointer.dtype.width // 8).bit_length() - 1
    return Int32((pointer.toint() >> shift) & Int64(vec - 1))


@cute.jit
def piece_predicate(
    pointer: cute.Pointer, index: Int32, count: Int32, vec: cutlass.Constexpr[int], align: int
) -> cute.Tensor:
    """Which accesses of a piece meet an element ``0 <= e < count``: (1, accesses)."""
    access = const_expr(access_elements(vec, pointer.dtype.width, align))
    pred = cute.make_rmem_tensor(cute.make_layout((1, vec // access)), Boolean)
    for a in cutlass.range_constexpr(vec // access):
        first = index + a * access
        pred[0, a] = (first + access > 0) & (first < count)
    return pred


def piece_view(pointer: cute.Pointer, index: Int32, vec: int, align: int) -> cute.Tensor:
    """Elements ``index`` to ``index + vec`` of a row as ((access, 1), accesses)."""
    width = pointer.dtype.width
    access = access_elements(vec, width, align)
    layout = cute.make_layout(((access, 1), vec // access), stride=((1, 0), access))
    return cute.make_tensor(aligned(pointer + index, access * width // 8), layout)


@cute.jit
def load_piece(
    pointer: cute.Pointer,
    index: Int32,
    count: Int32,
    vec: cutlass.Constexpr[int],
    align: cutlass.Constexpr[int],
    fill: cutlass.Constexpr[float] = 0,
    policy: Int64 | None = None,
) -> cute.Tensor:
    """Elements ``index`` to ``index + vec`` of a row in global memory: registers (vec,).

    An access takes place if it meets an element ``0 <= e < count``; then all of it is read, which
    is safe where ``align`` is 16: 16 aligned bytes never straddle the end of an allocation.
    Elements outside hold anything (``clear_outside``), or ``fill`` where no access took place.

    Args:
        align: bytes that divide the address of element ``index``.
        policy: of ``l2``.
    """
    source = piece_view(pointer, index, vec, align)
    registers = cute.make_rmem_tensor(vec, pointer.dtype)
    registers.fill(fill)
    target = cute.make_tensor(registers.iterator, cute.make_layout(source.shape))
    pred = piece_predicate(pointer, index, count, vec, align)
    l2.load(source, target, pred, policy)
    return registers


@cute.jit
def clear_outside(
    registers: cute.Tensor, index: Int32, count: Int32, fill: cutlass.Constexpr[float] = 0
) -> None:
    """Set the elements of a piece that lie outside ``0 <= e < count`` to ``fill``."""
    vec = const_expr(cute.size(registers))
    if index < 0 or index + vec > count:
        for v in cutlass.range_constexpr(vec):
            if index + v < 0 or index + v >= count:
                registers[v] = registers.element_type(fill)


@cute.jit
def load_shifted(
    pointer: cute.Pointer,
    index: Int32,
    count: Int32,
    vec: cutlass.Constexpr[int],
) -> cute.Tensor:
    """As ``load_piece`` with ``align`` 16, where ``pointer`` is aligned and ``index`` is not.

    Two pieces in 16-byte accesses and a shift in registers.

    Args:
        index: of the first element; any number, also below 0.
        vec: a power of two, together at least 4 bytes.

    Raises:
        ValueError: it is no power of two.
    """
    _check_power_of_two(vec)
    num_words = const_expr(vec * pointer.dtype.width // 32)
    back = index & (vec - 1)
    low = load_piece(pointer, index - back, count, vec, CHUNK)
    high = load_piece(pointer, index - back + vec, count, vec, CHUNK)
    halves = (cute.recast_tensor(low, Uint32), cute.recast_tensor(high, Uint32))
    words = [half[i] for half in halves for i in range(num_words)]
    width = const_expr(pointer.dtype.width)
    return cute.recast_tensor(_shift(words, back * (width // 8), num_words, width), pointer.dtype)


@cute.jit
def read_shifted(
    pointer: cute.Pointer,
    num_bytes: Int32,
    vec: cutlass.Constexpr[int],
    passes: cutlass.Constexpr[int],
    step: cutlass.Constexpr[int],
) -> cute.Tensor:
    """Vectors that begin ``num_bytes`` behind aligned addresses: registers (vec, passes).

    Whole 16-byte accesses that cover the elements, one more than they fill, and a shift in
    registers: word by word, banks of shared memory collide (8192 rows of 16383: 5 % slower).

    Args:
        pointer: into shared memory, a multiple of 16 bytes.
        num_bytes: below 16, and whole elements; the same in all lanes.
        vec: elements that fill 16 bytes, or a multiple of that.
        passes: vectors.
        step: elements from one to the next, whole vectors.
    """
    dtype, num_words = pointer.dtype, const_expr(vec * pointer.dtype.width // 32)
    found = cute.make_rmem_tensor((num_words, passes), Uint32)
    selector = _selector(num_bytes, dtype.width)

    def fill(w: int) -> None:
        # Words are loaded here, not before the branch: fewer are in registers at once.
        for p in cutlass.range_constexpr(passes):
            _put(found[None, p], _words_around(pointer + p * step, num_words)[w:], selector)

    _branch(num_bytes, 0, WORDS, fill)
    return cute.recast_tensor(found, dtype)


@cute.jit
def shift_pieces(pieces: cute.Tensor, num_bytes: Int32) -> cute.Tensor:
    """The consecutive vectors of a warp out of aligned pieces that begin below them.

    A lane gets the end of its vector from the next one: what ``store_shifted`` does, backwards.

    Threads: all lanes of a warp; in pass p lane l holds piece ``32 * p + l``, and lane 0 in the last
    pass the one behind them all.

    Args:
        pieces: (vec, passes + 1), pieces of 16 bytes.
        num_bytes: from a piece to the vector, below 16, and whole elements; the same in all lanes.

    Returns:
        (vec, passes)
    """
    dtype = pieces.element_type
    words = cute.recast_tensor(pieces, Uint32)  # (words, passes + 1)
    passes = const_expr(words.shape[1] - 1)
    found = cute.make_rmem_tensor((WORDS, passes), Uint32)
    selector = _selector(num_bytes, dtype.width)

    def fill(w: int) -> None:
        for p in cutlass.range_constexpr(passes):
            own = [words[i, p] for i in range(WORDS)]
            behind = _starts_behind(words, p, w if selector is None else w + 1)
            _put(found[None, p], (own + behind)[w:], selector)

    _branch(num_bytes, 0, WORDS, fill)
    return cute.recast_tensor(found, dtype)


@cute.jit
def store_shifted(
    registers: cute.Tensor, pointer: cute.Pointer, index: Int32, count: Int32
) -> None:
    """The consecutive vectors of a warp to a row that begins anywhere, in 16-byte accesses.

    A lane hands the end of its vector to the next one. What the warp shares with its neighbours at
    both ends, lane 0 writes element by element.

    Threads: all lanes of a warp; in pass p lane l holds the elements from
    ``index + (32 * p + l) * vec`` on.

    Args:
        registers: (vec, passes), vectors of 16 bytes or a multiple.
        pointer: to element 0 of the row.
        index: of the warp's first element, the same in all lanes.
        count: elements of the row; nothing is written beyond.
    """
    vec, passes = registers.shape
    dtype, lane = registers.element_type, cute.arch.lane_idx()
    num_words = const_expr(vec * dtype.width // 32)
    offset = vector_offset(pointer, CHUNK * 8 // dtype.width)
    distance = CHUNK - offset * (dtype.width // 8)
    start, left = pointer + index, count - index  # the warp's own elements
    end = const_expr(WARP * vec * passes)
    if left > end:
        left = Int32(end)
    words = cute.recast_tensor(registers, Uint32)  # (words, passes)
    found = cute.make_rmem_tensor((num_words, passes + 1), Uint32)
    selector = _selector(distance, dtype.width)

    def fill(w: int) -> None:
        for p in cutlass.range_constexpr(passes + 1):  # the last: the end of the warp's elements
            before = _ends_before(words, p, num_words - WORDS + w)
            own = [words[i, p] if p < passes else Uint32(0) for i in range(num_words)]
            _put(found[None, p], [*before, *own, Uint32(0)], selector)

    _branch(distance, 1 if const_expr(dtype.width == 32) else 0, WORDS + 1, fill)
    for p in cutlass.range_constexpr(passes + 1):
        piece = cute.recast_tensor(found[None, p], dtype)
        place = (p * WARP + lane) * vec - offset
        if const_expr(p < passes) or lane == 0:
            store_piece(piece, start, place, left, CHUNK)


@cute.jit
def store_piece(
    registers: cute.Tensor,
    pointer: cute.Pointer,
    index: Int32,
    count: Int32,
    align: cutlass.Constexpr[int],
    whole: cutlass.Constexpr[bool] = False,
) -> None:
    """Registers (vec,) to elements ``index`` and following, those with ``0 <= element < count``.

    Args:
        whole: pieces lie inside or outside as a whole, and ``index`` is not negative.
    """
    vec = const_expr(cute.size(registers))
    start = pointer + index
    if const_expr(whole):
        if index < count:
            begin = aligned(start, _access_bytes(vec, pointer, align))
            cute.autovec_copy(registers, cute.make_tensor(begin, cute.make_layout(vec)))
    elif index >= 0 and index + vec <= count:
        begin = aligned(start, _access_bytes(vec, pointer, align))
        cute.autovec_copy(registers, cute.make_tensor(begin, cute.make_layout(vec)))
    else:
        for v in cutlass.range_constexpr(vec):
            if index + v >= 0 and index + v < count:
                cute.make_tensor(start + v, cute.make_layout(1))[0] = registers[v]


def _check_power_of_two(vec: int) -> None:
    if vec < 1 or vec & (vec - 1):
        raise ValueError(f"vec={vec}: must be a power of two")


def _access_bytes(vec: int, pointer: cute.Pointer, align: int) -> int:
    width = pointer.dtype.width
    return access_elements(vec, width, align) * width // 8


def _shift(words: list[Uint32], num_bytes: Int32, cases: int, width: int) -> cute.Tensor:
    """The words that begin ``num_bytes`` further on: registers (words,), ``cases`` fewer.

    Args:
        num_bytes: whole elements of ``width`` bits, below ``4 * cases``; the same in all lanes.
    """
    found = cute.make_rmem_tensor(len(words) - cases, Uint32)
    selector = _selector(num_bytes, width)
    _branch(num_bytes, 0, cases, lambda w: _put(found, words[w:], selector))
    return found


@cute.jit
def _branch(
    num_bytes: Int32,
    first: cutlass.Constexpr[int],
    end: cutlass.Constexpr[int],
    fill: cutlass.Constexpr[Callable[[int], None]],
) -> None:
    """Call ``fill`` with the whole words in a distance: ``first`` or more, fewer than ``end``.

    A branch that all lanes take together: selecting word by word costs three times as much.

    Args:
        num_bytes: the same in all lanes.
        fill: writes registers; traced once for each number.
    """
    for w in cutlass.range_constexpr(first, end):
        if num_bytes // 4 == w:
            fill(w)


def _words_around(pointer: cute.Pointer, num_words: int) -> list[Uint32]:
    """Words of shared memory from an aligned address on, and as many as an access has beyond."""
    source = cute.make_tensor(
        aligned(cute.recast_ptr(pointer, dtype=Uint32), CHUNK),
        cute.make_layout((WORDS, num_words // WORDS + 1)),
    )
    words = cute.make_rmem_tensor(source.shape, Uint32)
    cute.autovec_copy(source, words)
    return [words[i] for i in range(num_words + WORDS)]


def _starts_behind(words: cute.Tensor, p: int, count: int) -> list[Uint32]:
    """The first words of the vector behind the lane's one of pass p."""
    lane = cute.arch.lane_idx()
    given = [_select(lane == 0, words[i, p + 1], words[i, p]) for i in range(count)]
    return [cute.arch.shuffle_sync(word, (lane + 1) % WARP) for word in given]


def _ends_before(words: cute.Tensor, p: int, first: int) -> list[Uint32]:
    """The words from ``first`` on of the vector before the lane's one of pass p."""
    (num_words, passes), lane = words.shape, cute.arch.lane_idx()
    given = [words[i, min(p, passes - 1)] for i in range(first, num_words)]
    if 0 < p < passes:
        earlier = [words[i, p - 1] for i in range(first, num_words)]
        pairs = zip(earlier, given, strict=True)
        given = [_select(lane == WARP - 1, before, word) for before, word in pairs]
    return [cute.arch.shuffle_sync(word, (lane + WARP - 1) % WARP) for word in given]


def _selector(num_bytes: Int32, width: int) -> Uint32 | None:
    """How a word is made of two neighbours: of both halves between, or of the first alone."""
    if width == 32:
        return None
    return _select((num_bytes & 2) != 0, Uint32(0x5432), Uint32(0x3210))


def _put(target: cute.Tensor, words: list[Uint32], selector: Uint32 | None) -> None:
    """Write as many words as there is room for."""
    for i in range(cute.size(target)):
        word = words[i]
        if selector is not None:
            word = Uint32(cute.arch.prmt(word, words[i + 1], selector))
        target[i] = word


@cute.jit
def _select(condition: Boolean, a: Uint32, b: Uint32) -> Uint32:
    return a if condition else b
