"""What is measured: the suites, as text that is easy to read and to extend, and the cases they mean."""

from collections.abc import Iterable
from dataclasses import dataclass

NORM_FWD = """
    1x8192 1024x4096 8192x4096 64x8192 128x4096 2048x4096 4096x4096 32768x1024 65536x512 131072x128
    262144x128 32768x4096 32768x8192 8192x16384 8192x16383 4096x65536 2048x131072 1024x262144 4096x1000
    4096x4095
"""
NORM_BWD = """
    1024x4096 8192x4096 4096x16384 4096x4096 32768x1024 8192x8192 32768x4096 16384x8192 8192x16384
    131072x128 2048x65536
"""
SOFTMAX = """
    262144x128 65536x512 32768x1024 32768x4096 32768x8192 8192x16384 4096x65536 2048x131072
    1024x262144 4096x4096 128x4096 1x8192 8192x32000 8192x16383 4096x50257
"""
SOFTMAX_BWD = "32768x1024 32768x4096 32768x8192 8192x16384 4096x65536 4096x4096 8192x16383"
LAYERNORM = """
    1024x4096 8192x4096 32768x1024 32768x4096 32768x8192 8192x16384 8192x16383 4096x65536 2048x131072
    1024x262144 262144x128 4096x1000 128x4096
"""
LAYERNORM_BWD = "8192x4096 4096x16384 32768x1024 8192x8192 32768x4096 8192x16384"
CE = """
    8192x32000 4096x50257 4096x151936 32768x1024 32768x4096 8192x50304 1024x128256 8192x128256
    4096x151665 4096x201088 2048x262144
"""
GEMM_SMALL = """
    16x28672x4096 128x4096x14336 1024x1024x1024 1x28672x4096 64x28672x4096 64x8192x8192 16x4096x14336
    512x6144x4096 2048x2048x2048 16x57344x8192 128x2112x7168 16x7168x16384
"""
GEMM_LARGE = """
    8192x8192x8192 8192x8192x1024 8192x4096x14336 4096x4096x4096 8192x8192x4096 16384x4096x4096
    8192x28672x4096 4096x57344x8192 8192x128256x4096 4096x2112x7168 4001x4104x1032
"""
GEMM_ACT = "8192x28672x4096 1024x28672x4096 8192x57344x8192 8192x37888x3584 131072x1536x4096"
GEMM_FP8 = """
    8192x8192x8192 4096x7168x2048 128x7168x2048 4096x4096x7168 4096x2112x7168 4096x24576x7168
    4096x24576x1536 64x7168x16384
"""
QUANT = "128x7168 1024x7168 4096x7168 8192x8192 8192x14336 16384x16384"
OTHER_LAYOUTS = 3
"""GEMMs whose operands are transposed as well: the first shapes of a list."""
TOPK = "32768x128 32768x256 16384x1024 65536x64 8192x4096 32768x160 4096x32000"
FUSED_ADD = "1024x4096 8192x4096 32768x8192"
ALSO_FP32 = "8192x4096"
SMOKE = 3
"""The smoke suite is the first shapes of a list."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One row of a suite.

    Args:
        suite: its name on the command line.
        op: names the result file and the operator.
        shape: rows and columns.
        dtype: short name ("bf16") of the operands.
        opts: what else identifies the row, such as ``(("w", "fp32"),)``.
    """

    suite: str
    op: str
    shape: Shape
    dtype: str
    opts: tuple[tuple[str, str], ...] = ()

    def opt(self, name: str) -> str | None:
        return dict(self.opts).get(name)

    @property
    def label(self) -> str:
        opts = " ".join(f"{name}={value}" for name, value in self.opts)
        return f"{'x'.join(map(str, self.shape))} {self.dtype} {opts}".rstrip()


