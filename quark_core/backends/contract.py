"""The contract between Quark and a storage backend.

A backend is declared by a `BackendDefinition`, opened once for one run, and
fed batches by one lane, which is one thread. Its duties:

- `write(batch)` returns only when the batch is as safe as the backend can
  make it. It raises `BackendUnavailable` to be called again later with the
  same batch, `BackendRejected` to have the batch put in quarantine, and, where
  it is not idempotent, `BackendOutcomeUnknown` to have it counted as unknown
  and never sent again. Anything else that it raises counts as a bug; the lane
  tries again and then rests.
- A batch has the identity (run_id, writer_id, number) and is never cut again.
  A backend with `Capability.IDEMPOTENT` must store a batch that it gets twice
  once. Numbers of one writer arrive in ascending order; a gap is a batch that
  was dropped or quarantined before.
- `write` and `close` are called from the lane's thread only; the methods of
  `SupportsRead` from any thread, at any time, also while `write` runs.

Quark owns the thread, the retries and the order; the backend owns its files
and connections and gives them up in `close()`.

A backend works in a helper process, unless its definition says otherwise: it
may be killed at any moment, and is opened again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, runtime_checkable

import msgspec

from quark_core.backends.run_summary import RunSummary, StoredRun
from quark_core.records import RunRecord
from quark_core.records.codec import DecodedBody, decode_body

if TYPE_CHECKING:
    from quark_core.backends.curves import Cursor, CurveQuery, CurveSet, RunChanges, RunHeads
    from quark_core.backends.grids import Grid, GridQuery
    from quark_core.backends.run_pages import PageSearch, RunNames, RunPage
    from quark_core.backends.series import Series
    from quark_core.records import StreamRecord
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query, RunSearch

SOURCES_OPTION = "sources"
"""Option of a mirror: with `1` it is given the code that runs are made of, and says so by an
attribute `keeps_sources`; without it the payloads of that code never reach it."""

HELD_FILE = "held"
"""A file in `mirrors/<backend>/<folder>/` of a run that is there while the mirror keeps
something of acknowledged batches on this machine, to be passed on when it is opened next:
an empty group is written then, and the mirror closed."""

API_VERSION = 1
"""Version of this contract that this Quark speaks."""


class Capability(StrEnum):
    """What a backend declares that it can do, readable before it is opened."""

    PRIMARY = "primary"
    """May be the run's primary: durable, idempotent, serves lifecycle and reads."""
    READ = "read"
    """Implements `SupportsRead`."""
    IDEMPOTENT = "idempotent"
    """A batch delivered twice is there once."""
    REPLAY = "replay"
    """Implements `SupportsReplay`: gives batches back as they came."""
    GROUPS = "groups"
    """Implements `SupportsGroups`: several batches in one transaction."""
    SERIES = "series"
    """Implements `SupportsSeries`: curves reduced without reading every point."""
    SEARCH = "search"
    """Implements `SupportsSearch`: finds and sums up runs without reading their points."""
    PAGES = "pages"
    """Implements `SupportsPages`: pages of runs with chosen columns, and the names there are."""
    GRID = "grid"
    """Implements `SupportsGrid`: a figure of layers over steps, without reading whole records."""
    GENERATIONS = "generations"
    """Implements `SupportsGenerations`: keeps the outputs of analyzers."""
    ARTIFACTS = "artifacts"
    """Implements `quark_core.backends.contract.SupportsArtifacts`: keeps payloads."""
    REMOVAL = "removal"
    """Implements `backends.removal.SupportsRemoval`: measures runs, removes them by a trash."""
    CHANGES = "changes"
    """Implements `SupportsChanges`: windows of many curves, and what came since a cursor."""
    EDITS = "edits"
    """Implements `backends.edits.SupportsEdits`: edits what is said of runs, asks them to stop."""
    BELONGING = "belonging"
    """Implements `backends.belonging.SupportsBelonging`: describes projects and groups."""
    COORDINATION = "coordination"
    """Implements `backends.coordination.SupportsCoordination`: gives trials to many workers."""


