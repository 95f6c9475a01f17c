"""Which records analyzers read and MLflow does not give back as they were.

They go among the artifacts, see `segments`, so that a run that is read from MLflow is
judged as its store judges it. A run that MLflow holds whole has no such file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quark_backends.mlflow.lifecycle import PARAM_LIMITS, fit, flatten
from quark_backends.mlflow.plain_runs import parse_param
from quark_core.api import (
    RECORD_TYPES,
    Batch,
    JsonObject,
    LifecycleRecord,
    MetricRecord,
    encode_records,
)


def reduce_batch(batch: Batch, records: Sequence[Any]) -> Batch | None:
    """The part of a batch that is kept, under its number; None where nothing of it is.

    Args:
        batch: It.
        records: Its records.
    """
    if batch.kind == LifecycleRecord.KIND:
        if not any(record.action == "environment" for record in records):
            return batch
        return msgspec.structs.replace(batch, body=encode_records(list(map(_reduce, records))))
    if batch.kind == MetricRecord.KIND:
        return None if all(map(_is_given_back, records)) else batch
    known = RECORD_TYPES.get(batch.kind)
    return batch if known and known.HAS_FIGURES and not known.IS_ANALYSIS else None


def needs_file(kept: Batch, records: Sequence[Any]) -> bool:
    """Whether a kept batch is worth a file: analyzers would miss it.

    The lifecycle of a run that was begun once stands in MLflow's own fields.
    """
    if kept.kind != LifecycleRecord.KIND:
        return True
    return any(
        record.attempt > 0
        or (record.action == "config" and not _is_given_back_as_params(record.data or {}))
        for record in records
    )


def _reduce(record: LifecycleRecord) -> LifecycleRecord:
    """The record without the particulars of the machine and its packages."""
    if record.action != "environment":
        return record
    data: Mapping[str, Any] = record.data or {}
    return msgspec.structs.replace(record, data=JsonObject({"imported": data.get("imported")}))


def _is_given_back(record: MetricRecord) -> bool:
    """Whether a point of MLflow says all of a metric: it has one axis, and no infinity."""
    return record.step is not None and record.epoch is None and not math.isinf(record.value)


def _is_given_back_as_params(data: Mapping[str, Any]) -> bool:
    values = data.get("values") or {}
    texts = {path: fit(text, PARAM_LIMITS[0]) for path, text in flatten(values)}
    return {path[0]: parse_param(text) for path, text in texts.items()} == values
