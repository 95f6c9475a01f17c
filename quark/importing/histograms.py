"""Histograms of other tools as artifacts of type `histogram`, which the page draws over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from quark.importing.foreign import ForeignFile

_MOST_BINS = 128


def make_histogram(
    name: str,
    edges: Sequence[float],
    counts: Sequence[float],
    *,
    step: int | None,
    time_us: int,
) -> ForeignFile | None:
    """A histogram as `ArtifactStore.log_histogram` stores it; None where it has no bin that is one.

    Args:
        name: What the tool calls it.
        edges: One more than there are counts, ascending; those that do not ascend, or are not
            finite, are left out, and what lies between them counts with the next bin.
        counts: How many values lie in each bin. Of many bins, narrow neighbours become one:
            PyTorch's writer gives hundreds, most of them around 0, that no picture can show.
        step: Its step; None or a negative one where it has none.
        time_us: When it was logged.
    """
    kept_edges, kept_counts = _coarsen(*_clean(edges, counts))
    if not kept_counts:
        return None
    return ForeignFile(
        artifact_type="histogram",
        name=name,
        content=msgspec.json.encode({"bins": kept_edges, "counts": kept_counts}),
        payload_format="json",
        step=None if step is None or step < 0 else step,
        time_us=time_us,
    )


def _clean(edges: Sequence[float], counts: Sequence[float]) -> tuple[list[float], list[float]]:
    """Edges that ascend, and counts between them."""
    kept: list[float] = []
    found: list[float] = []
    waiting = 0.0
    for place, edge in enumerate(edges):
        count = counts[place - 1] if place else 0
        whole = count if math.isfinite(count) and count > 0 else 0.0
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


def _coarsen(edges: list[float], counts: list[float]) -> tuple[list[float], list[float]]:
    """At most so many bins, of the same edges: neighbours together until they are wide enough."""
    if len(counts) <= _MOST_BINS:
        return edges, counts
    least = (edges[-1] - edges[0]) / _MOST_BINS
    kept: list[float] = [edges[0]]
    found: list[float] = []
    waiting = 0.0
    for edge, count in zip(edges[1:], counts, strict=True):
        waiting += count
        if edge - kept[-1] >= least or edge == edges[-1]:
            kept.append(edge)
            found.append(waiting)
            waiting = 0.0
    return kept, found
