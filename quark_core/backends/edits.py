"""What people change of a run from elsewhere: its name, notes and tags, and that it shall stop.

A backend that keeps batches stores both as batches of a writer of their own: a lifecycle
record, which changes the run, and an event, which says who, when, why and what was before.
`make_edit` and `make_stop` make them, out of the run as it is at that moment; the backend
sees to it that nobody else changes the run between.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from quark_core.config.arguments import check_label, check_notes, check_tags
from quark_core.config.belonging import check_field_names, check_fields, check_groups
from quark_core.config.redaction import redact_text
from quark_core.errors import InvalidRunStateError, SchemaValidationError
from quark_core.records import (
    ArtifactLinkRecord,
    EventRecord,
    LifecycleRecord,
    RunRecord,
    StreamRecord,
    format_time,
)
from quark_core.records.artifact_layout import is_sha256
from quark_core.records.artifact_links import check_alias
from quark_core.records.belonging import change_fields, change_groups
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject
from quark_core.records.names import check_name
from quark_core.records.runs import StopRequest
from quark_core.records.times import now_us

if TYPE_CHECKING:
    from quark_core.backends.contract import Batch, StoredRun

EDIT_WRITER = "edit-"
"""What the ids of writers of edits begin with; the moment follows, so that they sort by it."""

RUN_EDITED = "run_edited"
STOP_REQUESTED = "stop_requested"
STOP_SEEN = "stop_seen"
"""Types of the events: an edit, a request to stop, and that the training knows of one."""

_MAX_REASON = 1_000
_MAX_SHOWN = 100
_Text = Annotated[str, Meta(max_length=250)]
_Tags = Annotated[tuple[_Text, ...], Meta(max_length=1000)]


class AliasEdit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An alias that is to name an artifact of the run, or no longer to.

    Attributes:
        artifact_key, artifact_id, sha256: The artifact's.
        version: Its number in the project, which it keeps from then on.
        alias: The alias.
        removed: Whether it is to be taken away.
    """

    artifact_key: Annotated[str, Meta(max_length=2000)]
    artifact_id: _Text
    sha256: _Text
    version: Annotated[int, Meta(ge=0)]
    alias: _Text
    removed: bool = False


