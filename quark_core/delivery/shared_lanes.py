"""Mirrors that stay open while several journals are delivered to them."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from quark_core.backends.contract import Backend
from quark_core.delivery.black_box_recovery import OpenLane
from quark_core.delivery.journal_folder import (
    JournalFolder,
    LaneEntry,
    Manifest,
    journal_directory,
)
from quark_core.delivery.lane_files import lane_folder_name
from quark_core.errors import BackendUnavailable, describe_error

_log = logging.getLogger("quark")

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 60.0

# Run and name of a lane.
_Key = tuple[str, str]


class SharedLanes:
    """Opens each mirror of a run once for many journals, since that may take seconds.

    The primary is opened for each. A mirror that only cannot take records now
    stays open; one that fails otherwise is closed, and opened anew for the
    next journal. So is one whose journal another process was at meanwhile, such
    as `quark sync`: what it remembers of the writer is older than its files
    then. For one thread at a time, which holds the lease of the lane.

    Args:
        open_lane: Opens backends.
        rests: Whether a mirror that has failed is not asked again before 1 s
            has passed, then ever later, up to a minute.
    """

    def __init__(self, open_lane: OpenLane, *, rests: bool = False) -> None:
        self._open_lane = open_lane
        self._rests = rests
        self._opened: dict[_Key, tuple[Backend, bool]] = {}
        # How far each open mirror left each writer, and the journal that it is at.
        self._left: dict[tuple[_Key, str], int] = {}
        self._at: tuple[Manifest, LaneEntry] | None = None
        # When each may be asked again, how long that rest is, and what it failed with.
        self._resting: dict[_Key, tuple[float, float, Exception]] = {}

    @property
    def is_open(self) -> bool:
        """Whether there is a mirror to close."""
        return bool(self._opened)

    def open(self, manifest: Manifest, entry: LaneEntry) -> tuple[Backend, bool]:
        """As `OpenLane` says.

        Raises:
            BackendUnavailable: It rests; what it failed with is said again.
        """
        if entry.primary:
            return self._open_lane(manifest, entry)
        key = manifest.run_id, entry.name
        until, _, error = self._resting.get(key, (0.0, 0.0, None))
        if time.monotonic() < until:
            raise BackendUnavailable(str(error), backend=entry.name) from error
        done = _find_done(manifest, entry)
        if self._left.get((key, manifest.writer_id), done) != done:
            self._close(key)
        self._at = manifest, entry
        if key not in self._opened:
            try:
                self._opened[key] = self._open_lane(manifest, entry)
            except Exception as failure:
                self._let_rest(key, failure)
                raise
        return self._opened[key]

    def keep(self, backend: Backend, error: Exception | None) -> bool:
        """Whether a backend stays open; where it does not, its caller closes it.

        Args:
            backend: It, after a journal.
            error: What it failed with; None where it has the journal.
        """
        key = next((key for key, (kept, _) in self._opened.items() if kept is backend), None)
        if key is None or self._at is None:
            return False
        manifest, entry = self._at
        self._left[key, manifest.writer_id] = _find_done(manifest, entry)
        if error is None:
            self._resting.pop(key, None)
            return True
        self._let_rest(key, error)
        if not isinstance(error, BackendUnavailable):
            self._forget(key)
            return False
        return True

    def hurry(self) -> None:
        """Let no mirror rest any longer."""
        self._resting.clear()

    def close(self, *, but_run_id: str | None = None) -> dict[_Key, str]:
        """Close the mirrors, except for those of one run.

        Returns:
            Run and name -> what a mirror could not finish.
        """
        found = {k: self._close(k) for k in list(self._opened) if k[0] != but_run_id}
        return {key: failure for key, failure in found.items() if failure is not None}

    def _close(self, key: _Key) -> str | None:
        backend = self._forget(key)
        try:
            if backend is not None:
                backend.close()
        except Exception as error:  # noqa: BLE001 - the others must still be closed
            _log.warning("backend %s: run %s: %s", key[1], key[0], error)
            return describe_error(error)
        return None

    def _forget(self, key: _Key) -> Backend | None:
        backend, _ = self._opened.pop(key, (None, False))
        self._left = {each: done for each, done in self._left.items() if each[0] != key}
        return backend

    def _let_rest(self, key: _Key, error: Exception) -> None:
        if self._rests:
            _, last_s, _ = self._resting.get(key, (0.0, _FIRST_REST_S / 2, None))
            rest_s = min(2.0 * last_s, _LONGEST_REST_S)
            self._resting[key] = time.monotonic() + rest_s, rest_s, error


def _find_done(manifest: Manifest, entry: LaneEntry) -> int:
    """How far a lane of a journal is, as the disk has it."""
    directory = journal_directory(Path(manifest.run_path), manifest.run_id)
    folder = JournalFolder(directory / lane_folder_name(manifest.writer_id))
    return folder.mark(entry.name).done
