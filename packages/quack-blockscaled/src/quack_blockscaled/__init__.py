"""Block-scaled formats (MX, NVFP4, FP8 blocks), their quantisers and products."""

from quack_blockscaled.__about__ import __version__ as __version__
