"""Rows of a suite, as the records hold them: what tables, plots and quoted figures are made of."""

from collections.abc import Sequence

from .record import Record

SUITES = {
    "norm_fwd": "RMSNorm forward",
    "norm_bwd": "RMSNorm backward (dx, dweight)",
    "layernorm": "LayerNorm forward",
    "layernorm_bwd": "LayerNorm backward (dx, dweight, dbias)",
    "softmax": "Softmax forward",
    "softmax_bwd": "Softmax backward",
    "ce": "Cross-entropy forward (loss and log-sum-exp of each row)",
    "ce_fwd_dx": "Cross-entropy, loss and gradient in one pass",
    "ce_fwd_bwd": "Cross-entropy, forward and backward through autograd",
    "topk": "Top-k",
    "gemm_small": "GEMM, few rows and small squares",
    "gemm_large": "GEMM, large",
    "gemm_act": "GEMM with SwiGLU",
    "gemm_fp8": "GEMM of 8-bit floats with scales",
    "gemm_fp8_block": "GEMM of FP8 blocks, 1x128 by 128x128",
    "quant": "Quantise to 8 bits in blocks",
}
PEERS = {
    "eager": "torch",
    "compile": "torch.compile",
    "liger": "Liger",
    "quack-kernels": "quack-kernels",
}
SOME_PEERS = {"liger-cute": "Liger CuTe"}
"""Those that not every suite has."""
PEERS_OF_PRODUCTS = {
    "cublas": "cuBLAS",
    "compile": "torch.compile",
    "quack-kernels": "quack-kernels",
}
PLAIN = {
    "w": "bf16", "grad": "1", "k": "8", "layout": "nt", "act": "swiglu", "scale": "tensor",
    "format": "fp8_block_1x128",
}  # fmt: skip

Row = dict[str, Record]
"""Variants by name."""


def grouped(records: Sequence[Record], suite: str) -> list[Row]:
    """The rows of a suite as variants by name, in file order."""
    found: dict[tuple, Row] = {}
    for one in records:
        if one.suite == suite:
            found.setdefault(one.row, {})[one.variant] = one
    return list(found.values())


def peers_of(found: Sequence[Row]) -> dict[str, str]:
    """The peers that tables of a suite have columns for, by name."""
    always, some = ({}, PEERS_OF_PRODUCTS) if is_product(found) else (PEERS, SOME_PEERS)
    return always | {name: title for name, title in some.items() if any(name in r for r in found)}


def is_product(found: Sequence[Row]) -> bool:
    """Whether a suite's rows are judged by their arithmetic, and not by the bytes that they move."""
    return any(row["ours"].rate_unit == "TFLOP/s" for row in found if "ours" in row)


def is_plain(one: Record) -> bool:
    """Whether a row is what a suite is about: bf16 everywhere (or 8 bits, if that is the suite), and
    nothing beyond the operator."""
    return one.dtype in ("bf16", "e4m3") and all(PLAIN.get(k) == v for k, v in one.opts.items())


def over(row: Row, peer: str) -> float | None:
    """A peer's time over ours; None if either is missing."""
    ours, other = row.get("ours"), row.get(peer)
    if ours is None or other is None or not ours.median or not other.median:
        return None
    return other.median / ours.median


def speedup(row: Row) -> float | None:
    """The strongest peer's time over ours; None if either is missing."""
    return over(row, row["ours"].best_peer) if "ours" in row else None
