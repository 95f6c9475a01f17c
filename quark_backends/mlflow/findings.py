"""What analyzers have found, and the newest error, as tags of the MLflow run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quark_backends.mlflow.figures import find_raised_rule
from quark_backends.mlflow.params import TAG_LIMITS
from quark_core.records import (
    AlertRecord,
    EventRecord,
    HealthScoreRecord,
    PhaseRecord,
)

__all__ = ["list_finding_tags", "list_raised_tags", "tag_last_error"]

_ERRORS = ("error", "critical")
_PHASE_FIELDS = ("phase_name", "step_start", "step_end", "epoch_start", "epoch_end", "summary")


def list_finding_tags(kind: str, records: Sequence[Any]) -> dict[str, str]:
    """Tag -> value for the alerts, scores or phases of one batch; {} for other kinds."""
    tags = {}
    if kind == AlertRecord.KIND:
        for record in records:
            tags[f"quark.alert.{record.rule_id}"] = _encode(record.to_dict())
    elif kind == HealthScoreRecord.KIND:
        for record in records:
            tags[f"quark.health.{record.score_key}"] = record.status
    elif kind == PhaseRecord.KIND:
        phases = [{name: getattr(one, name) for name in _PHASE_FIELDS} for one in records]
        tags["quark.phases"] = json.dumps(phases, ensure_ascii=False)
    return tags


def list_raised_tags(records: Sequence[EventRecord]) -> dict[str, str]:
    """Tag -> value for the alerts that a monitor has raised among events."""
    tags = {}
    for record in records:
        rule_id = find_raised_rule(record)
        if rule_id is not None:
            raised = {**dict(record.payload or {}), "timestamp": record.timestamp}
            tags[f"quark.alert.{rule_id}"] = _encode(raised)
    return tags


def tag_last_error(records: Sequence[EventRecord]) -> dict[str, str]:
    """The tag that tells of the last error of a batch of events; {} where there is none."""
    for record in reversed(records):
        if record.severity in _ERRORS:
            payload: Mapping[str, Any] = record.payload or {}
            said = {
                "event_type": record.event_type,
                "severity": record.severity,
                "step": record.step,
                "timestamp": record.timestamp,
                "message": payload.get("message", payload.get("error")),
            }
            return {"quark.last_error": json.dumps(said, ensure_ascii=False)}
    return {}


def _encode(described: dict[str, Any]) -> str:
    """A tag's value that stays JSON: evidence that does not fit is in the records only."""
    text = json.dumps(described, ensure_ascii=False)
    if len(text) > TAG_LIMITS[0]:
        text = json.dumps({**described, "evidence": [], "metadata": None}, ensure_ascii=False)
    return text
