"""Suites as text."""

import pytest
from benchmarks import shapes


def test_parse_keeps_order_and_drops_repeats() -> None:
    assert shapes.parse("8x16, 1x2\n 8X16 3x4x5") == ((8, 16), (1, 2), (3, 4, 5))


@pytest.mark.parametrize("word", ["8x", "x8", "8x-1", "axb", "0x4", "8*4"])
def test_parse_names_what_is_no_shape(word: str) -> None:
    with pytest.raises(ValueError, match="joined by x"):
        shapes.parse(f"4x4 {word}")


def test_forward_suite_has_every_row_once() -> None:
    cases = shapes.cases("norm_fwd")
    assert len(set(cases)) == len(cases) == 2 * 20 + 1 + 3
    weights = {(case.shape, case.opt("w")) for case in cases if case.opt("residual") is None}
    assert {
        (shape, w) for shape in shapes.parse(shapes.NORM_FWD) for w in ("bf16", "fp32")
    } <= weights
    assert [case.label for case in cases if case.dtype == "fp32"] == ["8192x4096 fp32 w=fp32"]


def test_backward_suite() -> None:
    assert len(shapes.cases("norm_bwd")) == 22


def test_smoke_is_the_first_shapes_and_shapes_can_be_chosen() -> None:
    smoke = {case.shape for case in shapes.cases("norm_fwd", smoke=True)}
    assert smoke == {(1, 8192), (1024, 4096), (8192, 4096)}
    assert {case.shape for case in shapes.cases("norm_bwd", "7x9")} == {(7, 9)}
