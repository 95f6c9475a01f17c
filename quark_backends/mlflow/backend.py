"""The MLflow mirror as a backend: its options, and batches sent in parts.

A run becomes a run of the MLflow experiment that is named like its project.
Metrics are metrics; `lifecycle` makes params, tags and status, `points`
curves and `findings` tags of the other kinds. Every record is kept exactly
among the run's artifacts too, as `files` says, and read back from there.

Where: `mlflow+URI`, such as `mlflow+http://127.0.0.1:5000` or
`mlflow+sqlite:///runs.db`; plain `mlflow` goes to MLFLOW_TRACKING_URI.
Options, as in `mlflow:http://127.0.0.1:5000?on_deleted=restore`:

    experiment      name of the experiment; else that of the run's project
    on_deleted      `new` (default) or `restore`: what to do where the run or its
                    experiment was deleted in MLflow
    max_params      how many params the server takes; further ones are left out
    quark           `minimal` (default): what MLflow has a place for, and a file of the records
                    that analyzers read and MLflow does not give back; or `full`: also every
                    record exactly, what analyzers found, and events
    layers          how many layers and parameters of a step become curves (20)
    max_payload_mb  payloads of artifacts that are larger are left out
    sample_ids      `hashed` (default) or `plain`: how ids of samples are kept

Credentials come from MLflow's own environment variables.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from quark_backends.mirror_state import digest_batch, is_new
from quark_backends.mlflow.artifacts import RECORDS, MirrorFiles
from quark_backends.mlflow.client import (
    Missing,
    Refused,
    RefusedRecords,
    Server,
    check_credentials_are_for,
    find_uri,
    open_server,
    unavailable,
    unusable,
)
from quark_backends.mlflow.lifecycle import (
    Lifecycle,
    ShownGenerations,
    list_finding_tags,
    list_raised_tags,
    tag_last_error,
)
from quark_backends.mlflow.points import (
    MAX_POINTS,
    NameMap,
    Point,
    chunk,
    count_events,
    key_and_text,
    list_raised_alerts,
    list_values,
    make_metric,
    make_points,
    note_infinities,
)
from quark_backends.mlflow.reader import MlflowReader, needs_file, reduce_batch
from quark_backends.mlflow.run import MirroredRun, MlflowFolder, MlflowWriter
from quark_core.api import (
    RECORD_TYPES,
    SOURCES_OPTION,
    AlertRecord,
    ArtifactRecord,
    BackendConfig,
    BackendRejected,
    BackendUnavailable,
    Batch,
    BatchDiagnosticRecord,
    EventRecord,
    FingerprintRecord,
    HealthScoreRecord,
    LifecycleRecord,
    MetricRecord,
    Payload,
    PhaseRecord,
    SampleRecord,
    SchemaValidationError,
    StoredRun,
    encode_records,
)

if TYPE_CHECKING:
    from quark_core.api import Columns, Query

_NUMBERS = ("layers", "max_params", "max_payload_mb")
_TEXTS = ("experiment",)
_CHOICES = {
    "on_deleted": ("new", "restore"),
    "quark": ("minimal", "full"),
    "sample_ids": ("hashed", "plain"),
    SOURCES_OPTION: ("0", "1"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user has asked for.

    Attributes:
        experiment: Name of the experiment, or None for that of the run's project.
        restore: Whether a deleted run or experiment is taken back.
        hash_sample_ids: Whether ids of samples are hashed.
        layers: How many layers, and parameters, of a step become curves.
        max_params: How many params the server takes, or None for any number.
        keeps_all: Whether MLflow gets all that Quark knows, and not only what it has a place for.
        keeps_sources: Whether it gets the code that the run is made of.
        max_payload_bytes: Larger payloads of artifacts are left out; None for no limit.
    """

    experiment: str | None = None
    restore: bool = False
    hash_sample_ids: bool = True
    layers: int = 20
    max_params: int | None = None
    max_payload_bytes: int | None = None
    keeps_all: bool = False
    keeps_sources: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Options:
        """Read them.

        Raises:
            BackendUnusable: An unknown option, or a bad value.
        """
        known = sorted((*_NUMBERS, *_CHOICES, *_TEXTS))
        for name, text in options.items():
            if name not in known:
                raise unusable(
                    f"the MLflow mirror has no option {name!r}. Its options are {', '.join(known)}"
                )
            if name in _NUMBERS and not (text.isascii() and text.isdecimal()):
                raise unusable(f"{name} must be a number, got {text!r:.60}")
            if name in _CHOICES and text not in _CHOICES[name]:
                raise unusable(f"{name} must be {' or '.join(_CHOICES[name])}, got {text!r:.60}")
        numbers = {name: int(options[name]) for name in _NUMBERS if name in options}
        size_mb = numbers.get("max_payload_mb")
        return cls(
            experiment=options.get("experiment", "").strip() or None,
            restore=options.get("on_deleted") == "restore",
            hash_sample_ids=options.get("sample_ids") != "plain",
            keeps_all=options.get("quark") == "full",
            keeps_sources=options.get(SOURCES_OPTION) == "1",
            layers=numbers.get("layers", 20),
            max_params=numbers.get("max_params"),
            max_payload_bytes=None if size_mb is None else size_mb * 1024 * 1024,
        )


