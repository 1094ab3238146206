"""The arithmetic of reductions, and the walk over a ring of barriers, evaluated on the CPU.

One process evaluates all requests: device functions are traced and compiled for the host. It shows
order and special values. It says nothing about the approximation of exp2 on a GPU.
"""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROBE = Path(__file__).parent / "device_probe"
INF, NAN = math.inf, math.nan
COUNTS = (1, 2, 3, 5, 8)
STAGES = 3


def random_rows(count, width=1, rows=200):
    """Values of very different size, so that another order of additions gives another sum."""
    rng = random.Random(count)
    return [
        [
            [rng.gauss(0, 1) * 2.0 ** rng.randint(-12, 12) for _ in range(width)]
            for _ in range(count)
        ]
        for _ in range(rows)
    ]


def online_rows(count, rows=200):
    """(maximum, sum) pairs: some empty, some far below the others."""
    rng = random.Random(count)
    pairs = [(-INF, 0.0), (-200.0, 1.5), (0.0, 1.0)]
    return [
        [rng.choice([*pairs, (rng.uniform(-30, 30), rng.uniform(1, 64))]) for _ in range(count)]
        for _ in range(rows)
    ]


def moments_of(values):
    """(number, base, mean - base, sum of squared distances from the mean); none: zeros."""
    if not len(values):
        return [0.0] * 4
    exact = np.array(values, np.float64)
    return [len(exact), exact[0], exact.mean() - exact[0], ((exact - exact.mean()) ** 2).sum()]


def moments_rows(count, rows=200):
    """Values of each partial result: none or a few, far from zero, some all alike."""
    rng = np.random.default_rng(count)
    centres = [0.0, 1e4, 1e6]
    return [
        [
            rng.normal(rng.choice(centres), rng.integers(0, 2), rng.choice([0, 1, 3, 8]))
            .astype(np.float32)
            .tolist()
            for _ in range(count)
        ]
        for _ in range(rows)
    ]


MOMENTS_ROWS = {count: moments_rows(count) for count in COUNTS}
THREAD_MOMENTS = [
    [
        *np.random.default_rng(row).normal(1e4, 1, exist).astype(np.float32).tolist(),
        *[0.0] * (8 - exist),
    ]
    for row, exist in enumerate(list(range(9)) * 20)
]

SPECIAL_MAX = [
    ([1.0, 2.0], 2.0),
    ([-INF, -INF], -INF),
    ([-INF, -3.0], -3.0),
    ([INF, 1.0], INF),
    ([NAN, 1.0], NAN),
    ([1.0, NAN], NAN),
    ([-INF, NAN], NAN),
]
SPECIAL_ONLINE = [  # pairs, expected maximum, expected sum
    ([(-INF, 0.0), (-INF, 0.0)], -INF, 0.0),
    ([(-INF, 0.0), (5.0, 3.0)], 5.0, 3.0),
    ([(5.0, 3.0), (-INF, 0.0)], 5.0, 3.0),
    ([(5.0, 3.0), (4.0, 2.0)], 5.0, 4.0),
    ([(0.0, 1.0), (-1000.0, 7.0)], 0.0, 1.0),
    ([(INF, 1.0), (0.0, 1.0)], INF, NAN),  # as softmax of a row with +inf
    ([(NAN, 1.0), (0.0, 1.0)], NAN, NAN),
    ([(0.0, 1.0), (0.0, NAN)], 0.0, NAN),
]
SPECIAL_THREAD_ONLINE = [  # values, expected maximum, expected sum
    ([-INF, -INF, -INF, -INF], -INF, 0.0),
    ([1.0, 2.0, 3.0, 3.0], 3.0, 2.75),
    ([-INF, 0.0, -INF, -1.0], 0.0, 1.5),
    ([INF, 0.0, 0.0, 0.0], INF, NAN),
    ([0.0, NAN, 0.0, 0.0], NAN, NAN),
]

