"""What the backward of RMSNorm and LayerNorm computes, apart from how rows move."""

import cutlass.cute as cute
from cutlass import Float32

from quack_core.device.reduce import SUM, SUM2, Partial, Reduction, thread_sum
from quack_core.reduction.tiling import RowTiling

from .bwd_spec import RMSNormBwdSpec


class NormGradient:
    """dh = rstd * (wdy - mean(wdy) - xhat * mean(wdy * xhat)); RMSNorm subtracts no mean of wdy.

    x below is what is normalised: h, or its distance from its mean.
    """

    spec: RMSNormBwdSpec
    tiling: RowTiling

    @staticmethod
    def reduction_of(spec: RMSNormBwdSpec) -> Reduction:
        return SUM2 if spec.centred else SUM

    def centre(self, x, mean: tuple[Float32, Float32]):
        return (x - mean[0]) - mean[1] if self.spec.centred else x

    def dots(self, xdy, dy, rW, weight_offset: Float32) -> Partial:
        dot = thread_sum(self.times_weight(xdy, rW, weight_offset))
        if not self.spec.centred:
            return (dot,)
        return dot, thread_sum(self.times_weight(dy, rW, weight_offset))

    def means(self, dots: Partial, rstd: Float32) -> Partial:
        """What is subtracted from wdy: per x, and for all elements."""
        per_x = dots[0] * (rstd * rstd * (1 / self.tiling.n))
        return (per_x, dots[1] * (1 / self.tiling.n)) if self.spec.centred else (per_x,)

    def gradient(self, x, dy, means: Partial, rstd: Float32, rW, weight_offset: Float32):
        """dh of the normalisation itself.

        What is subtracted from wdy is added up first: it is small, and so is its rounding.
        """
        small = x * means[0]
        if self.spec.centred and self.tiling.n == 1:
            return (dy - dy - small) * rstd  # wdy is its mean; the product's rounding would be left
        if self.spec.centred:
            small = small + means[1]
        if self.spec.weight is not None and self.spec.dx == "float32":  # wdy is not rounded
            return cute.math.fma(dy, self.weight(rW, weight_offset), -small) * rstd
        return (self.times_weight(dy, rW, weight_offset) - small) * rstd

    def times_weight(self, values, rW: cute.Tensor, weight_offset: Float32):
        """values * (weight + offset)"""
        if self.spec.weight is None:
            return values
        return values * self.weight(rW, weight_offset)

    def weight(self, rW: cute.Tensor, weight_offset: Float32):
        """weight + offset"""
        weight = rW.load().to(Float32)
        return weight + weight_offset if self.spec.offset else weight
