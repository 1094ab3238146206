"""Device arithmetic evaluated on the CPU, in a process of its own.

A device intrinsic in host code aborts the process; here that is a failed test, not the end of all.
Reads ``[[function, rows], ...]`` as JSON from standard input and writes the results likewise.
"""

import json
import sys

import cutlass
import numpy as np
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from quack_core.device import activation, barrier, reduce
from quack_core.gemm.sm90 import ring

REDUCTIONS = {
    "sum": reduce.SUM,
    "sum2": reduce.SUM2,
    "max": reduce.MAX,
    "online": reduce.ONLINE_MAX_SUM,
    "compensated": reduce.ONLINE_SOFTMAX_COMPENSATED,
    "moments": reduce.moments(even=False),
}
TABLES = {"activation": activation.FUNCTIONS, "derivative": activation.DERIVATIVES}
ABSENT = 1e30
"""Stands for a value beyond the end of a row, which must not count."""


@cute.jit
def tree(
    rows: cute.Tensor,
    out: cute.Tensor,
    name: cutlass.Constexpr[str],
    count: cutlass.Constexpr[int],
):
    """``combine_tree`` of ``count`` partial results: (rows, count, width) to (rows, width)."""
    reduction = cutlass.const_expr(REDUCTIONS[name])
    for row in range(rows.shape[0]):
        values = [tuple(rows[row, i, w] for w in range(reduction.width)) for i in range(count)]
        total = reduce.combine_tree(values, reduction)
        for w in cutlass.range_constexpr(reduction.width):
            out[row, w] = total[w]


@cute.jit
def thread(
    rows: cute.Tensor,
    out: cute.Tensor,
    name: cutlass.Constexpr[str],
    count: cutlass.Constexpr[int],
):
    """The values of one thread: (rows, count, 1) to (rows, width)."""
    values = cute.make_rmem_tensor(count, Float32)
    for row in range(rows.shape[0]):
        for i in cutlass.range_constexpr(count):
            values[i] = rows[row, i, 0]
        if cutlass.const_expr(name == "sum"):
            out[row, 0] = reduce.thread_sum(values.load())
        elif cutlass.const_expr(name == "max"):
            out[row, 0] = reduce.thread_max(values.load())
        elif cutlass.const_expr(name == "sum2"):
            out[row, 0], out[row, 1] = reduce.thread_compensated_sum(
                [values[i] for i in range(count)]
            )
        elif cutlass.const_expr(name == "moments"):
            given = values.load()
            found = reduce.thread_moments(given, given < cute.full_like(given, ABSENT))
            for w in cutlass.range_constexpr(4):
                out[row, w] = found[w]
        else:
            out[row, 0], out[row, 1] = reduce.thread_online(values.load())


@cute.jit
def phases(out: cute.Tensor, stages: cutlass.Constexpr[int]):
    """Stage and parity of reader and writer at each step of a loop."""
    reader, writer = barrier.full_phase(), barrier.empty_phase()
    for i in range(out.shape[0]):
        out[i, 0], out[i, 1] = reader.stage, reader.parity
        out[i, 2], out[i, 3] = writer.stage, writer.parity
        reader = barrier.next_phase(reader, stages)
        if i >= Int32(0):  # a branch carries it as well
            writer = barrier.next_phase(writer, stages)


@cute.jit
def skipped(out: cute.Tensor, count: Int32, stages: cutlass.Constexpr[int]):
    """Stage and parity of a reader that leaves every second run of ``count`` stages to another."""
    phase = barrier.full_phase()
    for i in range(out.shape[0]):
        out[i, 0], out[i, 1] = phase.stage, phase.parity
        phase = ring.skip(phase, count, stages)


@cute.jit
def activate(
    x: cute.Tensor, out: cute.Tensor, function: cutlass.Constexpr[str], name: cutlass.Constexpr[str]
):
    """An activation or its derivative of each number: (count,) to (count,)."""
    table = cutlass.const_expr(TABLES[function])
    for i in range(x.shape[0]):
        out[i] = table[name](x[i])


def evaluate(function: str, name: str, rows: list) -> list:
    """One function over all rows."""
    if function == "phases":
        found = np.zeros((len(rows), 4), np.int32)
        phases(from_dlpack(found).mark_layout_dynamic(), int(name))
        return found.tolist()
    if function == "skipped":
        found = np.zeros((len(rows), 2), np.int32)
        stages, count = name.split()
        skipped(from_dlpack(found).mark_layout_dynamic(), Int32(int(count)), int(stages))
        return found.tolist()
    values = np.array(rows, np.float32)
    if function in TABLES:
        found = np.zeros_like(values)
        activate(*(from_dlpack(a).mark_layout_dynamic() for a in (values, found)), function, name)
        return found.tolist()
    found = np.zeros((len(rows), REDUCTIONS[name].width), np.float32)
    arguments = (from_dlpack(array).mark_layout_dynamic() for array in (values, found))
    {"tree": tree, "thread": thread}[function](*arguments, name, values.shape[1])
    return found.tolist()


if __name__ == "__main__":
    # Only a GPU has these; here they pass a NaN on.
    cute.arch.fmax, cute.arch.fmin = cutlass.max, cutlass.min
    cute.arch.rcp_approx = lambda x: Float32(1.0) / x
    json.dump([evaluate(*request) for request in json.load(sys.stdin)], sys.stdout)