class RankPolicy(StrEnum):
    """On which ranks of a distributed run a backend is opened."""

    ZERO = "zero"
    """On the rank that leads the run, which is rank 0 unless `ranks` leaves it out."""
    SESSION = "session"
    """On the ranks of the session (`ranks=`, QUARK_RANKS): each writes for itself."""
    ALL = "all"
    """On every rank, unless the session says otherwise."""


class Batch(msgspec.Struct, frozen=True, dict=True):
    """Records of one kind from one writer, encoded; the unit of delivery.

    Attributes:
        run_id: The run.
        writer_id: One process's stream into the run.
        attempt: Attempt that the writer belongs to.
        rank: Global rank of the writer.
        number: 0, 1, 2 … within the writer, over all kinds.
        kind: Kind of the records.
        count: How many records.
        body: The records, as `quark_core.records.codec` encodes them.
    """

    run_id: str
    writer_id: str
    attempt: int
    rank: int
    number: int
    kind: str
    count: int
    body: bytes

    @cached_property
    def decoded(self) -> DecodedBody:
        """The body with its columns, decoded when asked for."""
        return decode_body(self.body)

    def to_records(self) -> list[StreamRecord]:
        """The batch's records, in order."""
        return self.decoded.to_records(
            run_id=self.run_id, writer_id=self.writer_id, attempt=self.attempt, rank=self.rank
        )


@runtime_checkable
class Backend(Protocol):
    """What every opened backend has."""

    def write(self, batch: Batch) -> None:
        """Store one batch; return when it is safe."""

    def close(self) -> None:
        """Finish what is derived, give up files and connections. Called once."""


@runtime_checkable
class SupportsRead(Protocol):
    """What a backend has that declares `Capability.READ`.

    Every method raises `RunNotFoundError` for an unknown run and
    `SessionStoreError` where the store cannot be read.
    """

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """Rows of one kind that fit the query, in persistence order."""

    def load_run(self, run_id: str) -> StoredRun:
        """One run."""

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """Runs, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLocation:
    """Where a primary keeps a run.

    Attributes:
        store_root: Root of the store: a directory, or a URI.
        db_path: Its database file, where there is one on this machine.
        run_path: The run's directory, or its URI.
    """

    store_root: Path | str
    db_path: Path | None
    run_path: str


@runtime_checkable
class SupportsPrimary(Backend, SupportsRead, Protocol):
    """What a backend has that declares `Capability.PRIMARY`, with READ, IDEMPOTENT and GENERATIONS.

    `write` of a lifecycle `start` whose attempt another process has started
    raises `BackendRejected`: that is how two processes that resume one run at
    the same moment are told apart. One that says `offline` was begun without
    the store: a remote store gives it the next attempt that is free instead.
    """

    def locate(self, run_id: str) -> RunLocation:
        """Where a run lies, whether it exists or not."""


@runtime_checkable
class SupportsGroups(Backend, Protocol):
    """What a backend has that declares `Capability.GROUPS`."""

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Store several batches as one: all of them or, when it raises, none.

        After `BackendRejected` the lane writes them one by one.
        """


@runtime_checkable
class SupportsReplay(Protocol):
    """What a backend has that declares `Capability.REPLAY`.

    A mirror that is far behind is served from here when the journal has had
    to let go what the primary has.
    """

    def read_batches(self, run_id: str, writer_id: str, start: int, limit: int) -> list[Batch]:
        """A writer's batches from a number on, in order, at most `limit`, as they were written."""


@runtime_checkable
class SupportsSeries(SupportsRead, Protocol):
    """What a backend has that declares `Capability.SERIES`.

    Other backends that read are served by `quark_core.runs.reading`, which reads
    every point.
    """

    def read_series(
        self,
        run_id: str,
        key: str,
        *,
        max_points: int | None,
        all_attempts: bool = False,
        rank: int | None = None,
    ) -> Series:
        """One metric of one rank or across all ranks, in at most `max_points` entries.

        For None every point, across several ranks an entry for each step; see `Series`,
        whose `ranks` are set. `merge_ranks` makes one curve of the ranks'.
        """

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """What `read` returns, in parts of about `rows` rows, in order.

        The parts are those of one moment: what comes or is compacted
        meanwhile changes nothing.
        """


