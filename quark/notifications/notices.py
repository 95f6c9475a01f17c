"""Notices: what people are told, and which of it they want to be told."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from quark_core.config.redaction import redact_text
from quark_core.errors import SchemaValidationError
from quark_core.records import RunRecord, format_time
from quark_core.records.base import now_us
from quark_core.records.kinds.findings import is_user_alert
from quark_core.system.terminal_text import clean_text

_SEVERITIES: Final = ("info", "warning", "error", "critical")
_ENDS: Final = ("failed", "lost", "interrupted", "finished")
_STATUSES = {"completed": "finished"}
_SEVERITY_OF = {"failed": "error", "lost": "error", "interrupted": "warning", "finished": "info"}
_MAX_TITLE = 200
_MAX_TEXT = 2_000
_MAX_DIGEST_LINES = 20
# What chat services read as a call to people, in what others have written into a run.
_MENTION = re.compile(r"<(?=[!@#])|@(?=\w)")


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that people are told; secrets are out of its texts.

    Attributes:
        key: The same of what is to be told once only.
        kind: "alert", "end" or "digest".
        event: Of an alert its rule, of an end failed, lost, interrupted or finished.
        severity: info, warning, error or critical.
        title: One line.
        text: Some lines.
        run_id, run_name, project: The run; of a digest of several runs None.
        step: Where it began, or None.
        at: When, as ISO 8601 text.
    """

    key: str
    kind: str
    event: str
    severity: str
    title: str
    text: str
    run_id: str | None = None
    run_name: str | None = None
    project: str | None = None
    step: int | None = None
    at: str = ""

    @property
    def topic(self) -> tuple[str | None, str]:
        """What is told of at most every few minutes: a rule of a run."""
        return self.run_id, self.event


class NoticeChoice(msgspec.Struct, frozen=True):
    """What is told.

    Attributes:
        severity: Alerts from this severity on; None for no alert.
        ends: How runs must end to be told of: failed, lost, interrupted, finished.
    """

    severity: str | None
    ends: frozenset[str]

    def takes(self, notice: Notice) -> bool:
        """Whether a notice is to be told."""
        if notice.kind == "alert":
            return self.severity is not None and (
                _SEVERITIES.index(notice.severity) >= _SEVERITIES.index(self.severity)
            )
        return notice.kind == "digest" or notice.event in self.ends


DEFAULT_CHOICE = NoticeChoice("error", frozenset(("failed", "lost")))
"""Alerts of errors and worse, and runs that have failed or are lost."""


def parse_choice(given: str | Iterable[str] | None, argument: str) -> NoticeChoice:
    """What `notify_on` means: a severity, from which on alerts are told, and ends of runs.

    Raises:
        SchemaValidationError: A word that is neither, or two severities.
    """
    if given is None:
        return DEFAULT_CHOICE
    words = given.replace(",", " ").split() if isinstance(given, str) else list(given)
    severities = [word for word in words if word in _SEVERITIES]
    ends = [word for word in words if word in _ENDS]
    unknown = [word for word in words if word not in (*_SEVERITIES, *_ENDS)]
    if unknown or len(severities) > 1 or not words:
        raise SchemaValidationError(
            f"{argument} must be at most one of {', '.join(map(repr, _SEVERITIES))}, and any of "
            f"{', '.join(_ENDS)}, such as 'error, failed, lost', got {given!r:.100}"
        )
    return NoticeChoice(severities[0] if severities else None, frozenset(ends))


def describe_alert(run: RunRecord, alert: Mapping[str, Any], severity: str) -> Notice:
    """The notice of an alert.

    Args:
        run: The run.
        alert: What the event `alert_raised` carries of it.
        severity: Its severity.
    """
    rule, culprit = str(alert.get("rule_id")), str(alert.get("culprit") or "")
    step = alert.get("first_step")
    title = f"{_name_run(run)}: {alert.get('title')}"
    lines = [
        str(alert.get("message") or ""),
        str(alert.get("fact") or ""),
        f"Look at: {alert['suggested_check']}" if alert.get("suggested_check") else "",
        f"({rule}, {severity}{'' if step is None else f', from step {step}'})",
        f"quark show {run.id}",
    ]
    # What somebody raises again at another step is something new.
    again = f" {step}" if is_user_alert(rule) else ""
    return _make(
        run,
        key=f"alert {run.id} {rule} {culprit} {severity}{again}",
        kind="alert",
        event=rule,
        severity=severity,
        title=title,
        text="\n".join(line for line in lines if line),
        step=step if isinstance(step, int) else None,
    )


def describe_end(run: RunRecord, state: str, reason: str | None = None) -> Notice:
    """The notice of a run's end.

    Args:
        run: The run.
        state: completed, failed, interrupted or lost.
        reason: What is known of why, or None.
    """
    event = _STATUSES.get(state, state)
    said = "is lost: its process ended unexpectedly" if event == "lost" else f"has {event}"
    said = "was interrupted" if event == "interrupted" else said
    lines = [reason or "", f"quark show {run.id}"]
    return _make(
        run,
        key=f"end {run.id} {run.attempt} {event}",
        kind="end",
        event=event,
        severity=_SEVERITY_OF[event],
        title=f"{_name_run(run)} {said}",
        text="\n".join(line for line in lines if line),
    )


def describe_digest(held: list[Notice]) -> Notice:
    """One notice of several that were held back."""
    lines = [f"{each.severity}: {each.title}" for each in held[:_MAX_DIGEST_LINES]]
    more = len(held) - len(lines)
    if more:
        lines.append(f"and {more} more")
    worst = max((each.severity for each in held), key=_SEVERITIES.index)
    runs = {each.run_id for each in held}
    first = held[0]
    one = len(runs) == 1
    return Notice(
        key=f"digest {first.key} {len(held)}",
        kind="digest",
        event="digest",
        severity=worst,
        title=f"{len(held)} notices were held back",
        text=_fit("\n".join(lines), _MAX_TEXT),
        run_id=first.run_id if one else None,
        run_name=first.run_name if one else None,
        project=first.project if one else None,
        at=format_time(now_us()),
    )


def _make(run: RunRecord, *, title: str, text: str, **fields: Any) -> Notice:
    return Notice(
        title=_fit(title.replace("\n", " "), _MAX_TITLE),
        text=_fit(text, _MAX_TEXT),
        run_id=run.id,
        run_name=None if run.name is None else _fit(run.name, _MAX_TITLE),
        project=_fit(run.project_name, _MAX_TITLE),
        at=format_time(now_us()),
        **fields,
    )


def _name_run(run: RunRecord) -> str:
    return f"{run.project_name}: run {run.name or str(run.id)[:8]}"


def _fit(text: str, length: int) -> str:
    """A text of others for a message: bounded, without secrets, and calling nobody."""
    shown = _MENTION.sub(lambda found: f"{found[0]}\u200b", clean_text(redact_text(text)))
    return shown if len(shown) <= length else shown[: length - 1] + "…"
