"""Data come to an analyzer, and its outputs go to the store and the mirrors.

A run that is open in this process is read through its own store, flushed
first; any other, also one that has ended, through a store opened to read.
Outputs are written to the run's primary as one generation, where it keeps
such; a backend that only reads, such as the CSV files, keeps none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from quark.analysis.run_data import RunData, find_long_curves
from quark_core.backends.contract import Generation, SupportsGenerations, SupportsPrimary
from quark_core.config import settings
from quark_core.config.redaction import redact_record
from quark_core.delivery.journal import frame_outputs, journal_outputs
from quark_core.delivery.journal_folder import LaneEntry, journal_directory
from quark_core.errors import (
    BackendUnavailable,
    RunNotFoundError,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.ranks.launches import RankInfo
from quark_core.records import HealthScoreRecord, StreamRecord
from quark_core.records.columns import Columns
from quark_core.records.query import Query
from quark_core.records.runs import RunContext
from quark_core.runs import backend_choice
from quark_core.runs.output_delivery import deliver_outputs, list_remembered_lanes
from quark_core.runs.reading import iterate, read_rows
from quark_core.runs.run_reader import RunReader, find_primary, open_context_primary, read_run

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.run_summary import StoredRun
    from quark_core.records.columns import Columns

_log = logging.getLogger("quark")


class GatheredOutputs:
    """Outputs of runs that have ended, on their way to the mirrors; see `gather_outputs`."""

    def __init__(self) -> None:
        self._runs: dict[Path, RunReader] = {}

    def add(self, run: RunReader, run_path: Path) -> None:
        """Note that outputs of a run are journaled."""
        self._runs[run_path] = run

    def deliver(self, timeout_s: float) -> None:
        """Deliver them, and say on the log what still waits.

        Args:
            timeout_s: How long to wait for each run.
        """
        for run_path, run in self._runs.items():
            _deliver(run, run_path, timeout_s)
        self._runs.clear()


_gathered: ContextVar[GatheredOutputs | None] = ContextVar("_gathered", default=None)


@contextmanager
def gather_outputs() -> Iterator[GatheredOutputs]:
    """Within it, outputs of runs that have ended are not delivered until that is asked for."""
    gathered = GatheredOutputs()
    token = _gathered.set(gathered)
    try:
        yield gathered
    finally:
        _gathered.reset(token)


def mirror_outputs(run: RunReader, outputs: Mapping[str, Sequence[StreamRecord]]) -> None:
    """Journal one generation for the run's mirrors, and have it delivered.

    Of a run that is open in this process, that process's own threads deliver
    it, and nothing is waited for. Of one that has ended, this waits for
    QUARK_EXIT_TIMEOUT_SECONDS (10) at most; what waits longer stays for
    `quark sync`. Of one that another process has open, that one delivers it.
    Where the run has no mirrors, or this is not the rank that leads it,
    nothing is done. Never raises: the outputs are in the primary.

    Args:
        run: The run.
        outputs: Records by kind, under the identity that a store returns them with.
    """
    leads = run.held is None or run.held.leads
    if not leads or not any(outputs.values()):
        return
    try:
        _mirror(run, outputs)
    except Exception as error:  # noqa: BLE001 - a mirror must not fail an analysis
        _log.warning(
            "run %s: the findings cannot be delivered to the run's mirrors (%s). When that is "
            "fixed, run: quark mirror replay %s",
            run.context.run_id,
            error,
            run.context.run_id,
        )


def _find_mirrors(run: RunReader, run_path: Path) -> tuple[LaneEntry, ...]:
    """The mirrors of a run: of its context, else those that its process has written to.

    Args:
        run: The run.
        run_path: Its directory on this machine, where its ledger and journals lie.
    """
    context = run.context
    if context.backends and not context.read_only:
        # The run's first rank has all of its backends, whichever rank this process is.
        plan = backend_choice.plan_backends(list(context.backends), RankInfo())
        entries = backend_choice.describe_lanes(plan)
    else:
        entries = list_remembered_lanes(run_path, context.run_id or "")
    return tuple(entry for entry in entries if not entry.primary)


def _mirror(run: RunReader, outputs: Mapping[str, Sequence[StreamRecord]]) -> None:
    context = run.context
    if len(context.backends) == 1 and not context.read_only:
        return  # the primary alone
    run_id = context.run_id or ""
    run_path = backend_choice.find_local_path(
        run.reader, context.storage_dir, run_id, context.run.run_path
    )
    lanes = _find_mirrors(run, run_path)
    if not lanes:
        return
    journal_outputs(
        journal_directory(run_path, run_id),
        frame_outputs(outputs),
        lanes,
        project=context.project_name,
        storage_dir=context.storage_dir,
        run_path=run_path,
    )
    gathered = _gathered.get()
    held = run.held
    if held is not None and held.children is not None and not held.is_over:
        held.children.poll_outputs()
    elif gathered is not None:
        gathered.add(run, run_path)
    else:
        _deliver(run, run_path, settings.exit_timeout_s())


def _deliver(run: RunReader, run_path: Path, timeout_s: float) -> None:
    run_id = run.context.run_id or ""
    children = None if run.held is None else run.held.children
    open_lane = backend_choice.open_lane if children is None else children.open_lane
    reason = deliver_outputs(journal_directory(run_path, run_id), open_lane, timeout_s)
    if reason is not None:
        _log.warning(
            "run %s: the findings are stored, but wait for the run's mirrors (%s). To deliver "
            "them, run: quark sync %s",
            run_id,
            reason,
            run.context.storage_dir,
        )


_MOST_LOOKED_AT = 50

AnyRecord = TypeVar("AnyRecord", bound=StreamRecord)


class AnalysisTarget:
    """One run as analyzers read and write it; made by `open_analysis`.

    Every method may be called from any thread.

    Attributes:
        run: Reads the run.
        run_id: The run's id; "" only on a rank that cannot know it.
        refusal: Why outputs are not stored, or None where they are. Set by
            `write` too, where the store turns out to be one that this process
            may only read.
    """

    def __init__(self, run: RunReader) -> None:
        self.run = run
        self.run_id = run.run_id or ""
        self.refusal: str | None = None
        if run.reader is None or not self.run_id:
            self.refusal = "this process stores nothing of the run that could be read back"
        elif not isinstance(run.reader, SupportsGenerations):
            name = type(run.reader).__name__
            self.refusal = f"{name} can be read but does not store outputs of analyzers"

    @property
    def context(self) -> RunContext:
        """The run's context."""
        return self.run.context

    @property
    def can_store(self) -> bool:
        """Whether outputs are kept, as far as is known before anything is written."""
        return self.refusal is None

    def refuse(self, store: bool | None) -> str | None:
        """Why outputs are not stored, as far as is known before anything is written.

        Args:
            store: What the caller wants; None stores unless the run was opened
                for reading only.

        Raises:
            SchemaValidationError: `store` is neither a bool nor None.
        """
        if store is not None and not isinstance(store, bool):
            raise SchemaValidationError("store must be True, False or None")
        if store is False:
            return "store=False was passed"
        if self.refusal is None and store is None and self.run.context.read_only:
            return "the run was opened for reading only; analyze(store=True) stores them"
        return self.refusal

    def load(self) -> RunData:
        """Flush the run, then return it as it is now; its columns are read when asked for.

        Raises:
            RunNotFoundError: The store has no such run.
            SessionStoreError: The store cannot be read, or this process was forked.
        """
        self.run.catch_up("analyze")
        reader = self.run.reader
        if reader is None or not self.run_id:
            return RunData(lambda kind, _: Columns.empty(kind), self.run_id, ended=False)
        return make_run_data(reader, reader.load_run(self.run_id))

    def iterate_healthy(self, analyzer: str) -> Iterator[RunData]:
        """The newest completed runs of the project that an analyzer has stored as healthy.

        Raises:
            SessionStoreError: The store cannot be read.
        """
        reader = self.run.reader
        if reader is None or not self.run_id or not isinstance(reader, SupportsGenerations):
            return
        project = self.run.context.project_name
        for stored in reader.list_runs(project=project, limit=_MOST_LOOKED_AT):
            run_id = str(stored.run.id)
            if stored.state != "completed" or run_id == self.run_id:
                continue
            scores = reader.read_outputs(run_id, HealthScoreRecord.KIND, analyzer).to_records()
            overall = [
                score
                for score in scores
                if isinstance(score, HealthScoreRecord) and score.score_key == "overall"
            ]
            if overall and overall[-1].is_known and overall[-1].status == "healthy":
                yield make_run_data(reader, stored)

    def read_outputs(self, kind: str, analyzer: str) -> Columns:
        """What an analyzer has stored of one kind, from its newest replacing generation on.

        Returns no rows where this process keeps nothing of the run at all.

        Raises:
            RunNotFoundError: The store has no such run.
            SessionStoreError: The store cannot be read, keeps no outputs of
                analyzers, or this process was forked.
        """
        self.run.catch_up("analyze")
        reader = self.run.reader
        if reader is None or not self.run_id:
            return Columns.empty(kind)
        if not isinstance(reader, SupportsGenerations):
            raise SessionStoreError(
                f"run_id {self.run_id}: {self.refusal}. Use the return value of analyze()"
            )
        return reader.read_outputs(self.run_id, kind, analyzer)

    def write(
        self,
        analyzer: str,
        replaces: bool,
        outputs: Mapping[str, Sequence[StreamRecord]],
    ) -> int | None:
        """Store the outputs of one analysis, all at once; returns the generation's number.

        Readers find them under the identity that `identify` gives them with
        that number. The run's mirrors get them too, as `mirror_outputs` says.

        Args:
            analyzer: Name of the analyzer.
            replaces: Whether its earlier generations are no longer seen.
            outputs: Records by kind; a kind may be empty, which says that
                there is none.

        Returns:
            The number, 1 for the first; None where the outputs cannot be
            kept, and then `refusal` says why.

        Raises:
            RunNotFoundError: The store has no such run.
            SessionStoreError: The store is busy or full, or this process was
                forked; nothing was stored.
        """
        self.run.catch_up("analyze")
        if self.refusal is not None:
            return None
        # A rule may quote what it has read, and a plugin's rule whatever it likes.
        outputs = {
            kind: [redact_record(record) for record in records] for kind, records in outputs.items()
        }
        generation = Generation(
            run_id=self.run_id,
            analyzer=analyzer,
            replaces=replaces,
            outputs={
                kind: identify(records, self.run_id, analyzer, None)
                for kind, records in outputs.items()
            },
        )
        try:
            number = self._write(generation)
        except BackendUnavailable as error:
            raise SessionStoreError(
                f"run_id {self.run_id}: the outputs of {analyzer} were not stored: {error}"
            ) from error
        if number is not None:
            identified = {
                kind: identify(records, self.run_id, analyzer, number)
                for kind, records in outputs.items()
            }
            mirror_outputs(self.run, identified)
        return number

    def _write(self, generation: Generation) -> int | None:
        reader: object = self.run.reader
        context, held = self.run.context, self.run.held
        assert isinstance(reader, SupportsGenerations)
        try:
            return reader.write_generation(generation)
        except BackendUnavailable:
            # The store of a run that has ended, or is only looked at, writes no more by itself.
            primary = isinstance(reader, SupportsPrimary) and find_primary(context) is not None
            if (held is not None and held.refusal is None) or not primary:
                raise
        try:
            store = open_context_primary(context, read_only=False)
        except RunNotFoundError:
            raise
        except SessionStoreError as error:
            self.refusal = f"the store can be read but not written: {error}"
            _log.warning(
                "run %s: the outputs of %s are returned but not stored: %s",
                self.run_id,
                generation.analyzer,
                error,
                extra={"is_reported": True},
            )
            return None
        try:
            backend: object = store
            assert isinstance(backend, SupportsGenerations)
            return backend.write_generation(generation)
        finally:
            store.close()