@runtime_checkable
class SupportsChanges(SupportsRead, Protocol):
    """What a backend has that declares `Capability.CHANGES`, for those who look on at a run.

    Other backends that read are served by `quark_core.runs.following`, which reads
    every point. A cursor of a backend says for each writer of the run the number of
    its next batch, counted over all kinds of records.
    """

    def read_series_many(self, run_id: str, query: CurveQuery) -> CurveSet:
        """Metrics within a window, of one moment, each in at most `query.entries` a curve.

        The low and high of each entry are those of the points themselves.
        """

    def read_heads(self, run_id: str) -> RunHeads:
        """How far the run has come, without reading any record."""

    def read_changes(
        self,
        run_id: str,
        cursor: Cursor,
        *,
        kinds: Sequence[str],
        keys: Sequence[str] | None = None,
        all_attempts: bool = False,
        max_rows: int,
    ) -> RunChanges:
        """What came since a cursor, each record once, of these kinds; of metrics only `keys`.

        Where it would be more than about `max_rows`, the oldest of it, and `more`.
        """

    def read_mark(self, run_id: str) -> str:
        """A text that stays the same as long as nothing in the run has changed.

        It may change although nothing has; asking costs next to nothing. Only marks that
        the same opened backend has given can be compared.
        """


@runtime_checkable
class SupportsSearch(SupportsRead, Protocol):
    """What a backend has that declares `Capability.SEARCH`.

    Other backends that read are served by `quark_core.search.fallback`, which
    reads every run.
    """

    def search(self, search: RunSearch) -> list[RunSummary]:
        """The runs that fit, in the order that is asked for, newest first by default.

        Raises:
            SchemaValidationError: A name that no run of the searched projects
                has; the message points at its column.
        """

    def summarize(self, run_id: str) -> RunSummary:
        """One run with its metrics summed up, as of now."""


@runtime_checkable
class SupportsPages(SupportsRead, Protocol):
    """What a backend has that declares `Capability.PAGES`.

    Other backends that read are served by `quark_core.search.fallback`, by their
    search where they have one.
    """

    def search_page(self, search: PageSearch) -> RunPage:
        """One page of the runs that fit, of each the chosen columns.

        Raises:
            SchemaValidationError: As `SupportsSearch.search`, or a cursor of another search.
        """

    def list_names(self, project: str | None, text: str, limit: int) -> RunNames:
        """At most `limit` metrics, configuration keys and tags each that have a text in them."""


@runtime_checkable
class SupportsGrid(SupportsRead, Protocol):
    """What a backend has that declares `Capability.GRID`.

    Other backends that read are served by `quark_core.runs.following`.
    """

    def read_grid(self, run_id: str, query: GridQuery) -> Grid:
        """A figure of layers, parameters or telemetry over steps."""


