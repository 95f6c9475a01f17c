"""Histograms of other tools as parameter distributions, which the page draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quark_core.records import ParameterDistributionRecord

__all__ = ["make_distribution"]

_INT64_MAX = 2**63 - 1


def make_distribution(
    name: str,
    edges: Sequence[float],
    counts: Sequence[float],
    *,
    step: int | None,
    time_us: int,
) -> ParameterDistributionRecord | None:
    """The record of a histogram; None where it has no bin that is one.

    The tool does not say which module a parameter is of, nor whether it is a gradient: its
    name does. `encoder.0.weight` and `encoder/0/weight` are of module `encoder.0`.

    Args:
        name: What the tool calls it.
        edges: One more than there are counts, ascending; those that do not ascend, or are not
            finite, are left out with what lies between them.
        counts: How many values lie in each bin; rounded.
        step: Its step, or None.
        time_us: When it was logged.
    """
    kept_edges, kept_counts = _clean(edges, counts)
    if not kept_counts:
        return None
    module, _, last = name.replace("/", ".").rpartition(".")
    lower = name.lower()
    total = min(sum(kept_counts), _INT64_MAX)
    kind = "gradient" if "grad" in lower else "update" if "update" in lower else "value"
    role = next((word for word in ("weight", "bias") if word in last.lower()), "other")
    return ParameterDistributionRecord(
        None,
        "",
        0,
        0,
        0,
        time_us,
        module or name,
        "",
        name,
        role,
        kind,
        total,
        total,
        step,
        None,
        tuple(kept_edges),
        tuple(kept_counts),
    )


def _clean(edges: Sequence[float], counts: Sequence[float]) -> tuple[list[float], list[int]]:
    """Edges that ascend, and whole counts between them."""
    kept: list[float] = []
    found: list[int] = []
    waiting = 0
    for place, edge in enumerate(edges):
        count = counts[place - 1] if place else 0
        whole = round(count) if math.isfinite(count) and count > 0 else 0
        if not math.isfinite(edge) or (kept and edge <= kept[-1]):
            # A bin without width: what lies in it counts with the next one.
            waiting += whole
            continue
        if kept:
            found.append(whole + waiting)
            waiting = 0
        kept.append(edge)
    if found and waiting:
        found[-1] += waiting
    if kept and not found and waiting:
        # All values are one: a bin around it.
        middle = kept[0]
        width = abs(middle) * 1e-6 or 1e-6
        return [middle - width, middle + width], [waiting]
    return kept, found
