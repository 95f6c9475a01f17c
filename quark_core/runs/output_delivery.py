"""Delivers what analyzers found to a run's mirrors: while it is open, or after its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from quark_core.backends.contract import Backend
from quark_core.delivery.crash_buffer_recovery import OpenLane
from quark_core.delivery.delivery_state import lane_folder_name, read_lines
from quark_core.delivery.journal import split_generation
from quark_core.delivery.journal_folder import (
    JournalFolder,
    LaneEntry,
    Manifest,
    journal_directory,
)
from quark_core.delivery.sending import order_journals
from quark_core.delivery.sync import SharedLanes, SyncLog, sync_folder
from quark_core.errors import BackendUnavailable
from quark_core.system.process import start_thread

_log = logging.getLogger("quark")

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


class OutputDelivery:
    """Delivers, from a run's own process, the outputs of its analyzers.

    Called from the delivery thread and, at the run's end, from the thread that
    ends it; the work is done on a thread of its own. What a mirror does not
    take is tried again after 1 s, then ever later, up to every minute. A mirror
    that has nothing of the run itself yet is given nothing.

    Args:
        directory: Where the run's journals lie.
        writer_id: The process's own writer, whose journal has the run's start.
        open_lane: Opens backends.
    """

    def __init__(self, directory: Path, writer_id: str, open_lane: OpenLane) -> None:
        self._directory = directory
        self._own_journal = JournalFolder(directory / lane_folder_name(writer_id))
        self._open_lane = open_lane
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted: set[str] = set()
        self._log = SyncLog()
        self._hurried: set[str] = set()
        # When each is tried again, and how long that wait was.
        self._waits: dict[str, tuple[float, float]] = {}

    def poll(self, names: Iterable[str]) -> None:
        """Begin to deliver those outputs that are due, where none are being delivered.

        Args:
            names: Of the folders among the run's journals.
        """
        found = _choose_outputs(names)
        if not found:
            return
        now = time.monotonic()
        with self._lock:
            if self._thread is None:
                due = {name for name in found if self._waits.get(name, (now, 0.0))[0] <= now}
                self._begin(due)

    def hurry(self, names: Iterable[str]) -> None:
        """Try all outputs once more, whatever they wait for; a second call tries what is new."""
        found = _choose_outputs(names) - self._hurried
        self._hurried |= found
        with self._lock:
            self._begin(found)

    def join(self, timeout_s: float) -> None:
        """Wait for what is under way."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def finish(self, list_names: Callable[[], Iterable[str]], timeout_s: float) -> int:
        """Try once more what is left; how many generations are left after that.

        Args:
            list_names: Names the folders among the run's journals.
            timeout_s: How long to wait; with none left, nothing is tried.
        """
        left = _choose_outputs(list_names())
        if left and timeout_s > 0.0:
            with self._lock:
                self._begin(left)
            self.join(timeout_s)
            left = _choose_outputs(list_names())
        return len(left)

    def _begin(self, names: set[str]) -> None:
        """Have the thread do it, the one at work or a new one; the lock is held."""
        self._wanted |= names
        if not self._wanted or self._thread is not None:
            return
        self._thread = start_thread(self._run, name="quark-outputs")

    def _run(self) -> None:
        """The thread."""
        while True:
            with self._lock:
                names, self._wanted = self._wanted, set()
                if not names:
                    self._thread = None
                    return
            self._deliver(names)

    def _deliver(self, names: set[str]) -> None:
        lanes = SharedLanes(self._open_after_run)
        for folder, manifest in order_journals(JournalFolder(self._directory / n) for n in names):
            name = folder.path.name
            try:
                results = sync_folder(folder, manifest, lanes.open, keep_lane=lanes.keep)
                self._log.note(_describe(manifest), results)
            except Exception:  # noqa: BLE001 - this must not reach the run
                _log.exception("the journal %s could not be delivered", folder.path)
            if not folder.path.exists():
                self._waits.pop(name, None)
                continue
            wait_s = min(2.0 * self._waits.get(name, (0.0, _FIRST_WAIT_S / 2))[1], _LONGEST_WAIT_S)
            self._waits[name] = (time.monotonic() + wait_s, wait_s)
        lanes.close()

    def _open_after_run(self, manifest: Manifest, entry: LaneEntry) -> tuple[Backend, bool]:
        """As `OpenLane` says, for a lane that the run itself has begun to go through."""
        if self._own_journal.path.exists() and self._own_journal.mark(entry.name).done == 0:
            raise BackendUnavailable("the records of the run come first", backend=entry.name)
        return self._open_lane(manifest, entry)


