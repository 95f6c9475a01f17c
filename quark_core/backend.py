"""The contract between Quark and a storage backend.

A backend is declared by a `BackendDefinition`, opened once for one run, and
fed batches by one lane, which is one thread. Its duties:

- `write(batch)` returns only when the batch is as safe as the backend can
  make it. It raises `BackendUnavailable` to be called again later with the
  same batch, `BackendRejected` to have the batch put in quarantine. Anything
  else that it raises counts as a bug; the lane tries again and then rests.
- A batch has the identity (run_id, writer_id, number) and is never cut again.
  A backend with `Capability.IDEMPOTENT` must store a batch that it gets twice
  once. Numbers of one writer arrive in ascending order; a gap is a batch that
  was dropped or quarantined before.
- `write` and `close` are called from the lane's thread only; the methods of
  `SupportsRead` from any thread, at any time, also while `write` runs.

Quark owns the thread, the retries and the order; the backend owns its files
and connections and gives them up in `close()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from quark_core.codec import DecodedBody, decode_body
from quark_core.records import ConfigSnapshot, EnvironmentSnapshot, ProjectRecord, RunRecord

if TYPE_CHECKING:
    from quark_core.columns import Columns
    from quark_core.query import Query
    from quark_core.records import StreamRecord
    from quark_core.run_summary import RunSummary
    from quark_core.search.expression import RunSearch
    from quark_core.series import Series

__all__ = [
    "API_VERSION",
    "Backend",
    "BackendConfig",
    "BackendDefinition",
    "Batch",
    "Capability",
    "Generation",
    "RankPolicy",
    "RunLocation",
    "StoredRun",
    "SupportsGenerations",
    "SupportsGroups",
    "SupportsPrimary",
    "SupportsRead",
    "SupportsReplay",
    "SupportsSearch",
    "SupportsSeries",
]

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
    GENERATIONS = "generations"
    """Implements `SupportsGenerations`: keeps the outputs of analyzers."""
    ARTIFACTS = "artifacts"
    """Implements `quark_core.artifacts.contract.SupportsArtifacts`: keeps payloads."""
    REMOVAL = "removal"
    """Implements `quark_core.keeping.SupportsRemoval`: measures runs, removes them by a trash."""


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
        body: The records, as `quark_core.codec` encodes them.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run as a store knows it.

    Attributes:
        project: Its project.
        run: Its record, with the stored status.
        state: The status, or "lost" where the status still says running but
            the process is gone.
        config: The newest attempt's configuration, or None.
        environment: The newest attempt's environment, or None.
        heartbeat_at: When the newest attempt was last heard of, or None.
        lost_reason: Why the run counts as lost, or None.
    """

    project: ProjectRecord
    run: RunRecord
    state: str
    config: ConfigSnapshot | None = None
    environment: EnvironmentSnapshot | None = None
    heartbeat_at: str | None = None
    lost_reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {
            "project": self.project.to_dict(),
            "run": self.run.to_dict(),
            "state": self.state,
            "config": None if self.config is None else self.config.to_dict(),
            "environment": None if self.environment is None else self.environment.to_dict(),
            "heartbeat_at": self.heartbeat_at,
            "lost_reason": self.lost_reason,
        }


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
    """What a backend has that declares `Capability.PRIMARY`.

    `write` of a lifecycle `start` whose attempt another process has started
    raises `BackendRejected`: that is how two processes that resume one run at
    the same moment are told apart.
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

    Other backends that read are served by `quark_core.reading`, which reads
    every point.
    """

    def read_series(
        self, run_id: str, key: str, *, max_points: int | None, all_attempts: bool = False
    ) -> Series:
        """One metric, in at most `max_points` entries; every point for None."""

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """What `read` returns, in parts of about `rows` rows, in order.

        The parts are those of one moment: what comes or is compacted
        meanwhile changes nothing.
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
    """

    storage_dir: Path
    run_path: Path | None = None
    run_id: str | None = None
    project: str | None = None
    location: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    read_only: bool = False


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
        own_process: As a mirror it is opened in a helper process, where its `open`
            is a function of a module: for backends that do much in Python, which
            training would wait for. It must recover from a kill at any moment.
    """

    name: str
    summary: str
    open: Callable[[BackendConfig], Backend]
    capabilities: frozenset[Capability] = frozenset()
    schemes: Sequence[str] = ()
    rank_policy: RankPolicy = RankPolicy.ZERO
    api_version: int = API_VERSION
    migrate: Callable[[BackendConfig, str], int] | None = None
    own_process: bool = False