def make_run_data(reader: SupportsRead, stored: StoredRun) -> RunData:
    """A stored run as analyzers want it; nothing is read before it is asked for."""
    run_id = str(stored.run.id)
    environment = {} if stored.environment is None else stored.environment.values

    def read(kind: str, query: Query) -> Columns:
        return read_rows(reader, run_id, kind, query)

    def iterate_parts(kind: str, query: Query) -> Iterator[Columns]:
        return iterate(reader, run_id, kind, query)

    return RunData(
        read,
        run_id,
        iterate=iterate_parts,
        ended=stored.state != "running",
        config=None if stored.config is None else stored.config.values,
        stored=stored,
        find_curves=partial(find_long_curves, reader, run_id),
        with_torch="torch" in (environment.get("imported") or ()),
    )


def open_analysis(session: object) -> AnalysisTarget:
    """The run behind a session or a context, for an analyzer.

    Nothing is written and nothing joins the run: the context of a run that
    another process holds open is read through a store opened to read.

    Args:
        session: A TrainingSession, of any state, a RunContext or a RunReader.

    Raises:
        SchemaValidationError: `session` is neither.
        RunNotFoundError: The store has no such run.
        SessionStoreError: The store cannot be opened.
    """
    return AnalysisTarget(read_run(session))


def identify(
    records: Iterable[AnyRecord], run_id: str, analyzer: str, generation: int | None
) -> tuple[AnyRecord, ...]:
    """Records with the identity under which a store returns them, numbered from 0.

    Args:
        records: Records of one kind, in order.
        run_id: The run.
        analyzer: Name of the analyzer.
        generation: What `AnalysisTarget.write` returned; None counts as 0.
    """
    writer_id = f"{analyzer}.{generation or 0}"
    return tuple(
        msgspec.structs.replace(
            record, run_id=run_id, writer_id=writer_id, attempt=0, rank=0, sequence=number
        )
        for number, record in enumerate(records)
    )
