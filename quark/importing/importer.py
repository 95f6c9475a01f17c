"""Takes runs of other tools into a store, each point once; see `quark.importing.neutral_run`."""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from quark.importing.conversion import (
    FileIntake,
    encode_named,
    encode_points,
    keep_records,
    place_records,
)
from quark.importing.neutral_run import (
    ForeignFile,
    ForeignRun,
    ImportFailure,
    Loss,
    Losses,
    Portion,
    RunFacts,
)
from quark.importing.run_metadata import (
    ACTION,
    Story,
    Taken,
    derive_run_id,
    describe_process,
    describe_start,
    find_changes,
    is_run_id,
    load_story,
    take_facts,
)
from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.backends.contract import Batch, SupportsGroups, SupportsPrimary
from quark_core.backends.edits import RUN_EDITED
from quark_core.backends.registry import default_registry
from quark_core.config.redaction import redact_text
from quark_core.delivery.sending import send_payloads
from quark_core.errors import (
    BackendRejected,
    BackendUnavailable,
    QuarkError,
    RunNotFoundError,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.records import (
    ArtifactRecord,
    EventRecord,
    LifecycleRecord,
    MetricRecord,
    StreamRecord,
)
from quark_core.records.base import now_us, start_fields
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.artifact_links import ArtifactLinkRecord
from quark_core.records.names import LATEST, check_alias
from quark_core.records.query import Query
from quark_core.runs.backend_choice import choose_primary, find_payload_directory, open_primary

IMPORTED = "run_imported"
"""Type of the event that says what an import has brought."""

_log = logging.getLogger("quark")

_KEPT_OF_RUN = (
    *("name", "notes", "parent_run_id", "lineage_root_run_id", "run_path", "git_commit"),
)
_TRIES = 8
_PATIENCE_S = 30.0
_FIRST_PAUSE_S = 0.05


class AlreadyHere(ImportFailure):
    """The store has a run of this id that is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What is asked of every run.

    Attributes:
        project: The project that all of them go to; None takes the tool's.
        tags: Tags that all of them get.
    """

    project: str | None = None
    tags: Sequence[str] = ()


@dataclass(slots=True, kw_only=True)
class RunImport:
    """What an import has brought of one run.

    Attributes:
        run_id: Its id with us, or None where it was not even begun.
        identity: What the tool calls it, for people.
        name, project: As they are with us.
        is_new: It was not there before.
        points, records, files: How many came now.
        failure: Why it is not whole, or None.
        losses: What could not be taken.
    """

    run_id: str | None = None
    identity: str = ""
    name: str | None = None
    project: str | None = None
    is_new: bool = False
    points: int = 0
    records: int = 0
    files: int = 0
    failure: str | None = None
    losses: list[Loss] = field(default_factory=list)

    @property
    def is_changed(self) -> bool:
        """Whether anything came."""
        return bool(self.is_new or self.points or self.records or self.files)

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {name.removeprefix("is_"): value for name, value in asdict(self).items()}


@contextmanager
def open_intake(storage_dir: Path, tool: str, options: ImportOptions) -> Iterator[RunIntake]:
    """Open the store of a storage root for what is imported; made where there is none.

    Raises:
        SessionStoreError: It cannot be opened.
    """
    choice = choose_primary(default_registry())
    primary = open_primary(choice, choice.configure(storage_dir))
    try:
        with tempfile.TemporaryDirectory(prefix="quark-import-") as scratch:
            yield RunIntake(primary, storage_dir, tool, options, Path(scratch))
    finally:
        primary.close()


class RunIntake:
    """Takes runs into one store. Belongs to one thread.

    Args:
        primary: The store, opened for writing.
        storage_dir: The storage root.
        tool: The tool that the runs are of.
        options: What is asked of every run.
        scratch: A folder for payloads on their way to a store elsewhere.
    """

    def __init__(
        self,
        primary: SupportsPrimary,
        storage_dir: Path,
        tool: str,
        options: ImportOptions,
        scratch: Path,
    ) -> None:
        self._primary = primary
        self._storage_dir = storage_dir
        self._tool = tool
        self._options = options
        self._scratch = scratch
        self._seen: dict[str, str] = {}

    def begin_pass(self) -> None:
        """All runs of the place are about to be given, each once."""
        self._seen.clear()

    def take(self, run: ForeignRun, *, is_watched: bool = False) -> RunImport:
        """Bring what is new of a run; what is wrong with it stands in what is returned.

        Args:
            run: The run.
            is_watched: More may come: its end is not told yet.

        Raises:
            SessionStoreError: The store cannot be written.
        """
        outcome, losses = RunImport(), Losses()
        try:
            self._take(run, outcome, losses, is_watched=is_watched)
        except SessionStoreError:
            raise
        except AlreadyHere as error:
            losses.add("run", outcome.identity, str(error))
        except QuarkError as error:
            outcome.failure = str(error)
        except Exception as error:  # noqa: BLE001 - what is read is anybody's: the others come
            _log.debug("a run cannot be imported", exc_info=error)
            outcome.failure = f"it cannot be read: {type(error).__name__}: {error}"
        outcome.losses = losses.list()
        return outcome

    def _take(
        self, run: ForeignRun, outcome: RunImport, losses: Losses, *, is_watched: bool
    ) -> None:
        facts = run.describe()
        # What cannot be taken of them is told at the end.
        taken = take_facts(self._change(facts), self._tool, Losses())
        own_id = facts.run_id if is_run_id(facts.run_id) else None
        run_id = outcome.run_id = own_id or derive_run_id(self._tool, facts.identity)
        outcome.identity, outcome.name = facts.identity, taken.name
        outcome.project = taken.project
        if self._seen.setdefault(run_id, run.key) != run.key:
            raise ImportFailure(
                f"{facts.identity} occurs twice; only the first one is imported (a copy of a "
                "run is the same run)"
            )
        writing = _RunWriting(self._primary, self._storage_dir, run_id, self._tool)
        story = writing.load()
        if story is None:
            story = writing.begin(taken)
            outcome.is_new = True
        run.known = writing.count_points
        files = FileIntake(self._find_payload_folder(run_id), losses)
        failure: Exception | None = None
        try:
            story = self._read_all(run, writing, story, files, outcome, losses)
        except SessionStoreError:
            raise
        except Exception as error:  # noqa: BLE001 - raised again when the run's end is told
            failure, story = error, writing.reload()
        facts = run.describe()
        if failure is not None:
            # What came is there; the rest may come later, and then the end is told again.
            facts = replace(facts, status="running")
        described = take_facts(self._change(facts), self._tool, losses)
        outcome.name = described.name
        writing.settle(story, described, outcome, is_watched=is_watched)
        if failure is not None:
            raise failure

    def _read_all(
        self,
        run: ForeignRun,
        writing: _RunWriting,
        story: Story,
        files: FileIntake,
        outcome: RunImport,
        losses: Losses,
    ) -> Story:
        """Read a run to its end, also where somebody else imports it at the same time.

        Raises:
            ImportFailure: The others are quicker again and again.
        """
        for _ in range(_TRIES):
            found = self._read(run, writing, story, files, outcome, losses)
            if found is not None:
                return found
            # Another import was quicker: what it has stored is not read again.
            story = writing.reload()
        raise ImportFailure("another process is importing this run. Import it again later")

    def _read(
        self,
        run: ForeignRun,
        writing: _RunWriting,
        story: Story,
        files: FileIntake,
        outcome: RunImport,
        losses: Losses,
    ) -> Story | None:
        """Read a run to its end; None where somebody else has stored something meanwhile."""
        for portion in run.read(story.position, losses):
            made = writing.make(story, portion, files, losses)
            if not writing.store(made, files.folder):
                return None
            story = made.story
            outcome.points += made.points
            outcome.records += made.records
            outcome.files += made.files
        return story

    def _change(self, facts: RunFacts) -> RunFacts:
        """The facts with what was asked for."""
        return replace(
            facts,
            project=self._options.project or facts.project,
            tags=[*facts.tags, *self._options.tags],
        )

    def _find_payload_folder(self, run_id: str) -> PayloadFolder:
        in_place = find_payload_directory(self._primary, run_id)
        return PayloadFolder(in_place or self._scratch / run_id)


@dataclass(slots=True)
class _Group:
    """Batches that are stored as one."""

    story: Story
    batches: list[Batch] = field(default_factory=list)
    points: int = 0
    records: int = 0
    files: int = 0


class _RunWriting:
    """Writes one run."""

    def __init__(self, primary: SupportsPrimary, storage_dir: Path, run_id: str, tool: str) -> None:
        self._primary = primary
        self._storage_dir = storage_dir
        self._run_id = run_id
        self._tool = tool

    def load(self) -> Story | None:
        """How far the run has come; None where there is none.

        Raises:
            ImportFailure: It is no import of this tool's.
        """
        try:
            story = load_story(self._primary, self._run_id)
        except RunNotFoundError:
            return None
        if story is None or story.tool != self._tool:
            raise AlreadyHere(
                f"run {self._run_id} of this store was not imported from {self._tool}, so it is "
                "not changed"
            )
        return story

    def reload(self) -> Story:
        """As `load`, of a run that was there."""
        story = self.load()
        if story is None:
            raise ImportFailure(f"run {self._run_id} was removed from this store meanwhile")
        return story

    def begin(self, taken: Taken) -> Story:
        """Begin the run, unless somebody else just has."""
        story = Story(tool=self._tool).copy()
        story.said = {
            "tags": list(taken.tags),
            "name": taken.name,
            "notes": taken.notes,
            "environment": taken.environment_digest,
        }
        place = self._primary.locate(self._run_id)
        start = describe_start(
            taken, self._run_id, place.run_path, self._storage_dir, self._primary
        )
        records: list[tuple[str, Mapping[str, Any]]] = [("start", start)]
        records.append(("environment", taken.environment))
        if taken.config is not None:
            records.append(("config", taken.config))
            story.said["config"] = taken.config_digest
        group = _Group(story)
        self._add_lifecycle(group, records, taken.started_us or now_us())
        reason = ""
        try:
            if self._write(group, None):
                return story
        except BackendRejected as error:
            reason = f": {error}"
        known = self.load()
        if known is None:
            raise ImportFailure(
                f"run {self._run_id} is in the trash of this store (`quark restore "
                f"{self._run_id}` restores it), or was permanently deleted{reason}"
            )
        return known

    def count_points(self, name: str) -> Counter[tuple[int, int, float]]:
        """The points of a metric that are stored: see `KnownPoints`."""
        query = Query(equals={"metric_key": encode_named(name)}, all_attempts=True)
        columns = self._primary.read(self._run_id, MetricRecord.KIND, query)
        fields = (columns[field].tolist() for field in ("time_us", "step", "value"))
        return Counter(zip(*fields, strict=True))

    def make(self, story: Story, portion: Portion, files: FileIntake, losses: Losses) -> _Group:
        """The batches of a portion."""
        group = _Group(story.copy())
        group.story.position = dict(portion.position)
        if portion.from_step is not None:
            group.story.begin_attempt()
            # The start says that the run goes on; its end is to be told again.
            group.story.said.pop("ending", None)
            self._add_start(group, portion.from_step)
        if portion.points is not None and len(portion.points.which):
            first = group.story.sequences.get(MetricRecord.KIND, 0)
            for count, body in encode_points(portion.points, losses, first):
                self._add(group, MetricRecord.KIND, count, body)
                group.points += count
        by_kind: dict[str, list[StreamRecord]] = {}
        for record in keep_records(portion.records, losses):
            by_kind.setdefault(record.KIND, []).append(record)
        group.records = sum(map(len, by_kind.values()))
        kept = [(item, one) for item in portion.files if (one := files.keep(item))]
        group.files = len(kept)
        by_kind[ArtifactRecord.KIND] = [one for _, one in kept]
        by_kind[ArtifactLinkRecord.KIND] = [*self._name_versions(group.story, kept, losses)]
        for kind, records in by_kind.items():
            self._add_records(group, kind, records)
        self._add_lifecycle(group, [], now_us())
        return group

    def _name_versions(
        self, story: Story, kept: Sequence[tuple[ForeignFile, ArtifactRecord]], losses: Losses
    ) -> Iterator[ArtifactLinkRecord]:
        """The aliases of artifacts that come next, as links to them."""
        first = story.sequences.get(ArtifactRecord.KIND, 0)
        for place, (item, record) in enumerate(kept):
            # Of its own is that of the newest version.
            for alias in (each for each in item.aliases if each != LATEST):
                try:
                    named = check_alias(redact_text(alias))
                except SchemaValidationError as error:
                    losses.add("alias", f"{item.name}:{alias}", str(error))
                    continue
                placed = msgspec.structs.replace(
                    record, writer_id=story.name_writer(self._run_id), sequence=first + place
                )
                yield ArtifactLinkRecord(
                    *start_fields(None)[:5],
                    record.time_us,
                    "alias",
                    record.artifact_key,
                    self._run_id,
                    placed.id,
                    record.sha256,
                    alias=named,
                )

    def store(self, group: _Group, folder: PayloadFolder) -> bool:
        """Store a group; False where another import has stored something in its place."""
        try:
            return self._write(group, folder)
        except BackendRejected as error:
            known = self.reload()
            if known.token == group.story.token:
                return True
            if (known.attempt, known.number) == self._find_base(group):
                # Nobody was quicker: it is what it holds that is refused.
                raise ImportFailure(f"the store rejects the records: {error}") from error
            return False

    def settle(self, story: Story, taken: Taken, outcome: RunImport, *, is_watched: bool) -> None:
        """Say what has changed of the run itself, and how it ended."""
        group = _Group(story.copy())
        changes = find_changes(story.said, taken, is_watched=is_watched)
        group.story.said = {**story.said, **changes.said}
        if not changes.records and not outcome.is_changed:
            return
        if outcome.is_changed:
            self._add_records(group, EventRecord.KIND, [self._make_event(outcome)])
        for action, data, time_us in changes.records:
            self._add_action(group, action, data, time_us)
            if action == "edit":
                # As every edit: a service takes none of which nobody is told.
                told = {"message": f"edited by {data['by']}", **data}
                event = (*start_fields(None), RUN_EDITED, "info", None, None, None)
                self._add_records(group, EventRecord.KIND, [EventRecord(*event, JsonObject(told))])
        self._add_lifecycle(group, [], now_us())
        # Where another import says it meanwhile, it says the same.
        self.store(group, PayloadFolder(self._storage_dir))

    def _make_event(self, outcome: RunImport) -> EventRecord:
        payload = {
            "message": f"imported from {self._tool}: {outcome.points} points, "
            f"{outcome.records} records, {outcome.files} files",
            "tool": self._tool,
            "points": outcome.points,
            "records": outcome.records,
            "files": outcome.files,
        }
        return EventRecord(
            *start_fields(None), IMPORTED, "info", None, None, None, JsonObject(payload)
        )

    def _add_start(self, group: _Group, from_step: int) -> None:
        stored = self._primary.load_run(self._run_id)
        kept = {name: getattr(stored.run, name) for name in _KEPT_OF_RUN}
        data = {
            "project": {
                "id": stored.project.id,
                "name": stored.project.name,
                "root_path": stored.project.root_path,
            },
            "run": {**kept, "strict_mode": False, "tags": list(stored.run.tags)},
            "process": describe_process(),
            "from_step": from_step,
        }
        self._add_action(group, "start", data, now_us())

    def _add_records(self, group: _Group, kind: str, records: Sequence[StreamRecord]) -> None:
        story = group.story
        for count, body in place_records(
            records,
            story.sequences.get(kind, 0),
            run_id=self._run_id,
            writer_id=story.name_writer(self._run_id),
            attempt=story.attempt,
        ):
            self._add(group, kind, count, body)

    def _add_action(
        self, group: _Group, action: str, data: Mapping[str, Any], time_us: int
    ) -> None:
        record = LifecycleRecord(None, "", 0, 0, 0, time_us, action, JsonObject(data))
        self._add_records(group, LifecycleRecord.KIND, [record])

    def _add_lifecycle(
        self, group: _Group, records: Sequence[tuple[str, Mapping[str, Any]]], time_us: int
    ) -> None:
        """Add the batch that ends a group: it says how far the run has come with it."""
        story = group.story
        number, first = story.take(LifecycleRecord.KIND, len(records) + 1)
        writer_id = story.name_writer(self._run_id)
        made = [
            LifecycleRecord(
                self._run_id,
                writer_id,
                story.attempt,
                0,
                first + place,
                time_us,
                action,
                JsonObject(data),
            )
            for place, (action, data) in enumerate([*records, (ACTION, msgspec.to_builtins(story))])
        ]
        self._append(group, LifecycleRecord.KIND, len(made), number, encode_records(made))

    def _add(self, group: _Group, kind: str, count: int, body: bytes) -> None:
        number, _ = group.story.take(kind, count)
        self._append(group, kind, count, number, body)

    def _append(self, group: _Group, kind: str, count: int, number: int, body: bytes) -> None:
        story = group.story
        group.batches.append(
            Batch(
                self._run_id,
                story.name_writer(self._run_id),
                story.attempt,
                0,
                number,
                kind,
                count,
                body,
            )
        )

    def _find_base(self, group: _Group) -> tuple[int, int]:
        first = group.batches[0]
        return first.attempt, first.number

    def _write(self, group: _Group, folder: PayloadFolder | None) -> bool:
        """Store a group, and see that it is the one that is stored."""
        pause_s, until_s = _FIRST_PAUSE_S, time.monotonic() + _PATIENCE_S
        while True:
            try:
                if folder is not None:
                    send_payloads(self._primary, group.batches, [folder.find])
                writer: object = self._primary
                if isinstance(writer, SupportsGroups):
                    writer.write_group(group.batches)
                else:
                    raise SessionStoreError("the store does not accept several batches at once")
                break
            except BackendUnavailable as error:
                if time.monotonic() + pause_s > until_s:
                    raise SessionStoreError(
                        f"the store does not accept the records: {error}"
                    ) from error
                time.sleep(pause_s)
                pause_s *= 2
        try:
            known = load_story(self._primary, self._run_id)
        except RunNotFoundError:
            return False
        return known is not None and known.token == group.story.token


_MOST_WORK = 0.1
"""A look takes this share of the time at most."""
_LONGEST_PAUSE_S = 60.0


def import_all(intake: RunIntake, find: Callable[[], Iterable[ForeignRun]]) -> list[RunImport]:
    """Import every run that is found, each as far as it goes.

    Raises:
        ImportFailure: The place cannot be read at all.
        SessionStoreError: The store cannot be written.
    """
    intake.begin_pass()
    return [intake.take(run) for run in find()]


def watch_all(
    intake: RunIntake,
    find: Callable[[], Iterable[ForeignRun]],
    interval_s: float,
    on_news: Callable[[RunImport], None] | None = None,
) -> list[RunImport]:
    """Import every run that is found, and what comes, until Ctrl-C.

    Runs without news are not read again. Looks are as rare as it takes to need no more than a
    tenth of one core.

    Args:
        intake: Where the runs go.
        find: Finds the runs; called at each look.
        interval_s: Seconds between two looks.
        on_news: Told of each run of which something came, or that has just begun to fail.

    Returns:
        What has come of each run.

    Raises:
        ImportFailure: The place cannot be read at the first look.
        SessionStoreError: The store cannot be written.
    """
    watched = _Watch(intake, find, on_news)
    try:
        pause_s = watched.look(is_first=True)
        while True:
            time.sleep(min(max(interval_s, pause_s), _LONGEST_PAUSE_S))
            pause_s = watched.look()
    except KeyboardInterrupt:
        pass
    # Asked twice: what was taken is kept; only that it has ended is not said.
    with suppress(KeyboardInterrupt):
        watched.end()
    return list(watched.results.values())


class _Watch:
    """What is known of the runs of one place."""

    def __init__(
        self,
        intake: RunIntake,
        find: Callable[[], Iterable[ForeignRun]],
        on_news: Callable[[RunImport], None] | None,
    ) -> None:
        self.results: dict[str, RunImport] = {}
        self._intake = intake
        self._find = find
        self._on_news = on_news
        self._marks: dict[str, str | None] = {}
        self._failure: str | None = None

    def look(self, *, is_first: bool = False) -> float:
        """Take what is new; returns how many seconds to rest."""
        began_s = time.process_time()
        try:
            self._take_all(is_watched=True)
            self._failure = None
        except ImportFailure as error:
            # What is watched may be away for a while.
            if is_first:
                raise
            self._tell_once(str(error))
        return (time.process_time() - began_s) / _MOST_WORK

    def end(self) -> None:
        """Take the rest, and say of each run how it ended."""
        self._marks.clear()
        try:
            self._take_all(is_watched=False)
        except ImportFailure as error:
            self._tell_once(str(error))

    def _take_all(self, *, is_watched: bool) -> None:
        self._intake.begin_pass()
        for run in self._find():
            try:
                mark = run.mark()
            except OSError:
                # Its file is gone; to take it says so.
                mark = None
            key = run.key
            if mark is not None and self._marks.get(key) == mark:
                continue
            result = self._intake.take(run, is_watched=is_watched)
            if result.failure is None:
                self._marks[key] = mark
            self._note(key, result)

    def _note(self, key: str, result: RunImport) -> None:
        before = self.results.get(key)
        is_news = result.is_changed or (
            result.failure is not None and (before is None or before.failure != result.failure)
        )
        if before is not None:
            result.is_new |= before.is_new
            result.points += before.points
            result.records += before.records
            result.files += before.files
        self.results[key] = result
        if is_news and self._on_news is not None:
            self._on_news(result)

    def _tell_once(self, message: str) -> None:
        if message != self._failure:
            self._failure = message
            if self._on_news is not None:
                self._on_news(RunImport(identity="watch", failure=message))
