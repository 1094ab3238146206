"""RMSNorm forward of long rows."""

from quack_norm.ops.row_map.ring import RowMapRing

from .config import FwdConfig
from .fwd import RMSNormRows, arguments
from .spec import RMSNormFwdSpec


class RMSNormFwdRing(RMSNormRows, RowMapRing):
    """RMSNorm by CTAs that stay."""


def build(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple[RMSNormFwdRing, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormFwdRing(spec, config), arguments(spec, config)
