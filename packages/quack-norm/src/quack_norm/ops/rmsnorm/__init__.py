"""RMSNorm: ``out = h * rsqrt(mean(h^2) + eps) * (weight + weight_offset) + bias``, ``h = x + residual``."""
