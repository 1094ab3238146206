"""Block-scaled formats (MX, NVFP4, FP8 blocks) and their quantisers."""

import importlib
from typing import TYPE_CHECKING

from quack_blockscaled.__about__ import __version__ as __version__

if TYPE_CHECKING:
    from quack_blockscaled.api import dequantize as dequantize
    from quack_blockscaled.api import quantize as quantize
    from quack_blockscaled.api import quantize_both as quantize_both
    from quack_blockscaled.api import supports as supports
    from quack_blockscaled.files import load_file as load_file
    from quack_blockscaled.files import save_file as save_file
    from quack_blockscaled.formats import FP8_BLOCK_1X128 as FP8_BLOCK_1X128
    from quack_blockscaled.formats import FP8_BLOCK_128X128 as FP8_BLOCK_128X128
    from quack_blockscaled.formats import MXFP4 as MXFP4
    from quack_blockscaled.formats import MXFP6_E2M3 as MXFP6_E2M3
    from quack_blockscaled.formats import MXFP6_E3M2 as MXFP6_E3M2
    from quack_blockscaled.formats import MXFP8_E4M3 as MXFP8_E4M3
    from quack_blockscaled.formats import MXFP8_E5M2 as MXFP8_E5M2
    from quack_blockscaled.formats import NVFP4 as NVFP4
    from quack_blockscaled.formats import BlockFormat as BlockFormat
    from quack_blockscaled.formats import ElementFormat as ElementFormat
    from quack_blockscaled.formats import ScaleFormat as ScaleFormat
    from quack_blockscaled.layers import linear as linear
    from quack_blockscaled.products import matmul as matmul
    from quack_blockscaled.products import matmul_grouped as matmul_grouped
    from quack_blockscaled.tensor import BlockScaledTensor as BlockScaledTensor

# Each public name and its module, imported on first use: those who want only a format, on a machine
# without torch, do not pay for the rest.
_HOME = {
    "FP8_BLOCK_128X128": "quack_blockscaled.formats",
    "FP8_BLOCK_1X128": "quack_blockscaled.formats",
    "MXFP4": "quack_blockscaled.formats",
    "MXFP6_E2M3": "quack_blockscaled.formats",
    "MXFP6_E3M2": "quack_blockscaled.formats",
    "MXFP8_E4M3": "quack_blockscaled.formats",
    "MXFP8_E5M2": "quack_blockscaled.formats",
    "NVFP4": "quack_blockscaled.formats",
    "BlockFormat": "quack_blockscaled.formats",
    "BlockScaledTensor": "quack_blockscaled.tensor",
    "ElementFormat": "quack_blockscaled.formats",
    "ScaleFormat": "quack_blockscaled.formats",
    "dequantize": "quack_blockscaled.api",
    "linear": "quack_blockscaled.layers",
    "load_file": "quack_blockscaled.files",
    "matmul": "quack_blockscaled.products",
    "matmul_grouped": "quack_blockscaled.products",
    "quantize": "quack_blockscaled.api",
    "quantize_both": "quack_blockscaled.api",
    "save_file": "quack_blockscaled.files",
    "supports": "quack_blockscaled.api",
}

__all__ = [
    "FP8_BLOCK_1X128",
    "FP8_BLOCK_128X128",
    "MXFP4",
    "MXFP6_E2M3",
    "MXFP6_E3M2",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "NVFP4",
    "BlockFormat",
    "BlockScaledTensor",
    "ElementFormat",
    "ScaleFormat",
    "__version__",
    "dequantize",
    "linear",
    "load_file",
    "matmul",
    "matmul_grouped",
    "quantize",
    "quantize_both",
    "save_file",
    "supports",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # the next look-up finds it without a call
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
