"""A backend that does what a script tells it: succeed, fail, refuse, exit, hang."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Literal

from quark_core.backends.contract import (
    Backend,
    BackendConfig,
    BackendDefinition,
    Batch,
    Capability,
)
from quark_core.errors import (
    BackendOutcomeUnknown,
    BackendRejected,
    BackendUnauthorized,
    BackendUnavailable,
    BackendUnusable,
)

Fault = Literal[
    "ok",
    "unavailable",
    "unauthorized",
    "unusable",
    "unknown",
    "lost_reply",
    "rejected",
    "bug",
    "exit",
    "hang",
]


class ScriptedBackend:
    """Keeps batches in memory and follows a script, one entry per call of `write`.

    Where the script is at its end every write succeeds. "lost_reply" stores
    the batch and then raises; "hang" waits until `release` is set.

    Attributes:
        stored: The batches it has, in order; one that comes twice is there once.
        calls: How often `write` was called.
        closed: Whether `close` was called.
        release: Ends every hang.
    """

    def __init__(self, script: Iterable[Fault] = (), *, always: Fault = "ok") -> None:
        self._script = iter(script)
        self._always = always
        self.stored: list[Batch] = []
        self.calls = 0
        self.closed = False
        self.release = threading.Event()

    def write(self, batch: Batch) -> None:
        """Do what the script says next."""
        self.calls += 1
        fault = next(self._script, self._always)
        if fault == "unavailable":
            raise BackendUnavailable("planted outage")
        if fault == "unauthorized":
            raise BackendUnauthorized("planted refusal of the credentials")
        if fault == "unusable":
            raise BackendUnusable("planted lack of a package")
        if fault == "unknown":
            raise BackendOutcomeUnknown("planted end of its process")
        if fault == "rejected":
            raise BackendRejected("planted refusal")
        if fault == "bug":
            raise ZeroDivisionError("planted bug")
        if fault == "exit":
            sys.exit(3)
        if fault == "hang":
            self.release.wait()
        known = {(one.writer_id, one.number) for one in self.stored}
        if (batch.writer_id, batch.number) not in known:
            self.stored.append(batch)
        if fault == "lost_reply":
            raise BackendUnavailable("planted loss of the reply")

    def close(self) -> None:
        """Note that it was called."""
        self.closed = True

    @property
    def count_records(self) -> int:
        """How many records are stored."""
        return sum(batch.count for batch in self.stored)


def define_scripted(name: str, backend: Backend, *, idempotent: bool = True) -> BackendDefinition:
    """A definition that opens this one backend, whatever it is opened with."""

    def open_it(_config: BackendConfig) -> Backend:
        return backend

    return BackendDefinition(
        name=name,
        summary="does what a script says",
        open=open_it,
        capabilities=frozenset({Capability.IDEMPOTENT} if idempotent else ()),
        own_process=False,
    )
