"""The plan of top-k kernels on numbers: the network, keys, configurations. No GPU."""

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quack_core.arch import SM90, SM120
from quack_norm.ops.topk.config import (
    GroupsConfig,
    SelectConfig,
    SortConfig,
    default_bwd,
    default_fwd,
)
from quack_norm.ops.topk.network import power_of_two, steps, work
from quack_norm.ops.topk.spec import MAX_K, MAX_N, TopKBwdSpec, TopKFwdSpec

pytestmark = pytest.mark.exhaustive

DTYPES = ("float32", "bfloat16", "float16")


def through_network(keys: list[int], values: int, threads: int, k: int) -> list[int]:
    """The keys after all steps, as threads with their registers would hold them."""
    held = [keys[t * values : (t + 1) * values] for t in range(threads)]
    for step in steps(values, threads, k):
        size = len(held[0])
        if step.halves and step.mask < size:
            firsts = [(b, i) for b in range(0, size, 2 * step.run) for i in range(step.run)]
            held = [[max(v[b + i], v[b + 2 * step.run - 1 - i]) for b, i in firsts] for v in held]
            continue
        flat = [key for registers in held for key in registers]
        met = []
        for p, key in enumerate(flat):
            other = flat[p ^ step.mask]
            largest = step.halves or not p & step.high_bit
            met.append(max(key, other) if largest else min(key, other))
        held = [met[t * size : (t + 1) * size] for t in range(threads)]
    return [key for registers in held for key in registers]


