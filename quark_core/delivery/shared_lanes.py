"""Mirrors that stay open while several journals are delivered to them."""

from __future__ import annotations

import logging
import time

from quark_core.backend import Backend
from quark_core.delivery.journal_folder import LaneEntry, Manifest
from quark_core.delivery.sync import OpenLane
from quark_core.errors import BackendUnavailable

__all__ = ["SharedLanes"]

_log = logging.getLogger("quark")

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 60.0

# Run and name of a lane.
_Key = tuple[str, str]


class SharedLanes:
    """Opens each mirror of a run once for many journals, since that may take seconds.

    The primary is opened for each. A mirror that only cannot take records now
    stays open; one that fails otherwise is closed, and opened anew for the
    next journal. For one thread at a time.

    Args:
        open_lane: Opens backends.
        rests: Whether a mirror that has failed is not asked again before 1 s
            has passed, then ever later, up to a minute.
    """

    def __init__(self, open_lane: OpenLane, *, rests: bool = False) -> None:
        self._open_lane = open_lane
        self._rests = rests
        self._opened: dict[_Key, tuple[Backend, bool]] = {}
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
        if key is None:
            return False
        if error is None:
            self._resting.pop(key, None)
            return True
        self._let_rest(key, error)
        if isinstance(error, BackendUnavailable):
            return True
        del self._opened[key]
        return False

    def hurry(self) -> None:
        """Let no mirror rest any longer."""
        self._resting.clear()

    def close(self, *, but_run_id: str | None = None) -> dict[_Key, str]:
        """Close the mirrors, except for those of one run.

        Returns:
            Run and name -> what a mirror could not finish.
        """
        failures = {}
        for key in [key for key in self._opened if key[0] != but_run_id]:
            backend, _ = self._opened.pop(key)
            try:
                backend.close()
            except Exception as error:  # noqa: BLE001 - the others must still be closed
                _log.warning("backend %s: run %s: %s", key[1], key[0], error)
                failures[key] = f"{type(error).__name__}: {error}"
        return failures

    def _let_rest(self, key: _Key, error: Exception) -> None:
        if self._rests:
            _, last_s, _ = self._resting.get(key, (0.0, _FIRST_REST_S / 2, None))
            rest_s = min(2.0 * last_s, _LONGEST_REST_S)
            self._resting[key] = time.monotonic() + rest_s, rest_s, error
