"""RMSNorm backward of rows that do not fit into registers: each row is read twice, piece by piece."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from quack_core.device import copy
from quack_core.device.reduce import thread_sum

from .bwd import RMSNormBwd, arguments
from .config import BwdConfig
from .fwd import weight_pointer
from .spec import RMSNormBwdSpec


class RMSNormBwdLong(RMSNormBwd):
    """As ``RMSNormBwd``; a thread holds its column sums and one vector at a time.

    Traffic: x, dout and dresidual_out twice, mostly from L2 the second time; weight twice per row.
    """

    def _hold(self, *weight) -> None:
        return None

    def _pieces(self, at, weight):
        """(pass, element, x, dout, weight) of the thread's vectors, in order."""
        inputs, _, row, rows, head, row_rank, _, tid = at
        mW, where, first, thread, _ = weight
        vec, step, count = self.tiling.vec, self.tiling.step, self.spec.n - first
        valid = row < rows
        limit = _limit(count, valid)
        rows_at = [self._pointer(tensor, row, valid, head, row_rank) for tensor in inputs]
        for p in range(self.tiling.passes):
            cute.arch.sync_warp()  # or else all loads come first, and spill
            index = thread * vec + p * step
            x, dy, dh = (
                copy.load_piece(pointer, index, limit, vec, self.spec.align).load().to(Float32)
                for pointer in rows_at
            )
            rW = None
            if mW is not None:
                pointer = weight_pointer(mW, where, first)
                rW = copy.load_piece(pointer, index, count, vec, self.spec.weight_align)
            yield p, index, limit, x, dy, dh, rW

    def _first_pass(self, at, rstd: Float32, held, weight, sums, weight_offset: Float32):
        dot = Float32(0.0)
        for p, _, _, x, dy, _, rW in self._pieces(at, weight):
            xdy = x * dy
            if self.spec.dweight:
                piece = sums[0][None, p]
                piece.store(piece.load() + xdy * rstd)
            if self.spec.dbias is not None:
                piece = sums[1][None, p]
                piece.store(piece.load() + dy)
            dot = dot + thread_sum(self._times_weight(xdy, rW, weight_offset))
        return None, dot

    def _second_pass(
        self, at, kept, mean: Float32, rstd: Float32, held, weight, outputs, weight_offset: Float32
    ) -> None:
        _, _, row, rows, head, row_rank, _, _ = at
        for _, index, limit, x, dy, dh_out, rW in self._pieces(at, weight):
            dh = (self._times_weight(dy, rW, weight_offset) - x * mean) * rstd
            if self.spec.dresidual_out is not None:
                dh = dh + dh_out
            for output in outputs:
                if output is not None:
                    pointer = self._pointer(output, row, row < rows, head, row_rank)
                    registers = cute.make_rmem_tensor(self.tiling.vec, pointer.dtype)
                    registers.store(dh.to(pointer.dtype))
                    copy.store_piece(registers, pointer, index, limit, self.spec.align)


@cute.jit
def _limit(count: Int32, valid) -> Int32:
    return count if valid else Int32(0)


def build(spec: RMSNormBwdSpec, config: BwdConfig) -> tuple[RMSNormBwdLong, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormBwdLong(spec, config), arguments(spec)
