"""Verdicts, noise, floors: what turns samples into claims."""

import pytest
from benchmarks import judge


@pytest.mark.parametrize(
    ("ours", "peer", "spread", "wanted"),
    [
        (100.0, 103.0, 0.005, "win"),
        (103.0, 100.0, 0.005, "loss"),
        (100.0, 101.9, 0.005, "tie"),  # inside the margin
        (100.0, 103.0, 0.018, "tie"),  # twice the spread is more than the difference
        (100.0, 150.0, 0.021, "void"),
        (150.0, 100.0, 0.021, "void"),
        (None, 100.0, 0.0, "loss"),
        (None, None, 0.0, "loss"),
        (100.0, None, 0.001, "win"),
    ],
)
def test_verdict(ours: float | None, peer: float | None, spread: float, wanted: str) -> None:
    assert judge.verdict(ours, peer, spread) == wanted


def test_summary_is_robust_to_one_outlier() -> None:
    found = judge.summarise([10.0] * 29 + [1000.0])
    assert (found.median, found.p10, found.p90) == (10.0, 10.0, 10.0)
    assert found.spread == 0


def test_summary_of_a_ramp() -> None:
    found = judge.summarise([float(i) for i in range(101)])
    assert (found.median, found.p10, found.p90) == (50.0, 10.0, 90.0)
    assert found.spread == pytest.approx(1.6)


def test_one_sample_and_none() -> None:
    assert judge.summarise([3.0]) == judge.Summary(3.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="no samples"):
        judge.summarise([])


def test_noise_sees_entries_that_differ() -> None:
    assert judge.noise([100.0] * 30, [100.0] * 30) == 0
    assert judge.noise([100.0] * 30, [103.0] * 30) == pytest.approx(3 / 101.5)


def test_floor_has_the_fixed_cost_and_the_rate_of_its_mix() -> None:
    assert judge.floor_us(0, 0) == 2.2
    # 67 MB each way: 31.36 us at 4.28 TB/s
    assert judge.floor_us(2**26, 2**26) == pytest.approx(2.2 + 2**27 / 4.28e6)
    assert judge.floor_us(2**27, 2**26) == pytest.approx(2.2 + 3 * 2**26 / 4.38e6)
    assert judge.floor_us(2**27, 0) == pytest.approx(2.2 + 2**27 / 4.57e6)