class RunEdit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is to be changed of a run; None leaves a thing as it is.

    Attributes:
        name, notes: The new ones; an empty text takes them away.
        add_tags, remove_tags: Tags; one that is there already, or is not there, is no mistake.
        archived: Whether the run is to be archived, or taken back from there.
        add_groups, remove_groups: Paths of groups, as tags.
        set_fields: Fields to note, by name.
        remove_fields: Names of fields to take away.
        alias: An alias of one of its artifacts.
    """

    name: _Text | None = None
    notes: Annotated[str, Meta(max_length=100_000)] | None = None
    add_tags: _Tags = ()
    remove_tags: _Tags = ()
    archived: bool | None = None
    alias: AliasEdit | None = None
    add_groups: _Tags = ()
    remove_groups: _Tags = ()
    set_fields: Annotated[dict[str, Any], Meta(max_length=1000)] = {}
    remove_fields: _Tags = ()


@runtime_checkable
class SupportsEdits(Protocol):
    """What a backend has that declares `Capability.EDITS`.

    Each of its methods may be called from any thread, and while other processes write the run.
    """

    def edit_run(self, run_id: str, edit: RunEdit, *, by: str) -> StoredRun:
        """Change what is said of a run, and note in it who did; returns the run as it is then.

        Of two at once the one that comes last counts, and the events say what each has changed.

        Args:
            run_id: The run, whether it goes on or not.
            edit: What to change, checked by `check_edit`.
            by: Who does, as `user@host`.

        Raises:
            RunNotFoundError: There is no such run, or it is in the trash.
            SessionStoreError: The store cannot be written.
        """

    def request_stop(self, run_id: str, *, by: str, reason: str | None = None) -> StopRequest:
        """Ask the newest attempt of a run to stop; returns the request that stands then.

        Every request is an event of the run; the first one of an attempt is the one that stands.

        Raises:
            RunNotFoundError: There is no such run, or it is in the trash.
            InvalidRunStateError: It has ended, or is lost.
            SessionStoreError: The store cannot be written.
        """

    def find_stop(self, run_id: str) -> StopRequest | None:
        """The request that stands for the newest attempt of a run, or None.

        Trainings ask this every few seconds: it reads next to nothing.

        Raises:
            RunNotFoundError: There is no such run.
            SessionStoreError: The store cannot be read.
        """


def check_edit(edit: RunEdit) -> RunEdit:
    """An edit as it is kept: secrets taken out, tags sorted.

    Raises:
        SchemaValidationError: A bad value, one tag to be added and removed, or nothing to do.
    """
    if edit.archived is not None and not isinstance(edit.archived, bool):
        raise SchemaValidationError(
            f"archived must be True or False, not a {type(edit.archived).__name__}"
        )
    checked = RunEdit(
        name=None if edit.name is None else _check_name(edit.name),
        notes=check_notes(edit.notes),
        add_tags=check_tags(edit.add_tags),
        remove_tags=check_tags(edit.remove_tags),
        archived=edit.archived,
        alias=None if edit.alias is None else _check_alias_edit(edit.alias),
        add_groups=check_groups(edit.add_groups, "add_groups"),
        remove_groups=check_groups(edit.remove_groups, "remove_groups"),
        set_fields=dict(check_fields(edit.set_fields, "set_fields")),
        remove_fields=check_field_names(edit.remove_fields, "remove_fields"),
    )
    for what, added, removed in (
        ("tag", checked.add_tags, checked.remove_tags),
        ("group", checked.add_groups, checked.remove_groups),
        ("field", checked.set_fields, checked.remove_fields),
    ):
        both = sorted({*added} & {*removed})
        if both:
            raise SchemaValidationError(
                f"{what} {both[0]!r} is to be added and to be removed: choose one"
            )
    if checked == RunEdit():
        raise SchemaValidationError(
            "an edit must change something: give a name, notes, tags, groups, fields, archived, "
            "or an alias"
        )
    return checked


def _check_name(name: object) -> str:
    return "" if isinstance(name, str) and not name else check_label(name, "name")


def _check_alias_edit(edit: AliasEdit) -> AliasEdit:
    if not is_sha256(edit.sha256):
        raise SchemaValidationError("alias.sha256 must be 64 lowercase hexadecimal digits")
    check_name(edit.artifact_key, "alias.artifact_key")
    check_label(edit.artifact_id, "alias.artifact_id")
    return msgspec.structs.replace(edit, alias=check_alias(edit.alias))


def check_reason(reason: object) -> str | None:
    """A reason without secrets; None where none is given.

    Raises:
        SchemaValidationError: Not a str, or too long.
    """
    if reason is None:
        return None
    if not isinstance(reason, str):
        raise SchemaValidationError(f"reason must be a str, not {type(reason).__name__}")
    if len(reason) > _MAX_REASON:
        raise SchemaValidationError(f"reason has {len(reason)} characters; at most {_MAX_REASON}")
    return redact_text(reason.encode("utf-8", "replace").decode()) or None


def make_edit(stored: StoredRun, edit: RunEdit, *, by: str) -> list[Batch]:
    """The batches of an edit.

    Args:
        stored: The run as it is now.
        edit: What to change, checked.
        by: Who does.
    """
    run = stored.run
    changes: dict[str, Any] = {}
    for field, wanted in (("name", edit.name), ("notes", edit.notes)):
        if wanted is not None:
            changes[field] = {"before": getattr(run, field), "after": wanted or None}
    for field, known, added, removed in (
        ("tags", run.tags, edit.add_tags, edit.remove_tags),
        ("groups", run.groups, edit.add_groups, edit.remove_groups),
    ):
        if added or removed:
            changes[field] = {
                "before": list(known),
                "after": sorted({*known, *added} - {*removed}),
                "added": list(added),
                "removed": list(removed),
            }
    if edit.set_fields or edit.remove_fields:
        named = {*edit.set_fields, *edit.remove_fields}
        changes["fields"] = {
            "before": {name: value for name, value in stored.fields.items() if name in named},
            "set": edit.set_fields,
            "removed": list(edit.remove_fields),
        }
    if edit.archived is not None:
        changes["archived"] = {"before": run.archived_at is not None, "after": edit.archived}
    if edit.alias is not None:
        changes["alias"] = msgspec.to_builtins(edit.alias)
    said = "; ".join(_describe_change(field, change) for field, change in changes.items())
    writer = _Writer(run)
    links = [] if edit.alias is None else [writer.encode(writer.link(edit.alias))]
    return [
        *links,
        writer.encode(writer.lifecycle("edit", {"by": by, "changes": changes})),
        writer.encode(
            writer.event(
                RUN_EDITED, "info", {"message": f"{by}: {said}", "by": by, "changes": changes}
            )
        ),
    ]


def apply_edit(run: RunRecord, record: LifecycleRecord) -> RunRecord:
    """A run as it is after an edit, of which this is the lifecycle record."""
    data: Mapping[str, Any] = record.data or {}
    changes: Mapping[str, Any] = data.get("changes") or {}
    changed: dict[str, Any] = {
        field: changes[field]["after"] for field in ("name", "notes") if changes.get(field)
    }
    if changes.get("tags"):
        # Not what the editor saw: another one's tags stay.
        tags = {*run.tags, *changes["tags"]["added"]} - {*changes["tags"]["removed"]}
        changed["tags"] = tuple(sorted(tags))
    if changes.get("groups"):
        said = {"add": changes["groups"]["added"], "remove": changes["groups"]["removed"]}
        changed["groups"] = tuple(change_groups(run.groups, said))
    if changes.get("archived"):
        archived_at = run.archived_at or format_time(record.time_us)
        changed["archived_at"] = archived_at if changes["archived"]["after"] else None
    return msgspec.structs.replace(run, **changed)


def edit_fields(known: Mapping[str, Any], record: LifecycleRecord) -> dict[str, Any]:
    """The fields of a run after an edit, of which this is the lifecycle record."""
    data: Mapping[str, Any] = record.data or {}
    said = (data.get("changes") or {}).get("fields") or {}
    return change_fields(known, {"set": said.get("set"), "remove": said.get("removed")})


def apply_stop(known: StopRequest | None, record: LifecycleRecord) -> StopRequest | None:
    """What is known of a request after a lifecycle record `stop` or `stop_seen` of the attempt.

    Journals of one run are read one after the other, so that the second may come first. What
    is not complete then stands for nothing.

    Args:
        known: What was known before.
        record: The record.
    """
    data: Mapping[str, Any] = record.data or {}
    moment = format_time(record.time_us)
    if record.action == "stop" and (known is None or not known.is_complete):
        seen_at = known.seen_at if known is not None and known.id == data["id"] else None
        return StopRequest(data["id"], data["by"], moment, data["reason"], seen_at)
    if record.action == "stop_seen":
        if known is None:
            return StopRequest(data["id"], "", moment, seen_at=moment)
        if known.id == data["id"]:
            return msgspec.structs.replace(known, seen_at=known.seen_at or moment)
    return known


@dataclass(frozen=True, slots=True)
class PlannedStop:
    """A request to stop on its way into a store.

    Attributes:
        request: The one that stands then: this one, or an earlier one.
        batches: What to store.
    """

    request: StopRequest
    batches: list[Batch]


def make_stop(stored: StoredRun, *, by: str, reason: str | None = None) -> PlannedStop:
    """The batches of a request to stop.

    Args:
        stored: The run as it is now.
        by: Who asks.
        reason: Why, checked by `check_reason`.

    Raises:
        InvalidRunStateError: Nobody is there who could stop.
    """
    run = stored.run
    if run.status != "running":
        raise InvalidRunStateError(
            f"run {run.id} has ended ({run.status}), so there is nothing to stop"
        )
    if stored.state == "lost":
        raise InvalidRunStateError(
            f"run {run.id} is lost ({stored.lost_reason}), so nobody is there who could stop"
        )
    writer = _Writer(run)
    asked = StopRequest(id=writer.id, by=by, at=format_time(writer.time_us), reason=reason)
    batches = []
    if stored.stop is None:
        said = {"id": asked.id, "by": by, "reason": reason}
        batches.append(writer.encode(writer.lifecycle("stop", said)))
    payload = {"message": asked.describe(), "by": by, "reason": reason, "request": asked.id}
    batches.append(writer.encode(writer.event(STOP_REQUESTED, "warning", payload)))
    return PlannedStop(stored.stop or asked, batches)


class _Writer:
    """Makes the batches of one edit."""

    def __init__(self, run: RunRecord) -> None:
        self.time_us = now_us()
        self.id = f"{EDIT_WRITER}{self.time_us:014x}-{uuid.uuid4().hex[:8]}"
        self._run_id = str(run.id)
        self._attempt = run.attempt
        self._numbers = 0

    def lifecycle(self, action: str, data: Mapping[str, Any]) -> LifecycleRecord:
        return LifecycleRecord(*self._origin(), action, JsonObject(data))

    def event(self, event_type: str, severity: str, payload: Mapping[str, Any]) -> EventRecord:
        return EventRecord(
            *self._origin(), event_type, severity, None, None, None, JsonObject(payload)
        )

    def link(self, edit: AliasEdit) -> ArtifactLinkRecord:
        return ArtifactLinkRecord(
            *self._origin(),
            "unalias" if edit.removed else "alias",
            edit.artifact_key,
            self._run_id,
            edit.artifact_id,
            edit.sha256,
            edit.version,
            edit.alias,
        )

    def encode(self, record: StreamRecord) -> Batch:
        from quark_core.backends.contract import Batch

        number, self._numbers = self._numbers, self._numbers + 1
        return Batch(
            self._run_id,
            self.id,
            self._attempt,
            0,
            number,
            record.KIND,
            1,
            encode_records([record]),
        )

    def _origin(self) -> tuple[str, str, int, int, int, int]:
        return self._run_id, self.id, self._attempt, 0, 0, self.time_us


def _describe_change(field: str, change: Mapping[str, Any]) -> str:
    if field == "alias":
        way = "no longer names" if change.get("removed") else "names"
        return f"alias {change['alias']!r} {way} {change['artifact_key']}:v{change['version']}"
    if field == "archived":
        return "archived" if change["after"] else "no longer archived"
    if field in ("tags", "groups"):
        one = field[:-1]
        told = [f"{one} {text!r} added" for text in change["added"]]
        return ", ".join([*told, *(f"{one} {text!r} removed" for text in change["removed"])])
    if field == "fields":
        before = change["before"]
        told = [
            f"field {name!r} {_show(before.get(name))} becomes {_show(value)}"
            for name, value in change["set"].items()
        ]
        return ", ".join([*told, *(f"field {name!r} removed" for name in change["removed"])])
    return f"{field} {_show(change['before'])} becomes {_show(change['after'])}"


def _show(value: Any) -> str:
    shown = repr(value)
    return "none" if value is None else shown[:_MAX_SHOWN] + ("…" * (len(shown) > _MAX_SHOWN))
