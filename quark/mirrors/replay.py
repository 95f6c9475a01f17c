"""Sends what a run's primary has to a mirror, again or for the first time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from quark.mirrors.survey import MirrorState, find_sent, load_generations
from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.backends.contract import (
    Backend,
    Batch,
    Capability,
    StoredRun,
    SupportsArtifacts,
    SupportsPrimary,
    SupportsRead,
    SupportsReplay,
)
from quark_core.backends.registry import check_capabilities
from quark_core.config.redaction import redact_text
from quark_core.delivery.delivery_state import LedgerLine, append_lines
from quark_core.delivery.sending import FindPayload, send_payloads
from quark_core.errors import (
    ArtifactNotFoundError,
    BackendRejected,
    InvalidRunStateError,
    RunNotFoundError,
    SessionStoreError,
    UnknownKindError,
)
from quark_core.records import RECORD_TYPES
from quark_core.records.query import Query
from quark_core.runs.backend_choice import BackendChoice, find_local_path, remember

_ALL = Query(all_attempts=True)
_CHUNK = 256
_Identity = tuple[str, str, int]


@dataclass(slots=True, kw_only=True)
class Replay:
    """What was sent to a mirror. All counts are records, without what is lifecycle.

    Attributes:
        backend: How to ask for the mirror.
        sent: Sent and acknowledged; one that had them already keeps them once.
        present: In the mirror before, and so not sent.
        refused: Refused by it, by reason.
        unseen: Sent and acknowledged, and yet not in the mirror when it is read: it
            believes to have them, as after somebody has deleted some of its files.
        lifecycle: Batches of the run's start, status and config that were sent.
    """

    backend: str
    sent: int = 0
    present: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    unseen: int = 0
    lifecycle: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return asdict(self)


def replay_run(
    primary: SupportsPrimary,
    stored: StoredRun,
    choice: BackendChoice,
    known: MirrorState | None,
    storage_dir: Path,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> Replay:
    """Give a mirror everything of a run that the primary has and it lacks.

    That is the run's records, and what analyzers found as far as readers see it.

    A backend that is idempotent may be given it at any time, as often as
    wanted. Another one is given a run once only, and never one that a lane
    has delivered to it: it would store it twice.

    Args:
        primary: The run's primary, opened for reading.
        stored: The run.
        choice: The mirror.
        known: What is known of it as a mirror of this run; None where it was none.
        storage_dir: The storage root.
        on_progress: Told of each number of records that are done with.

    Raises:
        InvalidRunStateError: The run is being written, or the mirror may have it already.
        SessionStoreError: The primary does not give batches back.
        BackendUnavailable: The mirror does not take them now; what it took, it has.
    """
    definition, run_id = choice.definition, str(stored.run.id)
    place = redact_text(choice.specification)
    source = _check_run(primary, stored)
    run_path = find_local_path(primary, storage_dir, run_id)
    config = choice.configure(storage_dir, run_id=run_id, project=stored.project.name)
    idempotent = Capability.IDEMPOTENT in definition.capabilities
    if known is not None and not idempotent:
        raise InvalidRunStateError(
            f"{place} was a mirror of run {run_id} and cannot tell a batch that comes twice: "
            "what it has acknowledged would be there twice. What still waits for it, "
            "`quark sync` delivers"
        )
    # What analyzers find later is sent there too.
    remember([choice], storage_dir)
    mirror = check_capabilities(definition, definition.open(replace(config, run_path=run_path)))
    try:
        present = _list_present(mirror, run_id)
        if present and not idempotent:
            raise InvalidRunStateError(
                f"{place} has records of run {run_id} and cannot tell a batch that comes twice"
            )
        writers = _list_writers(primary, run_id)
        generations = load_generations(primary, run_id)
        lines = [
            LedgerLine(writer, attempt, rank, place, place, begun=True)
            for writer, attempt, rank in writers
        ]
        # Before the first batch: a replay that is broken off must be known of.
        append_lines(run_path, lines if known is None else ())
        replay = Replay(backend=place)
        with _PayloadFinder(primary, run_id) as find:
            sending = _Sending(mirror, present, find, replay, on_progress)
            for writer, _, _ in writers:
                sending.send(_iterate(source, run_id, writer))
            refused = dict(replay.refused)
            sending.send(chain.from_iterable(generations.values()))
        if isinstance(mirror, SupportsRead):
            own = {writer for writer, _, _ in writers} | set(generations)
            replay.unseen = sending.count_unseen(_list_present(mirror, run_id), own)
    finally:
        mirror.close()
    if known is None:
        append_lines(run_path, [msgspec.structs.replace(line, begun=False) for line in lines])
    if replay.refused == refused:
        lane = (place, place) if known is None else (known.backend, known.specification)
        noted = find_sent(storage_dir, run_path, run_id).get(lane[1], set())
        append_lines(run_path, _describe_generations(generations, noted, *lane))
    return replay


def _describe_generations(
    generations: Mapping[str, Sequence[Batch]], noted: set[str], name: str, specification: str
) -> list[LedgerLine]:
    """The ledger's lines of what analyzers found, without what it has them of."""
    return [
        LedgerLine(writer, 0, 0, name, specification, batches=len(batches))
        for writer, batches in generations.items()
        if writer not in noted
    ]


