"""Building blocks of GEMM kernels: tile order, epilogues as values, and the parts of each architecture.

No complete kernel: those are in the packages that depend on this one.
"""
