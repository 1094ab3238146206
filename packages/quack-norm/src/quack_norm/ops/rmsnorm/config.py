"""How a forward kernel computes: frozen configurations. ``rules`` chooses them."""

from typing import Self

from quack_core.arch import Arch
from quack_norm.ops.row_map.config import RowConfig
from quack_norm.ops.row_map.spec import RowSpec

from .spec import RMSNormFwdSpec


class FwdConfig(RowConfig):
    """Forward."""

    shiftable = True

    def crowded(self, spec: RowSpec, arch: Arch) -> Self | None:
        """None for float32 results as well: what they take to be rounded once would spill."""
        wide = isinstance(spec, RMSNormFwdSpec) and spec.out == "float32"
        return None if wide else super().crowded(spec, arch)


class CentredFwdConfig(FwdConfig):
    """Forward of LayerNorm."""

    shiftable = False

    def for_few(self, spec: RowSpec) -> Self | None:
        """None for rings as well: they do not keep distances, which gives other bits."""
        return None if self.persistent else super().for_few(spec)

    def crowded(self, spec: RowSpec, arch: Arch) -> Self | None:
        """None: a tile does not keep them either."""
        return None