@runtime_checkable
class SupportsGenerations(Backend, Protocol):
    """What a backend has that declares `Capability.GENERATIONS`."""

    def write_generation(self, generation: Generation) -> int:
        """Keep the outputs of one analysis, all at once; returns the generation's number.

        May be called from any thread, and for a run that has ended.
        """

    def read_outputs(self, run_id: str, kind: str, analyzer: str | None = None) -> Columns:
        """Outputs of one kind: of each analyzer all from its newest replacing generation on.

        Their `writer_id` is the analyzer's name and the generation's number,
        with a dot between; whoever made the records does not matter.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Outputs of one analysis of a run.

    Attributes:
        run_id: The run.
        analyzer: Name of the analyzer.
        replaces: Whether readers no longer see the analyzer's earlier generations.
        outputs: Records by kind; a kind may be empty, which says that there is none.
    """

    run_id: str
    analyzer: str
    replaces: bool
    outputs: Mapping[str, Sequence[StreamRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """What a backend is opened with.

    Attributes:
        storage_dir: The user's storage root, absolute.
        run_path: A directory of the run's own, made when something is put there.
        run_id: The run; None where a store is opened only to read.
        project: Name of the run's project, or None likewise.
        location: What stands behind the scheme in the backend's URI, or "".
        options: Query parameters of the URI.
        read_only: No run may be written and no store made; an older store may be migrated.
        is_noted: The place stands in a run's folder, and this user has chosen it at some
            time, but this process was not asked for it: a key in the environment that
            is meant for another host must not be sent there.
        unasked: Nothing is asked of a remote store while it is opened: it is out of reach,
            and may be back by the first call.
        removes: Runs are to be removed, or what is said of them to be edited, and none to be
            written.
    """

    storage_dir: Path
    run_path: Path | None = None
    run_id: str | None = None
    project: str | None = None
    location: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    read_only: bool = False
    is_noted: bool = False
    unasked: bool = False
    removes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerForm:
    """How `setup_tracker` asks for a mirror by its plain name.

    Attributes:
        make: Makes the `MirrorBackend`, of the keywords `project_name`, `config`, `outdir`,
            `rank` and whatever `setup_tracker` was given besides.
        project_variables: Environment variables that name a project, where nothing else does.
        is_default: Whether it is the one where no backend is asked for.
    """

    make: Callable[..., Any]
    project_variables: Sequence[str] = ()
    is_default: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendDefinition:
    """Declares a backend: cheap to make, opens nothing, imports no client library.

    Attributes:
        name: What users write, such as `csv`.
        summary: One line for `quark backends`.
        open: Opens the backend for one run; called on the lane's thread for a
            mirror, in `start_run` for a primary.
        capabilities: What the opened backend can do.
        schemes: URI schemes that lead here, besides the name.
        rank_policy: On which ranks it is opened where its URI says nothing
            (`?ranks=all`); a primary is always opened on those of the session.
        api_version: Version of the contract that it was written against.
        migrate: Brings an older store at the configured place to the current schema
            and returns its version; None where there is nothing to migrate. The
            text is what the store notes as the moment of it.
        own_process: Where a run is written it is opened in a helper process, which
            finds it by its `open`, a function of a module, or by its plugin. False
            keeps it in the training process: what it does there (end the process,
            close descriptors, keep the interpreter) the training suffers.
        plugin: Where another process finds the plugin that declares it, as
            `module:object`; the registry fills it in from the entry point.
        stays_inside: Without a location and options it writes into the run's own
            folder only and talks to no host. Such a backend is opened for a run
            folder of anybody's; another one where this user has chosen it.
        remote: As a primary it lies across a network. A start waits 5 s at most for it, and
            a restart goes on without it where it raises `StoreUnavailableError` or does not
            answer; it is then opened with `unasked`.
        needs: Names of modules that it imports and Quark does not bring. Where one is not
            installed, it is not opened, and the user is told.
        describe_run: What is known on this machine of the run that it mirrors, for people:
            it reads what the mirror has noted in the run's folder, imports no client
            library and asks nobody. Given the configuration and the run; None where
            there is nothing to say but the run's own id and name.
        tracker: How a tracker asks for it by name; None for any other mirror.
        is_default_primary: Whether runs go there where nobody says otherwise. It has
            `migrate`.
        install: How to install them, such as `pip install "my-package[client]"`.
    """

    name: str
    summary: str
    open: Callable[[BackendConfig], Backend]
    capabilities: frozenset[Capability] = frozenset()
    schemes: Sequence[str] = ()
    rank_policy: RankPolicy = RankPolicy.ZERO
    api_version: int = API_VERSION
    migrate: Callable[[BackendConfig, str], int] | None = None
    own_process: bool = True
    plugin: str | None = None
    stays_inside: bool = False
    remote: bool = False
    needs: Sequence[str] = ()
    install: str = ""
    describe_run: Callable[[BackendConfig, RunRecord], MirrorRun] | None = None
    tracker: TrackerForm | None = None
    is_default_primary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A payload on its way to a backend.

    Attributes:
        run_id: The run.
        sha256: Its SHA-256, in hexadecimal.
        size_bytes: Its length.
        path: A file that holds it, to be read and left as it is.
    """

    run_id: str
    sha256: str
    size_bytes: int
    path: Path


@runtime_checkable
class SupportsArtifacts(Backend, Protocol):
    """What a backend has that declares `Capability.ARTIFACTS`."""

    def put_payload(self, payload: Payload) -> None:
        """Keep a payload; return when it is as safe as a batch.

        Called by the lane before `write` of the batch whose records name it,
        perhaps again for one that is kept already. Raises as `write` does.
        """

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """A payload, open for reading; from any thread.

        Raises:
            ArtifactNotFoundError: It is not kept here.
            SessionStoreError: The store cannot be read.
        """

    def payload_directory(self, run_id: str) -> Path | None:
        """The run's own directory, where payloads may be put in place.

        None where they have to be sent. In place means: as
        `quark_core.artifacts` lays them out under that directory.
        """


class MirrorRun(msgspec.Struct, frozen=True):
    """A run in another tool, read-only: the tool itself works elsewhere.

    Mirrors live in helper processes, so that none can touch training; there
    is no object of theirs to hand out here. To log, use the tracker.

    Attributes:
        backend: Name of the mirror.
        id: Its id there; None until the mirror has begun it.
        name: Its name, or None.
        project: Project or experiment there.
        entity: User or team that it belongs to there, where that is known.
        tracking_uri: Where the tool is, where that was given.
        url: Its page, once the mirror has begun the run: None where the tool has no
            server, and of a run that has only been offline.
        directory: Where the mirror keeps its files on this machine, or None.
    """

    backend: str
    id: str | None = None
    name: str | None = None
    project: str | None = None
    entity: str | None = None
    tracking_uri: str | None = None
    url: str | None = None
    directory: Path | None = None

    @property
    def experiment(self) -> str | None:
        """The project, as some tools call it."""
        return self.project


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendDelivery:
    """Delivery state of one backend; all counts are records.

    `submitted == delivered + waiting + dropped + unknown + sum(quarantined.values())` holds at each
    moment.

    Attributes:
        backend: Name of the backend.
        primary: Whether it is the primary store.
        state: `opening`, `ready`, `retrying`, `resting`, `paused` (credentials rejected) or
            `closed`.
        submitted: Records given to the delivery queue.
        delivered: Records acknowledged by the backend.
        waiting: Records not yet acknowledged.
        quarantined: Reason -> number of rejected records.
        dropped: Records removed from memory before the backend accepted them.
        unknown: Records in flight when the delivery was abandoned or the backend's process ended.
            The backend may have stored them.
        errors: Reason -> number of failed attempts.
    """

    backend: str
    primary: bool
    state: str
    submitted: int
    delivered: int
    waiting: int = 0
    quarantined: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0
    unknown: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether the backend has all submitted records."""
        return self.delivered == self.submitted

    def describe(self) -> str:
        """Return a one-line summary."""
        parts = [f"{self.delivered} delivered"]
        parts += [
            f"{count} {what}"
            for what, count in (
                ("waiting", self.waiting),
                ("dropped", self.dropped),
                ("unknown", self.unknown),
            )
            if count
        ]
        parts += [f"{count} refused ({reason})" for reason, count in self.quarantined.items()]
        if self.errors and not self.complete:
            parts.append("last errors: " + "; ".join(list(self.errors)[-2:]))
        return f"{self.backend}: " + ", ".join(parts)


@dataclass(frozen=True, slots=True)
class DeliveryReport:
    """Delivery state of the records that this process wrote to a run.

    Attributes:
        lanes: One report per backend.
        uncovered: Records that a SIGKILL could have lost for a moment, because the crash buffer was
            full.
    """

    lanes: tuple[BackendDelivery, ...] = ()
    uncovered: int = 0

    @property
    def complete(self) -> bool:
        """Whether each backend has all records."""
        return all(lane.complete for lane in self.lanes)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a new dict of JSON values."""
        return {"lanes": [asdict(lane) for lane in self.lanes], "uncovered": self.uncovered}
