"""Models whose kernels `quack warmup` knows: sizes that their configurations publish."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """What kernels depend on.

    Args:
        hidden: features of a token between layers.
        vocab: classes of the logits.
        heads: of queries.
        kv_heads: of keys, and of values.
        intermediate: features between the two linear layers of an MLP.
        head: features of a head.
        dtype: of activations and weights.
    """

    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    intermediate: int
    head: int = 128
    dtype: str = "bfloat16"


MODELS = {
    "llama3-8b": Model(4096, 128256, heads=32, kv_heads=8, intermediate=14336),
    "llama3-70b": Model(8192, 128256, heads=64, kv_heads=8, intermediate=28672),
    "qwen3-8b": Model(4096, 151936, heads=32, kv_heads=8, intermediate=12288),
}
