"""A run's mirrors after the fact: what they have, whether it is all, and sending it again."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.backends.contract import (
    Backend,
    Batch,
    Capability,
    SupportsArtifacts,
    SupportsGenerations,
    SupportsPrimary,
    SupportsRead,
    SupportsReplay,
)
from quark_core.backends.registry import check_capabilities
from quark_core.backends.run_summary import StoredRun
from quark_core.config.redaction import redact_text
from quark_core.delivery.delivery_state import (
    LedgerLine,
    append_lines,
    lane_folder_name,
    read_lines,
)
from quark_core.delivery.journal import frame_outputs, split_generation
from quark_core.delivery.journal_folder import JournalFolder, Manifest, find_folders
from quark_core.delivery.sending import FindPayload, Quarantine, send_payloads
from quark_core.delivery.sync import count_waiting
from quark_core.errors import (
    ArtifactNotFoundError,
    BackendRejected,
    InvalidRunStateError,
    RunNotFoundError,
    SessionStoreError,
    UnknownKindError,
)
from quark_core.records import RECORD_TYPES, LifecycleRecord, MetricRecord, StreamRecord
from quark_core.records.query import Query
from quark_core.runs.backend_choice import BackendChoice, find_local_path, remember

# What each backend of a run was given, and which outputs of analyzers it is to have.
#
# Out of the run's journals, marks, ledger and quarantine on this machine, and its primary.


@dataclass(slots=True, kw_only=True)
class MirrorState:
    """One backend of a run, over all of the run's writers.

    Attributes:
        backend: Name of its lane.
        specification: How to ask for it.
        primary: Whether it is the run's primary.
        state: delivered, waiting, delivering (a living process is at it) or begun (a replay
            that was broken off).
        writers: How many processes have written to it; each generation of an analyzer
            counts as one.
        batches: Batches that it was given.
        waiting: Records that are still to be delivered.
        quarantined: Records that it refused, by reason.
        unknown: Records that it may or may not have.
        reasons: Why it waits, and what is damaged.
        outputs: Kind of what analyzers find -> (records in the primary, those of them that
            it was sent or that wait for it); filled in by `note_outputs`.
    """

    backend: str
    specification: str
    primary: bool = False
    state: str = "delivered"
    writers: int = 0
    batches: int = 0
    waiting: int = 0
    quarantined: dict[str, int] = field(default_factory=dict)
    unknown: int = 0
    reasons: list[str] = field(default_factory=list)
    outputs: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def unsent(self) -> dict[str, int]:
        """Kind -> records of analyzers that the primary has and it was never sent."""
        return {kind: has - got for kind, (has, got) in self.outputs.items() if has > got}

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return asdict(self)


def find_journals(storage_dir: Path, run_id: str) -> list[tuple[JournalFolder, Manifest]]:
    """The journals of a run that are not all delivered yet."""
    found = [(folder, folder.read_manifest()) for folder in find_folders(storage_dir, run_id)]
    return [(folder, manifest) for folder, manifest in found if manifest]


def survey_mirrors(storage_dir: Path, run_path: Path, run_id: str) -> list[MirrorState]:
    """The backends that a run was written to, the primary first; touches nothing.

    A run that had no mirror and is wholly delivered has left no trace of its
    lanes: the list is empty then.

    Args:
        storage_dir: The storage root.
        run_path: The run's directory.
        run_id: The run.
    """
    states: dict[str, MirrorState] = {}

    def find(name: str, specification: str, *, primary: bool) -> MirrorState:
        return states.setdefault(
            specification, MirrorState(backend=name, specification=specification, primary=primary)
        )

    begun = set()
    for line in read_lines(run_path):
        state = find(line.lane, line.specification, primary=line.primary)
        if line.begun:
            begun.add(line.specification)
            continue
        begun.discard(line.specification)
        state.writers += 1
        state.batches += line.batches
        state.unknown += line.unknown
    for specification in begun:
        states[specification].state = "begun"
    for folder, manifest in find_journals(storage_dir, run_id):
        for entry, waiting in zip(manifest.lanes, count_waiting(folder, manifest), strict=True):
            state = find(entry.name, entry.specification, primary=entry.primary)
            state.writers += 1
            state.batches += folder.mark(entry.name).done
            state.waiting += waiting.waiting
            if waiting.state == "held":
                state.state = "delivering"
            elif waiting.waiting and state.state != "delivering":
                state.state = "waiting"
            state.reasons += [waiting.reason] if waiting.reason else []
            state.reasons += waiting.damage
    for state in states.values():
        quarantine = run_path / "quarantine" / lane_folder_name(state.backend)
        for item in Quarantine(quarantine, state.backend).load():
            count = state.quarantined.get(item.reason, 0)
            state.quarantined[item.reason] = count + item.batch.count
    return sorted(states.values(), key=lambda state: (not state.primary, state.backend))


def load_generations(primary: object, run_id: str) -> dict[str, list[Batch]]:
    """Batches of each generation that readers see, by writer, the older ones first.

    They are those that went to the mirrors when the run was analyzed. Nothing
    of a primary that keeps no outputs.

    Raises:
        SessionStoreError: The primary cannot be read.
    """
    if not isinstance(primary, SupportsGenerations):
        return {}
    found: dict[str, dict[str, list[StreamRecord]]] = {}
    for kind in (kind for kind, each in RECORD_TYPES.items() if each.IS_ANALYSIS):
        for record in primary.read_outputs(run_id, kind).to_records():
            kinds = found.setdefault(record.writer_id, {})
            kinds.setdefault(kind, []).append(record)
    return {writer: frame_outputs(found[writer]) for writer in sorted(found, key=_place)}


def find_sent(storage_dir: Path, run_path: Path, run_id: str) -> dict[str, set[str]]:
    """Backend's specification -> generations that it was sent, or that wait for it.

    As the run's ledger and journals on this machine have it.

    Args:
        storage_dir: The storage root.
        run_path: The run's directory.
        run_id: The run.
    """
    sent: dict[str, set[str]] = {}
    for line in read_lines(run_path):
        if line.batches and not line.begun and split_generation(line.writer_id) is not None:
            sent.setdefault(line.specification, set()).add(line.writer_id)
    for _, manifest in find_journals(storage_dir, run_id):
        for entry in manifest.lanes if manifest.generation else ():
            sent.setdefault(entry.specification, set()).add(manifest.writer_id)
    return sent


def note_outputs(
    states: list[MirrorState],
    generations: Mapping[str, list[Batch]],
    sent: Mapping[str, set[str]],
) -> None:
    """Note in the state of each mirror which outputs of analyzers it was sent, of how many.

    Args:
        states: What `survey_mirrors` returned.
        generations: What `load_generations` returned.
        sent: What `find_sent` returned.
    """
    for state in states:
        if state.primary:
            continue
        known = sent.get(state.specification, set())
        for writer, batches in generations.items():
            for batch in batches:
                has, got = state.outputs.get(batch.kind, (0, 0))
                was_sent = batch.count if writer in known else 0
                state.outputs[batch.kind] = has + batch.count, got + was_sent


def _place(writer_id: str) -> tuple[int, str]:
    found = split_generation(writer_id)
    return (0, writer_id) if found is None else (found[1], found[0])


_ALL = Query(all_attempts=True)


@dataclass(frozen=True, slots=True)
class RecordCounts:
    """How many records a backend has of a run.

    Attributes:
        kinds: Kind -> records; what travels as lifecycle, and the outputs of analyzers, left out.
        metrics: Metric key -> points.
        outputs: Kind -> generation (its `writer_id`) -> records. Of a primary those that
            readers see; a mirror has those of earlier generations too.
    """

    kinds: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a mirror has against what the primary has.

    Attributes:
        backend: How to ask for the mirror.
        metrics: Metric key -> (points in the primary, in the mirror), where they differ.
        kinds: Kind -> the same for its records, where they differ.
        not_kept: Kinds that the primary has and the mirror has nothing of.
        compared: How many records of the primary were compared.
        refusal: Why nothing could be compared, or None.
    """

    backend: str
    metrics: dict[str, tuple[int, int]] = field(default_factory=dict)
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)
    not_kept: tuple[str, ...] = ()
    compared: int = 0
    refusal: str | None = None

    @property
    def equal(self) -> bool:
        """Whether the mirror has all of every kind that it keeps, and all metrics."""
        return self.refusal is None and not self.metrics and not self.kinds

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {**asdict(self), "equal": self.equal}


