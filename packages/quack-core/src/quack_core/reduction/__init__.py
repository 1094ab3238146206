"""Row-wise reductions: how a row is spread over threads, and the base class of kernels that reduce it."""
