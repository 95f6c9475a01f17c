"""Edits runs that nobody here has open, and asks them to stop."""

from __future__ import annotations

import getpass
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from quark_core.backends.edits import RunEdit, SupportsEdits, check_edit, check_reason
from quark_core.backends.registry import default_registry
from quark_core.config import settings
from quark_core.config.arguments import check_label, check_run_id, check_tags, resolve_storage_dir
from quark_core.config.belonging import check_field_names, check_fields, check_groups
from quark_core.errors import SchemaValidationError, SessionStoreError, StoreUnauthorizedError
from quark_core.records import RunRecord
from quark_core.records.runs import RunContext, StopRequest
from quark_core.runs.backend_choice import choose_primary, open_primary, open_reader
from quark_core.runs.mirrored_edits import mirror_newest_edit
from quark_core.runs.run_ids import find_run_id


def edit_run(
    run: object,
    *,
    name: str | None = None,
    notes: str | None = None,
    add_tags: Iterable[str] | None = None,
    remove_tags: Iterable[str] | None = None,
    archived: bool | None = None,
    add_groups: str | Iterable[str] | None = None,
    remove_groups: str | Iterable[str] | None = None,
    fields: Mapping[str, Any] | None = None,
    remove_fields: Iterable[str] | None = None,
    storage_dir: str | Path | None = None,
) -> RunRecord:
    """Change what is said of a run, while it trains or after its end.

    Who changed what, when, and what was before is an event of the run (`run_edited`). Of two
    edits at once the last one counts, and both are in the events. The run's mirrors are told:
    by its own process while it is open, else within QUARK_EXIT_TIMEOUT_SECONDS (10), or later
    by `quark sync`.

    Args:
        run: Its id or the beginning of it, or a session or context of it.
        name, notes: The new ones; an empty text takes them away, None leaves them.
        add_tags, remove_tags: Tags; one that is there already, or is not there, is no mistake.
        archived: True leaves the run out of searches and lists that do not ask for archived
            runs; everything of it stays, and can be read. False takes it back.
        add_groups, remove_groups: Paths of groups, such as "paper/fig3", one or several.
        fields: Fields to note, by name, as `session.annotate` does.
        remove_fields: Names of fields to take away.
        storage_dir: Storage root; the working directory by default.

    Returns:
        The run as it is then.

    Raises:
        SchemaValidationError: A bad argument, or nothing to change.
        RunNotFoundError: There is no such run, or it is in the trash.
        SessionStoreError: The store cannot be written, or keeps no edits; of a service too
            where the key lacks the scope write.
    """
    run_id, root = _find_target(run, storage_dir)
    edit = check_edit(
        RunEdit(
            name=name,
            notes=notes,
            add_tags=check_tags(add_tags),
            remove_tags=check_tags(remove_tags),
            archived=archived,
            add_groups=check_groups(add_groups, "add_groups"),
            remove_groups=check_groups(remove_groups, "remove_groups"),
            set_fields={} if fields is None else dict(check_fields(fields)),
            remove_fields=check_field_names(remove_fields, "remove_fields"),
        )
    )
    with open_editor(root, run_id, "edits") as editor:
        stored = editor.edit_run(run_id, edit, by=find_user())
        mirror_newest_edit(editor, run_id, root, stored.project.name, settings.exit_timeout_s())
        return stored.run


def stop_run(
    run: object, *, reason: str | None = None, storage_dir: str | Path | None = None
) -> StopRequest:
    """Ask the newest attempt of a run to stop, wherever it trains.

    The training knows within a heartbeat (10 s): its `session.stop_requested` is set, and
    what it does then is its own affair. Who asked and why is an event of the run
    (`stop_requested`), and so is that the training knows (`stop_seen`). It ends no process.

    Args:
        run: Its id or the beginning of it, or a session or context of it.
        reason: Why, for people.
        storage_dir: Storage root; the working directory by default.

    Returns:
        The request that stands then: this one, or that of who has asked before.

    Raises:
        SchemaValidationError: A bad argument.
        RunNotFoundError: There is no such run, or it is in the trash.
        InvalidRunStateError: It has ended, or is lost: nobody is there who could stop.
        SessionStoreError: As `edit_run`.
    """
    run_id, root = _find_target(run, storage_dir)
    checked = check_reason(reason)
    with open_editor(root, run_id, "requests to stop") as editor:
        return editor.request_stop(run_id, by=find_user(), reason=checked)


def _find_target(run: object, storage_dir: str | Path | None) -> tuple[str, Path]:
    """The id and the storage root that are meant.

    Raises:
        SchemaValidationError: `run` is none.
    """
    context = run if isinstance(run, RunContext) else getattr(run, "context", None)
    if not isinstance(context, RunContext):
        root = resolve_storage_dir(storage_dir)
        return _find_id(root, check_run_id(run, "run")), root
    if context.run_id is None:
        raise SchemaValidationError("run: this rank does not know the id of its run")
    return context.run_id, context.storage_dir if storage_dir is None else resolve_storage_dir(
        storage_dir
    )


@contextmanager
def open_editor(root: Path, run_id: str, what: str) -> Iterator[SupportsEdits]:
    """The primary store of a storage root, to be edited.

    Args:
        root: The storage root.
        run_id: The run that is meant.
        what: What is to be made, for messages.

    Raises:
        RunNotFoundError: It has no such run.
        SessionStoreError: There is none, it cannot be opened, or it keeps no edits.
    """
    choice = choose_primary(default_registry())
    if not choice.definition.remote:
        # Looked up before anything is opened for writing: a wrong root must leave no store.
        _find_id(root, run_id)
    primary = open_primary(choice, replace(choice.configure(root), removes=True))
    try:
        editor: object = primary
        if not isinstance(editor, SupportsEdits):
            raise SessionStoreError(
                f"run {run_id}: the store ({choice.definition.name}) keeps no {what}"
            )
        yield editor
    finally:
        primary.close()


def _find_id(root: Path, given: str) -> str:
    """The id of the run of a storage root that a text means; see `run_ids`."""
    reader = open_reader(root)
    try:
        return find_run_id(reader, given)
    except StoreUnauthorizedError:
        # A key that may write need not be one that may read: then the whole id must be given.
        return given
    finally:
        reader.close()


def find_user() -> str:
    """`user@host`, as this machine knows it."""
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = "unknown"  # a process without an entry in the system's list of users
    return check_label(f"{user}@{platform.node() or 'unknown'}"[:250], "user")
