"""The edits that the page offers: of runs, stop requests and sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from quark.page.routes.page_source import check_known_form
from quark.page.routes.sweeps import NoSuchSweep, is_sweep_id
from quark_core.backends.edits import RunEdit, check_edit, check_reason
from quark_core.errors import SchemaValidationError
from quark_core.records.sweeps import SweepState
from quark_core.runs.run_editing import mirror_newest_edit, open_editor

if TYPE_CHECKING:
    from quark_core.backends.run_summary import StoredRun
    from quark_core.records.runs import StopRequest
    from quark_core.records.sweeps import StoredSweep

Body = TypeVar("Body")


class PageEditor(Protocol):
    """Changes runs; from any thread. As `SupportsEdits` has it."""

    def edit_run(self, run_id: str, edit: RunEdit, *, by: str) -> StoredRun:
        """Change what is said of a run; returns it as it is then."""

    def request_stop(self, run_id: str, *, by: str, reason: str | None = None) -> StopRequest:
        """Ask the newest attempt of a run to stop; returns the request that stands."""

    def update_sweep(self, sweep_id: str, state: SweepState, *, by: str) -> StoredSweep:
        """Pause, go on with or cancel a sweep; returns it as it is then."""


class RootEditor:
    """Changes runs of the store of a storage root.

    Args:
        storage_dir: The root.
    """

    def __init__(self, storage_dir: Path) -> None:
        self._root = storage_dir

    def edit_run(self, run_id: str, edit: RunEdit, *, by: str) -> StoredRun:
        """See `PageEditor`."""
        with open_editor(self._root, run_id, "edits") as editor:
            stored = editor.edit_run(run_id, edit, by=by)
            # Whoever looks at the page does not wait for it.
            mirror_newest_edit(editor, run_id, self._root, stored.project.name, 0.0)
            return stored

    def request_stop(self, run_id: str, *, by: str, reason: str | None = None) -> StopRequest:
        """See `PageEditor`."""
        with open_editor(self._root, run_id, "requests to stop") as editor:
            return editor.request_stop(run_id, by=by, reason=reason)

    def update_sweep(self, sweep_id: str, state: SweepState, *, by: str) -> StoredSweep:
        """See `PageEditor`."""
        from quark.sweeps.sweep_store import StoreLink

        link = StoreLink(self._root)
        try:
            return link.store.update_sweep(sweep_id, state, by=by)
        finally:
            link.close()


class _SweepBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state: SweepState


class _StopBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reason: str | None = None


class _EditBody(RunEdit, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


def change_run(editor: PageEditor, run_id: str, body: bytes, by: str) -> dict[str, Any]:
    """Edit a run as the page asks.

    Args:
        editor: Does it.
        run_id: The run.
        body: A `RunEdit` as JSON.
        by: Who asks.

    Raises:
        SchemaValidationError: A bad value, or nothing to change.
        RunNotFoundError: There is no such run.
        SessionStoreError: The store cannot be written, or keeps no edits.
    """
    asked = _decode(body, _EditBody)
    edit = RunEdit(**{name: getattr(asked, name) for name in RunEdit.__struct_fields__})
    checked = check_known_form(run_id)
    return {"run": describe_edited(editor.edit_run(checked, check_edit(edit), by=by))}


def ask_to_stop(editor: PageEditor, run_id: str, body: bytes, by: str) -> dict[str, Any]:
    """Ask a run to stop as the page asks; arguments and errors as `change_run`.

    Raises:
        InvalidRunStateError: Nobody is there who could stop.
    """
    reason = check_reason(_decode(body, _StopBody).reason)
    stop = editor.request_stop(check_known_form(run_id), by=by, reason=reason)
    return {"run": {"stop": _describe_stop(stop)}}


def change_sweep(editor: PageEditor, sweep_id: str, body: bytes, by: str) -> dict[str, Any]:
    """Pause a sweep, go on with it or cancel it, as the page asks; arguments as `change_run`.

    Raises:
        NoSuchSweep: There is no such sweep.
        SchemaValidationError: No such state, or it is cancelled and shall go on.
        SessionStoreError: The store cannot be written, or has no sweeps.
    """
    state = _decode(body, _SweepBody).state
    if not is_sweep_id(sweep_id):
        raise NoSuchSweep(f"the sweep {sweep_id!r:.120} does not exist")
    sweep = editor.update_sweep(sweep_id, state, by=by)
    return {"sweep": {"state": sweep.state, "counts": dict(sweep.counts)}}


def describe_edited(stored: StoredRun) -> dict[str, Any]:
    """What people may have changed of a run."""
    run = stored.run
    return {
        "name": run.name,
        "notes": run.notes,
        "tags": list(run.tags),
        "archived_at": run.archived_at,
        "stop": None if stored.stop is None else _describe_stop(stored.stop),
    }


def _describe_stop(stop: StopRequest) -> dict[str, Any]:
    return {"by": stop.by, "at": stop.at, "reason": stop.reason, "seen_at": stop.seen_at}


def _decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise SchemaValidationError(f"the request cannot be read: {error}") from None
