"""Keeps the lease of a trial that has no run yet, whose heartbeats would do it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from quark_core.errors import QuarkError

_log = logging.getLogger("quark")

# Heartbeats of a run come every 10 s, which is too seldom for a shorter lease than this.
_BEATS_HOLD_S = 30.0


class LeaseKeeper:
    """Renews a lease from a thread of its own, from the claim until a run does it.

    Args:
        renew: Renews it once; may raise.
        lease_s: How long it holds.

    Attributes:
        has_run: Whether a run's heartbeats hold the trial, so that a long lease needs no more.
    """

    def __init__(self, renew: Callable[[], None], lease_s: float) -> None:
        self.has_run = False
        self._renew = renew
        self._lease_s = lease_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
        if self._thread is not None or self._ended.is_set():
            return
        self._thread = threading.Thread(target=self._keep, name="quark-lease", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None  # none to spare; the lease holds as long as it holds

    def stop(self) -> None:
        """End; does not wait for a renewal that is on its way."""
        self._ended.set()

    def _keep(self) -> None:
        while not self._ended.wait(self._lease_s / 3):
            if self.has_run and self._lease_s >= _BEATS_HOLD_S:
                continue
            try:
                self._renew()
            except QuarkError as error:
                _log.debug("a lease is not renewed: %s", error)
            except Exception:  # noqa: BLE001 - the store may be closing
                _log.debug("a lease is not renewed", exc_info=True)