class PointSender:
    """Brings metric records into MLflow, each point once.

    Args:
        server: Where the run is.
        run: The run.
        names: Names of metrics.
        refused: Takes what MLflow refuses.
        save: Keeps how far a writer is.
    """

    def __init__(
        self,
        server: Server,
        run: MirroredRun,
        names: NameMap,
        refused: RefusedRecords,
        save: Callable[[str, MlflowWriter], None],
    ) -> None:
        self._server = server
        self._run = run
        self._names = names
        self._refused = refused
        self._save = save

    def send(
        self, batch: Batch, writer: MlflowWriter, records: Sequence[MetricRecord]
    ) -> tuple[MlflowWriter, dict[str, dict[str, int]]]:
        """Send the points of a batch.

        Args:
            batch: The batch that the records are of.
            writer: How far its writer is.
            records: Metric records, of the batch itself or made from it.

        Returns:
            How far the writer is then, its head aside; and of each name where
            its value first became infinite, as `note_infinities` says.

        Raises:
            BackendRejected: MLflow refuses every one of a batch of metrics.
        """
        names = self._names.find("metrics", map(key_and_text, records))
        points, recent = make_points(records, names, writer.recent)
        done = writer.offset if writer.partial == batch.number else 0
        refused: list[tuple[Point, str]] = []
        rest = points[done:]
        for part in chunk(rest, (point.size_bytes for point in rest), MAX_POINTS):
            self._push(part, refused)
            done += len(part)
            # A part is noted only where no point was refused: the file of refused records
            # gets them all at the end, once it is known that the batch as a whole is good.
            if not refused and done < len(points):
                writer = msgspec.structs.replace(writer, partial=batch.number, offset=done)
                self._save(batch.writer_id, writer)
        if points and len(refused) == len(points) and batch.kind == MetricRecord.KIND:
            raise BackendRejected(refused[0][1], backend="mlflow")
        for point, reason in refused:
            self._refused.add(batch.kind, point.record.to_dict(), reason)
        return msgspec.structs.replace(writer, recent=recent), note_infinities(points)

    def send_together(
        self, writer: MlflowWriter, parts: Sequence[Sequence[MetricRecord]]
    ) -> tuple[MlflowWriter, dict[str, dict[str, int]]] | None:
        """Send the points of a writer's next batches of metrics in one request.

        Each batch makes the points that it would make by itself, so that it
        may come again in another company.

        Returns:
            As `send` does; None where MLflow refuses any of the points.
        """
        recent = writer.recent
        points: list[Point] = []
        for records in parts:
            names = self._names.find("metrics", map(key_and_text, records))
            made, recent = make_points(records, names, recent)
            points += made
        try:
            for part in chunk(points, (point.size_bytes for point in points), MAX_POINTS):
                self._log(part)
        except Refused:
            return None
        return msgspec.structs.replace(writer, recent=recent), note_infinities(points)

    def _log(self, points: Sequence[Point]) -> None:
        self._run.call(lambda run_id: self._server.log_metrics(run_id, points))

    def _push(self, points: Sequence[Point], refused: list[tuple[Point, str]]) -> None:
        """Send points; halve what is refused until the bad ones are alone."""
        try:
            self._log(points)
        except Refused as error:
            middle = len(points) // 2
            if not middle:
                refused.append((points[0], str(error)))
                return
            self._push(points[:middle], refused)
            self._push(points[middle:], refused)


