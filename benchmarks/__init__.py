"""Measurements against torch, its compiler and other kernel libraries: ``python -m benchmarks --help``.

Results are JSON lines in ``benchmarks/results/<gpu>/<op>.jsonl``; the tables and plots of the
documentation are generated from them.
"""
