"""One accuracy metric for every operator, and bitwise equality.

An error is judged against the error that torch makes on the same operands, never against a
hand-picked tolerance. The reference is computed in float64.
"""

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["rows", "columns"]

EPS32 = torch.finfo(torch.float32).eps

# Explicit mantissa bits, exponent of the smallest normal number, exponent of the largest number.
_FORMATS = {
    torch.float64: (52, -1022, 1023),
    torch.float32: (23, -126, 127),
    torch.bfloat16: (7, -126, 127),
    torch.float16: (10, -14, 15),
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def ulp(x64: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of `dtype` at each element of `x64`.

    Elements below the smallest normal number, zero included, get the spacing of the subnormals;
    infinities and elements too large for `dtype` get the spacing of its largest numbers.

    Args:
        x64: float64, any shape.
        dtype: float64, float32, bfloat16 or float16.

    Returns:
        float64 powers of two, shaped like `x64`; NaN gives the spacing at zero.

    Raises:
        TypeError: `x64` is not float64, or `dtype` is none of these.
    """
    if x64.dtype != torch.float64:
        raise TypeError(f"x64 is {x64.dtype}: the spacing is found from a float64 tensor")
    mantissa, smallest, largest = _format(dtype)
    finite = torch.nan_to_num(x64, nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs()
    finite = finite.clamp(max=torch.finfo(dtype).max)
    exponent = torch.frexp(finite).exponent.to(torch.int64) - 1  # frexp's fraction is in [0.5, 1)
    # zero has no exponent of its own: frexp returns 0 for it
    exponent = torch.where(finite == 0, smallest, exponent).clamp(smallest, largest)
    return _power_of_two(exponent - mantissa)


def assert_accurate(
    actual: Tensor,
    ref64: Tensor,
    baseline: Tensor,
    *,
    kind: Kind = "rows",
    terms: Tensor | None = None,
    name: str = "",
) -> float:
    """Fail unless `actual` is as accurate as torch, element by element.

    ``rows``: ``|actual - ref64| <= 2 * max over its row of |baseline - ref64| + ulp(ref64)``, a row
    being the last dimension. ``columns`` (a sum over rows, such as dweight):
    ``|actual - ref64| <= 2 * |baseline - ref64| + ulp(ref64) + 2 * eps32 * terms``, everything that
    element's. The ulp is that element's in the dtype of `actual`.

    `actual` has to be finite where the reference is, unless the reference lies so close to the
    overflow of the dtype that the bound reaches it; NaN and Inf have to stand exactly where the
    reference has them. A baseline that is not finite where the reference is allows nothing.

    Args:
        actual: the result under test; float32, bfloat16 or float16.
        ref64: the right values in float64. For one value per row (rstd) give ``(M, 1)``.
        baseline: torch's result on the same operands, at least as precise a dtype as `actual`.
        kind: ``"rows"`` or ``"columns"``.
        terms: for ``columns`` and only there, the sum over rows of the terms' absolute values,
            shaped like `ref64`.
        name: what is compared, for the message.

    Returns:
        The largest ``|actual - ref64| / bound``, at most 1; 0 for an empty tensor.

    Raises:
        AssertionError: names the worst element, what was found and wanted, its bound and the
            number of elements out of bounds.
        ValueError, TypeError: shapes or dtypes that cannot be compared.
    """
    _check_operands(actual, ref64, baseline, kind, terms, name)
    if ref64.numel() == 0:
        return 0.0
    found = actual.detach().to(ref64.device, torch.float64)
    bound = _bound(ref64, baseline.detach().to(ref64.device, torch.float64), kind, actual.dtype)
    if terms is not None:
        bound = bound + 2 * EPS32 * terms.detach().to(ref64.device, torch.float64)
    ratio = _ratio(found, ref64, bound, actual.dtype)
    worst = int(ratio.argmax())
    if float(ratio.flatten()[worst]) > 1:
        raise AssertionError(_message(found, ref64, bound, ratio, worst, actual.dtype, name))
    return float(ratio.flatten()[worst])


def assert_bitwise(a: Tensor, b: Tensor, name: str = "") -> None:
    """Fail unless both tensors hold the same bits: signs of zero and NaN payloads count.

    Raises:
        AssertionError: names the first element that differs and how many do.
        ValueError, TypeError: shapes or dtypes differ.
    """
    label = name or "tensors"
    if a.shape != b.shape:
        raise ValueError(f"{label}: shapes {tuple(a.shape)} and {tuple(b.shape)} differ")
    if a.dtype != b.dtype:
        raise TypeError(f"{label}: dtypes {a.dtype} and {b.dtype} differ")
    different = _as_integers(a) != _as_integers(b.to(a.device))
    count = int(different.sum())
    if count == 0:
        return
    first = _index(int(different.flatten().to(torch.uint8).argmax()), a.shape)
    raise AssertionError(
        f"{label}: {count} of {a.numel()} elements differ in their bits, "
        f"first at {list(first)}: {a[first].item()!r} and {b[first].item()!r}"
    )


def _overflow(dtype: torch.dtype) -> float:
    """The smallest number that rounding to nearest turns into an infinity."""
    mantissa, _, largest = _format(dtype)
    # float64 holds this number for every narrower dtype
    half_ulp = 0.0 if dtype == torch.float64 else 2.0 ** (largest - mantissa - 1)
    return float(torch.finfo(dtype).max) + half_ulp


def _format(dtype: torch.dtype) -> tuple[int, int, int]:
    if dtype not in _FORMATS:
        known = ", ".join(str(d).removeprefix("torch.") for d in _FORMATS)
        raise TypeError(f"dtype {dtype} has no known spacing: use {known}")
    return _FORMATS[dtype]


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent in float64, exactly, for int64 exponents down to the subnormals."""
    normal = (exponent.clamp(min=-1022) + 1023) << 52
    subnormal = torch.ones_like(exponent) << (exponent + 1074).clamp(0, 51)
    return torch.where(exponent >= -1022, normal, subnormal).view(torch.float64)


def _check_operands(
    actual: Tensor, ref64: Tensor, baseline: Tensor, kind: str, terms: Tensor | None, name: str
) -> None:
    label = name or "result"
    if ref64.dtype != torch.float64:
        raise TypeError(f"{label}: ref64 is {ref64.dtype}: the reference must be float64")
    _format(actual.dtype)
    if torch.finfo(baseline.dtype).eps > torch.finfo(actual.dtype).eps:
        raise TypeError(
            f"{label}: baseline is {baseline.dtype}, which is coarser than the result's "
            f"{actual.dtype} and would allow its error: compute it in {actual.dtype}"
        )
    for operand, tensor in (("actual", actual), ("baseline", baseline), ("terms", terms)):
        if tensor is not None and tensor.shape != ref64.shape:
            shapes = f"{tuple(tensor.shape)}, the reference {tuple(ref64.shape)}"
            raise ValueError(f"{label}: {operand} has shape {shapes}")
    if kind not in ("rows", "columns"):
        raise ValueError(f"{label}: kind={kind!r} must be 'rows' or 'columns'")
    if (terms is not None) != (kind == "columns"):
        raise ValueError(f"{label}: terms go with kind='columns', and only with it")
    if terms is not None and not bool((terms >= 0).all()):
        raise ValueError(f"{label}: terms must be sums of absolute values, not negative or NaN")


def _bound(ref64: Tensor, baseline: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    error = (baseline - ref64).abs()
    # an infinite or NaN allowance would let everything pass
    error = torch.where(error.isfinite(), error, 0.0)
    if kind == "rows" and ref64.dim() > 0:
        error = error.amax(dim=-1, keepdim=True)
    return 2 * error + ulp(ref64, dtype)


def _ratio(found: Tensor, ref64: Tensor, bound: Tensor, dtype: torch.dtype) -> Tensor:
    """|found - ref64| / bound; 0 for NaN and Inf in their place, inf for those out of place."""
    ratio = (found - ref64).abs() / bound
    same_class = (found == ref64) | (found.isnan() & ref64.isnan())
    may_overflow = (ref64.abs() + bound >= _overflow(dtype)) & ref64.isfinite()
    overflown = found.isinf() & (found.sign() == ref64.sign()) & may_overflow
    ratio = torch.where(found.isfinite() & ref64.isfinite(), ratio, torch.inf)
    return torch.where(same_class | overflown, 0.0, ratio)


def _message(
    found: Tensor,
    ref64: Tensor,
    bound: Tensor,
    ratio: Tensor,
    worst: int,
    dtype: torch.dtype,
    name: str,
) -> str:
    index = _index(worst, ref64.shape)
    count = int((ratio > 1).sum())
    kind = str(dtype).removeprefix("torch.")
    return (
        f"{name or 'result'} ({kind}): {count} of {ref64.numel()} elements out of bounds; "
        f"worst at {list(index)}: found {float(found[index])!r}, wanted {float(ref64[index])!r}, "
        f"bound {float(bound[index]):.6g}, error {float(ratio[index]):.4g} times the bound"
    )


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index: list[int] = []
    for extent in reversed(shape):
        flat, position = divmod(flat, extent)
        index.append(position)
    return tuple(reversed(index))


def _as_integers(x: Tensor) -> Tensor:
    if x.dtype == torch.bool or not (x.is_floating_point() or x.is_complex()):
        return x.detach()
    if x.is_complex():
        return _as_integers(torch.view_as_real(x.detach()))
    return x.detach().contiguous().view(_BITS[x.element_size()])
