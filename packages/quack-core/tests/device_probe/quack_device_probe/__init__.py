"""Unit kernels: each calls a few functions of ``quack_core.device``, so that these can be tested."""
