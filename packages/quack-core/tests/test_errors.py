import pickle

import pytest

from quack_core import errors


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.ShapeError, ValueError),
        (errors.LayoutError, ValueError),
        (errors.DTypeError, TypeError),
        (errors.DeviceError, ValueError),
        (errors.UnsupportedError, NotImplementedError),
        (errors.ArchError, NotImplementedError),
        (errors.CompileError, RuntimeError),
        (errors.StaleSourceError, RuntimeError),
    ],
)
def test_each_error_is_a_quack_error_and_a_builtin(ours, builtin):
    with pytest.raises(builtin, match="n=3"):
        raise ours("n=3")
    with pytest.raises(errors.QuackError, match="n=3"):
        raise ours("n=3")


def test_the_message_says_what_the_limit_and_the_way_out():
    error = errors.UnsupportedError("n=300000", "rows have up to 262144 elements", "split the row")
    assert str(error) == "n=300000; rows have up to 262144 elements; split the row"
    assert str(errors.ArchError("sm80", way_out="use the CPU")) == "sm80; use the CPU"


def test_an_unsupported_error_survives_pickling():
    error = errors.ArchError("sm80", "sm90", "use the CPU")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.ArchError
    assert (copy.what, copy.limit, copy.way_out) == ("sm80", "sm90", "use the CPU")


def test_an_arch_error_is_an_unsupported_error():
    assert issubclass(errors.ArchError, errors.UnsupportedError)
