"""The fingerprints of two runs compared: what was the same, and how far values are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, Protocol, TypeAlias

from quark_core.records.kinds.provenance import FingerprintRecord

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
            return SketchComparison("unknown", level, words="same type; nothing else is known")
        seen = "" if a.level == "full" else f", at level {a.level}"
        return SketchComparison("identical", level, 0.0, words=f"identical{seen}")
    form, other_form = one.get("form"), other.get("form")
    if form is not None and other_form is not None and form != other_form:
        return SketchComparison("other_form", level, words=_tell_forms(one, other))
    if a.level != b.level:
        words = f"inconclusive: inspected at levels {a.level} and {b.level}"
        return SketchComparison("unknown", level, words=words)
    if a.level == "type":
        return SketchComparison("other_form", level, words="of a different type")
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
        words = "different in parts that the sketch does not contain"
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
        counts = f"{part.get('non_finite')} and {twin.get('non_finite')} non-finite values"
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
        return f"different types: {one.get('type')} and {other.get('type')}"
    parts, twins = one.get("parts") or (), other.get("parts") or ()
    for part, twin in zip(parts, twins, strict=False):
        for name, called in (("shape", "shape"), ("dtype", "type of items")):
            if part.get(name) != twin.get(name):
                path = f" at {part['path']}" if part.get("path") else ""
                return f"another {called}{path}: {part.get(name)} against {twin.get(name)}"
    return "another structure"


FingerprintVerdict: TypeAlias = Literal[
    "same", "other_order", "rounding", "different", "other_form", "unknown"
]

_STREAM = "stream:"
# What was not looked at as a whole may differ there, so that it is never called the same.
_WEAK_LEVELS = frozenset({"partial", "type", "length", f"{_STREAM}count", f"{_STREAM}partial"})
# At these levels the same digest means that all of it was the same.
_WHOLE_LEVELS = frozenset(
    {"full", "pointer", "huggingface", f"{_STREAM}contents", "bytes", "code", "environment"}
)


@dataclass(frozen=True, slots=True)
class FingerprintComparison:
    """How one fingerprint of two runs compares.

    Attributes:
        subject, key: Which one.
        verdict: same (at `level`); other_order (the same samples in another order); rounding
            (equal but for rounding); different; other_form (another type or shape); unknown
            (missing on a side, or not to be compared).
        level: The level of both, or of each, as `sample/full`.
        step: The first step, or pass through data, at which they differ; None where they do not,
            or have none.
        words: All of it in a few words.
    """

    subject: str
    key: str
    verdict: FingerprintVerdict
    level: str
    step: int | None = None
    words: str = ""

    @property
    def is_ruled_out(self) -> bool:
        """Whether it was the same and all of it was looked at, so that it explains nothing."""
        return self.verdict == "same" and self.level in _WHOLE_LEVELS


def compare_fingerprints(
    records_a: Iterable[FingerprintRecord], records_b: Iterable[FingerprintRecord]
) -> tuple[FingerprintComparison, ...]:
    """Compare by subject and key, data that was watched apart from data that was given.

    Of several records of a key those of the same rank and step (or pass through data) are
    compared; of two with the same, the newest attempt's counts. The verdict is that of the first
    that is not the same. A key that one side lacks is unknown, never the same.
    """
    one, other = _sort(records_a), _sort(records_b)
    return tuple(
        _compare_series(subject, key, one.get((subject, key, way)), other.get((subject, key, way)))
        for subject, key, way in sorted({*one, *other})
    )


_Series: TypeAlias = dict[tuple[int, int], FingerprintRecord]


def _sort(records: Iterable[FingerprintRecord]) -> dict[tuple[str, str, str], _Series]:
    found: dict[tuple[str, str, str], _Series] = {}
    for record in records:
        is_stream = record.level.startswith(_STREAM)
        metadata: Mapping[str, Any] = record.metadata or {}
        place = _read_pass(metadata) if is_stream else record.step
        series = found.setdefault((record.subject, record.key, _STREAM if is_stream else ""), {})
        at = (record.rank or 0, -1 if place is None else place)
        kept = series.get(at)
        if kept is None or (kept.attempt, kept.time_us) <= (record.attempt, record.time_us):
            series[at] = record
    return found


def _read_pass(metadata: Mapping[str, Any]) -> int:
    """Which pass through its data a record is of; a record may be somebody else's."""
    number = metadata.get("pass", 0)
    return number if isinstance(number, int) else 0


