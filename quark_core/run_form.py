"""Makes runs and their summaries out of the dicts that `to_dict()` made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quark_core.backend import StoredRun
from quark_core.errors import SchemaValidationError
from quark_core.json_object import JsonObject
from quark_core.records import ConfigSnapshot, EnvironmentSnapshot, ProjectRecord, RunRecord
from quark_core.run_summary import MetricSummary, RunSummary

__all__ = ["restore_run", "restore_summary"]


def restore_run(data: Mapping[str, Any]) -> StoredRun:
    """The run that a dict of `StoredRun.to_dict` says; fields that it does not know are let go.

    Raises:
        SchemaValidationError: It is none.
    """
    try:
        config, environment = data["config"], data["environment"]
        return StoredRun(
            project=msgspec.convert(data["project"], ProjectRecord),
            run=msgspec.convert(data["run"], RunRecord),
            state=_text(data["state"]),
            config=None if config is None else ConfigSnapshot.from_data(config),
            environment=(
                None
                if environment is None
                else EnvironmentSnapshot(JsonObject(environment["values"]))
            ),
            heartbeat_at=data["heartbeat_at"],
            lost_reason=data["lost_reason"],
        )
    except (msgspec.ValidationError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise SchemaValidationError(f"run: this is none: {error!r}") from error


def restore_summary(data: Mapping[str, Any]) -> RunSummary:
    """The summary that a dict of `RunSummary.to_dict` says.

    Raises:
        SchemaValidationError: It is none.
    """
    stored = restore_run(data)
    try:
        return RunSummary(
            stored=stored,
            newest_step=data["newest_step"],
            last_metric_at=data["last_metric_at"],
            metrics={
                key: msgspec.convert(metric, MetricSummary)
                for key, metric in data["metrics"].items()
            },
        )
    except (msgspec.ValidationError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise SchemaValidationError(f"run summary: this is none: {error!r}") from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text was expected, not {value!r:.60}")
    return value
