"""What a run's batches say: which were hard, what each class cost, what was seen how often."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from quark_core.records import BatchDiagnosticRecord
from quark_core.records.query import Query
from quark_core.runs.reading import iterate

if TYPE_CHECKING:
    from quark.page.api.source import PageSource

_MOST_HARD = 50
_MOST_CLASSES = 200
_MOST_IDS = 20


def describe_batches(source: PageSource, run_id: str) -> dict[str, Any]:
    """What `DataDiagnostics.summarize` says, and the mean loss of the batches with each class.

    Raises:
        RunNotFoundError: There is no such run.
    """
    from quark_core.writers.data_diagnostics import BatchReading

    run = source.open_run(run_id)
    found = BatchReading(run).summarize(hard_batch_limit=_MOST_HARD).to_dict()
    for name in ("hard_batches", "loss_outliers", "sequence_length_outliers"):
        for batch in found[name]:
            ids = batch["sample_ids"] or ()
            batch["sample_ids"], batch["sample_count"] = list(ids[:_MOST_IDS]), len(ids)
    exposure = found["exposure"]
    exposure["class_count"] = len(exposure["class_counts"])
    for name in ("class_counts", "class_fractions"):
        exposure[name] = dict(list(exposure[name].items())[:_MOST_CLASSES])
    losses = _measure_classes(source, run_id)
    return {"summary": found, "class_losses": {name: losses[name] for name in exposure[
        "class_counts"] if name in losses}}  # fmt: skip


def _measure_classes(source: PageSource, run_id: str) -> dict[str, float]:
    """The mean of the losses of the batches with a class, each by how many of it were there."""
    import numpy as np

    total: dict[str, float] = defaultdict(float)
    weight: dict[str, float] = defaultdict(float)
    for part in iterate(source.reader, run_id, BatchDiagnosticRecord.KIND, Query()):
        losses = part["loss"]
        for loss, counts in zip(losses.tolist(), part["class_counts"], strict=True):
            if counts is None or not np.isfinite(loss):
                continue
            for label, count in counts.items():
                total[label] += loss * count
                weight[label] += count
    return {label: total[label] / weight[label] for label in total if weight[label]}
