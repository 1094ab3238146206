"""Models whose kernels `quack warmup` knows: sizes that their configurations publish."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """What kernels depend on.

    Args:
        hidden: features of a token between layers.
        vocab: classes of the logits.
        dtype: of activations and weights.
    """

    hidden: int
    vocab: int
    dtype: str = "bfloat16"


MODELS = {
    "llama3-8b": Model(hidden=4096, vocab=128256),
    "llama3-70b": Model(hidden=8192, vocab=128256),
    "qwen3-8b": Model(hidden=4096, vocab=151936),
}
