import re
from xml.etree import ElementTree

import pytest

from quack_core.errors import ShapeError
from quack_core.layout import draw
from quack_core.layout.layout import Layout
from quack_core.layout.swizzle import ComposedLayout, Swizzle

# Four threads with two values each hold a tile of 2 x 4: neighbours along the columns.
THREAD_VALUE = Layout(((2, 2), 2), ((1, 4), 2))


def test_text_of_a_matrix():
    assert draw.text(Layout((2, 4), (1, 10))).splitlines() == [
        "  | 0  1  2  3",
        "--+-----------",
        "0 | 0 10 20 30",
        "1 | 1 11 21 31",
    ]


def test_text_of_a_vector_is_one_row():
    assert draw.text(Layout(3, 5)).splitlines()[-1] == "0 | 0 5 10"


def test_text_of_a_nested_layout_counts_each_mode():
    lines = draw.text(Layout((2, (2, 2)), (1, (8, 2)))).splitlines()
    assert [line.split("|")[1].split() for line in (lines[0], *lines[2:])] == [
        ["0", "1", "2", "3"],
        ["0", "8", "2", "10"],
        ["1", "9", "3", "11"],
    ]


def test_text_of_a_swizzled_layout():
    layout = ComposedLayout(Swizzle(1, 0, 1), Layout((2, 2), (2, 1)))
    lines = draw.text(layout).splitlines()
    assert [line.split("|")[1].split() for line in lines[2:]] == [["0", "1"], ["3", "2"]]


def test_ownership_names_thread_and_value():
    lines = draw.ownership_text(THREAD_VALUE, (2, 4)).splitlines()
    assert [line.split("|")[1].split() for line in lines[2:]] == [
        ["T0V0", "T0V1", "T2V0", "T2V1"],
        ["T1V0", "T1V1", "T3V0", "T3V1"],
    ]


def test_ownership_shows_gaps_and_shared_elements():
    lines = draw.ownership_text(Layout((2, 1), (0, 0)), (1, 2)).splitlines()
    assert lines[-1].split("|")[1].split() == ["T0V0/T1V0", "."]


def cells(document):
    """``[(text, fill of its box)]`` of the boxes of a drawing, in order."""
    root = ElementTree.fromstring(document)
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    found = []
    for box, label in zip(root, list(root)[1:], strict=False):
        if box.tag == f"{space}rect" and box.get("stroke"):
            assert label.tag == f"{space}text"
            found.append((label.text, box.get("fill")))
    return found


def test_svg_holds_every_offset():
    found = cells(draw.svg(Layout((2, 3), (3, 1))))
    assert found == [(str(i), "white") for i in range(6)]


def test_svg_gives_equal_groups_equal_tones():
    found = cells(draw.svg(Layout((2, 4), (4, 1)), group=4))
    tones = [tone for _, tone in found]
    assert tones[:4] == tones[4:]
    assert len(set(tones)) == 4


def test_ownership_svg_gives_each_thread_a_tone():
    found = cells(draw.ownership_svg(THREAD_VALUE, (2, 4)))
    assert [label for label, _ in found][:4] == ["T0V0", "T0V1", "T2V0", "T2V1"]
    tones = {label[:2]: tone for label, tone in found}
    assert len(set(tones.values())) == 4
    assert all(tones[label[:2]] == tone for label, tone in found)


def test_svg_boxes_lie_within_the_picture_and_do_not_overlap():
    document = draw.svg(Layout((3, 5)))
    width, height = map(int, re.search(r'width="(\d+)" height="(\d+)"', document).groups())
    root = ElementTree.fromstring(document)
    boxes = [
        tuple(int(box.get(name)) for name in ("x", "y", "width", "height"))
        for box in root
        if box.get("stroke")
    ]
    assert len(boxes) == len({(x, y) for x, y, _, _ in boxes}) == 15
    assert all(x + w <= width and y + h <= height for x, y, w, h in boxes)
    assert {x % w for x, _, w, _ in boxes} == {y % h for _, y, _, h in boxes} == {0}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: draw.text(Layout((2, 2, 2))), r"\(2,2,2\):\(1,2,4\) has 3 modes"),
        (lambda: draw.ownership_text(Layout(4), (2, 2)), "4:1 must have two modes"),
        (
            lambda: draw.ownership_text(Layout((2, 2), (1, 4)), (2, 2)),
            "thread 0, value 1 the element 4: a tile of 2 x 2 has 4",
        ),
    ],
)
def test_errors_name_the_values(call, words):
    with pytest.raises(ShapeError, match=words):
        call()