def parse(text: str) -> tuple[Shape, ...]:
    """Shapes written as ``"8192x4096 128x4096"``, in order and without repeats.

    Raises:
        ValueError: names the word that is not numbers joined by ``x``.
    """
    shapes: dict[Shape, None] = {}
    for word in text.replace(",", " ").split():
        parts = word.lower().split("x")
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"shape {word!r}: write positive sizes joined by x, such as 8192x4096")
        shapes[tuple(int(part) for part in parts)] = None
    return tuple(shapes)


def norm_fwd(shapes: Iterable[Shape]) -> list[Case]:
    """RMSNorm forward: bf16 with either weight, and for some shapes fp32 and the fused add."""
    fused, also_fp32 = parse(FUSED_ADD), parse(ALSO_FP32)
    cases = []
    for shape in shapes:
        rows = [("bf16", {"w": "bf16"}), ("bf16", {"w": "fp32"})]
        rows += [("fp32", {"w": "fp32"})] if shape in also_fp32 else []
        rows += [("bf16", {"w": "bf16", "residual": "bf16"})] if shape in fused else []
        for dtype, opts in rows:
            cases.append(Case("norm_fwd", "rmsnorm_fwd", shape, dtype, tuple(opts.items())))
    return cases


def norm_bwd(shapes: Iterable[Shape]) -> list[Case]:
    """RMSNorm backward (dx and dweight): bf16 with either weight."""
    return _by_weight("norm_bwd", "rmsnorm_bwd", shapes)


def softmax(shapes: Iterable[Shape]) -> list[Case]:
    """Softmax forward in bf16, and for some shapes in fp32."""
    also_fp32 = parse("32768x4096 8192x16384")
    return [
        Case("softmax", "softmax_fwd", shape, dtype)
        for shape in shapes
        for dtype in ("bf16", "fp32")
        if dtype == "bf16" or shape in also_fp32
    ]


def softmax_bwd(shapes: Iterable[Shape]) -> list[Case]:
    """Softmax backward, from the result and its gradient."""
    return [Case("softmax_bwd", "softmax_bwd", shape, "bf16") for shape in shapes]


def layernorm(shapes: Iterable[Shape]) -> list[Case]:
    """LayerNorm forward with weight and bias: bf16 with either weight."""
    return _by_weight("layernorm", "layernorm_fwd", shapes)


def layernorm_bwd(shapes: Iterable[Shape]) -> list[Case]:
    """LayerNorm backward (dx, dweight, dbias): bf16 with either weight."""
    return _by_weight("layernorm_bwd", "layernorm_bwd", shapes)


def ce_fwd(shapes: Iterable[Shape]) -> list[Case]:
    """Loss and log-sum-exp of each row of logits: bf16, and for some shapes fp32."""
    return _ce("ce", "cross_entropy_fwd", shapes)


def ce_fwd_dx(shapes: Iterable[Shape]) -> list[Case]:
    """The mean loss and the gradient of the logits in one pass."""
    return _ce("ce_fwd_dx", "cross_entropy_fused", shapes)


def ce_fwd_bwd(shapes: Iterable[Shape]) -> list[Case]:
    """Mean loss and gradient through autograd; for some shapes the loss is scaled as well."""
    scaled = parse("8192x32000 4096x50257 8192x128256")
    return [
        Case("ce_fwd_bwd", "cross_entropy_autograd", shape, "bf16", (("grad", grad),))
        for shape in shapes
        for grad in ("1", "0.375")
        if grad == "1" or shape in scaled
    ]


def _ce(suite: str, op: str, shapes: Iterable[Shape]) -> list[Case]:
    also_fp32 = parse("8192x128256")
    return [
        Case(suite, op, shape, dtype)
        for shape in shapes
        for dtype in ("bf16", "fp32")
        if dtype == "bf16" or shape in also_fp32
    ]


