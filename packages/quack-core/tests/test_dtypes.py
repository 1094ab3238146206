import pytest

from quack_core import dtypes
from quack_core.errors import DTypeError


@pytest.mark.parametrize(
    ("name", "bits", "short"),
    [("float32", 32, "fp32"), ("bfloat16", 16, "bf16"), ("float16", 16, "fp16")],
)
def test_widths_and_short_names(name, bits, short):
    assert (dtypes.width(name), dtypes.short(name)) == (bits, short)


def test_supported_lists_every_name_once():
    assert dtypes.SUPPORTED == ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("name", ["float64", "fp32", "", None, []])
@pytest.mark.parametrize("function", [dtypes.width, dtypes.short])
def test_other_names_raise_and_the_message_lists_what_works(function, name):
    with pytest.raises(DTypeError, match="float32, bfloat16, float16"):
        function(name)
