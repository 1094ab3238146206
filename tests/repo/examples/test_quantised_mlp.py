"""Formats rank as their bits say, and errors are of the size of their rounding."""

import pytest
import quantised_mlp

pytest.importorskip("quack_blockscaled")

HALF_STEP = {
    "fp8_block": 2.0**-4,
    "mxfp8_e4m3": 2.0**-4,
    "mxfp6_e2m3": 2.0**-4,
    "nvfp4": 2.0**-2,
    "mxfp4": 2.0**-2,
}
"""The largest relative error of an element that is no subnormal number."""


def test_errors_are_those_of_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    """Finer scales and smaller blocks help; three products in a row stay within two half steps."""
    found = quantised_mlp.compare()
    errors = {name: error for name, (error, _) in found.items()}
    assert sorted(errors, key=errors.__getitem__) == list(HALF_STEP)
    for name, error in errors.items():
        assert 0.3 * HALF_STEP[name] < error < 2 * HALF_STEP[name], name
    assert found["mxfp8_e4m3"][1] > 0.8 > found["mxfp4"][1]
    quantised_mlp.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["format", *HALF_STEP]
