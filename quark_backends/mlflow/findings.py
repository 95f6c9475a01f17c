"""What analyzers have found, and the newest error, as tags of the MLflow run.

Of each analyzer's outputs the tags show the newest generation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quark_backends.mirroring.curves import find_raised_rule
from quark_backends.mlflow.lifecycle import TAG_LIMITS, Lifecycle
from quark_backends.mlflow.run import MirroredRun
from quark_core.api import (
    AlertRecord,
    EventRecord,
    HealthScoreRecord,
    PhaseRecord,
    split_generation,
)

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
            tags[f"quark.health.{record.score_key}"] = record.word
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


_ALERT_TAG = "quark.alert."
# Early in the tag's JSON, whose end may have been cut off.
_WRITER = re.compile(r'"writer_id": "([^"\\]*)"')


class ShownGenerations:
    """Keeps the tag `quark.generation.<analyzer>`, and no tags of older generations.

    Journals of one run may be delivered in any order, and by several machines.

    Args:
        run: The MLflow run.
        lifecycle: Sets its tags.
    """

    def __init__(self, run: MirroredRun, lifecycle: Lifecycle) -> None:
        self._run = run
        self._lifecycle = lifecycle

    def take_up(self, writer_id: str) -> bool:
        """Whether tags are to show what this writer found: none that is newer was here.

        Alerts that only older generations of the analyzer have lose their tags.
        A writer that is no generation is always shown.
        """
        found = split_generation(writer_id)
        if found is None:
            return True
        analyzer, number = found
        tags = self._run.load().tags
        name = f"quark.generation.{analyzer}"
        known = tags.get(name, "")
        shown = int(known) if known.isascii() and known.isdigit() else 0
        if number < shown:
            return False
        if number > shown:
            self._lifecycle.drop_tags(
                key
                for key, text in tags.items()
                if key.startswith(_ALERT_TAG) and _is_older(text, analyzer, number)
            )
            self._lifecycle.set_named_tags({name: str(number)})
        return True


def _is_older(text: str, analyzer: str, number: int) -> bool:
    match = _WRITER.search(text)
    found = None if match is None else split_generation(match[1])
    return found is not None and found[0] == analyzer and found[1] < number
