"""Kernels that quantise, and that make numbers of it again: one family for all architectures."""
