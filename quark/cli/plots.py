"""Small line plots in braille, or in ASCII."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DOTS_ACROSS = 2
_DOTS_UP = 4
_ASCII_UP = 2
_ASCII = " .':"  # by which of the two dots of a character are set: none, lower, upper, both


def draw_curve(
    x: NDArray[Any],
    y: NDArray[Any],
    *,
    width: int = 36,
    height: int = 4,
    ascii_only: bool = False,
) -> str:
    """A curve as lines of text, `width` by `height` characters.

    Each column of dots shows the least and the greatest value that falls on
    it, so a spike of one point is seen however many points there are. Values
    that are not finite leave a gap. With `ascii_only` a character is one dot
    across and two up.
    """
    y = np.asarray(y, dtype=float)
    if not np.isfinite(y).any():
        return "\n".join([" " * width] * height)
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    finite = np.isfinite(y)
    if ascii_only:
        across, up = _scale(x, finite, width - 1), _scale(y, finite, height * _ASCII_UP - 1)
        stretches = [_reduce(across[a:b], up[a:b]) for a, b in _find_stretches(finite)]
        return _draw_ascii(stretches, width, height)
    import plotille

    # In dots of the canvas, so that its own arithmetic meets no value that is too large or small.
    columns, rows = width * _DOTS_ACROSS, height * _DOTS_UP
    across = _scale(x, finite, columns - 1)
    up = _scale(y, finite, rows - 1)
    canvas = plotille.Canvas(width, height, 0, 0, columns, rows)
    for start, stop in _find_stretches(finite):
        points = _reduce(across[start:stop], up[start:stop])
        for (x0, y0), (x1, y1) in zip(points, points[1:] or points, strict=False):
            canvas.line(x0, y0, x1, y1)
    text: str = canvas.plot()
    # Braille blanks are spaces that do not look like spaces in every font.
    return text.replace("\u2800", " ")


def _scale(values: NDArray[Any], known: NDArray[Any], dots: int) -> NDArray[Any]:
    """Values as places among so many dots; in the middle where they are all the same."""
    # Halved, so that the difference of the two widest floats is one too.
    halves = values / 2
    low, high = halves[known].min(), halves[known].max()
    if not high > low:
        return np.full(len(values), dots / 2)
    with np.errstate(invalid="ignore"):  # what is not finite is not drawn
        return np.asarray((halves - low) / (high - low) * dots)


def _find_stretches(finite: NDArray[Any]) -> list[tuple[int, int]]:
    """Where values are finite without a break."""
    edges = np.flatnonzero(np.diff(np.r_[False, finite, False].astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _reduce(across: NDArray[Any], up: NDArray[Any]) -> list[tuple[float, float]]:
    """At most two points per column of dots: its extremes, in the order they came."""
    column = np.rint(across).astype(int)
    starts = np.flatnonzero(np.r_[True, column[1:] != column[:-1]])
    points: list[tuple[float, float]] = []
    for start, stop in zip(starts, np.r_[starts[1:], len(up)], strict=True):
        part = up[start:stop]
        extremes = sorted({int(part.argmin()), int(part.argmax())})
        points.extend((float(column[start]), float(part[index])) for index in extremes)
    return points


def _draw_ascii(stretches: list[list[tuple[float, float]]], width: int, height: int) -> str:
    """Lines through points, each column of characters from its lowest to its highest dot."""
    dots = np.zeros((height * _ASCII_UP, width), dtype=bool)
    for points in stretches:
        for (x0, y0), (x1, y1) in zip(points, points[1:] or points, strict=False):
            first, last = round(x0), round(x1)
            ends = np.interp(np.arange(first, last + 1), [x0, x1], [y0, y1])
            ends[0], ends[-1] = (y0, y1) if last > first else (ends[0], ends[-1])
            befores = np.r_[ends[0], ends[:-1]]
            for column, here, before in zip(range(first, last + 1), ends, befores, strict=True):
                low, high = sorted((round(float(here)), round(float(before))))
                dots[low : high + 1, column] = True
            if last == first:
                low, high = sorted((round(y0), round(y1)))
                dots[low : high + 1, first] = True
    lower, upper = dots[0::_ASCII_UP], dots[1::_ASCII_UP]
    codes = lower.astype(int) + 2 * upper.astype(int)
    return "\n".join("".join(_ASCII[code] for code in row) for row in codes[::-1])
