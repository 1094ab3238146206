"""LayerNorm: the kernels of RMSNorm, with the mean subtracted."""
