"""Activation functions in torch, and their derivatives: what kernels are compared with.

Imports torch when it is called.
"""

import math
from typing import Any

from quack_core.errors import DTypeError

from .epilogue import ACTIVATIONS

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def reference(name: str, x: Any) -> Any:
    """f(x), in the dtype of x.

    Raises:
        DTypeError: no such function.
    """
    from torch.nn import functional as F

    functions = {
        "identity": lambda: x,
        "relu": lambda: F.relu(x),
        "relu_sq": lambda: F.relu(x).square(),
        "silu": lambda: F.silu(x),
        "sigmoid": lambda: x.sigmoid(),
        "tanh": lambda: x.tanh(),
        "gelu": lambda: F.gelu(x),
        "gelu_tanh": lambda: F.gelu(x, approximate="tanh"),
        "quick_gelu": lambda: x * (1.702 * x).sigmoid(),
    }
    if name not in functions:
        raise DTypeError(f"activation {name!r} must be one of {', '.join(functions)}")
    return functions[name]()


def derivative(name: str, x: Any) -> Any:
    """f'(x), in the dtype of x; at a kink the one torch takes, 0.

    Raises:
        DTypeError: no such function.
    """
    import torch

    if name == "identity":
        return torch.ones_like(x)
    if name == "relu":
        return (x > 0).to(x.dtype)
    if name == "relu_sq":
        return 2 * x.clamp(min=0)
    if name == "tanh":
        return 1 - x.tanh().square()
    if name == "gelu":
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(
            2 * math.pi
        )
    if name == "gelu_tanh":
        inner = SQRT_2_OVER_PI * (x + 0.044715 * x**3)
        slope = SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x)
        t = inner.tanh()
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope
    factors = {"silu": 1.0, "quick_gelu": 1.702, "sigmoid": 0.0}
    if name not in factors:
        raise DTypeError(f"activation {name!r} must be one of {', '.join(ACTIVATIONS)}")
    factor = factors[name]
    s = (x * (factor or 1.0)).sigmoid()
    if name == "sigmoid":
        return s * (1 - s)
    return s + factor * x * s * (1 - s)
