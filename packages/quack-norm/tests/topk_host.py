"""Keys of top-k evaluated on the CPU, in a process of their own.

A device intrinsic in host code aborts the process; here that is a failed test, not the end of all.
Reads ``[[dtype, n, bits, columns], ...]`` as JSON from standard input; writes keys and the columns
that are read from them.
"""

import json
import sys

import cutlass
import numpy as np
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from quack_core.jit.compile import to_cute
from quack_norm.ops.topk.keys import Keys
from quack_norm.ops.topk.spec import TopKFwdSpec


@cute.jit
def evaluate(
    bits: cute.Tensor,
    columns: cute.Tensor,
    keys: cute.Tensor,
    found: cute.Tensor,
    spec: cutlass.Constexpr,
):
    register = cute.make_rmem_tensor(1, to_cute(spec.x))
    for i in range(bits.shape[0]):
        cute.recast_tensor(register, bits.element_type)[0] = bits[i]
        key = Keys(spec.x, spec.n).of(register, 0, columns[i])
        keys[i] = cutlass.Int64(key)
        found[i] = Int32(Keys(spec.x, spec.n).place(key))


def main() -> None:
    results = []
    for dtype, n, bits, columns in json.load(sys.stdin):
        unsigned = np.uint32 if dtype == "float32" else np.uint16
        given = np.array(bits, unsigned), np.array(columns, np.int32)
        keys, found = np.zeros(len(bits), np.int64), np.zeros(len(bits), np.int32)
        evaluate(*map(from_dlpack, (*given, keys, found)), TopKFwdSpec(n, 1, dtype))
        results.append((keys.tolist(), found.tolist()))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
