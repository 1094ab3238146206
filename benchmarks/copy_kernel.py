"""The kernel that memory-bound work is judged by: a plain copy with 128-bit accesses.

With a second input it computes ``out = a ^ b``: two reads per write, as in a backward pass, with
arithmetic that costs nothing and cannot be optimised away.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

WORDS = 4
"""32-bit words of one access."""


@dataclass(frozen=True)
class CopyConfig:
    """How the words are spread.

    Args:
        unroll: accesses that a thread has in flight.
        persistent: a grid that stays resident and strides over the tiles, or a CTA per tile.
        threads: of a CTA.
    """

    unroll: int = 4
    persistent: bool = False
    threads: int = 256

    @property
    def name(self) -> str:
        return f"{'persistent' if self.persistent else 'oneshot'}{self.unroll}"

    @property
    def tile(self) -> int:
        """Accesses of one CTA at a time."""
        return self.threads * self.unroll


CONFIGS = (CopyConfig(1), CopyConfig(4), CopyConfig(4, persistent=True))


class Copy:
    """out = a, or a ^ b.

    Threads: each moves `unroll` vectors of 16 bytes of a tile, neighbours next to each other.
    Traffic: every byte once.
    """

    def __init__(self, config: CopyConfig):
        self.config = config
        self.threads, self.unroll = config.threads, config.unroll

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor | None,
        out: cute.Tensor,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(a, b, out, ctas).launch(
            grid=[ctas, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor | None, out: cute.Tensor, ctas: Int32):
        block, _, _ = cute.arch.block_idx()
        tile = Int64(self.threads * self.unroll)
        first = Int64(block) * tile
        if const_expr(self.config.persistent):
            while first < out.shape[0]:
                self._tile(a, b, out, first)
                first += Int64(ctas) * tile
        else:
            self._tile(a, b, out, first)

    @cute.jit
    def _tile(self, a: cute.Tensor, b: cute.Tensor | None, out: cute.Tensor, first: Int64):
        """Vectors `first` and following; all loads before the first store."""
        tid, _, _ = cute.arch.thread_idx()
        r_a = cute.make_rmem_tensor(cute.make_layout((WORDS, self.unroll)), Int32)
        r_b = cute.make_rmem_tensor(cute.make_layout((WORDS, self.unroll)), Int32)
        if first + self.threads * self.unroll <= out.shape[0]:
            for i in cutlass.range_constexpr(self.unroll):
                self._load(a, b, r_a, r_b, first + i * self.threads + tid, i)
            for i in cutlass.range_constexpr(self.unroll):
                self._store(b, out, r_a, r_b, first + i * self.threads + tid, i)
        else:
            for i in cutlass.range_constexpr(self.unroll):
                at = first + i * self.threads + tid
                if at < out.shape[0]:
                    self._load(a, b, r_a, r_b, at, i)
                    self._store(b, out, r_a, r_b, at, i)

    @cute.jit
    def _load(
        self,
        a: cute.Tensor,
        b: cute.Tensor | None,
        r_a: cute.Tensor,
        r_b: cute.Tensor,
        at: Int64,
        i: cutlass.Constexpr[int],
    ):
        cute.autovec_copy(a[at, None], r_a[None, i])
        if const_expr(b is not None):
            cute.autovec_copy(b[at, None], r_b[None, i])

    @cute.jit
    def _store(
        self,
        b: cute.Tensor | None,
        out: cute.Tensor,
        r_a: cute.Tensor,
        r_b: cute.Tensor,
        at: Int64,
        i: cutlass.Constexpr[int],
    ):
        if const_expr(b is not None):
            for k in cutlass.range_constexpr(WORDS):
                r_a[k, i] = r_a[k, i] ^ r_b[k, i]
        cute.autovec_copy(r_a[None, i], out[at, None])


def compile_copy(
    config: CopyConfig, inputs: int = 1, target: str | None = None
) -> Callable[..., None]:
    """Compile for any length; the function takes ``(a, b or None, out, ctas)``, tensors (vectors, 4) int32."""
    if inputs not in (1, 2):
        raise ValueError(f"inputs={inputs}: a copy reads one tensor, an xor two")
    vectors = cute.sym_int()

    def operand():  # type: ignore[no-untyped-def]
        return make_fake_compact_tensor(
            Int32, (vectors, WORDS), stride_order=(1, 0), assumed_align=16
        )

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = "--enable-tvm-ffi" + (f" --gpu-arch {target}" if target else "")
    second = operand() if inputs == 2 else None
    return cute.compile(
        Copy(config), operand(), second, operand(), Int32(1), stream, options=options
    )


class Empty:
    """A kernel that does nothing, to see what a launch costs.

    Args:
        dependent: launch programmatically dependent on the kernel before.
    """

    def __init__(self, dependent: bool):
        self.dependent = dependent

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(out).launch(
            grid=[1, 1, 1], block=[32, 1, 1], stream=stream, use_pdl=self.dependent
        )

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        if const_expr(self.dependent):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()


def compile_empty(dependent: bool, target: str | None = None) -> Callable[..., None]:
    """Compile; the function takes one int32 tensor, which tells it the stream."""
    out = make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = "--enable-tvm-ffi" + (f" --gpu-arch {target}" if target else "")
    return cute.compile(Empty(dependent), out, stream, options=options)
