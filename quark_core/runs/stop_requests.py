"""Learns that somebody has asked a run to stop, while it trains."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from quark_core.backends.edits import STOP_SEEN, SupportsEdits
from quark_core.errors import StopRequested
from quark_core.records.json_object import JsonObject
from quark_core.records.runs import StopRequest

if TYPE_CHECKING:
    from quark_core.runs.open_run import OpenRun

_log = logging.getLogger("quark")


class StopLookout:
    """Asks the store of an open run, at each of its heartbeats, whether it shall stop.

    The training thread has no part in it: it reads an attribute. The store may be slow or out of
    reach: it is asked on a thread of its own, one at a time.

    Args:
        run: The run.
    """

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Ask, unless the answer is known or being waited for; returns at once."""
        run = self._run
        reader: object = run.reader
        if run.stop_request is not None or run.is_over or not isinstance(reader, SupportsEdits):
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(
            target=self._ask, args=(reader,), name="quark-stop", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None  # none to spare; the next heartbeat tries again

    def _ask(self, reader: SupportsEdits) -> None:
        run_id = self._run.context.run_id
        try:
            request = None if run_id is None else reader.find_stop(run_id)
        except Exception as error:  # noqa: BLE001 - the next heartbeat asks again
            _log.debug("run %s: nobody can say whether it shall stop: %s", run_id, error)
            return
        if request is not None:
            self._note(request)

    def _note(self, request: StopRequest) -> None:
        run = self._run
        if run.is_over:
            return
        _log.warning("run %s: %s", run.context.run_id, request.describe())
        run.emit_lifecycle("stop_seen", {"id": request.id})
        payload = {
            "message": f"the training knows that {request.describe()}",
            "by": request.by,
            "reason": request.reason,
            "request": request.id,
        }
        run.emit_event(STOP_SEEN, "info", status="running", payload=JsonObject(payload))
        # Said first: the training may end the run as soon as it knows.
        run.stop_request = request
        if run.raises_on_stop:
            text = f"{request.describe()} (this call was not accepted, the next one is)"
            run.halt(StopRequested(text, request))
