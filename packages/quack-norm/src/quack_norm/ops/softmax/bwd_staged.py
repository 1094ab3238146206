"""Softmax backward of rows that wait in shared memory."""

from quack_norm.ops.row_map.staged import RowMapStaged

from .bwd import SoftmaxGradientRows, arguments
from .config import BwdConfig
from .spec import SoftmaxBwdSpec


class SoftmaxBwdStaged(SoftmaxGradientRows, RowMapStaged):
    """Gradient by several CTAs on an SM."""


def build(spec: SoftmaxBwdSpec, config: BwdConfig) -> tuple[SoftmaxBwdStaged, tuple]:
    """The kernel and its symbolic arguments."""
    return SoftmaxBwdStaged(spec, config), arguments(spec, config)
