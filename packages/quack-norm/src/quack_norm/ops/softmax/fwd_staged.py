"""Softmax forward of rows that wait in shared memory."""

from quack_norm.ops.row_map.staged import RowMapStaged

from .config import FwdConfig
from .fwd import SoftmaxRows, arguments
from .spec import SoftmaxFwdSpec


class SoftmaxFwdStaged(SoftmaxRows, RowMapStaged):
    """Softmax by several CTAs on an SM."""


def build(spec: SoftmaxFwdSpec, config: FwdConfig) -> tuple[SoftmaxFwdStaged, tuple]:
    """The kernel and its symbolic arguments."""
    return SoftmaxFwdStaged(spec, config), arguments(spec, config)
