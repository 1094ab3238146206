"""Arithmetic that the forward and backward kernels share: labels, logits, and the gradient of a row."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from quack_core.device import fast_math
from quack_core.device.reduce import ONLINE_SOFTMAX, ONLINE_SOFTMAX_ROUNDED, Reduction, finite

from .spec import CrossEntropyBwdSpec, CrossEntropyFwdSpec

Spec = CrossEntropyFwdSpec | CrossEntropyBwdSpec


class Options(NamedTuple):
    """Numbers of a launch."""

    ignore_index: Int64
    label_smoothing: Float32
    softcap: Float32
    z_loss: Float32


class Label(NamedTuple):
    """What a row's label says.

    Args:
        index: of the class; 0 if there is none.
        kept: whether the row counts.
        factor: weight of the class; NaN for an illegal label, 0 if the row does not count.
    """

    index: Int32
    kept: Boolean
    factor: Float32


@cute.jit
def read_label(
    targets: cute.Tensor,
    weights: cute.Tensor | None,
    row: Int64,
    ignore_index: Int64,
    num_classes: cutlass.Constexpr[int],
) -> Label:
    """The label of a row."""
    return label_of(Int64(targets[row]), weights, ignore_index, num_classes)


@cute.jit
def label_of(
    target: Int64,
    weights: cute.Tensor | None,
    ignore_index: Int64,
    num_classes: cutlass.Constexpr[int],
) -> Label:
    """What a label says; compared in 64 bits, whatever dtype it has."""
    kept = target != ignore_index
    legal = (target >= 0) & (target < num_classes)
    index = Int32(target) if legal else Int32(0)
    factor = Float32(1.0)
    if const_expr(weights is not None):
        factor = Float32(weights[index])
    factor = factor if legal else Float32(float("nan"))
    return Label(index, kept, factor if kept else Float32(0.0))


def capped(x, spec: Spec, options: Options):
    """Logits as the loss sees them; ``x`` is a vector or a number in float32."""
    if not spec.softcap:
        return x
    return cute.math.tanh(x * fast_math.reciprocal(options.softcap)) * options.softcap


def powers(values, spec: Spec):
    """e ** values, as precise as the gradient's dtype can tell."""
    if spec.x == "float32":
        return fast_math.exp_rounded(values)
    return cute.math.exp2(values * fast_math.LOG2_E, fastmath=True)


def online_of(spec: Spec) -> Reduction:
    """Of `powers`: the largest logit, and the sum of powers of what logits are below it."""
    return ONLINE_SOFTMAX_ROUNDED if spec.x == "float32" else ONLINE_SOFTMAX


class Slope(NamedTuple):
    """The gradient of a row: ``(e ** (z - shift) * slope - every * weight) * (1 - (z / cap)^2)``.

    Args:
        shift: the largest logit, or 0.
        slope: of the powers.
        every: what label smoothing takes from each class, times its weight.
        own: what the label's class loses besides.
    """

    shift: Float32
    slope: Float32
    every: Float32
    own: Float32


def slope_of(
    label: Label,
    shift: Float32,
    exp_sum: Float32,
    lse: Float32,
    weight_sum: Float32,
    incoming: Float32,
    spec: Spec,
    options: Options,
) -> Slope:
    """The gradient of a row that counts.

    Args:
        weight_sum: of all classes; used with label smoothing only.
        incoming: gradient of the row's loss.
    """
    own, every = label.factor, Float32(0.0)
    if spec.smoothing:
        own = own * (Float32(1.0) - options.label_smoothing)
        every = options.label_smoothing * (1 / spec.n)
    shares = own + every * weight_sum if spec.smoothing else own
    if spec.z_loss:
        shares = shares + Float32(2.0) * options.z_loss * lse
    return Slope(
        shift, shares * incoming * fast_math.inverse(exp_sum), every * incoming, own * incoming
    )


def gradient(x, weight, slope: Slope, spec: Spec, options: Options):
    """Gradient of logits, without what the label's class loses besides.

    Args:
        x: logits, a vector or a number in float32.
        weight: of their classes, alike; None: 1.
    """
    z = capped(x, spec, options)
    dz = powers(z - slope.shift, spec) * slope.slope
    if spec.smoothing:
        dz = dz - (slope.every if weight is None else weight * slope.every)
    return _uncapped(dz, z, spec, options)


def gradient_of_label(x: Float32, weight: Float32, slope: Slope, spec: Spec, options: Options):
    """Gradient of the logit of the label's class."""
    z = capped(x, spec, options)
    dz = powers(z - slope.shift, spec) * slope.slope - slope.own
    if spec.smoothing:
        dz = dz - weight * slope.every
    return _uncapped(dz, z, spec, options)


@cute.jit
def log_of(exp_sum: Float32) -> Float32:
    """Natural logarithm of a sum of powers: precise where the largest is one of them, so 1."""
    precise = fast_math.log_rounded(exp_sum, Float32(0.0))
    return precise if exp_sum >= Float32(1.0) else fast_math.log(exp_sum)


@cute.jit
def log_sum_exp(peak: Float32, log_sum: Float32) -> Float32:
    """An infinite peak is the log-sum-exp itself: the sum is NaN then, or 0 unless a logit is NaN."""
    return peak if peak == Float32(math.inf) else finite(peak) + log_sum


def element(pointer: cute.Pointer) -> cute.Tensor:
    """One element of memory."""
    return cute.make_tensor(pointer, cute.make_layout(1))


def _uncapped(dz, z, spec: Spec, options: Options):
    if not spec.softcap:
        return dz
    share = z * fast_math.reciprocal(options.softcap)
    return dz - dz * (share * share)
