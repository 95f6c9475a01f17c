"""Passes what people change of a run on to its mirrors, once the primary has it."""

from __future__ import annotations

import logging
from pathlib import Path

from quark_core.backends.contract import Batch, SupportsRead, SupportsReplay
from quark_core.backends.edits import EDIT_WRITER, RUN_EDITED
from quark_core.delivery.generation_journal import journal_outputs
from quark_core.delivery.journal_folder import journal_directory
from quark_core.errors import SessionStoreError
from quark_core.records import EventRecord
from quark_core.records.query import Query
from quark_core.runs.backend_choice import find_local_path, open_lane
from quark_core.runs.output_delivery import deliver_outputs, list_remembered_lanes
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
                "run %s: the edit is stored, but waits for the run's mirrors (%s); "
                "deliver it with: quark sync %s",
                run_id,
                reason,
                storage_dir,
            )
    except Exception as error:  # noqa: BLE001 - a mirror must not fail an edit
        _log.warning(
            "run %s: the edit does not reach the run's mirrors (%s); once that is mended: "
            "quark mirror replay %s",
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
