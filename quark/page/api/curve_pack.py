"""Curves as a pack has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quark.page.pack import choose_floats, encode_pack

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark_core.backends.series import Series


@dataclass(frozen=True, slots=True)
class ShownCurve:
    """A curve with what the head says of it.

    Attributes:
        series: The curve; a `Curve` of one attempt says more.
        said: What the head has besides: key, name, and so on.
    """

    series: Series
    said: Mapping[str, Any] = field(default_factory=dict)


def pack_curves(
    curves: Sequence[ShownCurve],
    head: Mapping[str, Any],
    *,
    x: str = "step",
    extremes: bool = False,
) -> bytes:
    """A pack of curves.

    Args:
        curves: The curves.
        head: What else the head says.
        x: `step`, `time` or `epoch`: a column besides.
        extremes: Whether the steps of lowest and highest points are wanted.
    """
    listed, columns = lay_out_curves(curves, x=x, extremes=extremes)
    return encode_pack({**head, "curves": listed}, columns)


def lay_out_curves(
    curves: Sequence[ShownCurve], *, x: str = "step", extremes: bool = False
) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """What the head says of curves, and their columns; arguments as in `pack_curves`."""
    listed: list[dict[str, Any]] = []
    columns: dict[str, NDArray[Any]] = {}
    for place, curve in enumerate(curves):
        said, arrays = _lay_out(curve, x, extremes)
        listed.append(said)
        columns.update({f"{place}.{name}": array for name, array in arrays.items()})
    return listed, columns


def _lay_out(
    curve: ShownCurve, x: str, extremes: bool
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    import numpy as np

    series = curve.series
    by_epoch = len(series) > 0 and bool((series.step < 0).all()) and bool((series.epoch >= 0).any())
    said = {
        "attempt": getattr(series, "attempt", None),
        "rank": getattr(series, "rank", None),
        **curve.said,
        "points": int(series.count.sum()),
        "exact": bool(series.exact),
        "non_finite": int(series.non_finite.sum()),
        "low": _find_extreme(series.low, series.low_step, np.argmin),
        "high": _find_extreme(series.high, series.high_step, np.argmax),
        "unit": "epoch" if by_epoch else "step",
    }
    dtype = choose_floats(series.low, series.high)
    arrays = {
        "step": _to_places(series.epoch if by_epoch else series.step),
        "mean": series.mean.astype(dtype),
    }
    if not series.exact:
        arrays |= {"low": series.low.astype(dtype), "high": series.high.astype(dtype)}
        if extremes:
            arrays["low_step"] = _to_places(series.low_step)
            arrays["high_step"] = _to_places(series.high_step)
    if x == "time":
        arrays["time"] = series.time_us / 1e6
    elif x == "epoch":
        arrays["epoch"] = _to_places(series.epoch)
    if said["non_finite"]:
        arrays["non_finite"] = series.non_finite.astype("f4")
        at = getattr(series, "non_finite_step", None)
        if at is None:
            at = np.where(series.non_finite > 0, series.step, -1)
        arrays["non_finite_step"] = _to_places(at)
    return said, arrays


def _to_places(values: NDArray[Any]) -> NDArray[Any]:
    """Steps or epochs; NaN where there is none."""
    import numpy as np

    return np.where(values < 0, np.nan, values.astype(np.float64))


def _find_extreme(values: NDArray[Any], steps: NDArray[Any], find: Any) -> list[Any] | None:
    import numpy as np

    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return None
    place = known[find(values[known])]
    step = int(steps[place])
    return [float(values[place]), None if step < 0 else step]
