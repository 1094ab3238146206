"""GEMM with fused epilogues, one kernel family per architecture."""