def topk(shapes: Iterable[Shape]) -> list[Case]:
    """Top-k of rows as a router of experts has them (k = 8), and of longer ones (also 64)."""
    return [
        Case("topk", "topk_fwd", shape, "bf16", (("k", str(k)),))
        for shape in shapes
        for k in (8, 64)
        if k == 8 or shape[1] >= 1024
    ]


def gemm_small(shapes: Iterable[Shape]) -> list[Case]:
    """M x N x K as decoding has them, and small squares; weights as torch.nn.Linear keeps them."""
    return [Case("gemm_small", "gemm_fwd", shape, "bf16", (("layout", "nt"),)) for shape in shapes]


def gemm_large(shapes: Iterable[Shape]) -> list[Case]:
    """M x N x K as training has them; the first ones in the layouts of the gradients too."""
    return [
        Case("gemm_large", "gemm_fwd", shape, "bf16", (("layout", layout),))
        for i, shape in enumerate(shapes)
        for layout in ("nt", "nn", "tn")
        if layout == "nt" or i < OTHER_LAYOUTS
    ]


def gemm_act(shapes: Iterable[Shape]) -> list[Case]:
    """Gate and up projection with SwiGLU; N counts both."""
    opts = (("layout", "nt"), ("act", "swiglu"))
    return [Case("gemm_act", "gemm_fwd", shape, "bf16", opts) for shape in shapes]


def gemm_fp8(shapes: Iterable[Shape]) -> list[Case]:
    """8-bit operands with scales: one, or one for each row of A and column of B."""
    return [
        Case("gemm_fp8", "gemm_fwd", shape, "e4m3", (("layout", "nt"), ("scale", scale)))
        for shape in shapes
        for scale in ("tensor", "row")
    ]


def gemm_fp8_block(shapes: Iterable[Shape]) -> list[Case]:
    """8-bit operands in blocks: 1x128 of A along K, 128x128 of B, whose columns are padded to that."""
    padded = [(m, -(-n // 128) * 128, k) for m, n, k in shapes]
    return [Case("gemm_fp8_block", "matmul_fwd", shape, "e4m3") for shape in padded]


def quant(shapes: Iterable[Shape]) -> list[Case]:
    """bf16 into the formats of products with 8 bits."""
    formats = ("fp8_block_1x128", "fp8_block_128x128", "mxfp8_e4m3")
    return [
        Case("quant", "quantize_fwd", shape, "bf16", (("format", format),))
        for shape in shapes
        for format in formats
    ]


def _by_weight(suite: str, op: str, shapes: Iterable[Shape]) -> list[Case]:
    weights = ("bf16", "fp32")
    return [Case(suite, op, shape, "bf16", (("w", w),)) for shape in shapes for w in weights]


SUITES = {
    "norm_fwd": (NORM_FWD, norm_fwd),
    "norm_bwd": (NORM_BWD, norm_bwd),
    "layernorm": (LAYERNORM, layernorm),
    "layernorm_bwd": (LAYERNORM_BWD, layernorm_bwd),
    "softmax": (SOFTMAX, softmax),
    "softmax_bwd": (SOFTMAX_BWD, softmax_bwd),
    "ce": (CE, ce_fwd),
    "ce_fwd_dx": (CE, ce_fwd_dx),
    "ce_fwd_bwd": (CE, ce_fwd_bwd),
    "topk": (TOPK, topk),
    "gemm_small": (GEMM_SMALL, gemm_small),
    "gemm_large": (GEMM_LARGE, gemm_large),
    "gemm_act": (GEMM_ACT, gemm_act),
    "gemm_fp8": (GEMM_FP8, gemm_fp8),
    "gemm_fp8_block": (GEMM_FP8, gemm_fp8_block),
    "quant": (QUANT, quant),
}


def cases(suite: str, shapes: str | None = None, smoke: bool = False) -> list[Case]:
    """The cases of a suite, for its own shapes or for those given."""
    text, build = SUITES[suite]
    chosen = parse(shapes if shapes else text)
    return build(chosen[:SMOKE] if smoke else chosen)
