"""From samples to a verdict: medians, noise, and who wins. Pure Python."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 0.02
"""Differences below this are ties, and a row that is noisier than this is void."""


@dataclass(frozen=True)
class Summary:
    """Microseconds of one call."""

    median: float
    p10: float
    p90: float

    @property
    def spread(self) -> float:
        """(p90 - p10) / median."""
        return (self.p90 - self.p10) / self.median if self.median > 0 else 0.0

    def rounded(self) -> dict[str, float]:
        """As records hold it: to a nanosecond."""
        return {
            "median": round(self.median, 3),
            "p10": round(self.p10, 3),
            "p90": round(self.p90, 3),
        }


def summarise(samples: Sequence[float]) -> Summary:
    """Median, 10th and 90th percentile of at least one sample."""
    if not samples:
        raise ValueError("no samples to summarise")
    if len(samples) == 1:
        return Summary(samples[0], samples[0], samples[0])
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return Summary(statistics.median(samples), deciles[0], deciles[8])


def noise(first: Sequence[float], second: Sequence[float]) -> float:
    """Spread of a variant that was entered twice, over the samples of both entries."""
    return summarise([*first, *second]).spread


def verdict(ours: float | None, peer: float | None, spread: float) -> str:
    """Who won: "win", "tie", "loss" or "void".

    Args:
        ours: our median, or None if we have none, which is a loss.
        peer: the strongest peer's median, or None if no peer completed.
        spread: noise of this row; above the margin nothing can be said.
    """
    if ours is None:
        return "loss"
    if spread > MARGIN:
        return "void"
    if peer is None:
        return "win"
    difference = peer / ours - 1
    threshold = max(MARGIN, 2 * spread)
    if abs(difference) <= threshold:
        return "tie"
    return "win" if difference > 0 else "loss"


# TB/s that an H200 reaches, by the share of reads among the bytes moved (two-to-one is 0.67).
_BANDWIDTH = ((0.6, 4.28), (0.8, 4.38), (1.0, 4.57))
FIXED_US = 2.2
"""Time of a small kernel inside a CUDA graph that does nothing."""


# TFLOP/s that an H200 keeps up, limited by power, by the dtype of the operands.
_TENSOR = {"bf16": 780.0, "fp16": 780.0, "e4m3": 1450.0}


def floor_us(read_bytes: int, write_bytes: int, flop: int = 0, dtype: str = "bf16") -> float:
    """Least time of one H200 kernel that moves these bytes: fixed cost and bandwidth, or arithmetic."""
    total = read_bytes + write_bytes
    share = read_bytes / total if total else 0.0
    rate = next(rate for limit, rate in _BANDWIDTH if share <= limit)
    multiply = flop / _TENSOR[dtype] * 1e-6 if flop else 0.0
    return FIXED_US + max(total / rate * 1e-6, multiply)
