"""The smallest kernel: it shows that compiling works, and makes a process ready for others.

The first compilation of a process takes one to two seconds longer than the next ones.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda  # type: ignore[import-not-found]
from cutlass import cute

from .compile import symbolic
from .dsl import sym_int


@dataclass(frozen=True)
class BlankSpec:
    """``x = 1`` for ``x`` of int32, ``(N,)``."""

    name: str = "blank"


@dataclass(frozen=True)
class BlankConfig:
    """One CTA of so many threads for each element."""

    threads: int = 32


class Blank:
    """A CTA writes one element."""

    def __init__(self, spec: BlankSpec, config: BlankConfig) -> None:
        self.spec, self.config = spec, config

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: cuda.CUstream):  # type: ignore[no-untyped-def]
        shape = {"grid": [cute.size(x), 1, 1], "block": [self.config.threads, 1, 1]}
        self.kernel(x).launch(**shape, stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor):  # type: ignore[no-untyped-def]
        """Threads: all of a CTA write the same."""
        index, _, _ = cute.arch.block_idx()
        mX[index] = 1


def build(spec: BlankSpec, config: BlankConfig) -> tuple[Blank, tuple[Any, ...]]:
    """The kernel and its symbolic arguments."""
    return Blank(spec, config), (symbolic("int32", (sym_int(),), align=4),)
