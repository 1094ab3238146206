"""The accuracy metric: each kind of fault fails it, and only faults do."""

import math

import pytest

torch = pytest.importorskip("torch")

from quack_core.testing.compare import EPS32, assert_accurate, assert_bitwise, ulp

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rows(dtype: torch.dtype = torch.bfloat16, m: int = 4, n: int = 64):
    """A result rounded once, its reference, and a baseline with an error of its own."""
    ref64 = torch.randn(m, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    actual = ref64.to(dtype)
    baseline = (ref64 * (1 + 2 * torch.finfo(dtype).eps)).to(dtype)
    return actual, ref64, baseline


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_is_the_distance_to_the_next_number(dtype):
    """Counted on the integers that the floats are, subnormals and powers of two included."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    top = torch.tensor([torch.finfo(dtype).max], dtype=dtype).view(integer).item()
    codes = torch.arange(0, top, max(1, top // 50021), dtype=torch.int64)
    codes = torch.cat([codes, torch.tensor([0, 1, 2, top - 1])]).to(integer)
    x, following = codes.view(dtype).double(), (codes + 1).view(dtype).double()
    assert torch.equal(ulp(x, dtype), following - x)
    assert torch.equal(ulp(-x, dtype), following - x)


def test_ulp_at_special_values():
    smallest = 2.0**-149
    assert ulp(f64(0.0, math.nan, 1e-300), torch.float32).tolist() == [smallest] * 3
    assert ulp(f64(math.inf, -math.inf, 1e300), torch.float16).tolist() == [32.0] * 3
    assert ulp(f64(0.0, 1.0, 2.0**-1022), torch.float64).tolist() == [
        2.0**-1074,
        2.0**-52,
        2.0**-1074,
    ]
    with pytest.raises(TypeError, match="float64"):
        ulp(torch.ones(1), torch.float16)
    with pytest.raises(TypeError, match="int32"):
        ulp(f64(1.0), torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rounding_passes(dtype):
    actual, ref64, baseline = rows(dtype)
    assert 0 < assert_accurate(actual, ref64, baseline) < 1
    # even against a baseline without any error, half an ulp is allowed one
    assert 0.4 < assert_accurate(actual, ref64, ref64) <= 0.5


def test_the_row_sets_the_bound():
    """2 * the largest baseline error of the row + this element's ulp, exactly."""
    ref64 = torch.zeros(2, 3, dtype=torch.float64)
    baseline = torch.tensor([[0.0, -0.25, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float32)
    actual = torch.zeros(2, 3)
    actual[0, 2] = 0.5
    assert assert_accurate(actual, ref64, baseline) == pytest.approx(1.0)
    actual[0, 2] = 0.500001
    with pytest.raises(AssertionError, match=r"1 of 6 .* worst at \[0, 2\]"):
        assert_accurate(actual, ref64, baseline)
    other_row = torch.zeros(2, 3)
    other_row[1, 2] = 1e-3  # the first row's error allows the second nothing
    with pytest.raises(AssertionError, match=r"worst at \[1, 2\]"):
        assert_accurate(other_row, ref64, baseline)


def test_the_ulp_is_that_elements():
    """A large neighbour does not loosen a small element."""
    ref64 = f64(1024.0, 2.0**-10).view(1, 2)
    exact = ref64.to(torch.bfloat16)
    off = exact.clone()
    off[0, 1] += 2 * ulp(ref64, torch.bfloat16)[0, 1].to(torch.bfloat16)
    assert assert_accurate(exact, ref64, exact) == 0
    with pytest.raises(AssertionError, match=r"worst at \[0, 1\].* 2 times the bound"):
        assert_accurate(off, ref64, exact)


def test_columns_are_judged_element_by_element():
    ref64 = f64(0.0, 0.0)
    baseline = torch.tensor([0.25, 0.0])
    terms = f64(0.0, 2.0**20)
    allowed = 2 * EPS32 * 2.0**20
    passing = torch.tensor([0.5, allowed])
    ratio = assert_accurate(passing, ref64, baseline, kind="columns", terms=terms)
    assert ratio == pytest.approx(1.0)
    for fault in ([0.51, 0.0], [0.0, 1.01 * allowed], [0.0, 0.5]):
        with pytest.raises(AssertionError, match="1 of 2"):
            assert_accurate(torch.tensor(fault), ref64, baseline, kind="columns", terms=terms)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_not_finite_where_the_reference_is(wrong):
    actual, ref64, baseline = rows()
    actual[2, 5] = wrong
    with pytest.raises(AssertionError, match=r"1 of 256 .* worst at \[2, 5\]"):
        assert_accurate(actual, ref64, baseline)


@pytest.mark.parametrize("wanted", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("found", [math.nan, math.inf, -math.inf, 0.0, 3e38])
def test_nan_and_inf_stand_where_the_reference_has_them(wanted, found):
    actual, ref64, baseline = rows(torch.float32)
    ref64[1, 3] = wanted
    actual[1, 3] = found
    baseline[1, 3] = wanted
    if found == wanted or math.isnan(found) and math.isnan(wanted):
        assert assert_accurate(actual, ref64, baseline) < 1
    else:
        with pytest.raises(AssertionError, match=r"worst at \[1, 3\]"):
            assert_accurate(actual, ref64, baseline)


def test_a_baseline_that_is_not_finite_allows_nothing():
    actual, ref64, baseline = rows()
    actual[0, 0] += 1
    for wrong in (math.nan, math.inf):
        baseline[0, 1] = wrong
        with pytest.raises(AssertionError, match=r"1 of 256 .* worst at \[0, 0\]"):
            assert_accurate(actual, ref64, baseline)


def test_overflow_of_the_output_dtype():
    ref64 = f64(65519.0, 65521.0, -70000.0).view(1, 3)
    right = torch.tensor([[65504.0, math.inf, -math.inf]], dtype=torch.float16)
    assert assert_accurate(right, ref64, right) <= 1
    # within an ulp of the threshold both are a rounding; far beyond it only the infinity is
    for fault in ([65504.0, math.inf, -65504.0], [65504.0, math.inf, math.inf]):
        wrong = torch.tensor([fault], dtype=torch.float16)
        with pytest.raises(AssertionError, match=r"worst at \[0, 2\]"):
            assert_accurate(wrong, ref64, right)
    small = torch.tensor([[math.inf]], dtype=torch.float16)
    with pytest.raises(AssertionError):
        assert_accurate(small, f64(60000.0).view(1, 1), small)


def test_the_message_names_everything():
    actual, ref64, _ = rows(torch.float32)
    ref64[3, 7], ref64[3, 8] = 1.5, 1.25
    actual[3, 7], actual[3, 8] = 5.0, 4.0
    with pytest.raises(AssertionError) as raised:
        assert_accurate(actual, ref64, ref64, name="dx")
    message = str(raised.value)
    bound = float(ulp(ref64, torch.float32)[3, 7])
    assert message.startswith("dx (float32): 2 of 256 elements out of bounds; worst at [3, 7]: ")
    assert f"found 5.0, wanted {float(ref64[3, 7])!r}, bound {bound:.6g}, error " in message
    assert message.endswith(f"{abs(5.0 - float(ref64[3, 7])) / bound:.4g} times the bound")


def test_operands_that_cannot_be_compared():
    actual, ref64, baseline = rows()
    with pytest.raises(TypeError, match="must be float64"):
        assert_accurate(actual, ref64.float(), baseline)
    with pytest.raises(TypeError, match="coarser"):
        assert_accurate(actual.float(), ref64, baseline)
    with pytest.raises(TypeError, match="int32"):
        assert_accurate(actual.int(), ref64, baseline)
    with pytest.raises(ValueError, match="actual has shape"):
        assert_accurate(actual[:1], ref64, baseline)  # would broadcast
    with pytest.raises(ValueError, match="terms go with"):
        assert_accurate(actual, ref64, baseline, kind="columns")
    with pytest.raises(ValueError, match="terms go with"):
        assert_accurate(actual, ref64, baseline, terms=ref64.abs())
    with pytest.raises(ValueError, match="absolute"):
        assert_accurate(actual, ref64, baseline, kind="columns", terms=-ref64.abs())
    with pytest.raises(ValueError, match="kind="):
        assert_accurate(actual, ref64, baseline, kind="matrix")  # type: ignore[arg-type]


def test_empty_and_scalar():
    empty = torch.empty(0, 8)
    assert assert_accurate(empty, empty.double(), empty) == 0.0
    scalar = torch.tensor(1.0)
    assert assert_accurate(scalar, scalar.double(), scalar) == 0.0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.bool])
def test_bitwise_equal(dtype):
    a = torch.arange(6).view(2, 3).to(dtype)
    assert_bitwise(a, a.clone())
    assert_bitwise(a.t(), a.t().contiguous())


def test_bitwise_tells_what_equality_does_not():
    zero, nan = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, math.nan]])
    assert_bitwise(nan, nan.clone())
    with pytest.raises(AssertionError, match=r"y: 1 of 2 .* first at \[0, 1\]: 0.0 and -0.0"):
        assert_bitwise(zero, torch.tensor([[1.0, -0.0]]), "y")
    payload = nan.view(torch.int32).clone()
    payload[0, 1] += 1
    payload = payload.view(torch.float32)
    with pytest.raises(AssertionError, match="1 of 2"):
        assert_bitwise(nan, payload)
    with pytest.raises(TypeError, match="dtypes"):
        assert_bitwise(zero, zero.double())
    with pytest.raises(ValueError, match="shapes"):
        assert_bitwise(zero, zero[0])
