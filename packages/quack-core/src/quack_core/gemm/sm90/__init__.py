"""Parts of Hopper's GEMM kernels: warpgroup matrix instructions, fed by TMA."""