def _compare_series(
    subject: str, key: str, one: _Series | None, other: _Series | None
) -> FingerprintComparison:
    if not one or not other:
        side = "first" if not one else "second"
        known = (one or other or {}).values()
        level = next(iter(known)).level if known else ""
        words = f"the {side} has no fingerprint of it"
        return FingerprintComparison(subject, key, "unknown", level, None, words)
    shared = sorted({*one} & {*other}, key=lambda at: (at[1], at[0]))
    if not shared:
        level = next(iter(one.values())).level
        return FingerprintComparison(
            subject, key, "unknown", level, None, "none of the same step or rank"
        )
    unknown: FingerprintComparison | None = None
    last: FingerprintComparison | None = None
    for at in shared:
        last = _compare(subject, key, one[at], other[at], None if at[1] < 0 else at[1])
        if last.verdict == "unknown":
            unknown = unknown or last
        elif last.verdict != "same":
            return last
    assert last is not None
    return unknown or last


def _compare(
    subject: str, key: str, a: FingerprintRecord, b: FingerprintRecord, step: int | None
) -> FingerprintComparison:
    level = a.level if a.level == b.level else f"{a.level}/{b.level}"
    if level.startswith(_STREAM):
        verdict, words = _compare_streams(a, b)
    elif subject == "output" or (a.sketch is not None and b.sketch is not None):
        found = compare_sketches(a, b)
        verdict = "same" if found.verdict == "identical" else found.verdict
        words = found.words
    elif a.level != b.level:
        verdict, words = "unknown", f"inspected at levels {a.level} and {b.level}"
    elif a.digest == b.digest:
        verdict, words = "same", f"the same at level {a.level}"
    else:
        verdict, words = "different", "different"
    if verdict == "same" and a.level in _WEAK_LEVELS:
        verdict, words = ("unknown", f"the same in the inspected part, not all ({a.level})")
    at = step if verdict not in ("same", "unknown") else None
    return FingerprintComparison(subject, key, verdict, level, at, words)


def _compare_streams(a: FingerprintRecord, b: FingerprintRecord) -> tuple[FingerprintVerdict, str]:
    one, other = dict(a.metadata or {}), dict(b.metadata or {})
    if a.level != b.level:
        return "unknown", f"watched at levels {a.level} and {b.level}"
    if not one.get("batches") or not other.get("batches"):
        return "unknown", "one side received no data"
    if a.digest == b.digest and one.get("order") == other.get("order"):
        if one.get("contents") != other.get("contents"):
            if one.get("hashed") == other.get("hashed"):
                return "different", "fully hashed batches differ"
            return "unknown", "the same samples and order, in batches of another size"
        return "same", f"the same {one.get('samples')} samples in the same order"
    if a.digest == b.digest:
        return "other_order", f"the same {one.get('samples')} samples in a different order"
    if one.get("whole") and other.get("whole"):
        if one.get("samples") != other.get("samples"):
            counts = f"{one.get('samples')} against {other.get('samples')}"
            return "different", f"other samples: {counts}"
        return "different", f"other samples, {_tell_parting(one, other)}"
    return _compare_beginnings(one, other)


def _compare_beginnings(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[FingerprintVerdict, str]:
    """Of passes that were left early: as far as both went, at batches of powers of two."""
    marks, twins = _read_marks(one), _read_marks(other)
    shared = sorted(set(marks) & set(twins))
    if not shared:
        return "unknown", "left early before anything could be compared"
    if all(marks[number] == twins[number] for number in shared):
        return "unknown", f"the first {shared[-1]} batches are the same; a pass was left early"
    last = shared[-1]
    if marks[last][0] == twins[last][0]:
        return "other_order", f"the samples of the first {last} batches come in a different order"
    # Another order of the whole looks like other samples where it was left early.
    return "different", f"other samples, or a different order, {_tell_parting(one, other)}"


def _read_marks(metadata: Mapping[str, Any]) -> dict[int, list[Any]]:
    """The digests after batches of powers of two, as far as they are any."""
    found = metadata.get("marks")
    return {
        mark[0]: list(mark[1:])
        for mark in (found if isinstance(found, list | tuple) else ())
        if isinstance(mark, list | tuple) and len(mark) > 1 and isinstance(mark[0], int)
    }


def _tell_parting(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    marks, twins = _read_marks(one), _read_marks(other)
    same = 0
    for number in sorted(set(marks) & set(twins)):
        if marks[number] != twins[number]:
            return (
                f"from batch {same} to {number - 1} on"
                if number - 1 > same
                else (f"from batch {same} on")
            )
        same = number
    return f"after batch {same - 1}"
