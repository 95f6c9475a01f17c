"""Small statements that rules share: stretches of probes, evidence, numbers as text."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quark_core.records.kinds.findings import EvidenceRecord


def observe(
    kind: str,
    source: str,
    summary: str,
    observed: float | None = None,
    threshold: float | None = None,
    start: int | None = None,
    end: int | None = None,
) -> EvidenceRecord:
    """One piece of evidence; a value that is not finite is left out, since the summary says it."""
    return EvidenceRecord(
        kind, source, summary, _keep_finite(observed), _keep_finite(threshold), start, end
    )


def list_stretches(mask: NDArray[np.bool_], least: int = 1) -> list[tuple[int, int]]:
    """Stretches of at least so many true values: the first index, and the one after the last."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    pairs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [(low, high) for low, high in pairs if high - low >= least]


def count_run(mask: NDArray[np.bool_]) -> int:
    """How many values at the end are true without a break."""
    if not len(mask):
        return 0
    false = np.flatnonzero(~mask)
    return int(len(mask) - 1 - false[-1]) if len(false) else len(mask)


def rank_by(scores: dict[str, float]) -> list[str]:
    """Names, the highest score first; of equals the one that was there first."""
    return sorted(scores, key=lambda name: -scores[name])


def format_number(value: float) -> str:
    """A number for people: three digits, an exponent where it is long."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("infinite" if value > 0 else "-infinite")
    return f"{value + 0.0:.3g}"  # nothing is not told as minus nothing


def say_steps(first: int | None, last: int | None, unit: str = "step") -> str:
    """A stretch of steps in words."""
    if first is None:
        return "the whole run"
    if last is None or last == first:
        return f"{unit} {first}"
    return f"{unit}s {first} to {last}"


def _keep_finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
