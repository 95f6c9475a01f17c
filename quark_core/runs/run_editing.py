"""Edits runs that are not open in this process, and asks them to stop."""

from __future__ import annotations

import getpass
import logging
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from quark_core.backends.contract import Batch, SupportsRead, SupportsReplay
from quark_core.backends.coordination import SupportsCoordination, refuse_coordination
from quark_core.backends.edits import (
    EDIT_WRITER,
    RUN_EDITED,
    RunEdit,
    SupportsEdits,
    check_edit,
    check_reason,
)
from quark_core.backends.registry import default_registry
from quark_core.config import settings
from quark_core.config.arguments import (
    check_field_names,
    check_fields,
    check_groups,
    check_label,
    check_run_id,
    check_tags,
    resolve_storage_dir,
)
from quark_core.delivery.journal import journal_outputs
from quark_core.delivery.journal_folder import journal_directory
from quark_core.errors import SchemaValidationError, SessionStoreError, StoreUnauthorizedError
from quark_core.records import EventRecord, RunRecord
from quark_core.records.query import Query
from quark_core.records.runs import RunContext, StopRequest
from quark_core.runs.backend_choice import (
    choose_primary,
    find_local_path,
    open_lane,
    open_primary,
    open_reader,
)
from quark_core.runs.output_delivery import deliver_outputs, list_remembered_lanes
from quark_core.runs.run_ids import find_run_id
from quark_core.system.folders import describe_link, find_foreign_link

_log = logging.getLogger("quark")
_MAX_BATCHES = 16


def mirror_newest_edit(
    primary: object, run_id: str, storage_dir: Path, project: str, timeout_s: float
) -> None:
    """Journal the newest edit of a run for the mirrors that its processes have written to.

    Of a run that is open, its own process delivers it. Of one that has ended, this waits as
    long as it may, and what waits longer is delivered by `quark sync`. Never raises: the
    primary has the edit.

    Args:
        primary: The run's store.
        run_id: The run.
        storage_dir: The storage root.
        project: Name of the run's project.
        timeout_s: How long to wait; with 0 it goes on behind the caller's back.
    """
    try:
        run_path = find_local_path(primary, storage_dir, run_id)
        lanes = tuple(
            entry for entry in list_remembered_lanes(run_path, run_id) if not entry.primary
        )
        batches = _find_newest(primary, run_id) if lanes else []
        if not batches:
            return
        link = find_foreign_link(run_path)
        if link is not None:
            raise SessionStoreError(describe_link(link))
        directory = journal_directory(run_path, run_id)
        journal_outputs(
            directory, batches, lanes, project=project, storage_dir=storage_dir, run_path=run_path
        )
        reason = deliver_outputs(directory, open_lane, timeout_s)
        if reason is not None and timeout_s > 0.0:
            _log.warning(
                "run %s: the edit is stored, but waits for the run's mirrors (%s). To deliver "
                "it, run: quark sync %s",
                run_id,
                reason,
                storage_dir,
            )
    except Exception as error:  # noqa: BLE001 - a mirror must not fail an edit
        _log.warning(
            "run %s: the edit cannot be delivered to the run's mirrors (%s). When that is "
            "fixed, run: quark mirror replay %s",
            run_id,
            error,
            run_id,
        )


def _find_newest(primary: object, run_id: str) -> list[Batch]:
    """The batches of the newest edit, as the store has them."""
    if not isinstance(primary, SupportsRead) or not isinstance(primary, SupportsReplay):
        return []
    found = primary.read(run_id, EventRecord.KIND, Query(equals={"event_type": RUN_EDITED}))
    writers = {str(writer) for writer in found["writer_id"].tolist()}
    edits = [writer for writer in writers if writer.startswith(EDIT_WRITER)]
    # Their ids begin with the moment.
    return primary.read_batches(run_id, max(edits), 0, _MAX_BATCHES) if edits else []


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
    """Edit the name, notes, tags, groups, fields or archive state of a run.

    Works during training and after the end of a run. Each edit is logged to the run as a
    `run_edited` event with author, time and old values. If two edits overlap, the last one wins.
    Mirrors are updated by the process of an open run, else within QUARK_EXIT_TIMEOUT_SECONDS (10),
    or later by `quark sync`.

    Args:
        run: A run ID or unique prefix, a session or a context.
        name, notes: New values. An empty string removes the value; None keeps it.
        add_tags, remove_tags: Tags. Existing or missing ones are ignored.
        archived: True archives the run: searches omit it unless they include archived runs. Its
            data stays readable. False reverses this.
        add_groups, remove_groups: One or several group paths, such as "paper/fig3".
        fields: Custom fields to set, as in `session.annotate`.
        remove_fields: Names of fields to remove.
        storage_dir: Folder of the `.quark` store. Defaults to the working directory, or the nearest
            parent that has a store.

    Returns:
        The run after the edit.

    Raises:
        SchemaValidationError: An argument is invalid, or nothing is to change.
        RunNotFoundError: The run does not exist, or is in the trash.
        SessionStoreError: The store cannot be written, does not support edits, or the key of the
            Quark server lacks the scope write.
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
    """Ask a running run to stop, from any process.

    The training process is notified at its next heartbeat (10 s): `session.stop_requested` is set,
    and the script decides how to stop. No process is killed. The request and its receipt are logged
    to the run as `stop_requested` and `stop_seen`.

    Args:
        run: A run ID or unique prefix, a session or a context.
        reason: Reason, or None.
        storage_dir: Folder of the `.quark` store. Defaults to the working directory, or the nearest
            parent that has a store.

    Returns:
        The active request. If a request exists already, the earlier one.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
        RunNotFoundError: The run does not exist, or is in the trash.
        InvalidRunStateError: The run has ended or is lost.
        SessionStoreError: The store cannot be written, or the key of the Quark server lacks the
            scope write.
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
        raise SchemaValidationError("run: this rank does not know the ID of its run")
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
                f"run {run_id}: the store ({choice.definition.name}) does not support {what}"
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


def exchange_run_field(context: RunContext, field: str, expect: Any, value: Any) -> bool:
    """Set a field of a run where it has a value; whether it had it.

    Raises:
        SchemaValidationError: A bad name or value, or a rank that does not know its run.
        RunNotFoundError: The store has no such run, or has it in the trash.
        SessionStoreError: The store cannot be written, or can compare nothing.
    """
    if context.run_id is None:
        raise SchemaValidationError("run: this rank does not know the ID of its run")
    with _open(context.storage_dir) as store:
        return store.compare_and_set(context.run_id, field, expect, value, by=find_user())


def exchange_group_field(
    root: Path, project: str, path: str, field: str, expect: Any, value: Any
) -> bool:
    """As `exchange_run_field`, of a group, or of the project where `path` is empty.

    Raises:
        SchemaValidationError: A bad name or value, or no such project.
        SessionStoreError: The store cannot be written, or can compare nothing.
    """
    with _open(root) as store:
        return store.compare_and_set_group(project, path, field, expect, value, by=find_user())


@contextmanager
def _open(root: Path) -> Iterator[SupportsCoordination]:
    # Opened for reading first: a wrong root must leave no store.
    open_reader(root, takes_over=False).close()
    choice = choose_primary(default_registry())
    primary = open_primary(choice, replace(choice.configure(root), removes=True))
    try:
        store: object = primary
        if not isinstance(store, SupportsCoordination):
            raise refuse_coordination(f"the store of {root} ({choice.definition.name})")
        yield store
    finally:
        primary.close()
