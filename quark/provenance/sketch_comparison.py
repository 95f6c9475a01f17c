"""How far two values are apart, by their digests and sketches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, Protocol, TypeAlias

SketchVerdict: TypeAlias = Literal["identical", "rounding", "different", "other_form", "unknown"]

TOLERANCES: Mapping[str, float] = {
    "float64": 1e-10,
    "longdouble": 1e-10,
    "float128": 1e-10,
    "complex128": 1e-10,
    "float32": 1e-5,
    "complex64": 1e-5,
    "float16": 1e-2,
    "complex32": 1e-2,
    "bfloat16": 5e-2,
}
"""How far, relative to their size, numbers may be apart which differ by rounding alone."""

_FLOAT8_TOLERANCE = 0.25
_FIGURES = ("mean", "deviation", "low", "high")
_SPELLED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Sketched(Protocol):
    """A `FingerprintRecord`, or what `sketch_output` gave."""

    @property
    def digest(self) -> str:
        """Of its canonical bytes."""
        ...

    @property
    def level(self) -> str:
        """How much was looked at."""
        ...

    @property
    def sketch(self) -> Mapping[str, Any] | None:
        """Its figures."""
        ...


@dataclass(frozen=True, slots=True)
class SketchComparison:
    """How two values compare.

    Attributes:
        verdict: identical (at `level`); rounding (equal but for rounding, in all that the
            sketches hold); different; other_form (another type, shape or keys); unknown.
        level: The level that both have, or of each, as `full/sample`.
        deviation: The largest deviation that was seen, relative to the size of the numbers, or
            None where none can be told.
        place: Where it was seen, such as `.logits, item 17` or `mean`.
        words: All of it in a few words.
    """

    verdict: SketchVerdict
    level: str
    deviation: float | None = None
    place: str = ""
    words: str = ""


def compare_sketches(a: Sketched, b: Sketched) -> SketchComparison:
    """Compare two values by what is kept of them."""
    level = a.level if a.level == b.level else f"{a.level}/{b.level}"
    one, other = a.sketch or {}, b.sketch or {}
    if a.level == b.level and a.digest == b.digest:
        if a.level == "type":
            return SketchComparison("unknown", level, words="only their type is known, the same")
        seen = "" if a.level == "full" else f", at level {a.level}"
        return SketchComparison("identical", level, 0.0, words=f"identical{seen}")
    form, other_form = one.get("form"), other.get("form")
    if form is not None and other_form is not None and form != other_form:
        return SketchComparison("other_form", level, words=_tell_forms(one, other))
    if a.level != b.level:
        words = f"cannot be told: looked at as {a.level} and as {b.level}"
        return SketchComparison("unknown", level, words=words)
    if a.level == "type":
        return SketchComparison("other_form", level, words="of another type")
    if not one.get("parts") or not other.get("parts"):
        return SketchComparison("different", level, words="different")
    return _compare_parts(one, other, level)


def _compare_parts(
    one: Mapping[str, Any], other: Mapping[str, Any], level: str
) -> SketchComparison:
    worst, place = 0.0, ""
    is_rounding = True
    has_deviation = False
    for part, twin in zip(one["parts"], other["parts"], strict=False):
        apart, where = _measure(part, twin)
        if apart == 0.0:
            continue
        has_deviation = True
        is_rounding = is_rounding and apart <= _find_tolerance(str(part.get("dtype")))
        if apart > worst:
            worst = apart
            path = str(part.get("path") or "")
            place = f"{path}, {where}" if path else where
    if not has_deviation:
        words = "different, at places or in parts that the sketch does not hold"
        return SketchComparison("different", level, None, words=words)
    if one.get("more") or other.get("more") or one.get("exact") != other.get("exact"):
        # What the sketch leaves out differs by more than rounding, or may.
        is_rounding = False
    deviation = worst if math.isfinite(worst) else None
    size = f"by up to {worst:.3g} of their size at {place}" if deviation is not None else place
    if is_rounding:
        return SketchComparison(
            "rounding", level, deviation, place, f"equal but for rounding, {size}"
        )
    return SketchComparison("different", level, deviation, place, f"different {size}")


def _find_tolerance(dtype: str) -> float:
    if dtype.startswith("float8"):
        return _FLOAT8_TOLERANCE
    return TOLERANCES.get(dtype, 0.0)


def _measure(part: Mapping[str, Any], twin: Mapping[str, Any]) -> tuple[float, str]:
    """The largest relative deviation between two parts, and where; infinite where one has NaN."""
    if part.get("non_finite") != twin.get("non_finite"):
        counts = f"{part.get('non_finite')} against {twin.get('non_finite')} non-finite"
        return math.inf, counts
    pairs = list(zip(_flatten(part), _flatten(twin), strict=False))
    sizes = [abs(number) for pair in pairs for number in pair if math.isfinite(number)]
    # Sums round by the size of what was summed, so small numbers among large ones deviate more.
    usual = median(sizes) if sizes else 0.0
    worst, place = 0.0, ""
    count = max(1, len(pairs))
    items = int(part.get("count") or count)
    for index, (number, twin_number) in enumerate(pairs):
        apart = _deviate(number, twin_number, usual)
        if apart > worst:
            item = index if items <= count else (items - 1) * index // max(1, count - 1)
            worst, place = apart, f"item {item}"
    for name in _FIGURES:
        figures = _read(part.get(name)), _read(twin.get(name))
        if figures[0] is None or figures[1] is None:
            continue
        apart = _deviate(figures[0], figures[1], usual)
        if apart > worst:
            worst, place = apart, name
    return worst, place


def _deviate(number: float, twin: float, usual: float) -> float:
    if number == twin or (number != number and twin != twin):
        return 0.0
    if not (math.isfinite(number) and math.isfinite(twin)):
        return math.inf
    return abs(number - twin) / max(abs(number), abs(twin), usual)


def _flatten(part: Mapping[str, Any]) -> list[float]:
    """The values of a part; of complex ones real and imaginary, one after the other."""
    found: list[float] = []
    for value in part.get("values") or ():
        for number in value if isinstance(value, (list, tuple)) else (value,):
            read = _read(number)
            found.append(math.nan if read is None else read)
    return found


def _read(number: Any) -> float | None:
    if isinstance(number, str):
        return _SPELLED.get(number)
    return float(number) if isinstance(number, (int, float)) else None


def _tell_forms(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if one.get("type") != other.get("type"):
        return f"another type: {one.get('type')} against {other.get('type')}"
    parts, twins = one.get("parts") or (), other.get("parts") or ()
    for part, twin in zip(parts, twins, strict=False):
        for name, called in (("shape", "shape"), ("dtype", "type of items")):
            if part.get(name) != twin.get(name):
                path = f" at {part['path']}" if part.get("path") else ""
                return f"another {called}{path}: {part.get(name)} against {twin.get(name)}"
    return "another structure"
