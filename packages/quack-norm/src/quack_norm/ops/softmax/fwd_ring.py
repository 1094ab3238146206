"""Softmax forward of long rows."""

from quack_norm.ops.row_map.ring import RowMapRing

from .config import FwdConfig
from .fwd import SoftmaxRows, arguments
from .spec import SoftmaxFwdSpec


class SoftmaxFwdRing(SoftmaxRows, RowMapRing):
    """Softmax by CTAs that stay."""


def build(spec: SoftmaxFwdSpec, config: FwdConfig) -> tuple[SoftmaxFwdRing, tuple]:
    """The kernel and its symbolic arguments."""
    return SoftmaxFwdRing(spec, config), arguments(spec, config)
