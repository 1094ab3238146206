"""Softmax backward of long rows."""

from quack_norm.ops.row_map.ring import RowMapRing

from .bwd import SoftmaxGradientRows, arguments
from .config import BwdConfig
from .spec import SoftmaxBwdSpec


class SoftmaxBwdRing(SoftmaxGradientRows, RowMapRing):
    """Gradient by CTAs that stay."""


def build(spec: SoftmaxBwdSpec, config: BwdConfig) -> tuple[SoftmaxBwdRing, tuple]:
    """The kernel and its symbolic arguments."""
    return SoftmaxBwdRing(spec, config), arguments(spec, config)
