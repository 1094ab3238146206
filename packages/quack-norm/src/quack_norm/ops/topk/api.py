"""The public function."""

from torch import Tensor, is_grad_enabled

from quack_core import torch_op

from . import autograd, check, launch


def topk(x: Tensor, k: int, softmax: bool = False) -> tuple[Tensor, Tensor]:
    """The k largest elements of each row and where they are, largest first.

    The first k of a stable descending sort: equal elements are ordered by their index, NaN is
    larger than inf, and both zeros are equal.

    CUDA tensors run a CuTe kernel, CPU tensors the reference; meta and fake tensors give shapes.
    Differentiable once.

    Args:
        x: ``(..., N)``, in float32, bfloat16 or float16. Rows with a contiguous last dimension and
            up to two outer strides, at any alignment, are read where they lie; other layouts are
            copied once.
        k: from 1 to N; on CUDA devices up to 4096.
        softmax: normalise the k values of a row by their softmax.

    Returns:
        ``(values, indices)``, both contiguous ``(..., k)``. The values have the dtype of x, the
        indices are int64.

    Raises:
        DTypeError, ShapeError: operands that kernels do not take.
        UnsupportedError: larger k, or rows longer than 2**30, on CUDA devices; second derivatives.
        ArchError: there is no kernel for the GPU.

    Numerics:
        The values are elements of x, bit for bit. Their softmax is computed in float32 and rounded
        once; it is NaN across rows whose largest value is NaN or infinite. Its gradient is computed
        in float32 from the rounded values. Deterministic; a row has the same bits whatever rows
        come with it.

    Source: Batcher, Sorting networks and their applications, 1968; Alabi et al., Fast k-selection
    algorithms for graphics processing units, 2012.
    """
    check.forward(x, k, softmax)
    if torch_op.eager(x) and x.is_cuda:
        if is_grad_enabled() and x.requires_grad:
            return autograd.TopKFunction.apply(x, k, softmax)  # type: ignore[no-any-return]
        return launch.forward(x, k, softmax)
    torch_op.check_no_tangent("topk", x)
    result: tuple[Tensor, Tensor] = autograd.topk_fwd(x, k, softmax)
    return result
