"""Descriptions of projects and groups: `quark.project(name).update(…)`, and inherited values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from quark_core.backends.contract import SupportsRead
from quark_core.backends.edits import (
    BelongingEdit,
    Inherited,
    StoredGroup,
    StoredProject,
    SupportsBelonging,
    check_belonging_edit,
    inherit,
    list_groups_by_reading,
    refuse_belonging,
)
from quark_core.backends.registry import default_registry
from quark_core.backends.run_summary import StoredRun
from quark_core.config.arguments import (
    check_field_names,
    check_fields,
    check_group_path,
    check_label,
    check_tags,
    resolve_storage_dir,
)
from quark_core.errors import QuarkError
from quark_core.runs.backend_choice import choose_primary, open_primary, open_reader
from quark_core.runs.run_editing import exchange_group_field, find_user


class _Described:
    """A project or a group: what is said of it, and how that is changed."""

    def __init__(self, project_name: str, root: Path) -> None:
        self._project = project_name
        self._root = root

    @property
    def description(self) -> str | None:
        """Description, or None; read from the store on each access."""
        return self.load().description

    @property
    def fields(self) -> dict[str, Any]:
        """Custom fields that the runs inherit; read from the store on each access."""
        return dict(self.load().fields)

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that the runs inherit; read from the store on each access."""
        return self.load().tags

    def load(self) -> StoredProject:
        """Read the stored record.

        Raises:
            SchemaValidationError: It does not exist.
            SessionStoreError: The store does not exist, or cannot be read.
        """
        with _open(self._root, writes=False) as store:
            return self._load(store)

    def update(
        self,
        *,
        description: str | None = None,
        fields: Mapping[str, Any] | None = None,
        tags: Iterable[str] | None = None,
        remove_fields: Iterable[str] | None = None,
        remove_tags: Iterable[str] | None = None,
    ) -> Self:
        """Change the description, fields and tags, and return the object.

        Runs inherit fields and tags when they are read, including older runs. A run's own field
        overrides an inherited one. Tags are combined.

        Args:
            description: New description. An empty string removes it.
            fields: Custom fields to set, as in `session.annotate`.
            tags: Tags to add.
            remove_fields, remove_tags: Names to remove. Missing names are ignored.

        Raises:
            SchemaValidationError: An argument is invalid, nothing is to change, or the project does
                not exist.
            SessionStoreError: The store cannot be written, or does not support this.
        """
        edit = check_belonging_edit(
            BelongingEdit(
                description=description,
                set_fields=check_fields({} if fields is None else fields),
                remove_fields=check_field_names(remove_fields, "remove_fields"),
                add_tags=check_tags(tags),
                remove_tags=check_tags(remove_tags, "remove_tags"),
            )
        )
        with _open(self._root, writes=True) as store:
            self._update(store, edit)
        return self

    def compare_and_set(self, field: str, expect: Any, value: Any) -> bool:
        """Set a field if its current value is `expect`, and return whether it was set.

        Atomic: if several processes call it with the same `expect`, one of them gets True.

        Args:
            field: Name of the field.
            expect: Expected value. None stands for a missing field.
            value: New value. None removes the field.

        Raises:
            SchemaValidationError: A name or value is invalid, or the project does not exist.
            SessionStoreError: The store cannot be written, or does not support this.
        """
        path = self._path if isinstance(self, RunGroup) else ""
        return exchange_group_field(self._root, self._project, path, field, expect, value)

    def _load(self, store: SupportsBelonging) -> StoredProject:
        raise NotImplementedError

    def _update(self, store: SupportsBelonging, edit: BelongingEdit) -> None:
        raise NotImplementedError


class RunGroup(_Described):
    """Group of runs in a project, made by `RunProject.group`."""

    def __init__(self, project_name: str, path: str, root: Path) -> None:
        super().__init__(project_name, root)
        self._path = path

    @property
    def path(self) -> str:
        """Path of the group, such as `paper/fig3`."""
        return self._path

    def __repr__(self) -> str:
        return f"RunGroup({self._path!r} of project {self._project!r})"

    def _load(self, store: SupportsBelonging) -> StoredProject:
        for group in store.list_groups(self._project):
            if group.path == self._path:
                return group
        return StoredGroup(project=self._project, path=self._path)

    def _update(self, store: SupportsBelonging, edit: BelongingEdit) -> None:
        store.update_group(self._project, self._path, edit, by=find_user())


class RunProject(_Described):
    """Project of a store, made by `quark.project`."""

    @property
    def name(self) -> str:
        """Name of the project."""
        return self._project

    def group(self, path: str) -> RunGroup:
        """Return a group of the project, even if it has no runs yet.

        Args:
            path: Path such as "paper/fig3".

        Raises:
            SchemaValidationError: The path is invalid.
        """
        return RunGroup(self._project, check_group_path(path, "path"), self._root)

    def groups(self) -> tuple[StoredGroup, ...]:
        """List the groups of the project, with the number of runs in and below each."""
        with _open(self._root, writes=False) as store:
            return tuple(store.list_groups(self._project))

    def __repr__(self) -> str:
        return f"RunProject({self._project!r})"

    def _load(self, store: SupportsBelonging) -> StoredProject:
        return store.load_project(self._project)

    def _update(self, store: SupportsBelonging, edit: BelongingEdit) -> None:
        store.update_project(self._project, edit, by=find_user())


def project(name: str, *, storage_dir: str | Path | None = None) -> RunProject:
    """Return a project by name, to describe it or to list its groups.

    The project is read when you access it. It exists after its first run.

    Args:
        name: Name of the project.
        storage_dir: Folder of the `.quark` store. Defaults to the working directory, or the nearest
            parent that has a store.

    Raises:
        SchemaValidationError: The name is invalid.
        SessionStoreError: `storage_dir` cannot be used.

    Example:
        quark.project("digits").update(tags=["vision"])
    """
    return RunProject(check_label(name, "name"), resolve_storage_dir(storage_dir))


def list_groups(reader: SupportsRead, project_name: str | None = None) -> list[StoredGroup]:
    """The groups of an opened store, by project and path, each before what lies in it."""
    if project_name is not None:
        check_label(project_name, "project")
    if isinstance(reader, SupportsBelonging):
        found = reader.list_groups(project_name)
    else:
        found = list_groups_by_reading(reader, project_name)
    return sorted(found, key=lambda group: (group.project, group.path.split("/")))


def find_inherited(reader: SupportsRead, stored: StoredRun) -> Inherited:
    """Fields and tags of a run with those of its groups and project, where the store has any."""
    if not isinstance(reader, SupportsBelonging):
        return inherit(stored, None)
    try:
        name = stored.project.name
        groups = reader.list_groups(name) if stored.run.groups else []
        return inherit(stored, reader.load_project(name), groups)
    except QuarkError:
        return inherit(stored, None)  # a service of an older version


@contextmanager
def _open(root: Path, *, writes: bool) -> Iterator[SupportsBelonging]:
    # Opened for reading first: a wrong root must leave no store.
    store = open_reader(root)
    if writes:
        store.close()
        choice = choose_primary(default_registry())
        store = open_primary(choice, replace(choice.configure(root), removes=True))
    try:
        belonging: object = store
        if not isinstance(belonging, SupportsBelonging):
            raise refuse_belonging(f"the store of {root}")
        yield belonging
    finally:
        store.close()
