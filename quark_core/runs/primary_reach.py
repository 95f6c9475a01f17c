"""The primary while a run begins: asked within a bound, or gone without.

All that a start asks of a primary across a network ends with one deadline,
whatever the network does. What becomes of a start whose primary is out of
reach then:

    a new run                          raises, within 5 s
    a new run, QUARK_OFFLINE=allow     begins within 2 s; a refused key still raises
    a restart                          begins within 2 s, with a refused key too
    strict, or QUARK_REQUIRE_SERVICE   raises, within 5 s

A restart is a later attempt of a launch, or the resumption of a run that this
machine knows. A run that begins so is journaled, and delivered like after any
outage.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from quark_core.backends.contract import StoredRun, SupportsPrimary
from quark_core.config import settings
from quark_core.config.redaction import redact_text
from quark_core.errors import (
    SessionStoreError,
    StoreUnauthorizedError,
    StoreUnavailableError,
)
from quark_core.runs import backend_choice
from quark_core.runs.backend_choice import Plan, remember
from quark_core.runs.open_run import OpenRun

T = TypeVar("T")

_log = logging.getLogger("quark")

# Within 5 s and 2 s, with what a start does besides and what it takes back where it fails.
_FIRST_S = 4.0
_RESTART_S = 1.3
# Nothing is asked for, and so it takes no time, but for a machine that is busy elsewhere.
_UNASKED_S = 0.5
_GRACE_S = 0.1
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class StartPolicy:
    """What a start does where its primary is out of reach.

    Attributes:
        goes_without: Whether it begins all the same.
        goes_unauthorized: Whether it does so where its key is refused.
        advice: What the error says besides where it does not.
        joins: Whether another process begins the run: then nothing that the primary
            cannot be opened for is an error, and the lane tries again.
    """

    goes_without: bool
    goes_unauthorized: bool
    advice: str = ""
    joins: bool = False


ATTACHING = StartPolicy(True, True)
"""Of a process that takes part in a run which another one holds open."""

JOINING = StartPolicy(True, True, joins=True)
"""Of a process that joins a run: it must not fail where the one that leads it trains."""


def choose_policy(*, restarts: bool, strict: bool = False) -> StartPolicy:
    """The policy of a start.

    Args:
        restarts: Whether the run has begun before.
        strict: Whether the run is to fail with its primary.

    Raises:
        SchemaValidationError: QUARK_OFFLINE is no good.
    """
    wanted = settings.allows_offline() or restarts
    if settings.requires_service():
        return StartPolicy(False, False, f"; {settings.REQUIRE_SERVICE} is set")
    if strict:
        return StartPolicy(False, False, "; the run is strict, and so not begun without it")
    if not wanted:
        return StartPolicy(False, False, f"; {settings.OFFLINE}=allow lets runs begin without it")
    return StartPolicy(True, restarts)


class PrimaryReach:
    """The primary of a plan while a run begins, on the thread that begins it.

    A primary that nobody has taken over when its context is left is closed.

    Args:
        plan: The backends; where they have no primary, there is nothing to reach.
        root: The storage root.
        policy: What to do where it is out of reach.
        read_only: Whether nothing is to be written yet.
        began_s: When the start began, on the clock of `time.monotonic`; now by default.

    Attributes:
        outage: Why the run begins without the primary; None while it does not.
        given_s: How long the whole start may wait for it.
        left_writer: Writer of a start that was given up when it was not acknowledged, and
            that the primary may have all the same; or None.

    Raises:
        StoreUnavailableError: It is out of reach, and the policy waits for it.
        SessionStoreError: It cannot be opened.
    """

    def __init__(
        self,
        plan: Plan,
        root: Path,
        policy: StartPolicy,
        *,
        read_only: bool = False,
        began_s: float | None = None,
    ) -> None:
        self.outage: StoreUnavailableError | None = None
        self.left_writer: str | None = None
        self._choice = plan.primary
        self._root = root
        self._policy = policy
        self.given_s = _RESTART_S if policy.goes_without else _FIRST_S
        self.given_s = min(self.given_s, settings.persistence_timeout_s())
        self._deadline = (time.monotonic() if began_s is None else began_s) + self.given_s
        self._primary: SupportsPrimary | None = None
        self._taken: object = None
        # What an earlier attempt has left may be delivered before the stream is opened.
        remember(plan.choices, root)
        self._open(read_only=read_only)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(self._primary)

    def hand_over(self, run: OpenRun) -> None:
        """Leave the primary to a run that was opened with it."""
        self._taken = run.reader

    @property
    def primary(self) -> SupportsPrimary | None:
        """The primary, open; one that is out of reach answers again when it is back."""
        return self._primary

    @property
    def is_remote(self) -> bool:
        """Whether it lies across a network."""
        return self._choice is not None and self._choice.definition.remote

    @property
    def left_s(self) -> float:
        """How long the start may wait for the primary yet."""
        if not self.is_remote:
            return settings.persistence_timeout_s()
        return max(0.0, self._deadline - time.monotonic())

    def open_for_writing(self) -> None:
        """Open for writing what was open for reading.

        Raises:
            SessionStoreError: As the class.
        """
        before = self._primary
        self._open(read_only=False)
        if before is not self._primary:
            self._close(before)

    def load_run(self, run_id: str) -> StoredRun:
        """A run of the primary.

        Raises:
            RunNotFoundError: It has no such run.
            StoreUnavailableError: It is out of reach, as `outage` says from then on.
            SessionStoreError: It cannot say.
        """
        primary = self._primary
        if primary is None:
            raise SessionStoreError(f"run {run_id}: this process has no primary store")
        return self.ask(lambda: primary.load_run(run_id))

    def ask(self, call: Callable[[], T]) -> T:
        """Call the primary, within what is left of the start's time.

        Raises:
            StoreUnavailableError: It is out of reach, as `outage` says from then on.
            Exception: Whatever else it raises.
        """
        if self.outage is not None:
            raise self.outage
        if not self.is_remote:
            return call()
        try:
            return self._bound(call, self.left_s)
        except StoreUnavailableError as error:
            raise self.settle(error) from error.__cause__

    def settle(self, error: StoreUnavailableError) -> StoreUnavailableError:
        """Go on without the primary where that is allowed; returns what to raise where not."""
        policy = self._policy
        refused = isinstance(error, StoreUnauthorizedError)
        if not policy.goes_without or (refused and not policy.goes_unauthorized):
            return error if refused else type(error)(f"{error}{policy.advice}")
        self.outage = error
        self._open(read_only=False)
        return error

    def _open(self, *, read_only: bool) -> None:
        choice = self._choice
        if choice is None:
            return
        config = replace(
            choice.configure(self._root), read_only=read_only, unasked=self.outage is not None
        )
        open_it = backend_choice.open_primary if read_only else backend_choice.open_run_primary
        try:
            if self.outage is None:
                self._primary = self.ask(lambda: open_it(choice, config))
            else:
                self._primary = self._bound(
                    lambda: open_it(choice, config), max(_UNASKED_S, self.left_s)
                )
        except Exception as error:
            if self.outage is None and not self._policy.joins:
                raise
            if self.outage is not error:
                _log.warning("the store cannot be opened here now: %s", error)

    def _close(self, primary: SupportsPrimary | None) -> None:
        if primary is None or primary is self._taken:
            return
        try:
            self._bound(primary.close, _CLOSE_S)
        except Exception as error:  # noqa: BLE001 - nothing was written, and nothing is lost
            _log.debug("%s is not closed: %s", self.describe(), error)

    def _bound(self, call: Callable[[], T], timeout_s: float) -> T:
        """Call on a thread of its own, which may hang there without being waited for."""
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:  # noqa: BLE001 - raised by who waits for it
                errors.append(error)

        thread = threading.Thread(target=work, name="quark-reach", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return call()
        # A backend whose own time is over now says more than can be said here.
        thread.join(timeout_s + _GRACE_S)
        if results:
            return results[0]
        if errors:
            raise errors[0]
        raise StoreUnavailableError(f"{self.describe()} does not answer within {self.given_s:g} s")

    def describe(self) -> str:
        """Which store it is, for messages; without secrets."""
        choice = self._choice
        place = "" if choice is None else redact_text(choice.specification)
        return f"the primary store {place}"
