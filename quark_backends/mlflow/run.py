"""The MLflow run that mirrors a run, and the state of the mirror on this machine."""

from __future__ import annotations

import getpass
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quark_backends.mirror_state import load_state, make_file_name, save_state
from quark_backends.mlflow.client import Missing, MlflowRun, Refused, Server, unavailable
from quark_backends.mlflow.points import NAME_MAP_VERSION, TimeRange
from quark_core.api import LifecycleRecord, ProcessIdentity, current_process, is_alive

# What the mirror remembers on this machine, below the run's directory.
#
# mirrors/mlflow/<hash of the tracking URI>/
# run.json            which MLflow run it is, and what it was started with
# names.json          keys and their names in MLflow
# writers/<id>.json   how far each writer is acknowledged
# outbox/             files that will be among the run's artifacts, by their path there;
# removed when the mirror is closed and they are
# uploaded/           the same paths: which state of each file is there
# making              is there while the MLflow run is looked for and made
# staged/             payloads whose record has not come yet
#
# Each writer belongs to one process, so no two processes write one of those. Nothing
# is synced: what a power cut takes is sent again, and found to be there.

# Longer than the calls take within their bounds.
_CLAIM_S = 120.0


class RunState(msgspec.Struct):
    """The MLflow run that mirrors a run, as far as it is known.

    Attributes:
        mlflow_run_id: Its id, or None before it was found or made.
        url: Address of its page, where the tracking server has one.
        attempt: Newest attempt that was seen.
        start: Data of that attempt's start, or None where none was seen.
        started_ms: When the run was started.
        config: Values of the newest configuration, or None where none was seen.
        first_writer: The writer that began the run, or None where another machine saw that.
        from_steps: Attempt -> the step that it was resumed from.
        ended: Status and time in ms with which the newest attempt ended, or None.
        shown_tags: Names of the tags in MLflow that stand for tags of the run.
    """

    mlflow_run_id: str | None = None
    url: str | None = None
    attempt: int = -1
    start: dict[str, Any] | None = None
    started_ms: int = 0
    config: dict[str, Any] | None = None
    first_writer: str | None = None
    from_steps: dict[str, int] = {}
    ended: tuple[str, int] | None = None
    shown_tags: list[str] = []


class MlflowWriter(msgspec.Struct):
    """How far a writer is acknowledged.

    Attributes:
        head: Number of its newest batch that is.
        digest: Hash of that batch.
        partial: Number of a batch of which a part is.
        offset: How many records of it.
        recent: Times that points of its next batch might meet; see `make_points`.
        events: Severity -> how many events it has sent.
        missing: Kind -> how many records it says are missing.
        events_file, events_bytes: Number and length of its newest file of events; 0 for none.
        gaps: First and last number of batches before the newest that MLflow has not: it has
            refused them, and may take them another time.
    """

    head: int = -1
    digest: str = ""
    partial: int = -1
    offset: int = 0
    recent: list[TimeRange] = []
    events: dict[str, int] = {}
    missing: dict[str, int] = {}
    events_file: int = 0
    events_bytes: int = 0
    gaps: list[tuple[int, int]] = []

    def has_gap(self, number: int) -> bool:
        """Whether a batch before the newest is not there."""
        return any(first <= number <= last for first, last in self.gaps)

    def list_gaps_without(self, number: int) -> list[tuple[int, int]]:
        """The gaps when a batch has come that is newer than all, or was in one of them."""
        if number > self.head:
            return [*self.gaps, *([(self.head + 1, number - 1)] if number > self.head + 1 else [])]
        parts = (
            part
            for first, last in self.gaps
            for part in (
                [(first, number - 1), (number + 1, last)]
                if first <= number <= last
                else [(first, last)]
            )
        )
        return [(first, last) for first, last in parts if first <= last]


