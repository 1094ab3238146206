"""Other views of the same elements: CuTe tensors and layouts with their modes rearranged.

Plain functions over ``cute.Tensor``, ``cute.Layout`` and ``cute.ComposedLayout``, for kernels and
host functions alike. Nothing is copied and no code is generated: only the layout changes, and a
tensor keeps its pointer. Modes count from 0; a negative mode counts from the end.
"""

from typing import Any, TypeVar

from cutlass import cute

from quack_core.errors import LayoutError, ShapeError

View = TypeVar("View", cute.Tensor, cute.Layout, cute.ComposedLayout)


def select(view: View, *modes: int) -> View:
    """Only these modes, in this order; a tensor is seen at coordinate 0 of the others.

    Args:
        view: ``(m0, m1, ...)``.
        modes: at least one, each at most once.

    Raises:
        ShapeError: a mode that ``view`` does not have.
        LayoutError: no mode, or one that occurs twice.
    """
    wanted = [_mode(view, mode) for mode in modes]
    if not wanted or len(set(wanted)) != len(wanted):
        raise LayoutError(f"modes {modes}: name at least one, and each once")
    if isinstance(view, cute.Tensor):
        return cute.make_tensor(view.iterator, cute.select(view.layout, mode=wanted))
    return cute.select(view, mode=wanted)


def permute(view: View, *order: int) -> View:
    """Mode ``i`` of the result is mode ``order[i]`` of ``view``, as in ``torch.permute``.

    Raises:
        LayoutError: ``order`` is no permutation of all modes.
    """
    modes = cute.rank(view)
    in_range = all(-modes <= mode < modes for mode in order)
    if not in_range or sorted(mode % modes for mode in order) != list(range(modes)):
        raise LayoutError(f"order {order} must name each of the {modes} modes once")
    return select(view, *order)


def transpose(view: View) -> View:
    """The first two modes swapped: ``(m, n, ...)`` becomes ``(n, m, ...)``.

    Raises:
        ShapeError: ``view`` has one mode only.
    """
    modes = cute.rank(view)
    if modes < 2:
        raise ShapeError("transpose needs two modes, found one")
    return permute(view, 1, 0, *range(2, modes))


def expand(view: View, mode: int, size: int) -> View:
    """A new mode of ``size`` coordinates that all see the same elements (stride 0).

    Args:
        view: a tensor or layout of rank r.
        mode: where the new mode stands in the result, from 0 to r.
        size: a Python or run-time integer; at least 1 where it is known.

    Raises:
        ShapeError: ``mode`` is out of range, or ``size`` is below 1.
    """
    modes = cute.rank(view)
    if not -modes - 1 <= mode <= modes:
        raise ShapeError(f"mode {mode}: a view of rank {modes} can be expanded at 0 to {modes}")
    if isinstance(size, int) and size < 1:
        raise ShapeError(f"size {size}: must be at least 1")
    place = mode % (modes + 1)
    if isinstance(view, cute.Tensor):
        return cute.make_tensor(view.iterator, _inserted(view.layout, place, size))
    return _inserted(view, place, size)


def _inserted(layout: Any, place: int, size: int) -> Any:
    if isinstance(layout, cute.ComposedLayout):
        outer = _inserted(layout.outer, place, size)
        return cute.make_composed_layout(layout.inner, layout.offset, outer)
    shape, stride = _modes(layout.shape), _modes(layout.stride)
    return cute.make_layout(
        (*shape[:place], size, *shape[place:]), stride=(*stride[:place], 0, *stride[place:])
    )


def _modes(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _mode(view: View, mode: int) -> int:
    modes = cute.rank(view)
    if not -modes <= mode < modes:
        raise ShapeError(f"mode {mode}: the view has modes 0 to {modes - 1}")
    return mode % modes
