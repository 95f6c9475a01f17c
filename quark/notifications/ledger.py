"""Which notices were told, so that none is told twice, whatever dies in between."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Protocol

from quark_core.system.folders import read_plain_file

_MAX_BYTES = 4 * 1024 * 1024


class Ledger(Protocol):
    """Notes of what was told."""

    def note(self, key: str) -> bool:
        """Note that this is told now; False where it was noted before, by whomever.

        It is noted before it is sent: who dies in between tells it never, rather than twice.
        A ledger that cannot be written says True, and the notice is told.
        """


class FileLedger:
    """Notes in a file, a line of JSON each; from any thread.

    Args:
        path: The file; its folder is made where needed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: set[str] | None = None
        self._lock = threading.Lock()

    def note(self, key: str) -> bool:
        """See `Ledger`."""
        with self._lock:
            if self._known is None:
                self._known = self._load()
            if key in self._known:
                return False
            self._known.add(key)
            self._keep(key)
        return True

    def take_up(self, keys: set[str]) -> None:
        """Take what another machine has noted for known."""
        with self._lock:
            self._known = (self._known if self._known is not None else self._load()) | keys

    def _load(self) -> set[str]:
        try:
            lines = read_plain_file(self._path)[:_MAX_BYTES].splitlines()
        except OSError:
            return set()
        found = set()
        for line in lines:
            try:
                key = json.loads(line)
            except ValueError:
                continue  # the last line of a process that was killed
            if isinstance(key, str):
                found.add(key)
        return found

    def _keep(self, key: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, flags, 0o600)
            try:
                # Begins with the end of a line, which a line that was cut off has not.
                os.write(descriptor, b"\n" + json.dumps(key).encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError:
            pass  # for this process it is known in any case
