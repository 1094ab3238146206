"""RMSNorm backward of rows that do not fit into registers: each row is read twice, piece by piece."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from quack_core.device import copy
from quack_norm.ops.row_map.base import column_pointer, store_piece

from .bwd import RMSNormBwd, arguments
from .bwd_config import BwdConfig
from .bwd_spec import RMSNormBwdSpec


class RMSNormBwdLong(RMSNormBwd):
    """As ``RMSNormBwd``; a thread holds its column sums and one vector at a time.

    Traffic: x, dout and dresidual_out twice, mostly from L2 the second time; weight twice per row.
    """

    def _hold(self, *weight) -> None:
        return None

    def _pieces(self, at, weight):
        """(pass, element, end, x, dout, dresidual_out, weight) of the thread's vectors, in order.

        Elements count from the thread's first one: constants fold into the instructions.
        """
        inputs, _, row, rows, _, _, _, _ = at
        mW, where, first, thread, _ = weight
        vec, skip = self.tiling.vec, self.tiling.start(thread)
        count = self.spec.n - first - skip
        limit = _limit(count, row < rows)
        rows_at = [self._start(tensor, at) for tensor in inputs]
        weight_at = None if mW is None else column_pointer(mW, where, first) + skip
        for p in range(self.tiling.passes):
            cute.arch.sync_warp()  # or else all loads come first, and spill
            index = Int32(p * self.tiling.step)
            x, dy, dh = (
                copy.load_piece(start, index, limit, vec, self.spec.align).load().to(Float32)
                for start in rows_at
            )
            rW = None
            if weight_at is not None:
                rW = copy.load_piece(weight_at, index, count, vec, self.spec.weight_align)
            yield p, index, limit, x, dy, dh, rW

    def _first_pass(
        self,
        at,
        rstd: Float32,
        mean: tuple[Float32, Float32],
        held,
        weight,
        sums,
        weight_offset: Float32,
    ):
        dots = [Float32(0.0) for _ in range(self.reduction.width)]
        for p, _, _, x, dy, _, rW in self._pieces(at, weight):
            xdy = self.centre(x, mean) * dy
            if self.spec.dweight:
                piece = sums[0][None, p]
                piece.store(piece.load() + xdy * rstd)
            if self.spec.dbias is not None:
                piece = sums[1][None, p]
                piece.store(piece.load() + dy)
            parts = self.dots(xdy, dy, rW, weight_offset)
            dots = [dot + part for dot, part in zip(dots, parts, strict=True)]
        return None, tuple(dots)

    def _second_pass(
        self,
        at,
        kept,
        means,
        rstd: Float32,
        mean: tuple[Float32, Float32],
        held,
        weight,
        outputs,
        weight_offset: Float32,
    ) -> None:
        starts = [self._start(output, at) for output in outputs if output is not None]
        for _, index, limit, x, dy, dh_out, rW in self._pieces(at, weight):
            dh = self.gradient(self.centre(x, mean), dy, means, rstd, rW, weight_offset)
            if self.spec.dresidual_out is not None:
                dh = dh + dh_out
            for start in starts:
                store_piece(dh, start, index, limit, self.spec.align, True)

    def _start(self, tensor: cute.Tensor, at) -> cute.Pointer:
        """The thread's first element in a row."""
        _, _, row, rows, head, row_rank, _, tid = at
        pointer = self._pointer(tensor, row, row < rows, head, row_rank)
        return pointer + self.tiling.start(self.thread_in_row(tid))


@cute.jit
def _limit(count: Int32, valid) -> Int32:
    return count if valid else Int32(0)


def build(spec: RMSNormBwdSpec, config: BwdConfig) -> tuple[RMSNormBwdLong, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormBwdLong(spec, config), arguments(spec)
