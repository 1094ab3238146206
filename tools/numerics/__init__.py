"""Numerics of the block-scaled formats, computed."""
