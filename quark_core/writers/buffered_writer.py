"""The base of all buffered writers."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Any, ClassVar, Generic, NoReturn, Self, TypeVar

from quark_core.config import settings
from quark_core.config.migration_hints import answer_habits
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records import StreamRecord
from quark_core.records.runs import RunContext
from quark_core.runs.open_run import OpenRun
from quark_core.runs.opening import resolve_target

R = TypeVar("R", bound=StreamRecord)


@answer_habits
class BufferedWriter(Generic[R]):
    """Hands records of one kind to a run's stream, and remembers the latest for `flush()`.

    Args:
        session: A TrainingSession, or the RunContext of one.
        batch_size: Bounds what `flush()` returns, and how many records go into
            one batch while no more than ten such batches wait; a longer queue
            goes into larger ones. It never makes a call wait.

    Raises:
        SchemaValidationError: `session` is neither, or `batch_size` is not positive.
    """

    KIND: ClassVar[str]

    def __init__(self, session: object, *, batch_size: int = 100) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise SchemaValidationError(
                f"batch_size must be a positive integer, got {batch_size!r:.60}"
            )
        self._run = resolve_target(session)
        self._batch_size = batch_size
        while not self._run.add_writer(self) and isinstance(session, RunContext):
            # Another thread has closed the last writer of this context since it was found.
            self._run = resolve_target(session)
        self._writer_id = ""
        self.bind()
        self._closed = False

    def bind(self) -> None:
        """Connect to the run's stream; called again after a fork."""
        stream = self._run.stream
        channel = stream.channel(self.KIND)
        channel.fit_frames(self._batch_size)
        self._channel = channel
        self._append = channel.append
        self._put_record = channel.put
        self._take_sequence = channel.take_sequence
        before = self._writer_id
        self._origin = stream.origin.head
        self._run_id, self._writer_id, self._attempt, self._rank = self._origin
        if self._writer_id != before:
            self._begin()

    def _begin(self) -> None:
        """Count anew: in a forked child what the parent has logged is the parent's."""
        self._recent: deque[Any] = deque()
        self._recent_records = 0

    @property
    def open_run(self) -> OpenRun:
        """The open run that this writer belongs to."""
        return self._run

    def flush(self) -> tuple[R, ...]:
        """Deliver all accepted records of this run to the primary store.

        Returns:
            This writer's records since the last flush, or since `batch_size` was last reached, in
            order. Empty if nothing is stored.

        Raises:
            SessionStoreError: The store did not answer within QUARK_PERSISTENCE_TIMEOUT_SECONDS
                (15). The records stay queued and are delivered later.
        """
        self._run.flush()
        recent: list[R] = []
        while self._recent:
            recent.extend(self._expand(self._recent.popleft()))
        self._recent_records = 0
        return tuple(recent) if self._run.stream.active else ()

    def settle(self) -> None:
        """Submit pending work before the run ends; waits briefly."""

    def close(self) -> None:
        """Accept no more records; reading still works. A second call does nothing.

        Accepted records are delivered by the end of the run. An outage of the store is not raised
        here, unless the run is strict.

        Raises:
            SessionStoreError: In strict mode, the primary store's first delivery error.
        """
        if self._closed:
            return
        self._closed = True
        run = self._run
        run.hand_over_at_close()
        if run.strict:
            # Whether the primary takes it is what the caller wants to know.
            run.stream.wait_for_primary(settings.exit_timeout_s(), until=lambda: run.failed)
        run.remove_writer()
        if run.strict and run.failed:
            run.refuse("close")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except SessionStoreError:
            # The user's exception must not be replaced by ours.
            if error is None:
                raise

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"{type(self).__name__}({self._run.context.describe()}{closed})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to its process and cannot be pickled or copied. "
            "Pass session.context to the other process, and create a writer from it there"
        )

    def _expand(self, item: Any) -> list[R]:
        """The records that an item of the channel stands for."""
        return [item]

    def _remember(self, item: Any, records: int) -> None:
        self._recent.append(item)
        self._recent_records += records
        if self._recent_records >= self._batch_size:
            self._recent.clear()
            self._recent_records = 0

    def check_open(self, call: str) -> None:
        """Check that this writer and its run accept records.

        Args:
            call: Start of the error message.

        Raises:
            InvalidRunStateError: The writer is closed, or the run has ended or is open for reading.
            SessionStoreError: In strict mode, the primary store's first delivery error.
        """
        self._check_open(call)

    def _check_open(self, call: str) -> None:
        if self._run.refusal is not None:
            self._run.refuse(call)
        if self._closed:
            from quark_core.errors import InvalidRunStateError

            raise InvalidRunStateError(f"{call}: this {type(self).__name__} is closed")
