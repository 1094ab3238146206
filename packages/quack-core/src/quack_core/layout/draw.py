"""Drawings of layouts as text and as SVG, in pure Python."""

from collections.abc import Callable
from html import escape

from quack_core.errors import ShapeError
from quack_core.layout.layout import Layout, rank, size
from quack_core.layout.swizzle import ComposedLayout

Drawable = Layout | ComposedLayout
Cells = list[list[str]]

# Eight light tones that stay apart in greyscale neighbours; text on them is black.
_TONES = ["#cfe2f3", "#fde2c4", "#d9ead3", "#ead1dc", "#fff2b3", "#d0e8e6", "#e6d9f2", "#e3e3e3"]
_CELL_WIDTH = 44
_CELL_HEIGHT = 26


def text(layout: Drawable) -> str:
    """A table with rows from mode 0 and columns from mode 1; each cell holds the offset.

    Args:
        layout: a layout of rank 1 (drawn as one row) or 2, possibly swizzled.

    Raises:
        ShapeError: the rank is above 2.
    """
    return _table(_offset_cells(layout))


def svg(layout: Drawable, group: int = 0) -> str:
    """The table of `text` as an SVG document.

    Args:
        layout: a layout of rank 1 or 2, possibly swizzled.
        group: cells whose ``offset % group`` agrees get the same tone; 0 colours nothing. With 32
            and a 4-byte element, the tones are banks.

    Raises:
        ShapeError: the rank is above 2.
    """
    cells = _offset_cells(layout)
    return _svg(cells, lambda cell: int(cell) % group if group else None)


def ownership_text(thread_value: Layout, shape: tuple[int, int]) -> str:
    """Which thread holds each element of a tile, and as which of its values: ``T3V1``.

    Args:
        thread_value: maps ``(thread, value)`` to the element's number, which counts the tile with
            the rows fastest.
        shape: ``(rows, columns)`` of the tile.

    Raises:
        ShapeError: ``thread_value`` has not two modes, or leaves the tile. An element without an
            owner is drawn as ``.``, several owners are joined by ``/``.
    """
    return _table(_owner_cells(thread_value, shape))


def ownership_svg(thread_value: Layout, shape: tuple[int, int]) -> str:
    """The table of `ownership_text` as an SVG document, one tone per thread.

    Arguments and errors are those of `ownership_text`.
    """
    return _svg(_owner_cells(thread_value, shape), _thread_of)


def _offset_cells(layout: Drawable) -> Cells:
    plain = layout.layout if isinstance(layout, ComposedLayout) else layout
    if rank(plain) > 2:
        raise ShapeError(f"{layout} has {rank(plain)} modes: group or select two to draw them")
    if rank(plain) == 1:
        return [[str(layout(i)) for i in range(size(plain))]]
    rows, columns = map(size, plain)
    return [[str(layout(i, j)) for j in range(columns)] for i in range(rows)]


def _owner_cells(thread_value: Layout, shape: tuple[int, int]) -> Cells:
    if rank(thread_value) != 2:
        raise ShapeError(f"{thread_value} must have two modes: thread and value")
    rows, columns = shape
    cells = [["."] * columns for _ in range(rows)]
    threads, values = map(size, thread_value)
    for thread in range(threads):
        for value in range(values):
            element = thread_value(thread, value)
            if not 0 <= element < rows * columns:
                raise ShapeError(
                    f"{thread_value} gives thread {thread}, value {value} the element {element}: "
                    f"a tile of {rows} x {columns} has {rows * columns}"
                )
            column, row = divmod(element, rows)
            owner = f"T{thread}V{value}"
            before = cells[row][column]
            cells[row][column] = owner if before == "." else f"{before}/{owner}"
    return cells


def _thread_of(cell: str) -> int | None:
    return None if cell == "." else int(cell[1 : cell.index("V")])


def _table(cells: Cells) -> str:
    columns = len(cells[0])
    heads = [str(j) for j in range(columns)]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    side = len(str(len(cells) - 1))

    def line(head: str, row: list[str]) -> str:
        body = " ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return f"{head.rjust(side)} | {body}"

    rule = "-" * (side + 1) + "+" + "-" * (sum(widths) + columns)
    return "\n".join([line("", heads), rule, *(line(str(i), row) for i, row in enumerate(cells))])


def _svg(cells: Cells, key: Callable[[str], int | None]) -> str:
    longest = max(len(cell) for row in cells for cell in row)
    cell_width = max(_CELL_WIDTH, 8 * longest + 8)
    width = (len(cells[0]) + 1) * cell_width
    height = (len(cells) + 1) * _CELL_HEIGHT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="monospace" font-size="12" '
        'text-anchor="middle" dominant-baseline="central">'
    )
    parts = [head, f'<rect width="{width}" height="{height}" fill="white"/>']
    for j in range(len(cells[0])):
        parts.append(_label((j + 1) * cell_width, 0, cell_width, str(j), "#666666"))
    for i, row in enumerate(cells):
        top = (i + 1) * _CELL_HEIGHT
        parts.append(_label(0, top, cell_width, str(i), "#666666"))
        for j, cell in enumerate(row):
            left = (j + 1) * cell_width
            number = key(cell)
            tone = "white" if number is None else _TONES[number % len(_TONES)]
            parts.append(
                f'<rect x="{left}" y="{top}" width="{cell_width}" height="{_CELL_HEIGHT}" '
                f'fill="{tone}" stroke="#444444"/>'
            )
            parts.append(_label(left, top, cell_width, cell, "black"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _label(left: int, top: int, width: int, content: str, fill: str) -> str:
    x, y = left + width / 2, top + _CELL_HEIGHT / 2
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}">{escape(content)}</text>'
