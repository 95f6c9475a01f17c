"""The store of a sweep, opened where it is needed first and closed at the end."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from quark_core.backends.contract import SupportsPrimary
from quark_core.backends.coordination import SupportsCoordination, refuse_coordination
from quark_core.backends.registry import default_registry
from quark_core.errors import QuarkError, SessionStoreError, StoreUnauthorizedError
from quark_core.runs.backend_choice import choose_primary, open_primary

T = TypeVar("T")

_log = logging.getLogger("quark")

_PATIENCE_S = 600.0
_LONGEST_PAUSE_S = 10.0

_links: weakref.WeakSet[StoreLink] = weakref.WeakSet()
# What a forked child has of its parent's: kept, so that nothing of it is ever closed.
_parents: list[object] = []


class StoreLink:
    """The primary store of a storage root, for calls of any thread.

    Args:
        storage_dir: The storage root.
        read_only: Whether no store is to be made where there is none.
    """

    def __init__(self, storage_dir: Path, *, read_only: bool = False) -> None:
        self.storage_dir = storage_dir
        self._read_only = read_only
        self._lock = threading.Lock()
        self._store: SupportsPrimary | None = None
        self._when_dropped: weakref.finalize[..., StoreLink] | None = None
        self.is_forked = False
        _links.add(self)

    @property
    def store(self) -> SupportsCoordination:
        """The store, open.

        Raises:
            SessionStoreError: It cannot be opened, or gives no trials to workers.
        """
        found: Any = self.primary
        return found  # type: ignore[no-any-return]

    @property
    def primary(self) -> SupportsPrimary:
        """The same, as a store of runs."""
        if self.is_forked:
            raise SessionStoreError(
                "a forked process cannot use its parent's sweep. Call quark.sweep(name) here"
            )
        with self._lock:
            if self._store is None:
                self._store = self._open()
                # Nobody need close a sweep that is let go of.
                self._when_dropped = weakref.finalize(self, _close_quietly, self._store)
                self._when_dropped.atexit = False
            return self._store

    def close(self) -> None:
        """Close the store; the next call opens it again."""
        with self._lock:
            store, self._store = self._store, None
            if self._when_dropped is not None:
                self._when_dropped.detach()
        if store is not None and not self.is_forked:
            store.close()

    def insist(self, call: Callable[[SupportsCoordination], T], what: str) -> T:
        """Call the store again and again while it is out of reach, for ten minutes at most.

        Args:
            call: What is asked; it must do nothing twice.
            what: What it is, for messages.

        Raises:
            SessionStoreError: It is still out of reach, or refuses our credentials.
        """
        deadline = time.monotonic() + _PATIENCE_S
        pause_s = 0.2
        while True:
            try:
                return call(self.store)
            except StoreUnauthorizedError:
                raise
            except SessionStoreError as error:
                if self.is_forked or time.monotonic() > deadline:
                    raise
                if pause_s == 0.2:
                    _log.warning("%s: the store does not answer (%s); trying again", what, error)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)

    def _open(self) -> SupportsPrimary:
        choice = choose_primary(default_registry())
        config = choice.configure(self.storage_dir)
        config = replace(config, read_only=True) if self._read_only else config
        store: object = open_primary(choice, config)
        if not isinstance(store, SupportsCoordination):
            store.close()  # type: ignore[attr-defined]
            raise refuse_coordination(f"the store of {self.storage_dir}")
        return store  # type: ignore[return-value]

    def become_child(self) -> None:
        """Leave the parent's store alone: this process was forked."""
        _parents.append(self._store)
        self._store = None
        if self._when_dropped is not None:
            self._when_dropped.detach()
        self._lock = threading.Lock()
        self.is_forked = True


def close_links() -> None:
    """Close what is open still, as the process ends."""
    for link in list(_links):
        _close_quietly(link)


def _close_quietly(opened: Any) -> None:
    try:
        opened.close()
    except QuarkError as error:
        _log.debug("the store of a sweep could not be closed: %s", error)


def _become_child() -> None:
    for link in list(_links):
        link.become_child()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_become_child)
