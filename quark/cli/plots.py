"""Small line plots in braille."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["draw_curve"]

_DOTS_PER_CELL = 2


def draw_curve(x: NDArray[Any], y: NDArray[Any], *, width: int = 36, height: int = 4) -> str:
    """A curve as lines of text, `width` by `height` characters.

    Each column of dots shows the least and the greatest value that falls on
    it, so a spike of one point is seen however many points there are. Values
    that are not finite leave a gap.
    """
    import plotille

    finite = np.isfinite(y)
    x, y = x[finite].astype(float), y[finite].astype(float)
    if len(y) == 0:
        return "\n".join([" " * width] * height)
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    low, high = float(y.min()), float(y.max())
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    left, right = float(x[0]), float(x[-1])
    if right == left:
        left, right = left - 1.0, right + 1.0
    canvas = plotille.Canvas(width, height, left, low - margin, right, high + margin)
    points = _reduce(x, y, left, right, width * _DOTS_PER_CELL)
    for (x0, y0), (x1, y1) in zip(points, points[1:] or points, strict=False):
        canvas.line(x0, y0, x1, y1)
    text: str = canvas.plot()
    # Braille blanks are spaces that do not look like spaces in every font.
    return text.replace("\u2800", " ")


def _reduce(
    x: NDArray[Any], y: NDArray[Any], left: float, right: float, columns: int
) -> list[tuple[float, float]]:
    """At most two points per column of dots: its extremes, in the order they came."""
    if len(y) <= 2 * columns:
        return list(zip(x.tolist(), y.tolist(), strict=True))
    position = np.minimum(((x - left) / (right - left) * columns).astype(int), columns - 1)
    starts = np.flatnonzero(np.r_[True, position[1:] != position[:-1]])
    points: list[tuple[float, float]] = []
    for start, stop in zip(starts, np.r_[starts[1:], len(y)], strict=True):
        part = y[start:stop]
        extremes = sorted({int(part.argmin()), int(part.argmax())})
        points.extend((float(x[start + index]), float(part[index])) for index in extremes)
    return points
