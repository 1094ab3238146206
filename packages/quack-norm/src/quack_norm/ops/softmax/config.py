"""How a softmax kernel computes: frozen configurations, chosen by the rules of maps of rows."""

from quack_norm.ops.row_map.config import RowConfig


class FwdConfig(RowConfig):
    """Forward."""

    waits = True


class BwdConfig(RowConfig):
    """Backward."""

    kernel = "bwd"
    waits = True
