"""What launches of kernels on rows have in common: alignment, resident groups, few rows, devices."""

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from quack_core import arch, driver, dtypes, occupancy, torch_workspace
from quack_core.jit import cache

from .config import CROWD, RowConfig
from .spec import RowSpec

Launcher = Callable[..., None]

ALIGN = 16
"""Bytes of the widest access: with this alignment kernels are at their best."""
SURELY = 4
"""CTAs of one tile of a long row that an SM holds."""


class Aligned:
    """Launches the kernel for the alignment of its operands; compiles it when it is new.

    The kernels themselves refuse operands that are aligned less than they were compiled for. This
    stands in for them where rows are no multiple of 16 bytes, or after the first refusal.

    Args:
        kernel: gives the launcher for values of `alignment`.
        alignment: of the operands of a launch.
    """

    def __init__(
        self, kernel: Callable[..., Launcher], alignment: Callable[..., tuple[Any, ...]]
    ) -> None:
        self._kernel, self._alignment = kernel, alignment
        self._launchers: dict[tuple[Any, ...], Launcher] = {}

    def __call__(self, *operands: Any) -> None:
        key = self._alignment(*operands)
        launch = self._launchers.get(key)
        if launch is None:
            with torch_workspace.relaxed_capture():
                launch = self._launchers[key] = self._kernel(*key)
        launch(*operands)


def picker(
    spec: RowSpec, chosen: RowConfig, device: int
) -> Callable[[int], tuple[Launcher, Tensor | None, int]]:
    """Kernel, counters and groups for a number of rows.

    Where each CTA would have one tile, the kernel is the one of one tile and the same bits; where all
    rows are on the device at once only with ``RowConfig.crowded``, that one.
    """
    target, single, ints = arch.detect(device), chosen.for_few(spec), chosen.state_ints
    crowd, sms = chosen.crowded(spec, target), driver.multiprocessors(device)
    counters = torch_workspace.counters
    # So many CTAs are resident whatever they need; what more are takes 10 ms to ask.
    surely = sms if chosen.cluster == 1 else 0
    resident = functools.cache(lambda: resident_groups(device, spec, chosen))

    @functools.cache
    def kernel(use: RowConfig) -> Launcher:
        with torch_workspace.relaxed_capture():
            return cache.load(use.module, spec, use, target)

    @functools.lru_cache
    def groups(rows: int) -> int:
        return chosen.groups(spec, rows, 1, resident())

    def pick(rows: int) -> tuple[Launcher, Tensor | None, int]:
        if crowd is not None and SURELY * sms < rows <= CROWD * sms:
            return kernel(crowd), None, rows
        if single is not None and (rows <= surely or rows <= resident()):
            return kernel(single), None, rows
        return kernel(chosen), counters(device, ints) if ints else None, groups(rows)

    return pick


def resident_groups(device: int, spec: Any, chosen: Any) -> int:
    """Clusters that are on the device together."""
    sizes = (chosen.cluster, chosen.num_threads, chosen.smem_bytes(spec))
    return occupancy.resident_clusters(device, *sizes, registers=chosen.registers)


def row_align(n: int, *names: str | None) -> int:
    """Bytes that divide the strides of contiguous rows of these dtypes."""
    return math.gcd(ALIGN, *(n * dtypes.width(name) // 8 for name in names if name))
