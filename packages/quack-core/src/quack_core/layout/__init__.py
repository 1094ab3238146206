"""Layouts: their algebra, swizzles and drawings in pure Python, and views of CuTe tensors.

Import modules by name (``from quack_core.layout import algebra``); only ``views`` loads the DSL.
"""