REQUESTS = {
    **{("tree", "sum", n): random_rows(n) for n in COUNTS},
    **{("tree", "sum2", n): random_rows(n, 2) for n in COUNTS},
    **{("tree", "max", n): random_rows(n) for n in COUNTS},
    **{("tree", "online", n): online_rows(n) for n in COUNTS},
    ("tree", "max", "special"): [[[v] for v in values] for values, _ in SPECIAL_MAX],
    ("tree", "online", "special"): [pairs for pairs, *_ in SPECIAL_ONLINE],
    ("thread", "sum", 16): random_rows(16),
    ("thread", "max", 16): random_rows(16),
    ("thread", "max", "special"): [[[v] for v in values] for values, _ in SPECIAL_MAX],
    ("thread", "online", "special"): [[[v] for v in row] for row, *_ in SPECIAL_THREAD_ONLINE],
    **{
        ("tree", "moments", (n, turn)): [[moments_of(p) for p in row[::turn]] for row in rows]
        for n, rows in MOMENTS_ROWS.items()
        for turn in (1, -1)
    },
    ("thread", "some_moments", 8): [[[v] for v in row] for row in THREAD_MOMENTS],
    ("thread", "moments", 8): [[[v] for v in row] for row in THREAD_MOMENTS if all(row)],
    ("phases", str(STAGES), 10): [None] * 10,
}


