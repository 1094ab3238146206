"""Views evaluated on the host: static and swizzled layouts, coordinate tensors, real memory."""

import itertools

import numpy as np
import pytest
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from quack_core.errors import LayoutError, ShapeError
from quack_core.layout import views


def host_eval(function):
    """``function()`` within a trace, where static CuTe expressions are Python numbers."""
    result = []

    @cute.jit
    def trace():
        result.append(function())

    cute.compile(trace)
    return result[0]


def spelt(build, shape, stride):
    return lambda: str(build(cute.make_layout(shape, stride=stride)))


NESTED = ((8, (4, 2), 3), (1, (16, 8), 64))


@pytest.fixture(scope="module")
def layouts():
    """Every case of a static layout in one trace."""
    cases = {
        "transpose": spelt(views.transpose, *NESTED),
        "select one": spelt(lambda v: views.select(v, 1), *NESTED),
        "select last": spelt(lambda v: views.select(v, -1, 0), *NESTED),
        "permute": spelt(lambda v: views.permute(v, 2, 0, 1), *NESTED),
        "permute negative": spelt(lambda v: views.permute(v, -1, 0, 1), *NESTED),
        "expand front": spelt(lambda v: views.expand(v, 0, 5), *NESTED),
        "expand middle": spelt(lambda v: views.expand(v, 1, 5), *NESTED),
        "expand end": spelt(lambda v: views.expand(v, -1, 5), *NESTED),
        "expand vector": spelt(lambda v: views.expand(v, 0, 4), 8, 1),
    }
    return host_eval(lambda: {name: case() for name, case in cases.items()})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transpose", "((4,2),8,3):((16,8),1,64)"),
        ("select one", "((4,2)):((16,8))"),
        ("select last", "(3,8):(64,1)"),
        ("permute", "(3,8,(4,2)):(64,1,(16,8))"),
        ("permute negative", "(3,8,(4,2)):(64,1,(16,8))"),
        ("expand front", "(5,8,(4,2),3):(0,1,(16,8),64)"),
        ("expand middle", "(8,5,(4,2),3):(1,0,(16,8),64)"),
        ("expand end", "(8,(4,2),3,5):(1,(16,8),64,0)"),
        ("expand vector", "(4,8):(0,1)"),
    ],
)
def test_layouts(name, expected, layouts):
    assert layouts[name] == expected


def test_swizzled_layouts_keep_their_swizzle():
    def evaluate():
        swizzle = cute.make_swizzle(3, 3, 3)
        layout = cute.make_composed_layout(swizzle, 0, cute.make_layout((8, 64), stride=(64, 1)))
        turned, wide = views.transpose(layout), views.expand(layout, 1, 2)
        picked = views.select(layout, 1)
        pairs = list(itertools.product(range(8), range(0, 64, 7)))
        return [
            (layout((i, j)), turned((j, i)), wide((i, 0, j)), wide((i, 1, j))) for i, j in pairs
        ], [(layout((0, j)), picked(j)) for j in range(64)]

    whole, row = host_eval(evaluate)
    assert len({values[0] for values in whole}) == 80
    assert all(len(set(values)) == 1 for values in whole)
    assert all(a == b for a, b in row)


def test_coordinate_tensors():
    def evaluate():
        tensor = cute.make_identity_tensor((4, 6))
        return (
            views.transpose(tensor)[3, 1],
            views.expand(tensor, 2, 5)[1, 2, 3],
            views.select(tensor, 1)[3],
            views.permute(tensor, 1, 0)[5, 2],
        )

    assert host_eval(evaluate) == ((1, 3), (1, 2), (0, 3), (2, 5))


@cute.jit
def read_views(source: cute.Tensor, result: cute.Tensor):
    turned = views.transpose(source)  # (3, 4)
    wide = views.expand(source, 0, 2)  # (2, 4, 3)
    column = views.select(source, 0)  # (4)
    for i in range(4):
        result[i] = column[i]
        for j in range(3):
            result[4 + 3 * i + j] = turned[j, i]
            result[16 + 3 * i + j] = wide[1, i, j]


def test_views_of_memory_read_the_same_elements():
    source = np.arange(12, dtype=np.float32).reshape(4, 3) * 7
    result = np.full(28, -1, dtype=np.float32)
    read_views(from_dlpack(source), from_dlpack(result))
    flat = source.flatten().tolist()
    assert result.tolist() == [*source[:, 0].tolist(), *flat, *flat]


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda v: views.select(v, 2), ShapeError, "mode 2: the view has modes 0 to 1"),
        (lambda v: views.select(v, -3), ShapeError, "mode -3: the view has modes 0 to 1"),
        (lambda v: views.select(v), LayoutError, "name at least one"),
        (lambda v: views.select(v, 0, -2), LayoutError, r"\(0, -2\): name at least one"),
        (lambda v: views.permute(v, 0), LayoutError, r"order \(0,\) must name each of the 2"),
        (lambda v: views.permute(v, 0, 0), LayoutError, r"order \(0, 0\) must name each"),
        (lambda v: views.permute(v, 0, 3), LayoutError, r"order \(0, 3\) must name each"),
        (lambda v: views.transpose(views.select(v, 0)), ShapeError, "two modes, found one"),
        (lambda v: views.expand(v, 3, 4), ShapeError, "mode 3: .*at 0 to 2"),
        (lambda v: views.expand(v, -4, 4), ShapeError, "mode -4: .*at 0 to 2"),
        (lambda v: views.expand(v, 0, 0), ShapeError, "size 0: must be at least 1"),
    ],
)
def test_errors_name_the_values(build, error, words):
    def evaluate():
        with pytest.raises(error, match=words):
            build(cute.make_layout((4, 6)))
        return "raised"

    assert host_eval(evaluate) == "raised"
