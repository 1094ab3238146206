"""RMSNorm forward of rows that wait in shared memory."""

from quack_norm.ops.row_map.staged import RowMapStaged

from .config import FwdConfig
from .fwd import RMSNormRows, arguments
from .spec import RMSNormFwdSpec


class RMSNormFwdStaged(RMSNormRows, RowMapStaged):
    """RMSNorm by several CTAs on an SM."""


def build(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple[RMSNormFwdStaged, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormFwdStaged(spec, config), arguments(spec, config)
