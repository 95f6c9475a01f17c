"""The event that tells of an alert: a monitor's, or one that somebody has raised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quark_core.records.json_object import JsonObject

ALERT_RAISED = "alert_raised"
"""The type of the event that records a raised alert."""

USER_ALERT = "user_alert"
"""What the rules of alerts begin with that no analysis has found."""

_MAX_SLUG = 40


def complete_alert(payload: Mapping[str, Any] | None, step: int | None) -> JsonObject:
    """What the event carries of an alert; one without a rule gets one by its title.

    Args:
        payload: What was given: `title` and `message`, as a rule.
        step: Where it was raised, or None.
    """
    given = dict(payload or {})
    if isinstance(given.get("rule_id"), str):
        return JsonObject(given)
    title = str(given.get("title") or given.get("message") or "alert")
    slug = re.sub(r"\W+", "_", title.lower(), flags=re.ASCII).strip("_")[:_MAX_SLUG]
    rule_id = f"{USER_ALERT}_{slug}" if slug else USER_ALERT
    return JsonObject({"title": title, "first_step": step, **given, "rule_id": rule_id})


def is_user_alert(rule_id: str) -> bool:
    """Whether the rule of an alert says that user code raised the alert, not an analysis."""
    return rule_id.startswith(USER_ALERT)
