"""Samples or batches that stay hard while the rest is learned."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.curves import spread
from quark.analysis.observations import count_names, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

Floats = NDArray[np.float64]

_LEAST_BATCHES = 40
_LEAST_SIGHTS = 3  # batches that a sample was in
_DEVIATIONS = 4.0  # beyond what the highest of so many has by chance
_ROWS_WITH_IDS = 200  # of so many batches one at least has to name its samples
_MOST_NEIGHBOURS, _LEAST_NEIGHBOURS = 200, 20  # batches that a loss is held against
_PARTS = 4  # the neighbours are a quarter of the batches, within these bounds
_RESOLUTION = 1e-12  # of a loss: equal losses deviate by nothing
_CLIP = 10.0  # deviations of one batch: a single one must not make a sample hard
_NAMED = 8
_FACT_CHARACTERS, _SOURCE_CHARACTERS = 40, 80  # of an id, which may be any text
_CONFIDENCE = 0.7  # a batch is hard by its other samples too


class HardData(BaseRule):
    """Informs of samples whose batches have far higher losses whenever they are seen.

    It needs batch diagnostics with sample ids. A sample counts when the losses
    of its batches, three at least, are four deviations above those of their
    time on average.
    """

    rule_id = "hard_data"
    category: AlertCategory = "generalization"
    needs = f"it needs {_LEAST_BATCHES} batches (DataDiagnostics)"
    data = ("batch diagnostics",)
    tables = ("batches",)

    def judge(self, case: Case) -> Verdict | None:
        """Look for samples each of whose batches has a higher loss than those around it.

        Silent of a sample with a single easy batch or too few of them, and of
        one that is no further out than the hardest of so many by chance.
        """
        batches = case.run.batches
        if batches.count < _LEAST_BATCHES:
            return None
        losses, ids = batches["loss"], batches["sample_ids"]
        finite = np.isfinite(losses)
        rows = np.flatnonzero(finite)
        if not any(ids[row] is not None for row in rows[:_ROWS_WITH_IDS].tolist()):
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
        named = ", ".join(str(sample)[:_FACT_CHARACTERS] for sample in hard[:_NAMED])
        finding = Finding(
            culprit="batch loss",
            severity="info",
            title="Some samples stay hard",
            fact=say(
                "Batches with {count} of {all} samples have far higher losses whenever they are "
                "seen: {named}.",
                count=count_names(str(sample) for sample in hard), named=named,
                all=count_names(str(sample) for sample in seen),
            ),
            inference="These samples are mislabelled, damaged or of a kind of their own.",
            suggested_check="Look at these samples and their labels; find_hard_batches() lists the "
            "batches.",
            evidence=tuple(
                observe("sample", str(sample)[:_SOURCE_CHARACTERS],
                        "losses of its batches, in deviations", means[sample], float(limit))
                for sample in hard[:_NAMED]
            ),
            step=None,
            confidence=_CONFIDENCE,
        )  # fmt: skip
        return Verdict(findings=(finding,), observed=highest, threshold=limit)


def _score(losses: Floats) -> Floats:
    """Deviations of each loss from those around it."""
    out = np.zeros(len(losses))
    size = max(_LEAST_NEIGHBOURS, min(_MOST_NEIGHBOURS, len(losses) // _PARTS))
    for low in range(0, len(losses), size):
        part = slice(low, min(low + size, len(losses)))
        near = losses[max(0, min(low, len(losses) - size)) : low + size]
        deviation = max(spread(near), _RESOLUTION * (1 + abs(float(np.median(near)))))
        out[part] = np.clip((losses[part] - np.median(near)) / deviation, -_CLIP, _CLIP)
    return out
