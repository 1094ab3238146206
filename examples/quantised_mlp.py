"""The MLP of a small Llama in each block-scaled format: how far its logits move.

Weights and activations are quantised along the dimension that a product sums over. FP8 blocks are
multiplied as they are; for the other formats, whose products are not built yet, the numbers that codes
and scales stand for are multiplied in float32. Heavy tails, as activations have, are what blocks are for.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quack_blockscaled import (
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    MXFP4,
    MXFP6_E2M3,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
    matmul,
    quantize,
)

TOKENS, DIM, HIDDEN, VOCABULARY = 64, 256, 512, 512
Product = Callable[[Tensor, Tensor], Tensor]
"""Of x (M, K) and a weight (N, K): (M, N)."""


def make(seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Activations with outliers, and the weights of gate, up, down and head."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, DIM, generator=random)
    x[:, ::61] *= 20  # a few channels are large in all tokens
    shapes = {
        "gate": (HIDDEN, DIM),
        "up": (HIDDEN, DIM),
        "down": (DIM, HIDDEN),
        "head": (VOCABULARY, DIM),
    }
    weights = {
        name: torch.randn(shape, generator=random) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    return x, weights


def logits(x: Tensor, weights: dict[str, Tensor], product: Product) -> Tensor:
    """SwiGLU, then the head."""
    hidden = F.silu(product(x, weights["gate"])) * product(x, weights["up"])
    return product(x + product(hidden, weights["down"]), weights["head"])


def in_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """FP8: 1x128 by 128x128, by the tensor cores of Hopper where there is one."""
    return matmul(quantize(x, FP8_BLOCK_1X128), quantize(weight, FP8_BLOCK_128X128).mT)


def as_numbers(format: BlockFormat) -> Product:
    """A product of what is left of both operands, in float32."""

    def rounded(x: Tensor) -> Tensor:
        # NVFP4: the largest element of the tensor gets the largest element and the largest scale.
        scale = x.abs().amax() / (6.0 * 448.0) if format.per_tensor else None
        return quantize(x, format, per_tensor_scale=scale).dequantize()

    return lambda x, weight: rounded(x) @ rounded(weight).mT


def compare(device: str = "cpu") -> dict[str, tuple[float, float]]:
    """By format: relative error of the logits, and the share of tokens whose best logit is the same."""
    x, weights = make()
    x, weights = x.to(device), {name: weight.to(device) for name, weight in weights.items()}
    right = logits(x.double(), {k: w.double() for k, w in weights.items()}, lambda a, b: a @ b.mT)
    products = {"fp8_block": in_blocks}
    products |= {each.name: as_numbers(each) for each in (MXFP8_E4M3, MXFP6_E2M3, NVFP4, MXFP4)}
    found = {}
    for name, product in products.items():
        given = logits(x, weights, product).double()
        error = ((given - right).norm() / right.norm()).item()
        found[name] = error, (given.argmax(-1) == right.argmax(-1)).double().mean().item()
    return found


def main() -> None:
    """Print the comparison."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{'format':<12} {'error':>8} {'same best':>10}")
    for name, (error, same) in compare(device).items():
        print(f"{name:<12} {error:>8.4f} {same:>10.0%}")


if __name__ == "__main__":
    main()