class MlflowFolder:
    """The files of one mirror of one run.

    Args:
        folder: The run's folder for this kind of mirror.
        uri: The tracking URI; a run may be mirrored to several.
    """

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder = folder / hashlib.sha256(uri.encode("utf-8", "replace")).hexdigest()[:12]
        self._writers: dict[str, MlflowWriter] = {}

    def load_run(self) -> RunState:
        """The run as it was last saved; a new one where there is none."""
        return load_state(self.folder / "run.json", RunState)

    def save_run(self, run: RunState) -> None:
        """Keep the run."""
        save_state(self.folder / "run.json", run)

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Whether the caller alone may look for the run and make it, until it leaves.

        Two mirrors of one run, in one process or in several of this machine,
        would both find none and both make one.
        """
        path = self.folder / "making"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            with suppress(FileNotFoundError):
                if _is_given_up(path):
                    path.unlink()  # who made it has died; the next try has it
            yield False
            return
        try:
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(current_process()))
            yield True
        finally:
            path.unlink(missing_ok=True)

    def load_writer(self, writer_id: str) -> MlflowWriter:
        """The writer as it was last saved; a new one where there is none."""
        found = self._writers.get(writer_id)
        if found is None:
            found = self._writers[writer_id] = load_state(self._path_of(writer_id), MlflowWriter)
        return found

    def save_writer(self, writer_id: str, writer: MlflowWriter) -> None:
        """Keep how far a writer is."""
        self._writers.pop(writer_id, None)
        save_state(self._path_of(writer_id), writer)
        self._writers[writer_id] = writer

    def _path_of(self, writer_id: str) -> Path:
        return self.folder / "writers" / f"{make_file_name(writer_id)}.json"


def _is_given_up(path: Path) -> bool:
    """Whether a claim is of a process that has died, or is older than the calls may take."""
    try:
        owner = msgspec.json.decode(path.read_bytes(), type=ProcessIdentity)
    except msgspec.DecodeError:
        owner = None  # torn, or made a moment ago
    alive = None if owner is None else is_alive(owner)
    return alive is False or abs(time.time() - path.stat().st_mtime) > _CLAIM_S


_log = logging.getLogger("quark")

STATUSES: Mapping[str, str] = {
    "running": "RUNNING",
    "completed": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
    "lost": "FAILED",
}
PARENT_TAG = "mlflow.parentRunId"
"""By which MLflow nests runs."""
WHOLE_TAG = "quark.name_map_version"
"""What an MLflow run has from its first moment on that gets all that Quark knows."""

_START_WAIT_S = 30.0
_ALIVE_S = 1.0
_MAX_SUFFIX = 100

_Result = TypeVar("_Result")


class MirroredRun:
    """Knows which MLflow run is meant, and keeps it there.

    The run carries the tag `quark.run_id` from its first moment on, and is
    looked for by it before one is made: a crash between making it and noting
    it down makes no second one.

    Args:
        server: Where the run is.
        state: Remembers which one it is.
        run_id: The run that is mirrored.
        project: Its project.
        experiment: Name of the experiment that it goes to.
        restore: Whether a deleted run or experiment is taken back; otherwise
            a new one is made beside it.
        keeps_all: Whether an MLflow run that is made here gets all that Quark knows.

    Attributes:
        is_new: Whether an MLflow run was made that nothing was put into yet;
            who has done so sets it back.
        was_made_here: Whether the MLflow run is one that this object has made.
    """

    def __init__(
        self,
        server: Server,
        state: MlflowFolder,
        run_id: str,
        project: str,
        experiment: str,
        *,
        restore: bool,
        keeps_all: bool,
    ) -> None:
        self._server = server
        self._state = state
        self._run_id = run_id
        self._project = project
        self._experiment = experiment
        self._restore = restore
        self._makes_all = keeps_all
        self._known = state.load_run()
        self._found: MlflowRun | None = None
        self._asked_since: float | None = None
        self._alive_at = -math.inf
        self.is_new = False
        self.was_made_here = False

    @property
    def known(self) -> RunState:
        """What is remembered of the run."""
        return self._known

    @property
    def run_id(self) -> str:
        """The run that is mirrored."""
        return self._run_id

    @property
    def keeps_all(self) -> bool:
        """Whether the MLflow run has all that Quark knows: it goes on as it was made."""
        self._ensure()
        assert self._found is not None
        return WHOLE_TAG in self._found.tags

    def keep_description(self, changed: Mapping[str, Any]) -> None:
        """Remember another name, other notes or tags than the start has told of."""
        start = self._known.start or {}
        self._known.start = {**start, "run": {**start.get("run", {}), **changed}}
        self._save()

    def keep_shown_tags(self, names: Sequence[str]) -> None:
        """Remember which of its tags in MLflow stand for tags of the run."""
        if list(names) != self._known.shown_tags:
            self._known.shown_tags = list(names)
            self._save()

    def keep_config(self, values: Mapping[str, Any]) -> None:
        """Remember the configuration, for an MLflow run that must be made anew."""
        self._known.config = dict(values)
        self._save()

    def start(self, record: LifecycleRecord) -> None:
        """Find or make the MLflow run of an attempt, and mark it as running."""
        first = self._known.start is None
        saved = self._state.load_run()
        if saved.attempt > max(record.attempt, self._known.attempt):
            # What a process left behind comes beside the attempt that came after it.
            self._known = saved
        if record.attempt == 0:
            self._known.first_writer = record.writer_id
        if record.attempt < self._known.attempt:
            return
        self._known.start = dict(record.data or {})
        self._known.attempt = record.attempt
        self._known.ended = None
        if first:
            self._known.started_ms = record.time_us // 1000
        data: Mapping[str, Any] = record.data or {}
        from_step = data.get("from_step")
        if from_step is not None:
            self._known.from_steps[str(record.attempt)] = int(from_step)
        self._ensure()
        self._save()
        if record.attempt > 0 or not first:
            self.call(self._server.set_running)

    def end(self, status: str, ended_ms: int) -> None:
        """Give the MLflow run the status that it ends in."""
        theirs = STATUSES.get(status, "FAILED")
        self.call(lambda run_id: self._server.set_ended(run_id, theirs, ended_ms))
        if self._known.ended != (status, ended_ms):
            self._known.ended = status, ended_ms
            self._save()

    def load(self) -> MlflowRun:
        """The MLflow run as it is now."""
        for _ in range(2):
            found = self._look(self._ensure())
            if found is not None and found.active:
                return found
            self._lose(found)
        raise unavailable("the MLflow run was deleted just after it was created; the records wait")

    def find_parent(self) -> str | None:
        """Id of the MLflow run that this one belongs under; None where there is none yet."""
        parent = (self._known.start or {}).get("run", {}).get("parent_run_id")
        if not parent:
            return None
        self._ensure()
        assert self._found is not None
        known = self._found.tags.get(PARENT_TAG)
        if known:
            return known
        found = self._server.find_run(self._found.experiment_id, parent, deleted=False)
        return found and found.id

    def tell_children(self) -> None:
        """Nest the runs that were mirrored before this one, and are its children, under it."""
        self._ensure()
        assert self._found is not None
        own = self._found
        for child in self._server.list_children(own.experiment_id, self._run_id):
            if child.tags.get(PARENT_TAG) != own.id:
                with suppress(Missing, Refused):  # gone since; it is no concern of this run
                    self._server.set_tags(child.id, [(PARENT_TAG, own.id)])

    def call(self, act: Callable[[str], _Result]) -> _Result:
        """Call with the MLflow run's id; where the run is gone, once more with another one.

        Raises:
            Refused: The run is there, and the call is bad.
        """
        run_id = self._ensure()
        try:
            return act(run_id)
        except (Refused, Missing) as error:
            # MLflow refuses calls on a deleted run in the same words as bad records.
            if isinstance(error, Refused) and time.monotonic() - self._alive_at < _ALIVE_S:
                raise
            found = self._look(run_id)
            if found is not None and found.active:
                self._alive_at = time.monotonic()
                raise
            self._lose(found)
        return act(self._ensure())

    def _look(self, run_id: str) -> MlflowRun | None:
        try:
            return self._server.load_run(run_id)
        except Refused as error:
            # Something before the server refuses everything: the records are not to blame.
            raise unavailable(f"MLflow does not return the run: {error}") from error

    def _ensure(self) -> str:
        if self._found is None:
            try:
                self._found = self._find()
            except (Refused, Missing) as error:
                # Not a record but the run itself is refused, or its experiment has just gone.
                raise unavailable(f"MLflow rejects the run: {error}; the records wait") from error
            url = self._server.find_page(self._found)
            if (self._found.id, url) != (self._known.mlflow_run_id, self._known.url):
                self._known.mlflow_run_id, self._known.url = self._found.id, url
                self._save()
            if url is not None:
                _log.info("backend mlflow: run %s is at %s", self._run_id, url)
        return self._found.id

    def _save(self) -> None:
        # A process that only joined the run leaves the file to the one that started it.
        if self._known.start is not None:
            self._state.save_run(self._known)

    def _lose(self, found: MlflowRun | None) -> None:
        """The MLflow run is deleted or gone: take it back, or let another one be found or made."""
        assert self._found is not None
        lost, self._found = self._found.id, None
        if found is not None and self._restore:
            self._take_back(lost)
            return
        self._known.mlflow_run_id = None
        _log.warning(
            "backend mlflow: MLflow run %s of run %s was deleted. Later records go to another "
            "MLflow run. To restore the deleted run instead, use on_deleted=restore.",
            lost,
            self._run_id,
        )

    def _find(self) -> MlflowRun:
        if self._known.mlflow_run_id is not None:
            found = self._server.load_run(self._known.mlflow_run_id)
            if found is not None and found.tags.get("quark.run_id") != self._run_id:
                # The note lies in the run's folder, which may be somebody's who means another run.
                found = None
            if found is not None and not found.active and self._restore:
                self._take_back(found.id)
                return found
            if found is not None and found.active:
                return found
        experiment_id = self._find_experiment()
        with self._state.claim() as claimed:
            if not claimed:
                raise unavailable("another process is creating the MLflow run")
            found = self._server.find_run(experiment_id, self._run_id, deleted=False)
            if found is None and self._restore:
                found = self._server.find_run(experiment_id, self._run_id, deleted=True)
                if found is not None:
                    self._take_back(found.id)
            return found or self._create(experiment_id)

    def _take_back(self, run_id: str) -> None:
        # An experiment takes its runs with it, both ways.
        self._find_experiment()
        found = self._server.load_run(run_id)
        if found is not None and not found.active:
            self._server.restore_run(run_id)

    def _create(self, experiment_id: str) -> MlflowRun:
        start = self._known.start
        if start is None:
            # Another process of this run has the start, and makes the MLflow run.
            self._asked_since = self._asked_since or time.monotonic()
            if time.monotonic() - self._asked_since < _START_WAIT_S:
                raise unavailable(f"run {self._run_id} is not in MLflow yet; the records wait")
        run: Mapping[str, Any] = (start or {}).get("run", {})
        tags = {
            "quark.run_id": self._run_id,
            "mlflow.source.type": "LOCAL",
            "mlflow.user": _find_user(),
            "mlflow.source.git.commit": run.get("git_commit"),
        }
        if self._makes_all or self._experiment != self._project:
            tags["quark.project"] = self._project
        if self._makes_all:
            tags["quark.attempt"] = str(max(0, self._known.attempt))
            tags[WHOLE_TAG] = str(NAME_MAP_VERSION)
        parent = run.get("parent_run_id")
        if parent:
            tags["quark.parent_run_id"] = parent
            fork = (start or {}).get("fork")
            tags["quark.fork_step"] = str(fork["step"]) if fork else None
            found = self._server.find_run(experiment_id, parent, deleted=False)
            tags[PARENT_TAG] = found and found.id
        self.is_new = self.was_made_here = True
        return self._server.create_run(
            experiment_id,
            run.get("name") or self._run_id,
            self._known.started_ms or time.time_ns() // 1_000_000,
            {key: value for key, value in tags.items() if value},
        )

    def _find_experiment(self) -> str:
        name = self._experiment
        for number in range(2, _MAX_SUFFIX):
            found = self._server.find_experiment(name)
            if found is None:
                created = self._server.create_experiment(name)
                # None: another process made it at the same moment.
                found = (created, True) if created else self._server.find_experiment(name)
            if found is not None and found[1]:
                if name != self._experiment:
                    _log.warning(
                        "backend mlflow: the experiment %r is deleted, so the run goes to %r. "
                        "To restore the experiment instead, use on_deleted=restore.",
                        self._experiment,
                        name,
                    )
                return found[0]
            if found is not None and self._restore:
                self._server.restore_experiment(found[0])
                return found[0]
            name = f"{self._experiment}-{number}"
        raise unavailable(
            f"the MLflow experiments {self._experiment!r} to {name!r} are all deleted. Restore "
            "one, or use another project"
        )


def _find_user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return None