def group_batches(
    decoded: Sequence[tuple[Batch, Any]],
) -> list[list[tuple[Batch, Any]]]:
    """Cut into parts, in order: small batches of metrics of one writer together, others alone."""
    parts: list[list[tuple[Batch, Any]]] = []
    room = 0
    for batch, records in decoded:
        fits = batch.kind == MetricRecord.KIND and batch.count <= room
        if fits and parts[-1][0][0].writer_id == batch.writer_id:
            parts[-1].append((batch, records))
            room -= batch.count
        else:
            parts.append([(batch, records)])
            room = MAX_POINTS - batch.count if batch.kind == MetricRecord.KIND else 0
    return parts


class MlflowBackend:
    """Mirrors one run into MLflow, and reads any run of it; see the module for what.

    A batch is acknowledged in a file of this machine, and not sent again
    from then on. One that was sent without that goes out again as it was,
    and SQL stores keep its points once.

    Raises:
        BackendUnavailable: From the constructor, where MLflow cannot be used.
    """

    def __init__(self, config: BackendConfig) -> None:
        uri = find_uri(config.location)
        options = Options.parse(config.options)
        if config.is_noted:
            check_credentials_are_for(uri)
        read_only = config.read_only or config.run_id is None
        self._server = open_server(uri, read_only=read_only)
        self._writing = None if read_only else _Writing(self._server, config, uri, options)
        self.keeps_sources = options.keeps_sources
        self._reader = MlflowReader(self._server, project=config.project)

    def write(self, batch: Batch) -> None:
        """Send a batch; single records that MLflow refuses are put aside.

        Raises:
            BackendRejected: Other content under a known number, a body that
                cannot be read, or MLflow refuses every metric of it.
            BackendUnavailable: MLflow does not take it now.
        """
        self.write_group([batch])

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Send several batches, the points of small ones in one request; raises as `write` does.

        What of them was sent before a failure is acknowledged or, when it
        comes again, found to be there.
        """
        if self._writing is None:
            raise unavailable("the MLflow mirror was opened for reading only")
        self._writing.write(batches)

    def close(self) -> None:
        """Upload the files that are left.

        Raises:
            BackendUnavailable: Some of them have to wait for the next opening.
        """
        self._reader.close()
        if self._writing is not None:
            self._writing.close()

    @property
    def place(self) -> str:
        """Where its runs are, for messages."""
        return self._server.uri

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`; of a run that is not Quark's there are metrics only."""
        self._bring_up_to_date(run_id)
        return self._reader.read(run_id, kind, query)

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`; the run is known by Quark's id and by MLflow's."""
        self._bring_up_to_date(run_id)
        return self._reader.load_run(run_id)

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """See `SupportsRead`; a project is an experiment, and configs are made from params."""
        return self._reader.list_runs(project=project, limit=limit)

    def put_payload(self, payload: Payload) -> None:
        """See `SupportsArtifacts`: it is kept here until its record says where it goes."""
        if self._writing is None:
            raise unavailable("the MLflow mirror was opened for reading only")
        try:
            self._writing.files.stage_payload(payload)
        except OSError as error:
            raise unavailable(f"the mirror's files cannot be written: {error}") from error

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """See `SupportsArtifacts`."""
        if self._writing is not None and (path := self._writing.files.find_payload(sha256)):
            return path.open("rb")
        self._bring_up_to_date(run_id)
        return self._reader.open_payload(run_id, sha256)

    def payload_directory(self, run_id: str) -> Path | None:  # noqa: ARG002 - as the contract has it
        """See `SupportsArtifacts`: payloads have to be sent."""
        return None

    def _bring_up_to_date(self, run_id: str) -> None:
        if self._writing is not None and run_id == self._writing.run_id:
            self._writing.send_files()


class _Writing:
    """The half of the backend that writes; of its methods one runs at a time."""

    def __init__(self, server: Server, config: BackendConfig, uri: str, options: Options) -> None:
        self.run_id = config.run_id or ""
        self._options = options
        self._lock = threading.Lock()
        self._project = config.project or "quark"
        run_path = config.run_path or config.storage_dir / ".quark" / "runs" / self.run_id
        self._state = MlflowFolder(run_path / "mirrors" / "mlflow", uri)
        self._refused = RefusedRecords(run_path / "quarantine" / "mlflow")
        try:
            self._names = NameMap(self._state.folder / "names.json")
            self._run = MirroredRun(
                server,
                self._state,
                self.run_id,
                self._project,
                options.experiment or self._project,
                restore=options.restore,
                keeps_all=options.keeps_all,
            )
        except OSError as error:
            raise unavailable(f"the mirror's files cannot be read: {error}") from error
        self._server = server
        self.files = MirrorFiles(
            self._state.folder,
            self._upload,
            lambda name, reason: self._refused.add("artifact", {"name": name}, reason),
            self._list_segments,
            options.max_payload_bytes,
            lambda: self._run.keeps_all,
        )
        self._points = PointSender(
            server, self._run, self._names, self._refused, self._state.save_writer
        )
        self._lifecycle = Lifecycle(
            server,
            self._run,
            self._names,
            self._refused,
            self.files,
            max_params=options.max_params,
        )
        self._generations = ShownGenerations(self._run, self._lifecycle)

    def write(self, batches: Sequence[Batch]) -> None:
        with self._lock:
            try:
                self._write(batches)
            except SchemaValidationError as error:
                raise BackendRejected(str(error), backend="mlflow") from error
            except (Refused, Missing) as error:
                # Not a record but the run or the experiment itself.
                raise unavailable(f"MLflow rejects the run: {error}; the records wait") from error
            except OSError as error:
                raise unavailable(f"the mirror's files cannot be written: {error}") from error

    def send_files(self) -> None:
        with self._lock:
            if self._run.known.mlflow_run_id is not None:
                self._send_files()

    def close(self) -> None:
        with self._lock:
            if self._run.known.mlflow_run_id is None:
                return
            try:
                self._keep_names()
                self.files.close(self.run_id, self._run.known.first_writer)
            except BackendUnavailable as error:
                raise unavailable(
                    f"{self.files.count_waiting()} files wait for upload to the run: {error}"
                ) from error
            except OSError as error:
                raise unavailable(f"the mirror's files cannot be read: {error}") from error

    def _write(self, batches: Sequence[Batch]) -> None:
        fresh = [batch for batch in batches if self._is_new(batch)]
        # Nothing is sent of a group of which something cannot be read.
        decoded = [(batch, batch.to_records()) for batch in fresh]
        for part in group_batches(decoded):
            is_plain = all(self._follows(before, after) for before, after in pairwise(part))
            if len(part) == 1 or not is_plain or not self._write_together(part):
                for batch, records in part:
                    self._write_one(batch, records)
        self.files.drop_taken()

    def _is_new(self, batch: Batch) -> bool:
        writer = self._state.load_writer(batch.writer_id)
        if writer.has_gap(batch.number):
            return True
        return is_new(batch, writer.head, writer.digest, backend="mlflow")

    def _follows(self, before: tuple[Batch, Any], after: tuple[Batch, Any]) -> bool:
        """Whether one batch comes right after another that is the newest by then."""
        head = self._state.load_writer(before[0].writer_id).head
        return head < before[0].number == after[0].number - 1

    def _write_one(self, batch: Batch, records: Any) -> None:
        if not self._is_new(batch):
            return
        writer = self._state.load_writer(batch.writer_id)
        digest = digest_batch(batch)
        if batch.kind == BatchDiagnosticRecord.KIND and self._options.hash_sample_ids:
            batch, records = hash_sample_ids(batch, records, self._project)
        writer = self._deliver(batch, writer, records)
        self._lifecycle.catch_up()
        self._keep(batch, records)
        self._acknowledge(batch, digest, writer)
        is_end = batch.kind == LifecycleRecord.KIND and any(r.action == "status" for r in records)
        if is_end or self.files.is_due:
            self._send_files(final=is_end)
        elif batch.kind in (ArtifactRecord.KIND, SampleRecord.KIND):
            self.files.send(self.run_id, only_payloads=True)

    def _write_together(self, part: Sequence[tuple[Batch, Any]]) -> bool:
        """Send a writer's small batches of metrics as one; whether MLflow took every point."""
        newest = part[-1][0]
        sent = self._points.send_together(
            self._state.load_writer(newest.writer_id), [records for _, records in part]
        )
        if sent is None:
            return False
        writer, infinite = sent
        self._lifecycle.note_infinities(infinite)
        self._describe(record for _, records in part for record in records)
        self._lifecycle.catch_up()
        for batch, records in part:
            self._keep(batch, records)
        self._acknowledge(newest, digest_batch(newest), writer, part[0][0].number)
        if self.files.is_due:
            self._send_files()
        return True

    def _keep(self, batch: Batch, records: Any) -> None:
        """Keep a batch for the run's artifacts: exactly, or what analyzers need of it."""
        kept: Batch | None = batch
        is_needed = self._run.keeps_all
        if not is_needed:
            kept = reduce_batch(batch, records)
            is_needed = kept is not None and needs_file(kept, records)
        is_late = batch.number < self._state.load_writer(batch.writer_id).head
        if is_late:
            # Whoever offers again what was refused must see that it is there.
            kept, is_needed = kept or batch, True
        if kept is not None:
            self.files.keep_batch(kept, self.run_id, is_needed=is_needed, is_late=is_late)

    def _acknowledge(
        self, batch: Batch, digest: str, writer: MlflowWriter, first: int | None = None
    ) -> None:
        """Note that MLflow has a batch, and those before it from the `first` on."""
        known = self._state.load_writer(batch.writer_id)
        gaps = known.list_gaps_without(batch.number if first is None else first)
        done = msgspec.structs.replace(writer, partial=-1, offset=0, gaps=gaps)
        if batch.number > known.head:
            done = msgspec.structs.replace(done, head=batch.number, digest=digest)
        else:
            done = msgspec.structs.replace(done, recent=known.recent)
        self._state.save_writer(batch.writer_id, done)

    def _describe(self, records: Iterable[MetricRecord]) -> None:
        if not self._run.keeps_all:
            return
        names = self._names.find("metrics", ())
        self.files.describe_metrics(
            (names[key_and_text(record)[0]], record.metric_key, record.description)
            for record in records
            if record.description is not None
        )

    def _deliver(self, batch: Batch, writer: MlflowWriter, records: Sequence[Any]) -> MlflowWriter:
        kind = batch.kind
        if kind == MetricRecord.KIND:
            writer = self._send_points(batch, writer, records)
            self._describe(records)
        elif kind == LifecycleRecord.KIND:
            for record in records:
                writer = self._apply(batch.writer_id, writer, record)
        elif kind == FingerprintRecord.KIND:
            self._lifecycle.tell_code(records)
        elif kind in _QUARKS_OWN and not self._run.keeps_all:
            pass
        elif kind == EventRecord.KIND:
            counts = dict(writer.events)
            counted = chain(count_events(records, counts), list_raised_alerts(records))
            writer = self._send_points(batch, writer, [make_metric(*one) for one in counted])
            writer = msgspec.structs.replace(writer, events=counts)
            self._lifecycle.set_tags(tag_last_error(records))
            self._lifecycle.set_named_tags(list_raised_tags(records))
            is_first = batch.writer_id == self._run.known.first_writer
            writer = self.files.keep_events(batch.writer_id, writer, records, is_first=is_first)
        elif kind == PhaseRecord.KIND or (kind in RECORD_TYPES and RECORD_TYPES[kind].HAS_FIGURES):
            worst = list_values(kind, records, self._options.layers)
            writer = self._send_points(batch, writer, [make_metric(*one) for one in worst])
            tags = list_finding_tags(kind, records)
            if tags and self._generations.take_up(batch.writer_id):
                self._lifecycle.set_named_tags(tags)
                if kind == PhaseRecord.KIND:
                    self.files.put_text("phases.json", [record.to_dict() for record in records])
        elif kind == SampleRecord.KIND:
            self._run.load()
            self._lifecycle.show(self.files.keep_samples(batch, records))
        elif kind == ArtifactRecord.KIND:
            # Makes sure of the run, which the files of a batch need.
            self._run.load()
            shown = self.files.keep_artifacts(records, keeps_all=self._run.keeps_all)
            self._lifecycle.show(shown)
        return writer

    def _send_points(
        self, batch: Batch, writer: MlflowWriter, records: Sequence[MetricRecord]
    ) -> MlflowWriter:
        writer, infinite = self._points.send(batch, writer, records)
        self._lifecycle.note_infinities(infinite)
        return writer

    def _apply(self, writer_id: str, writer: MlflowWriter, record: LifecycleRecord) -> MlflowWriter:
        self._lifecycle.apply(record)
        if record.action != "gap":
            return writer
        missing = dict(writer.missing)
        data: Mapping[str, Any] = record.data or {}
        for kind, count in data.get("records", {}).items():
            missing[kind] = missing.get(kind, 0) + int(count)
        self._lifecycle.note_missing(writer_id, missing)
        return msgspec.structs.replace(writer, missing=missing)

    def _keep_names(self) -> None:
        # Readers of segments tell by it which points those account for.
        if self._run.keeps_all or self._names.has_changes or self.files.has_records:
            self.files.put_text("name_map.json", self._names.to_dict())

    def _send_files(self, *, final: bool = False) -> None:
        self._keep_names()
        self.files.send(self.run_id, final=final)

    def _upload(self, path: Path, folder: str) -> None:
        self._run.call(lambda run_id: self._server.upload(run_id, path, folder))

    def _list_segments(self) -> Sequence[str]:
        if self._run.was_made_here:
            return ()
        try:
            files = self._run.call(lambda run_id: self._server.list_files(run_id, RECORDS))
        except (BackendUnavailable, Refused, Missing):
            return ()  # artifacts cannot be listed now, so none was put there lately either
        return [file.path for file in files]


# What MLflow has no place for: it would stand among the user's own as `quark/…`.
_QUARKS_OWN = frozenset(
    {EventRecord.KIND, AlertRecord.KIND, HealthScoreRecord.KIND, PhaseRecord.KIND}
)
_LENGTH = 16


def hash_sample_ids(
    batch: Batch, records: Sequence[BatchDiagnosticRecord], project: str
) -> tuple[Batch, list[BatchDiagnosticRecord]]:
    """The batch and its records with hashes in place of ids.

    The same id gives the same hash in every run of a project, so that hard
    samples are found again. Small ids can be guessed from their hashes.
    """
    hashed = [
        record
        if record.sample_ids is None
        else msgspec.structs.replace(
            record, sample_ids=tuple(_hash(project, one) for one in record.sample_ids)
        )
        for record in records
    ]
    return msgspec.structs.replace(batch, body=encode_records(hashed)), hashed


def _hash(project: str, sample_id: int | str) -> str:
    text = f"{project}\0{type(sample_id).__name__}\0{sample_id}"
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:_LENGTH]
