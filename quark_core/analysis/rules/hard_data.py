"""Samples or batches that stay hard while the rest is learned."""

from __future__ import annotations

import numpy as np

from quark_core.analysis.case import Case
from quark_core.analysis.curves import spread
from quark_core.analysis.observations import format_number, observe
from quark_core.analysis.rule import Finding, Verdict
from quark_core.analysis_records import AlertCategory

__all__ = ["HardData"]

_LEAST_BATCHES = 40
_LEAST_SIGHTS = 3
_DEVIATIONS = 4.0
_NAMED = 8


class HardData:
    """Informs of samples whose batches have far higher losses whenever they are seen.

    It needs batch diagnostics with sample ids. A sample counts when the losses
    of its batches, three at least, are four deviations above those of their
    time on average.
    """

    rule_id = "hard_data"
    category: AlertCategory = "generalization"

    def check(self, case: Case) -> Verdict:
        """See `quark_core.analysis.rule.Rule`."""
        batches = case.run.batches
        if batches.count < _LEAST_BATCHES:
            return Verdict(
                reason=f"it needs {_LEAST_BATCHES} batches (DataDiagnostics)",
                missing=("batch diagnostics",),
            )
        losses, ids = batches["loss"], batches["sample_ids"]
        finite = np.isfinite(losses)
        rows = np.flatnonzero(finite)
        if not any(ids[row] is not None for row in rows[:200].tolist()):
            return Verdict(reason="no batch names its samples", missing=("sample_ids",))
        scores = _score(losses[rows])
        seen: dict[object, list[float]] = {}
        for row, score in zip(rows.tolist(), scores.tolist(), strict=True):
            for sample in ids[row] or ():
                seen.setdefault(sample, []).append(score)
        means = {
            sample: float(np.mean(some)) * np.sqrt(len(some))
            for sample, some in seen.items()
            if len(some) >= _LEAST_SIGHTS and min(some) > 0
        }
        # Of many samples the highest of pure chance is beyond four deviations.
        limit = _DEVIATIONS + np.sqrt(2.0 * np.log(max(len(seen), 2)))
        hard = sorted((s for s in means if means[s] > limit), key=lambda s: -means[s])
        highest = max(means.values(), default=0.0)
        if not hard:
            return Verdict(
                reason="no sample's batches have higher losses each time",
                observed=highest,
                threshold=limit,
            )
        named = ", ".join(str(sample)[:40] for sample in hard[:_NAMED])
        finding = Finding(
            culprit="batch loss",
            severity="info",
            title="Some samples stay hard",
            fact=f"Batches with {len(hard)} of {len(seen)} samples have far higher losses whenever "
            f"they are seen, up to {format_number(highest)} deviations: {named}.",
            inference="These samples are mislabelled, damaged or of a kind of their own.",
            suggested_check="Look at these samples and their labels; find_hard_batches() lists the "
            "batches.",
            evidence=tuple(
                observe("sample", str(sample)[:80], "losses of its batches, in deviations",
                        means[sample], float(limit))
                for sample in hard[:_NAMED]
            ),
            step=None,
            confidence=0.7,
        )  # fmt: skip
        return Verdict(findings=(finding,), observed=highest, threshold=limit)


def _score(
    losses: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Deviations of each loss from those around it."""
    out = np.zeros(len(losses))
    size = max(20, min(200, len(losses) // 4))
    for low in range(0, len(losses), size):
        part = slice(low, min(low + size, len(losses)))
        near = losses[max(0, min(low, len(losses) - size)) : low + size]
        deviation = max(spread(near), 1e-12 * (1 + abs(float(np.median(near)))))
        out[part] = np.clip((losses[part] - np.median(near)) / deviation, -10.0, 10.0)
    return out
