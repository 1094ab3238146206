"""GEMM with fused epilogues, one kernel family per architecture."""

import importlib
from typing import TYPE_CHECKING

from quack_gemm.__about__ import __version__ as __version__

if TYPE_CHECKING:
    from quack_gemm.api import gemm as gemm
    from quack_gemm.config import GemmConfig as GemmConfig
    from quack_gemm.config import SplitK as SplitK
    from quack_gemm.fused import gemm_act as gemm_act
    from quack_gemm.fused import gemm_add as gemm_add
    from quack_gemm.fused import gemm_dact as gemm_dact
    from quack_gemm.fused import gemm_dact_bias as gemm_dact_bias
    from quack_gemm.fused import gemm_dgated as gemm_dgated
    from quack_gemm.fused import gemm_gated as gemm_gated
    from quack_gemm.fused import gemm_norm_act as gemm_norm_act
    from quack_gemm.fused import gemm_rms as gemm_rms
    from quack_gemm.fused import gemm_symmetric as gemm_symmetric
    from quack_gemm.layers import MLP as MLP
    from quack_gemm.layers import Linear as Linear
    from quack_gemm.layers import linear as linear
    from quack_gemm.layers import linear_act as linear_act
    from quack_gemm.layers import linear_gated as linear_gated
    from quack_gemm.layers import mlp as mlp

# Each public name and its module, imported on first use: those who want only a spec, on a machine
# without torch, do not pay for the rest.
_HOME = {
    "GemmConfig": "quack_gemm.config",
    "Linear": "quack_gemm.layers",
    "MLP": "quack_gemm.layers",
    "SplitK": "quack_gemm.config",
    "gemm": "quack_gemm.api",
    "gemm_act": "quack_gemm.fused",
    "gemm_add": "quack_gemm.fused",
    "gemm_dact": "quack_gemm.fused",
    "gemm_dact_bias": "quack_gemm.fused",
    "gemm_dgated": "quack_gemm.fused",
    "gemm_gated": "quack_gemm.fused",
    "gemm_norm_act": "quack_gemm.fused",
    "gemm_rms": "quack_gemm.fused",
    "gemm_symmetric": "quack_gemm.fused",
    "linear": "quack_gemm.layers",
    "linear_act": "quack_gemm.layers",
    "linear_gated": "quack_gemm.layers",
    "mlp": "quack_gemm.layers",
}

__all__ = [
    "MLP",
    "GemmConfig",
    "Linear",
    "SplitK",
    "__version__",
    "gemm",
    "gemm_act",
    "gemm_add",
    "gemm_dact",
    "gemm_dact_bias",
    "gemm_dgated",
    "gemm_gated",
    "gemm_norm_act",
    "gemm_rms",
    "gemm_symmetric",
    "linear",
    "linear_act",
    "linear_gated",
    "mlp",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # the next look-up finds it without a call
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