def count_records(reader: SupportsRead, run_id: str) -> RecordCounts:
    """Count what a backend has of a run, hidden and non-finite points included.

    Raises:
        RunNotFoundError: It has no such run.
        SessionStoreError: It cannot be read.
    """
    import numpy as np

    counts = RecordCounts()
    for kind in _list_kinds():
        try:
            columns = reader.read(run_id, kind, _ALL)
        except UnknownKindError:
            continue  # the server does not have the plugin
        counts.kinds[kind] = columns.count
        if kind == MetricRecord.KIND and columns.count:
            keys, points = np.unique(columns["metric_key"].astype(str), return_counts=True)
            counts.metrics.update(zip(keys.tolist(), points.tolist(), strict=True))
        if RECORD_TYPES[kind].IS_ANALYSIS:
            writers = Counter(columns["writer_id"].tolist())
            outputs = {w: n for w, n in writers.items() if split_generation(w) is not None}
            counts.kinds[kind] -= sum(outputs.values())
            asked: object = reader
            if isinstance(asked, SupportsGenerations):
                stored = asked.read_outputs(run_id, kind)
                outputs = dict(Counter(stored["writer_id"].tolist()))
            counts.outputs[kind] = outputs
    return counts


def compare_counts(
    primary: RecordCounts,
    mirror: SupportsRead,
    run_id: str,
    backend: str,
    sent: Set[str] = frozenset(),
) -> Comparison:
    """Hold a mirror against what was counted in the primary.

    Of the outputs of analyzers those are compared that readers of the primary see.

    Args:
        primary: Counts of the primary.
        mirror: The mirror, opened for reading.
        run_id: The run.
        backend: How to ask for the mirror.
        sent: Generations that the mirror was sent: a kind of which it was sent all, and
            has nothing, is one that it does not keep.

    Raises:
        SessionStoreError: The mirror cannot be read.
    """
    try:
        found = count_records(mirror, run_id)
    except RunNotFoundError:
        found = RecordCounts()
    metrics = {
        key: (primary.metrics.get(key, 0), found.metrics.get(key, 0))
        for key in sorted({*primary.metrics, *found.metrics})
    }
    kinds = {kind: (primary.kinds.get(kind, 0), found.kinds.get(kind, 0)) for kind in _list_kinds()}
    for kind in (kind for kind in kinds if RECORD_TYPES[kind].IS_ANALYSIS):
        visible, theirs = primary.outputs.get(kind, {}), found.outputs.get(kind, {})
        has, got = kinds[kind]
        got += sum(count for writer, count in theirs.items() if writer in visible)
        kinds[kind] = has + sum(visible.values()), got
    not_kept = tuple(
        kind
        for kind, (has, got) in kinds.items()
        if has
        and not got
        and kind != MetricRecord.KIND
        and primary.outputs.get(kind, {}).keys() <= sent
    )
    if not any(got for _, got in kinds.values()):
        not_kept = ()  # it has nothing at all of the run, which is no choice of its
    return Comparison(
        backend=backend,
        metrics={key: pair for key, pair in metrics.items() if pair[0] != pair[1]},
        kinds={k: pair for k, pair in kinds.items() if pair[0] != pair[1] and k not in not_kept},
        not_kept=not_kept,
        compared=sum(has for kind, (has, _) in kinds.items() if kind not in not_kept),
    )


def _list_kinds() -> list[str]:
    return [kind for kind in RECORD_TYPES if kind != LifecycleRecord.KIND]


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
            f"{place} was a mirror of run {run_id} and cannot detect duplicate batches, so a "
            "replay would duplicate its records. `quark sync` delivers the records that still "
            "wait for it"
        )
    # What analyzers find later is sent there too.
    remember([choice], storage_dir)
    mirror = check_capabilities(definition, definition.open(replace(config, run_path=run_path)))
    try:
        present = _list_present(mirror, run_id)
        if present and not idempotent:
            raise InvalidRunStateError(
                f"{place} has records of run {run_id} and cannot detect duplicate batches"
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
            "the run's primary store cannot return batches, so they cannot be replayed"
        )
    if stored.state == "running":
        raise InvalidRunStateError(
            f"run {stored.run.id} is running, and its own process delivers to its mirrors. "
            "Replay it when it has ended"
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
