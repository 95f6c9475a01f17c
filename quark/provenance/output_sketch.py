"""What a value was: a digest over canonical bytes, and figures that say how far two are apart.

Equal values have equal digests in every process and version of Python: sets are sorted,
mappings come by key, nothing is pickled, and NaNs are alike whatever their bits. Everything
else counts by its bits: 0.0 and -0.0 differ, and so do 1 and 1.0, a list and a tuple.

Levels, from the weakest: `type` (only of which type it is), `partial` (some of its parts by
type only), `sample` (large arrays by size and 16 places of 64 kB), `full`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from quark.provenance.array_forms import ArrayForm
from quark.provenance.canonical_walk import SAMPLE_BYTES, CanonicalWalk, spell_number

if TYPE_CHECKING:
    import numpy.typing as npt

SketchLevel = Literal["full", "sample", "partial", "type"]

_VALUES = 64
_LEAST_VALUES = 4
_MOST_PARTS = 64
# Deviations and means are rounded to this many digits, which every processor agrees about.
_FIGURE_DIGITS = 12


@dataclass(frozen=True, slots=True)
class OutputSketch:
    """What `sketch_output` found out about a value.

    Attributes:
        digest: Of its canonical bytes, in hexadecimal.
        level: How much of it was looked at: full, sample, partial or type.
        sketch: JSON values: `form` (digest of types, keys and shapes), `exact` (digest of all but
            numbers that may differ by rounding), `parts` (for each array,
            number or list of numbers: path, type, dtype, shape, count, non_finite, mean,
            deviation, low, high, values at fixed places) and `more` (parts left out).
        unseen: Paths of what was taken by its type alone, with the type.
    """

    digest: str
    level: str
    sketch: dict[str, Any]
    unseen: tuple[str, ...] = field(default=())


def sketch_output(value: object, *, level: Literal["full", "sample"] = "full") -> OutputSketch:
    """Digest and sketch of any value; never raises for what a value is.

    Args:
        value: Numbers, texts, arrays, tensors, tables, images, containers of them. Tensors on a
            device are brought over, for which the call waits. It is not changed and not kept.
        level: `sample` looks at 16 places of 64 kB of each array above 1 MB.
    """
    walk = CanonicalWalk(level)
    walk.take(value)
    leaves = walk.leaves
    each = max(_LEAST_VALUES, _VALUES // max(1, len(leaves)))
    parts = [_sketch(path, form, each, level) for path, form in leaves[:_MOST_PARTS]]
    sketch: dict[str, Any] = {
        "form": walk.form_digest,
        "exact": walk.exact_digest,
        "type": walk.type_name,
        "parts": parts,
    }
    more = walk.leaf_count - len(parts)
    if more:
        sketch["more"] = more
    return OutputSketch(walk.digest, walk.level, sketch, tuple(walk.unseen))


def _sketch(path: str, form: ArrayForm, values: int, level: str) -> dict[str, Any]:
    import numpy as np

    found: dict[str, Any] = {
        "path": path,
        "type": form.kind,
        "dtype": form.dtype,
        "shape": list(form.shape),
        "count": int(form.bits.size),
    }
    if form.to_numbers is None or not form.bits.size:
        return found
    is_sampled = level == "sample" and form.size_bytes > SAMPLE_BYTES
    tally = _Tally()
    with np.errstate(all="ignore"):
        for piece in form.places() if is_sampled else form.pieces():
            tally.add(form.to_numbers(piece))
        places = spread(int(form.bits.size), values)
        picked = form.to_numbers(form.pick(places))
    if picked.dtype.kind in "fc" and picked.dtype.name not in ("complex64", "float16", "float32"):
        # Python has no long doubles.
        picked = picked.astype(np.complex128 if picked.dtype.kind == "c" else np.float64)
    found.update(tally.to_figures())
    if picked.dtype.kind == "c":
        found["values"] = [[spell_number(n.real), spell_number(n.imag)] for n in picked.tolist()]
    else:
        found["values"] = [spell_number(number) for number in picked.tolist()]
    return found


def spread(count: int, places: int) -> list[int]:
    """Fixed places out of `count`, from the first to the last."""
    if count <= places:
        return list(range(count))
    return [(count - 1) * place // (places - 1) for place in range(places)]


class _Tally:
    """Mean, deviation and bounds of what comes in pieces; of complex numbers, their magnitudes."""

    def __init__(self) -> None:
        self.count = 0
        self.non_finite = 0
        self.mean = 0.0
        self.m2 = 0.0
        self.low = math.inf
        self.high = -math.inf

    def add(self, piece: npt.NDArray[Any]) -> None:
        import numpy as np

        if piece.dtype.kind == "c":
            piece = np.abs(piece)
        numbers = piece.astype(np.float64)
        low, high = float(numbers.min()), float(numbers.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            is_finite = np.isfinite(numbers)
            self.non_finite += int(numbers.size - is_finite.sum())
            numbers = numbers[is_finite]
            if not numbers.size:
                return
            low, high = float(numbers.min()), float(numbers.max())
        count = int(numbers.size)
        mean = float(numbers.mean())
        numbers -= mean
        # Not by `dot`, whose threads would take the processors from the training.
        numbers *= numbers
        m2 = float(numbers.sum())
        total = self.count + count
        apart = mean - self.mean
        self.mean += apart * count / total
        self.m2 += m2 + apart * apart * self.count * count / total
        self.count = total
        self.low, self.high = min(self.low, low), max(self.high, high)

    def to_figures(self) -> dict[str, Any]:
        if not self.count:
            return {"non_finite": self.non_finite}
        return {
            "non_finite": self.non_finite,
            "mean": _round(self.mean),
            "deviation": _round(math.sqrt(self.m2 / self.count) if self.m2 >= 0 else math.nan),
            "low": spell_number(self.low),
            "high": spell_number(self.high),
        }


def _round(number: float) -> Any:
    if not math.isfinite(number):
        return None
    return float(f"{number:.{_FIGURE_DIGITS}g}")