@pytest.mark.parametrize("threads", [1, 2, 8, 32, 64])
@pytest.mark.parametrize("values", [1, 2, 4, 16])
def test_the_network_finds_the_largest_in_order(values: int, threads: int) -> None:
    count = values * threads
    for k in {1, 2, 3, 8, 31, count // 2, count - 1, count} & set(range(1, count + 1)):
        rng = random.Random(k)
        for keys in (
            list(range(count)),
            list(range(count))[::-1],
            rng.sample(range(count), count),
            [rng.randrange(2) for _ in range(count)],  # zeros and ones: Knuth's principle
        ):
            assert through_network(keys, values, threads, k)[:k] == sorted(keys)[::-1][:k]


def test_the_network_costs_what_a_bitonic_sort_costs() -> None:
    assert len(list(steps(8, 32, 256))) == 8 * 9 // 2
    assert len(list(steps(8, 32, 1))) == 8  # one step for each halving


def test_work_of_small_networks() -> None:
    assert work(2, 1, 2) == 2  # one pair
    assert work(2, 1, 1) == 1  # of which one is wanted
    assert work(1, 2, 2) == 4 and work(1, 2, 1) == 3
    assert work(16, 8, 8) > work(8, 8, 8) > work(8, 4, 8)


def ns() -> list[int]:
    return [*range(1, 600), 1000, 2048, 2049, 4096, 16384, 16385, 65536, 65537, 262144, MAX_N]


@pytest.mark.parametrize("dtype", DTYPES)
def test_configurations_hold_all_rows_and_k(dtype: str) -> None:
    for n in ns():
        for k in {1, 2, 9, n // 2, n, 1024, MAX_K} & set(range(1, min(n, MAX_K) + 1)):
            spec = TopKFwdSpec(n, k, dtype, align=4)
            config = default_fwd(spec)
            keys = config.num_keys(spec)
            # a row that begins within a vector of memory has one more of them
            assert keys & (keys - 1) == 0 and keys <= (
                32 if isinstance(config, GroupsConfig) else 16
            )
            threads = config.threads_per_row
            assert threads & (threads - 1) == 0
            assert config.smem_bytes(spec) <= SM120.smem_bytes
            aligned = replace(spec, align=16)
            assert default_fwd(aligned) == config  # a sum has the same order
            if isinstance(config, SortConfig):
                tiling = config.tiling(spec)
                assert tiling.values <= keys and tiling.cols >= n
                assert keys * threads >= power_of_two(k)
            elif isinstance(config, SelectConfig):
                assert k <= config.candidates == keys * threads
                assert threads <= config.num_bins and spec.key_bits >= config.digit_bits
                assert config.in_flight % spec.full_vector == 0
            else:
                sizes = [keys, config.num_elements(spec)]
                if config.bundled:
                    sizes.append(threads // config.sorters)
                    assert config.group == spec.full_vector and n // config.group >= threads
                assert min(sizes) * config.sorters >= power_of_two(k)
                assert config.num_elements(spec) <= 16
                assert config.kept == 0 or config.kept >= max(config.sorters, power_of_two(k))
                assert n // config.group >= k  # as many groups of elements as are wanted


def by_groups(values: list[int], k: int, offset: int, spec: TopKFwdSpec) -> list[int]:
    """Columns of the k largest values, found as the threads of `TopKGroups` find them.

    Args:
        offset: elements of the first vector of memory that come before the row.
    """
    config = default_fwd(spec)
    assert isinstance(config, GroupsConfig)
    group, threads, sorters = config.group, config.threads_per_row, config.sorters
    vec, far = spec.full_vector, 1 << 30  # than all places

    def find(keys: list[int], count: int, bound: int = 0) -> list[int]:
        """The k largest of keys that ``count`` registers of each sorter hold."""
        passed = [key for key in keys if key >= bound]
        if bound and len(passed) <= config.kept:
            keys, count = passed, config.kept // sorters
        held = keys + [0] * (count * sorters - len(keys))
        assert len(held) == count * sorters
        return through_network(held, count, sorters, k)[:k]

    def key(place: int) -> int:
        """Of a group; 0 where it has no element of the row."""
        first = place * group - offset
        found = values[max(first, 0) : max(first + group, 0)]
        return max(found) * far + ~place % far if found else 0

    def keys_of(vector: int) -> list[int]:
        return [key(vector * (vec // group) + part) for part in range(vec // group)]

    mine = [
        [key for p in range(config.passes(spec)) for key in keys_of(p * threads + t)]
        for t in range(threads)
    ]
    bound = 0
    if config.bundled:
        found = find([max(keys) for keys in mine], threads // sorters)
        inside = [key for bundle in found for key in mine[~bundle % far % threads]]
        bound = found[-1]
    else:
        inside = [key for keys in mine for key in keys]
        if bundles := config.kept // threads:
            found = find([max(keys[i::bundles]) for keys in mine for i in range(bundles)], bundles)
            bound = found[-1]
    if not (config.bundled and config.passes(spec) == 1):
        found = find(inside, config.num_keys(spec), bound if config.kept else 0)
    columns = [~key % far * group - offset + i for key in found for i in range(group)]
    elements = [values[c] * far + ~c % far if 0 <= c < len(values) else 0 for c in columns]
    bound = found[-1] // far * far if config.kept else 0
    return [~key % far for key in find(elements, config.num_elements(spec), bound)]


GROUPED = [(128, 8), (160, 8), (256, 5), (513, 1), (1000, 16), (512, 32), (1024, 64), (2048, 128)]
GROUPED += [(4096, 64), (4096, 8), (4100, 7), (8192, 8), (8200, 128), (32000, 64)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), GROUPED)
def test_the_groups_with_the_largest_maxima_hold_the_largest(n: int, k: int, dtype: str) -> None:
    """Whatever the values: at random, sorted, and few different ones, where ties decide."""
    rng = random.Random(n)
    for align in (16, 4):
        spec = TopKFwdSpec(n, k, dtype, align=align)
        offset = 0 if spec.whole else spec.full_vector - 1
        for values in (
            [rng.randrange(1, 10**6) for _ in range(n)],
            list(range(1, n + 1)),
            list(range(n, 0, -1)),
            [rng.randrange(1, 3) for _ in range(n)],
            [1] * n,
        ):
            right = sorted(range(n), key=lambda c: (-values[c], c))[:k]
            assert by_groups(values, k, offset, spec) == right, (align, values[:9])


def test_configurations_of_the_backward() -> None:
    for k in (1, 3, 128, 129, 1024, MAX_K):
        spec = TopKBwdSpec(MAX_K, k, "float32", "bfloat16", "bfloat16")
        config = default_bwd(spec)
        assert config.tile(spec) % (8 * config.num_threads) == 0  # whole 16-byte accesses each
        assert config.tiling(spec).passes <= 8
        assert config.smem_bytes(spec) <= SM90.smem_bytes


def test_specs_refuse_what_there_is_no_kernel_for() -> None:
    for n, k in ((0, 1), (MAX_N + 1, 1), (5, 6), (5, 0), (5000, MAX_K + 1)):
        with pytest.raises(ValueError, match="n=|k="):
            TopKFwdSpec(n, k, "float32")
        with pytest.raises(ValueError, match="n=|k="):
            TopKBwdSpec(n, k, "float32", "float32")
    for wrong in ({"rank": 4}, {"align": 3}, {"align": 2}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TopKFwdSpec(5, 2, "float32", **wrong)


def patterns(dtype: str) -> np.ndarray:
    """Bits of elements: all of 16, or of 32 some around every power of two and at random."""
    if dtype != "float32":
        return np.arange(65536, dtype=np.uint16)
    near = (np.arange(512, dtype=np.uint32)[:, None] << 23) + np.arange(-2, 3).astype(np.uint32)
    rng = np.random.default_rng(1)
    return np.concatenate([near.ravel(), rng.integers(0, 2**32, 5000).astype(np.uint32)])


def evaluated(requests: list[tuple[str, int, np.ndarray, list[int]]]) -> list[tuple[list, list]]:
    """Keys of elements in columns, and the columns of these keys, from the device's functions."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    listed = [(dtype, n, bits.tolist(), columns) for dtype, n, bits, columns in requests]
    found = subprocess.run(
        [sys.executable, "-m", "topk_host"],
        input=json.dumps(listed),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(found.stdout)


def test_keys_are_ordered_as_the_elements_are() -> None:
    """By value, NaN first and zeros equal, then by index, on the device's own arithmetic."""
    requests = []
    for dtype in DTYPES:
        bits = patterns(dtype)
        for n in (len(bits), 2**20, MAX_N) if dtype == "float32" else (65536, 65537, MAX_N):
            columns = np.random.default_rng(n).permutation(len(bits))
            if n == MAX_N:
                columns = MAX_N - 1 - columns
            requests.append((dtype, n, bits, columns.tolist()))
    for (dtype, n, bits, columns), (keys, found) in zip(requests, evaluated(requests), strict=True):
        assert found == columns, (dtype, n)
        integer = torch.int32 if dtype == "float32" else torch.int16
        signed = torch.from_numpy(bits.astype(np.int64)).to(integer)
        x = signed.view(getattr(torch, dtype)).double()
        values = [(math.isnan(value), 0 if math.isnan(value) else value) for value in x.tolist()]
        by_value = sorted(zip(values, [-column for column in columns], strict=True), reverse=True)
        order = sorted(zip(keys, values, columns, strict=True), reverse=True)
        assert [(value, -column) for _, value, column in order] == by_value, (dtype, n)
        assert len(set(keys)) == len(keys) and min(keys) > 0
        assert max(keys) < 1 << TopKFwdSpec(n, 1, dtype).key_bits


def test_select_configurations_refuse_nothing_that_the_kernel_needs() -> None:
    """A last digit of fewer bits, and rows that need no digit at all."""
    spec = TopKFwdSpec(1000, 1000, "bfloat16")
    config = default_fwd(spec)
    assert isinstance(config, SelectConfig) and config.candidates >= spec.n
