"""Which findings of one look after another are raised, and when the next look is due."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from quark.analysis.rule import SEVERITIES
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.findings import AlertRecord
from quark_core.runs.open_run import RunExtension

# A finding that stays away for so many looks is news when it comes back.
_FORGET_LOOKS = 10

_Key = tuple[str, str | None, bool]


class Sightings:
    """Turns what each look finds into alerts, each raised once.

    A finding is the same one as long as its rule and its culprit are. What is
    critical is raised at once. Anything else is raised at the severity that it
    had in two looks in a row, since what a run recovers from is no news; a
    higher severity is raised again, under the id of the first alert.

    Attributes:
        raised: The newest state of every alert that was raised, in the order of the raising.
    """

    def __init__(self) -> None:
        self._before: dict[_Key, int] = {}
        self._ranks: dict[_Key, int] = {}
        self._ids: dict[_Key, str] = {}
        self._absent: dict[_Key, int] = {}
        self._raised: dict[str, AlertRecord] = {}

    @property
    def raised(self) -> tuple[AlertRecord, ...]:
        """See the class."""
        return tuple(self._raised.values())

    def update(self, alerts: Iterable[AlertRecord], *, last: bool = False) -> list[AlertRecord]:
        """Take up what a look has found; returns what is to be raised now.

        Args:
            alerts: All that it found.
            last: No look comes after it, so that nothing is waited for.
        """
        found = {_identify(alert): alert for alert in reversed(list(alerts))}
        now = {key: SEVERITIES.index(alert.severity) for key, alert in found.items()}
        due: list[tuple[_Key, AlertRecord]] = []
        for key, rank in now.items():
            sure = rank
            if not last and rank < len(SEVERITIES) - 1:
                sure = min(rank, self._before.get(key, -1))
            if sure > self._ranks.get(key, -1):
                self._ranks[key] = sure
                due.append((key, msgspec.structs.replace(found[key], severity=SEVERITIES[sure])))
        self._before = now
        self._forget(now)
        given = {alert.id: self._ids.get(key, alert.id) for key, alert in found.items()}
        for key, alert in due:
            self._ids.setdefault(key, alert.id)
        known = {*self._raised, *(self._ids[key] for key, _ in due)}
        out = [_link(alert, self._ids[key], given, known) for key, alert in reversed(due)]
        for alert in out:
            self._raised[alert.id] = alert
        return out

    def _forget(self, now: dict[_Key, int]) -> None:
        for key in list(self._ranks):
            self._absent[key] = 0 if key in now else self._absent.get(key, 0) + 1
            if self._absent[key] >= _FORGET_LOOKS:
                for table in (self._ranks, self._ids, self._absent):
                    table.pop(key, None)


class RaisedAlerts(RunExtension):
    """Counts the alerts that monitors have raised in a run of this process.

    Attributes:
        severities: The severity of each.
    """

    def __init__(self) -> None:
        self.severities: list[str] = []

    def list_faults(self) -> list[str]:
        """How many there are of each severity, the worst first."""
        counts = {each: self.severities.count(each) for each in reversed(SEVERITIES[1:])}
        counted = [f"{count} {each}" for each, count in counts.items() if count]
        return [f"alerts: {', '.join(counted)}"] if counted else []


class Pace:
    """When the next look is due, so that all of them take a bounded share of the time.

    Args:
        least_s: The shortest time from one look to the next.
        share: The share of the time that looks may take.
    """

    def __init__(self, least_s: float, share: float) -> None:
        self._least_s = least_s
        self._share = share
        self._due = 0.0
        self.spacing_s = least_s
        """Time from the last look to the next."""

    def is_due(self, now: float) -> bool:
        """Whether a look may be taken now, on a clock in seconds."""
        return now >= self._due

    def note(self, began: float, cost_s: float) -> None:
        """Take up what a look has cost: seconds of processor time since the look before."""
        self.spacing_s = max(self._least_s, cost_s / self._share)
        self._due = began + self.spacing_s


def describe_alert(alert: AlertRecord) -> JsonObject:
    """What the event that tells of an alert carries."""
    return JsonObject(
        {
            "alert_id": alert.id,
            "rule_id": alert.rule_id,
            "category": alert.category,
            "title": alert.title,
            "message": alert.summary,
            "fact": alert.fact,
            "inference": alert.inference,
            "culprit": alert.culprit,
            "first_step": alert.step,
            "first_epoch": alert.epoch,
            "suggested_check": alert.suggested_check,
        }
    )


def _identify(alert: AlertRecord) -> _Key:
    return alert.rule_id, alert.culprit, bool(dict(alert.metadata or {}).get("hard_limit"))


def _link(alert: AlertRecord, alert_id: str, given: dict[str, str], known: set[str]) -> AlertRecord:
    """The alert under its id, with its links to those only that were raised."""
    metadata: dict[str, Any] = dict(alert.metadata or {})
    cause = given.get(str(metadata.pop("caused_by", "")))
    if cause in known:
        metadata["caused_by"] = cause
    follows = [given.get(str(item), "") for item in metadata.pop("consequences", ())]
    raised = [item for item in follows if item in known]
    if raised:
        metadata["consequences"] = raised
    return msgspec.structs.replace(alert, alert_id=alert_id, metadata=JsonObject(metadata))