@pytest.fixture(scope="module")
def on_host():
    """``{(function, reduction, case): rows of results}``, evaluated by one process."""
    requests = [(function, name, rows) for (function, name, _), rows in REQUESTS.items()]
    path = os.pathsep.join([str(PROBE), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-m", "quack_device_probe.host"],
        input=json.dumps(requests),
        env={**os.environ, "PYTHONPATH": path, "CUTE_DSL_DISABLE_FILE_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if result.returncode:
        pytest.fail(
            f"exit status {result.returncode} (-6: a device intrinsic in host code):\n"
            f"{result.stderr[-3000:]}"
        )
    return dict(zip(REQUESTS, json.loads(result.stdout), strict=True))


def in_tree(values, combine):
    """Combine neighbours until one is left; an odd one at the end waits for the next round."""
    while len(values) > 1:
        pairs = [combine(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        values = pairs + ([values[-1]] if len(values) % 2 else [])
    return values[0]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["sum", "sum2"])
def test_sums_follow_the_tree_bit_by_bit(on_host, name, count):
    for row, found in zip(REQUESTS["tree", name, count], on_host["tree", name, count], strict=True):
        expected = in_tree(list(np.array(row, np.float32)), np.add)
        assert found == expected.tolist()


@pytest.mark.parametrize("count", COUNTS)
def test_max_is_exact(on_host, count):
    for row, found in zip(
        REQUESTS["tree", "max", count], on_host["tree", "max", count], strict=True
    ):
        assert found == [float(np.array(row, np.float32).max())]


def test_sum_of_a_thread_is_in_index_order(on_host):
    for row, found in zip(REQUESTS["thread", "sum", 16], on_host["thread", "sum", 16], strict=True):
        total = np.float32(0)
        for value in np.array(row, np.float32)[:, 0]:
            total = total + value
        assert found == [float(total)]


def test_max_of_a_thread_is_exact(on_host):
    for row, found in zip(REQUESTS["thread", "max", 16], on_host["thread", "max", 16], strict=True):
        assert found == [float(np.array(row, np.float32).max())]


def equal(found, expected):
    return np.array_equal(np.float32(found), np.float32(expected), equal_nan=True)


@pytest.mark.parametrize("function", ["tree", "thread"])
@pytest.mark.parametrize("case", range(len(SPECIAL_MAX)), ids=lambda i: str(SPECIAL_MAX[i][0]))
def test_max_keeps_infinities_and_passes_nan_on(on_host, function, case):
    """Thread and tree must agree: otherwise the owner of an element decides whether NaN shows."""
    assert equal(on_host[function, "max", "special"][case], [SPECIAL_MAX[case][1]])


@pytest.mark.parametrize(
    "case", range(len(SPECIAL_ONLINE)), ids=lambda i: str(SPECIAL_ONLINE[i][0])
)
def test_online_combine_of_special_values(on_host, case):
    _, largest, total = SPECIAL_ONLINE[case]
    assert equal(on_host["tree", "online", "special"][case], [largest, total])


@pytest.mark.parametrize(
    "case", range(len(SPECIAL_THREAD_ONLINE)), ids=lambda i: str(SPECIAL_THREAD_ONLINE[i][0])
)
def test_online_of_a_thread_with_special_values(on_host, case):
    _, largest, total = SPECIAL_THREAD_ONLINE[case]
    assert equal(on_host["thread", "online", "special"][case], [largest, total])


@pytest.mark.parametrize("count", COUNTS)
def test_online_combine_is_the_sum_of_exponentials(on_host, count):
    """Each level rounds a difference, an exponential, a product and a sum."""
    levels = math.ceil(math.log2(count)) if count > 1 else 0
    for row, found in zip(
        REQUESTS["tree", "online", count], on_host["tree", "online", count], strict=True
    ):
        pairs = np.array(row, np.float32).astype(np.float64)
        largest = pairs[:, 0].max()
        shift = 0.0 if largest == -INF else largest
        total = (pairs[:, 1] * np.exp2(pairs[:, 0] - shift)).sum()
        # A difference up to 230 that is rounded by half an ulp changes 2 ** difference by a factor
        # of 2 ** (230 * eps / 2); terms that far down do not count, those above 2 ** -60 do.
        tolerance = levels * (60 * math.log(2) + 4) * np.finfo(np.float32).eps * total
        assert found[0] == largest
        assert abs(found[1] - total) <= tolerance


def assert_moments(found, values, roundings):
    """Each rounding is at most half an ulp of a distance within the row."""
    count, _, _, squares = moments_of(values)
    assert found[0] == count
    if not count:
        assert found[1:] == [0.0, 0.0, 0.0]
        return
    assert np.float32(found[1]) in np.float32(values)  # the base is one of the values
    exact = np.array(values, np.float64)
    error = roundings * np.finfo(np.float32).eps / 2 * np.ptp(exact)
    assert abs(found[1] + found[2] - exact.mean()) <= error
    # The error of a distance counts twice in its square, and once more squared.
    spread = math.sqrt(count * squares)
    allowed = 2 * error * spread + count * error**2 + roundings * 2**-24 * squares
    assert abs(found[3] - squares) <= allowed


@pytest.mark.parametrize("count", COUNTS)
def test_moments_are_those_of_all_values(on_host, count):
    """Values around a million with a spread of one lose nothing; empty parts change nothing."""
    levels = math.ceil(math.log2(count)) if count > 1 else 0
    for parts, found in zip(
        MOMENTS_ROWS[count], on_host["tree", "moments", (count, 1)], strict=True
    ):
        # The parts themselves are rounded, and each level rounds at most eight times.
        assert_moments(found, [v for part in parts for v in part], 2 + 8 * levels)


def test_moments_of_two_are_the_same_in_both_orders(on_host):
    """Lanes of a butterfly combine the same two results, each its own first."""
    assert on_host["tree", "moments", (2, 1)] == on_host["tree", "moments", (2, -1)]


def test_moments_of_a_thread(on_host):
    """All of eight values, or as many of them as exist."""
    for row, found in zip(THREAD_MOMENTS, on_host["thread", "some_moments", 8], strict=True):
        assert_moments(found, [v for v in row if v], 2 + 8)
    whole = [row for row in THREAD_MOMENTS if all(row)]
    for row, found in zip(whole, on_host["thread", "moments", 8], strict=True):
        assert_moments(found, row, 2 + 8)


def test_reader_and_writer_walk_over_the_ring(on_host):
    """The writer waits for the phase before the reader's: in the first round for none."""
    expected = [[i % STAGES, i // STAGES % 2, i % STAGES, (i // STAGES + 1) % 2] for i in range(10)]
    assert on_host["phases", str(STAGES), 10] == expected
