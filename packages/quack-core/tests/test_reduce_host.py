"""The arithmetic of reductions, and the walk over a ring of barriers, evaluated on the CPU.

One process evaluates all requests: device functions are traced and compiled for the host. It shows
order and special values. It says nothing about the approximation of exp2 on a GPU.
"""

import functools
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


POWERS = np.exp(np.random.default_rng(0).uniform(-60, 0, (400, 16))).astype(np.float32)
POWERS[:, 5] = 1.0
POWERS[200:] **= np.float32(0.02)  # all of them count

ABSENT = 1e30
MOMENTS = np.random.default_rng(1).normal(0, 1, (400, 16)).astype(np.float32)
MOMENTS[100:200] += np.float32(1e4)  # a mean far from all differences
MOMENTS[200:300, ::5] *= np.float32(1e5)  # outliers, one of them the first value
MOMENTS[300:] += np.float32(7)
for row in range(300, 400):  # ends of rows
    MOMENTS[row, row % 16 :] = ABSENT
PARTS = [  # of groups of different size; some are empty
    [
        [size, mean, size * 0.25, size * (1.0 + mean % 3)] if size else [0.0] * 4
        for size, mean in ((s * (r % 3), r * 10.0 + s) for s in (1, 16, 0, 3, 8))
    ]
    for r in range(200)
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
    ([(INF, NAN), (0.0, 1.0)], INF, NAN),  # as softmax of a row with +inf
    ([(NAN, NAN), (0.0, 1.0)], NAN, NAN),
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
    **{
        ("tree", "compensated", (n, turn)): [
            [[*pair, pair[1] * 2.0**-26] for pair in row[::turn]] for row in online_rows(n)
        ]
        for n in COUNTS
        for turn in (1, -1)
    },
    ("tree", "compensated", "special"): [
        [[*p, 0.0] for p in pairs] for pairs, *_ in SPECIAL_ONLINE
    ],
    ("thread", "moments", 16): MOMENTS[..., None].tolist(),
    ("tree", "moments", 5): PARTS,
    ("thread", "sum2", 16): POWERS[..., None].tolist(),
    ("thread", "sum", 16): random_rows(16),
    ("thread", "max", 16): random_rows(16),
    ("thread", "max", "special"): [[[v] for v in values] for values, _ in SPECIAL_MAX],
    ("thread", "online", "special"): [[[v] for v in row] for row, *_ in SPECIAL_THREAD_ONLINE],
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


def test_sum_of_a_thread_is_four_chains_in_index_order(on_host):
    for row, found in zip(REQUESTS["thread", "sum", 16], on_host["thread", "sum", 16], strict=True):
        values = np.array(row, np.float32)[:, 0]
        chains = [functools.reduce(np.add, values[i::4]) for i in range(4)]
        assert found == [float((chains[0] + chains[1]) + (chains[2] + chains[3]))]


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


def softmax_sum(parts):
    """The maximum, and of those (maximum, sum, rest) that have one: their terms and distances."""
    parts = np.array(parts, np.float32).astype(np.float64)
    largest = parts[:, 0].max()
    parts = parts[np.isfinite(parts[:, 0])]
    away = largest - parts[:, 0]
    return largest, (parts[:, 1] + parts[:, 2]) * np.exp(-away), away


@pytest.mark.parametrize("count", COUNTS)
def test_compensated_combine_rounds_nothing_but_factors(on_host, count):
    """Two ulps of a factor per level: its difference rounded at that size, and the exponential."""
    levels = math.ceil(math.log2(count)) if count > 1 else 0
    case = "tree", "compensated", (count, 1)
    for row, found in zip(REQUESTS[case], on_host[case], strict=True):
        largest, terms, away = softmax_sum(row)
        scaled = (terms * away).sum() + terms[away > 0].sum()
        assert found[0] == largest
        error = math.fsum([found[1], found[2], *-terms])
        assert abs(error) <= levels * 2**-23 * scaled + 2**-45 * terms.sum()
        assert abs(found[2]) <= (levels + 1) * 2**-24 * abs(found[1])


def test_compensated_combine_of_two_is_the_same_in_both_orders(on_host):
    one, other = (on_host["tree", "compensated", (2, turn)] for turn in (1, -1))
    assert one == other


@pytest.mark.parametrize(
    "case", range(len(SPECIAL_ONLINE)), ids=lambda i: str(SPECIAL_ONLINE[i][0])
)
def test_compensated_combine_of_special_values(on_host, case):
    pairs, largest, total = SPECIAL_ONLINE[case]
    found = on_host["tree", "compensated", "special"][case]
    assert equal(found[0], largest)
    if pairs == [(5.0, 3.0), (4.0, 2.0)]:  # base 2 there
        total = 3 + 2 / math.e
    assert equal(found[1], total)


def test_compensated_sum_of_a_thread_lacks_nothing(on_host):
    for row, found in zip(POWERS, on_host["thread", "sum2", 16], strict=True):
        error = math.fsum([*found, *-row.astype(np.float64)])
        assert abs(error) <= 16 * 2**-24 * (16 * 2**-24 * 16)  # roundings of what is below an ulp
        assert abs(found[1]) <= 16 * 2**-24 * 16


def around_the_mean(n, point, distances, squares):
    """Number, mean, and squared distances from it, in float64."""
    return n, point + distances / n, squares - distances * distances / n


def test_moments_of_a_thread_cancel_nothing(on_host):
    for row, found in zip(MOMENTS, on_host["thread", "moments", 16], strict=True):
        values = row[row < ABSENT].astype(np.float64)
        assert found[0] == len(values)
        if len(values) == 0:
            assert found[2] == found[3] == 0
            continue
        _, mean, squares = around_the_mean(*found)
        right = np.square(values - values.mean()).sum()
        assert abs(mean - values.mean()) <= 2**-22 * np.abs(values - values.mean()).max()
        assert abs(squares - right) <= 2**-19 * right


def test_moments_combine_around_one_point(on_host):
    for parts, found in zip(PARTS, on_host["tree", "moments", 5], strict=True):
        groups = [around_the_mean(*part) for part in parts if part[0]]
        n = sum(size for size, *_ in groups)
        if n == 0:
            assert found == [0.0] * 4
            continue
        mean = sum(size * its for size, its, _ in groups) / n
        right = sum(own + size * (its - mean) ** 2 for size, its, own in groups)
        assert found[0] == n
        _, its_mean, squares = around_the_mean(*found)
        assert abs(its_mean - mean) <= 2**-22 * (abs(mean) + right**0.5)
        assert abs(squares - right) <= 2**-18 * right


def test_reader_and_writer_walk_over_the_ring(on_host):
    """The writer waits for the phase before the reader's: in the first round for none."""
    expected = [[i % STAGES, i // STAGES % 2, i % STAGES, (i // STAGES + 1) % 2] for i in range(10)]
    assert on_host["phases", str(STAGES), 10] == expected
