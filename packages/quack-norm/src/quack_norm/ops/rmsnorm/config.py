"""How a forward kernel computes: frozen configurations. ``rules`` chooses them."""

from typing import Self

from quack_norm.ops.row_map.config import RowConfig
from quack_norm.ops.row_map.spec import RowSpec


class FwdConfig(RowConfig):
    """Forward."""

    shiftable = True


class CentredFwdConfig(FwdConfig):
    """Forward of LayerNorm."""

    shiftable = False

    def for_few(self, spec: RowSpec) -> Self | None:
        """None for rings as well: they do not keep distances, which gives other bits."""
        return None if self.persistent else super().for_few(spec)
