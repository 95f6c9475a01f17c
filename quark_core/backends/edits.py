"""Edits of runs, groups and projects from elsewhere, and the removal of runs.

A backend that keeps batches stores both as batches of a writer of their own: a lifecycle
record, which changes the run, and an event, which says who, when, why and what was before.
`make_edit` and `make_stop` make them, out of the run as it is at that moment; the backend
sees to it that nobody else changes the run between.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from quark_core.backends.contract import SupportsRead
from quark_core.backends.run_summary import StoredRun
from quark_core.config.arguments import (
    check_field_names,
    check_fields,
    check_groups,
    check_label,
    check_notes,
    check_tags,
)
from quark_core.config.redaction import redact_text
from quark_core.errors import InvalidRunStateError, SchemaValidationError, SessionStoreError
from quark_core.records import (
    ArtifactLinkRecord,
    EventRecord,
    LifecycleRecord,
    RunRecord,
    StreamRecord,
    format_time,
)
from quark_core.records.base import now_us
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject
from quark_core.records.names import check_alias, check_name, is_sha256
from quark_core.records.runs import StopRequest, change_fields, change_groups

if TYPE_CHECKING:
    from quark_core.backends.contract import Batch

EDIT_WRITER = "edit-"
"""What the ids of writers of edits begin with; the moment follows, so that they sort by it."""

RUN_EDITED = "run_edited"
"""The event of a run that was edited from elsewhere."""
STOP_REQUESTED = "stop_requested"
"""The event of a run that somebody asked to stop."""
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
            f"archived must be True or False, not {type(edit.archived).__name__}"
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
    _refuse_both("tag", checked.add_tags, checked.remove_tags)
    _refuse_both("group", checked.add_groups, checked.remove_groups)
    _refuse_both("field", checked.set_fields, checked.remove_fields)
    if checked == RunEdit():
        raise SchemaValidationError(
            "an edit must change something: pass name, notes, tags, groups, fields, archived or "
            "an alias"
        )
    return checked


def _refuse_both(what: str, added: Iterable[str], removed: Iterable[str]) -> None:
    both = sorted({*added} & {*removed})
    if both:
        raise SchemaValidationError(
            f"{what} {both[0]!r} cannot be both added and removed. Choose one"
        )


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
    for name, wanted in (("name", edit.name), ("notes", edit.notes)):
        if wanted is not None:
            changes[name] = {"before": getattr(run, name), "after": wanted or None}
    for name, known, added, removed in (
        ("tags", run.tags, edit.add_tags, edit.remove_tags),
        ("groups", run.groups, edit.add_groups, edit.remove_groups),
    ):
        if added or removed:
            changes[name] = {
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
    said = "; ".join(_describe_change(name, change) for name, change in changes.items())
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
            f"run {run.id} has ended ({run.status}), so it cannot be stopped"
        )
    if stored.state == "lost":
        raise InvalidRunStateError(
            f"run {run.id} is lost ({stored.lost_reason}), so it cannot be stopped"
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
        way = "no longer assigns" if change.get("removed") else "names"
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


# What is said of projects and groups, and what runs have from them.
#
# A group is there as soon as a run is in it or somebody has described it; a path is its own
# nesting, so `paper` is there where `paper/fig3` is. Tags and fields of projects and groups are
# inherited when a run is read (`inherit`) and are written into no run: they hold for the runs of
# yesterday and tomorrow alike, and searches do not see them.

_Texts = Annotated[tuple[_Text, ...], Meta(max_length=1000)]


class BelongingEdit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is to be changed of a project or group; None leaves a thing as it is.

    Attributes:
        description: The new one; an empty text takes it away.
        set_fields: Fields to note, by name.
        remove_fields: Names of fields to take away.
        add_tags, remove_tags: Tags; one that is there already, or is not there, is no mistake.
    """

    description: Annotated[str, Meta(max_length=100_000)] | None = None
    set_fields: Annotated[dict[str, Any], Meta(max_length=1000)] = {}
    remove_fields: _Texts = ()
    add_tags: _Texts = ()
    remove_tags: _Texts = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProject:
    """What a store knows of a project.

    Attributes:
        project: Its name.
        description: What it is about, or None.
        fields, tags: What its runs have from it.
        runs: How many runs it has; none of the trash.
        newest_at: When the newest of them was made, ISO 8601 in UTC; None without any.
    """

    project: str
    description: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    runs: int = 0
    newest_at: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {**asdict(self), "tags": list(self.tags)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup(StoredProject):
    """What a store knows of a group of a project.

    Attributes:
        path: Its path, such as `paper/fig3`.
        runs: How many runs are in it or below it.
    """

    path: str


@runtime_checkable
class SupportsBelonging(Protocol):
    """What a backend has that declares `Capability.BELONGING`; from any thread."""

    def list_groups(self, project: str | None = None) -> list[StoredGroup]:
        """The groups there are, described or with runs, by project and path.

        Raises:
            SessionStoreError: The store cannot be read.
        """

    def load_project(self, project: str) -> StoredProject:
        """What is known of a project.

        Raises:
            SchemaValidationError: There is no such project.
            SessionStoreError: The store cannot be read.
        """

    def update_project(self, project: str, edit: BelongingEdit, *, by: str) -> StoredProject:
        """Change what is said of a project; returns it as it is then.

        Args:
            project: Its name.
            edit: What to change, checked by `check_belonging_edit`.
            by: Who does, as `user@host`.

        Raises:
            SchemaValidationError: There is no such project.
            SessionStoreError: The store cannot be written.
        """

    def update_group(self, project: str, path: str, edit: BelongingEdit, *, by: str) -> StoredGroup:
        """Change what is said of a group, with runs in it or not yet; as `update_project`."""


def check_belonging_edit(edit: BelongingEdit) -> BelongingEdit:
    """An edit as it is kept: secrets taken out, texts bounded.

    Raises:
        SchemaValidationError: A bad value, one thing to be set and removed, or nothing to do.
    """
    checked = BelongingEdit(
        description=check_notes(edit.description),
        set_fields=dict(check_fields(edit.set_fields, "set_fields")),
        remove_fields=check_field_names(edit.remove_fields, "remove_fields"),
        add_tags=check_tags(edit.add_tags),
        remove_tags=check_tags(edit.remove_tags),
    )
    _refuse_both("tag", checked.add_tags, checked.remove_tags)
    _refuse_both("field", checked.set_fields, checked.remove_fields)
    if checked == BelongingEdit():
        raise SchemaValidationError(
            "an update must change something: pass a description, fields or tags"
        )
    return checked


def apply_belonging_edit(known: StoredProject, edit: BelongingEdit) -> dict[str, Any]:
    """Description, fields and tags of a project or group after an edit."""
    fields = {**known.fields, **edit.set_fields}
    for name in edit.remove_fields:
        fields.pop(name, None)
    wanted = edit.description
    return {
        "description": known.description if wanted is None else wanted or None,
        "fields": dict(sorted(fields.items())),
        "tags": tuple(sorted({*known.tags, *edit.add_tags} - {*edit.remove_tags})),
    }


def gather_groups(
    members: Iterable[tuple[str, Sequence[str], str]],
    described: Iterable[StoredGroup] = (),
) -> list[StoredGroup]:
    """The groups that runs and descriptions make, sorted by project and path.

    Args:
        members: Of each run its project, the paths that it is in, and when it was made.
        described: What was said of groups, without their runs.
    """
    counts: dict[tuple[str, str], tuple[int, str]] = {}
    for project, paths, created_at in members:
        for path in {above for own in paths for above in _list_above(own)}:
            runs, newest = counts.get((project, path), (0, ""))
            counts[project, path] = runs + 1, max(newest, created_at)
    said = {(group.project, group.path): group for group in described}
    found = []
    for project, path in sorted({*counts, *said}):
        runs, newest = counts.get((project, path), (0, ""))
        group = said.get((project, path)) or StoredGroup(project=project, path=path)
        found.append(replace(group, runs=runs, newest_at=newest or None))
    return found


def list_groups_by_reading(reader: SupportsRead, project: str | None = None) -> list[StoredGroup]:
    """The groups of any store that is read, of which nothing is described."""
    runs = (stored.run for stored in reader.list_runs(project=project))
    return gather_groups((run.project_name, run.groups, run.created_at) for run in runs)


@dataclass(frozen=True, slots=True)
class Inherited:
    """Fields and tags of a run with those that it has from its groups and project."""

    fields: Mapping[str, Any]
    tags: tuple[str, ...]


def inherit(
    stored: StoredRun, project: StoredProject | None, groups: Iterable[StoredGroup] = ()
) -> Inherited:
    """What a run has with what it inherits.

    Tags add up: no run can lay off one of its project. Of fields the nearest counts: the
    run's own, then that of the deepest of its groups, then the project's.

    Args:
        stored: The run.
        project: Its project, or None.
        groups: Groups of its project; those that it is not in are passed over.
    """
    above = {path for group in stored.run.groups for path in _list_above(group)}
    mine = [g for g in groups if g.path in above and g.project == stored.project.name]
    # Of two as deep the first by name counts, so it is laid on last.
    mine.sort(key=lambda group: group.path, reverse=True)
    mine.sort(key=lambda group: group.path.count("/"))
    layers: list[StoredProject] = [*([] if project is None else [project]), *mine]
    fields: dict[str, Any] = {}
    for layer in layers:
        fields.update(layer.fields)
    fields.update(stored.fields)
    tags = {*stored.run.tags, *(tag for layer in layers for tag in layer.tags)}
    return Inherited(dict(sorted(fields.items())), tuple(sorted(tags)))


def unknown_project(project: str) -> SchemaValidationError:
    """The error for a project that the store does not have."""
    return SchemaValidationError(
        f"project {project!r} does not exist in this store. It is created with its first run"
    )


def refuse_belonging(store: str) -> SessionStoreError:
    """The error of a store that keeps nothing of projects and groups."""
    return SessionStoreError(
        f"{store} stores no descriptions of projects and groups. Describe them in a store on a "
        "local disk or on a Quark server"
    )


def _list_above(path: str) -> list[str]:
    """A path, and those that it lies in."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]


CollectionProgress = Callable[[str, int, int], None]
"""Told of what is being done, how many bytes of it are done, and of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedRecords:
    """Records that could not be read and were set aside, with the bytes that were there.

    Attributes:
        run_id, writer_id: Whose they are.
        kind: Their kind.
        records: How many.
        reason: What is wrong with them.
        found_at: When they were set aside.
    """

    run_id: str
    writer_id: str
    kind: str
    records: int
    reason: str
    found_at: str

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUsage:
    """What one run takes up.

    Attributes:
        run_id: The run.
        name: Its name, or None.
        project: Name of its project.
        state: Its status, or "lost".
        created_at: When it began.
        trashed_at: When it was put into the trash, or None.
        points: Metric points that are kept, hidden ones included.
        database_bytes: Bytes of its records and texts in the database, without
            the indexes and page ends that all runs share.
        files: Bytes on disk by what they are: the name of the subfolder of the
            run's folder, or "other" for what lies in none.
    """

    run_id: str
    name: str | None
    project: str
    state: str
    created_at: str
    trashed_at: str | None
    points: int
    database_bytes: int
    files: Mapping[str, int] = field(default_factory=dict)

    @property
    def file_bytes(self) -> int:
        """Bytes on disk of all its files."""
        return sum(self.files.values())

    @property
    def total_bytes(self) -> int:
        """Database and files."""
        return self.database_bytes + self.file_bytes

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {
            **asdict(self),
            "file_bytes": self.file_bytes,
            "files": dict(self.files),
            "total_bytes": self.total_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """What a store takes up, all of it told apart.

    `total_bytes` is `database_file_bytes` + the files of all runs + `shared_bytes`;
    `database_file_bytes` is the data of all runs + `free_bytes` + `overhead_bytes`.

    Attributes:
        store_root: Root of the store.
        runs: Its runs, those in the trash too, the largest first.
        database_file_bytes: The database's files on disk.
        free_bytes: Pages in the database that hold nothing.
        shared_bytes: Files of the store that belong to no run.
        elsewhere_bytes: Journals under QUARK_JOURNAL_DIR; they count among
            their runs' files, and not in `total_bytes`.
        total_bytes: All that lies under the root, as `du` counts it.
    """

    store_root: str
    runs: tuple[RunUsage, ...]
    database_file_bytes: int
    free_bytes: int
    shared_bytes: int
    elsewhere_bytes: int
    total_bytes: int

    @property
    def overhead_bytes(self) -> int:
        """What the database's files hold beyond the data of runs: indexes, page ends, its log."""
        data_bytes = sum(run.database_bytes for run in self.runs)
        return self.database_file_bytes - self.free_bytes - data_bytes

    @property
    def trash(self) -> tuple[RunUsage, ...]:
        """The runs in the trash."""
        return tuple(run for run in self.runs if run.trashed_at is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What `collect_trash` did, or, of a dry run, would do.

    Attributes:
        runs: What was removed for good, with what it took up.
        skipped: Runs that stay in the trash for now: id -> why.
        leftovers: Other things that were removed: path -> bytes.
        before_bytes: Size of the store on disk before.
        after_bytes: And after; a training beside may have added to it meanwhile.
        notes: What could not be done now, and what to do about it.
    """

    runs: tuple[RunUsage, ...]
    skipped: Mapping[str, str]
    leftovers: Mapping[str, int]
    before_bytes: int
    after_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """By how much the store became smaller on disk."""
        return max(0, self.before_bytes - self.after_bytes)

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {
            "removed": [run.to_dict() for run in self.runs],
            "skipped": dict(self.skipped),
            "leftovers": dict(self.leftovers),
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
            "freed_bytes": self.freed_bytes,
            "notes": list(self.notes),
        }


@runtime_checkable
class SupportsRemoval(Protocol):
    """What a backend has that declares `Capability.REMOVAL`.

    May be called from any thread and beside processes that write. Removing a
    run never touches another one. Every method raises `SessionStoreError`
    where the store cannot be read or written.
    """

    def measure_store(self) -> StoreUsage:
        """What the store and each of its runs take up."""

    def measure_runs(self, run_ids: Sequence[str]) -> list[RunUsage]:
        """What these runs take up, in this order; `RunNotFoundError` for an unknown one."""

    def list_trash(self) -> list[RunUsage]:
        """The runs in the trash, the newest there first."""

    def list_damaged(self) -> list[DamagedRecords]:
        """What could not be read and was set aside, the newest first."""

    def trash_runs(self, run_ids: Sequence[str]) -> None:
        """Put runs into the trash, all or none, which hides them from every reader.

        Raises:
            RunNotFoundError: There is no such run.
            InvalidRunStateError: One of them is alive.
        """

    def restore_runs(self, run_ids: Sequence[str]) -> None:
        """Take runs out of the trash again, all or none.

        Raises:
            RunNotFoundError: There is no such run in the trash, or no more.
        """

    def collect_trash(
        self,
        *,
        older_than_s: float = 0.0,
        run_ids: Sequence[str] | None = None,
        dry_run: bool = False,
        on_progress: CollectionProgress | None = None,
    ) -> Collection:
        """Remove for good what has been in the trash for so long, and give its space back.

        May be broken off at any moment, also by a kill; the next call goes on, also with
        runs of which a call that was broken off has removed a part.

        Args:
            older_than_s: Only what has been in the trash for so long.
            run_ids: Only these runs, such as those that somebody has agreed to; all by default.
            dry_run: Only say what would go.
            on_progress: Told of what is being done.
        """