def _check_run(primary: object, stored: StoredRun) -> SupportsReplay:
    """Refuse a run whose batches the primary does not give back, or that is being written."""
    if not isinstance(primary, SupportsReplay):
        raise SessionStoreError(
            "the run's primary store does not give batches back, so there is nothing to replay"
        )
    if stored.state == "running":
        raise InvalidRunStateError(
            f"run {stored.run.id} is being written: its own process delivers to its mirrors; "
            "replay it when it has ended"
        )
    return primary


class _Sending:
    """Sends to one mirror what it does not have, and counts in a Replay what became of it."""

    def __init__(
        self,
        mirror: Backend,
        present: set[_Identity],
        find: FindPayload,
        replay: Replay,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self._mirror = mirror
        self._present = present
        self._find = find
        self._replay = replay
        self._on_progress = on_progress
        self._sent: set[_Identity] = set()

    def send(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            self._send_batch(batch)
            if self._on_progress is not None:
                self._on_progress(batch.count)

    def count_unseen(self, now: set[_Identity], own: set[str]) -> int:
        """How many of the records sent are not among those that the mirror has now.

        Args:
            now: What the mirror shows.
            own: The run's writers; what it shows of others are points, not records.
        """
        if not own & {writer for writer, _, _ in now}:
            return 0  # it shows points, and not which records they were
        unseen = 0
        # Of a kind that it has nothing of, it may keep none.
        for kind in {kind for _, kind, _ in now}:
            sent = {one for one in self._sent if one[1] == kind}
            shown = {one for one in now if one[1] == kind}
            missing = len(sent - shown)
            # Of points beside records only the number is known.
            points = sum(writer not in own for writer, _, _ in shown)
            unseen += max(0, missing - points)
        return unseen

    def _send_batch(self, batch: Batch) -> None:
        replay, is_lifecycle = self._replay, batch.kind == "lifecycle"
        sequences = batch.decoded.to_list("sequence")
        identities = {(batch.writer_id, batch.kind, sequence) for sequence in sequences}
        if not is_lifecycle and identities <= self._present:
            replay.present += batch.count
            return
        try:
            send_payloads(self._mirror, [batch], [self._find])
            self._mirror.write(batch)
        except BackendRejected as error:
            # The store may give a batch back in other bytes; of a start or a status that the
            # mirror has, that is all that is wrong.
            if not is_lifecycle:
                replay.refused[str(error)] = replay.refused.get(str(error), 0) + batch.count
            return
        if is_lifecycle:
            replay.lifecycle += 1
        else:
            replay.sent += batch.count
            self._sent |= identities


def _iterate(primary: SupportsReplay, run_id: str, writer: str) -> Iterator[Batch]:
    start = 0
    while batches := primary.read_batches(run_id, writer, start, _CHUNK):
        yield from batches
        start = batches[-1].number + 1


def _list_writers(primary: SupportsRead, run_id: str) -> list[tuple[str, int, int]]:
    """Every writer of a run with its attempt and rank, in the order in which they began."""
    first: dict[str, tuple[int, int, int]] = {}
    for kind in RECORD_TYPES:
        try:
            columns = primary.read(run_id, kind, _ALL)
        except UnknownKindError:
            continue  # the server does not have the plugin; its batches are replayed all the same
        fields = ("writer_id", "attempt", "rank", "time_us")
        for writer, attempt, rank, time_us in zip(
            *(columns[name].tolist() for name in fields), strict=True
        ):
            known = first.get(writer)
            if known is None or time_us < known[2]:
                first[writer] = (attempt, rank, time_us)
    ordered = sorted(first.items(), key=lambda item: (item[1], item[0]))
    return [(writer, attempt, rank) for writer, (attempt, rank, _) in ordered]


def _list_present(mirror: Backend, run_id: str) -> set[_Identity]:
    """Writer, kind and sequence of each record that a mirror has, where it can say so."""
    if not isinstance(mirror, SupportsRead):
        return set()
    found: set[_Identity] = set()
    for kind in RECORD_TYPES:
        try:
            columns = mirror.read(run_id, kind, _ALL)
        except RunNotFoundError:
            return set()
        writers, sequences = columns["writer_id"].tolist(), columns["sequence"].tolist()
        found.update((w, kind, s) for w, s in zip(writers, sequences, strict=True))
    return found


class _PayloadFinder:
    """Finds the payloads of a run: where the primary keeps them, or fetched from it."""

    def __init__(self, primary: object, run_id: str) -> None:
        self._primary = primary
        self._run_id = run_id
        self._fetched = tempfile.TemporaryDirectory(prefix="quark-replay-")

    def __enter__(self) -> FindPayload:
        return self._find

    def __exit__(self, *_: object) -> None:
        self._fetched.cleanup()

    def _find(self, sha256: str) -> Path | None:
        if not isinstance(self._primary, SupportsArtifacts):
            return None
        directory = self._primary.payload_directory(self._run_id)
        if directory is not None:
            return PayloadFolder(directory).find(sha256)
        path = Path(self._fetched.name) / sha256
        try:
            with (
                self._primary.open_payload(self._run_id, sha256) as source,
                path.open("wb") as file,
            ):
                while piece := source.read(1 << 20):
                    file.write(piece)
        except ArtifactNotFoundError:
            return None
        return path