def find_owner(directory: Path) -> Manifest | None:
    """What a living process that has a run open says of its journal; None where none has.

    Args:
        directory: Where the run's journals lie.
    """
    for folder, manifest in _find_journals(directory):
        if not manifest.generation and folder.is_written(manifest):
            return manifest
    return None


def deliver_outputs(directory: Path, open_lane: OpenLane, timeout_s: float) -> str | None:
    """Deliver the outputs that wait among the journals of a run that has ended.

    Nothing is done where the run is open: its own process does it. Where
    records of the run itself wait, the outputs wait with them, since a mirror
    must have the run first.

    Args:
        directory: Where the run's journals lie.
        open_lane: Opens backends.
        timeout_s: How long to wait; what is under way goes on.

    Returns:
        Why something still waits that nobody is at; None where nothing does.
    """
    found = _find_journals(directory)
    outputs = order_journals(folder for folder, manifest in found if manifest.generation)
    if not outputs or find_owner(directory) is not None:
        return None
    if len(outputs) < len(found):
        return "records of the run wait too, and come first"
    reasons: list[str] = []
    thread = start_thread(_deliver_all, args=(outputs, open_lane, reasons), name="quark-outputs")
    if thread is None:
        return "no thread can be started"
    thread.join(timeout_s)
    if not thread.is_alive() and not any(folder.path.exists() for folder, _ in outputs):
        return None
    return "; ".join(dict.fromkeys(reasons)) or f"that took longer than {timeout_s:g} s"


def list_remembered_lanes(run_path: Path, run_id: str) -> tuple[LaneEntry, ...]:
    """The lanes of a run's processes, those that are through and those that are not.

    Args:
        run_path: The run's directory on this machine, where its ledger and journals lie.
        run_id: The run.
    """
    found: dict[str, LaneEntry] = {}
    for line in read_lines(run_path):
        if not line.begun:
            entry = LaneEntry(line.lane, line.specification, line.primary)
            found.setdefault(line.specification, entry)
    try:
        paths = sorted(journal_directory(run_path, run_id).iterdir())
    except OSError:
        paths = []
    for path in paths:
        manifest = JournalFolder(path).read_manifest()
        for entry in () if manifest is None else manifest.lanes:
            found.setdefault(entry.specification, entry)
    return tuple(found.values())


def _choose_outputs(names: Iterable[str]) -> set[str]:
    return {name for name in names if split_generation(name) is not None}


def _find_journals(directory: Path) -> list[tuple[JournalFolder, Manifest]]:
    try:
        folders = [JournalFolder(path) for path in directory.iterdir() if path.is_dir()]
    except OSError:
        return []
    found = [(folder, folder.read_manifest()) for folder in folders]
    return [(folder, manifest) for folder, manifest in found if manifest is not None]


def _deliver_all(
    outputs: list[tuple[JournalFolder, Manifest]], open_lane: OpenLane, reasons: list[str]
) -> None:
    lanes, log = SharedLanes(open_lane), SyncLog()
    try:
        for folder, manifest in outputs:
            results = sync_folder(folder, manifest, lanes.open, keep_lane=lanes.keep)
            log.note(_describe(manifest), results)
            reasons += [f"{each.backend}: {each.reason}" for each in results if each.reason]
    except Exception as error:  # noqa: BLE001 - it is told as a reason
        _log.exception("outputs of analyzers could not be delivered")
        reasons.append(str(error))
    finally:
        lanes.close()


def _describe(manifest: Manifest) -> str:
    return f"outputs {manifest.writer_id} of run {manifest.run_id}"
