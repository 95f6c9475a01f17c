"""What is said of projects and groups, and what runs have from them.

A group is there as soon as a run is in it or somebody has described it; a path is its own
nesting, so `paper` is there where `paper/fig3` is. Tags and fields of projects and groups are
inherited when a run is read (`inherit`) and are written into no run: they hold for the runs of
yesterday and tomorrow alike, and searches do not see them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from quark_core.backends.contract import StoredRun, SupportsRead
from quark_core.config.arguments import check_notes, check_tags
from quark_core.config.belonging import check_field_names, check_fields
from quark_core.errors import SchemaValidationError, SessionStoreError

_Text = Annotated[str, Meta(max_length=250)]
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
    for what, added, removed in (
        ("tag", checked.add_tags, checked.remove_tags),
        ("field", checked.set_fields, checked.remove_fields),
    ):
        both = sorted({*added} & {*removed})
        if both:
            raise SchemaValidationError(
                f"{what} {both[0]!r} is to be added and to be removed: choose one"
            )
    if checked == BelongingEdit():
        raise SchemaValidationError(
            "an update must change something: give a description, fields or tags"
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
        group = said.get((project, path))
        found.append(
            StoredGroup(
                project=project,
                path=path,
                description=None if group is None else group.description,
                fields={} if group is None else group.fields,
                tags=() if group is None else group.tags,
                runs=runs,
                newest_at=newest or None,
            )
        )
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
        f"project {project!r}: this store has no such project; it begins with its first run"
    )


def refuse_belonging(store: str) -> SessionStoreError:
    """The error of a store that keeps nothing of projects and groups."""
    return SessionStoreError(
        f"{store} keeps nothing of projects and groups but which runs are in them: describe "
        "them in a service or in a store on a local disk"
    )


def _list_above(path: str) -> list[str]:
    """A path, and those that it lies in."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
