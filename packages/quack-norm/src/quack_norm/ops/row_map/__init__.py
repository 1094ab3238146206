"""Kernels that map rows to rows through a reduction over each row: norms, softmax.

An operator says in four methods what it computes (``base.RowMap``); ``tile`` and ``ring`` say how
rows move.
"""
