"""Kernels that quantise: one family for all architectures."""
