"""The MLflow run that mirrors a run: found, made, taken up again, ended."""

from __future__ import annotations

import getpass
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from quark_backends.mlflow.errors import Missing, Refused, unavailable
from quark_backends.mlflow.names import NAME_MAP_VERSION
from quark_backends.mlflow.server import MlflowRun, Server
from quark_backends.mlflow.state import MlflowFolder, RunState
from quark_core.api import LifecycleRecord

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
        raise unavailable("the MLflow run was deleted as soon as it was made; the records wait")

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
            raise unavailable(f"MLflow refuses to show the run: {error}") from error

    def _ensure(self) -> str:
        if self._found is None:
            try:
                self._found = self._find()
            except (Refused, Missing) as error:
                # Not a record but the run itself is refused, or its experiment has just gone.
                raise unavailable(
                    f"MLflow does not take the run: {error}; the records wait"
                ) from error
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
            "backend mlflow: MLflow run %s of run %s was deleted; what follows goes to another "
            "run. Use on_deleted=restore to have it taken back instead.",
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
                raise unavailable("another process is about to make the MLflow run")
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
                        "backend mlflow: the experiment %r is deleted; the run goes to %r. "
                        "Use on_deleted=restore to have it taken back instead.",
                        self._experiment,
                        name,
                    )
                return found[0]
            if found is not None and self._restore:
                self._server.restore_experiment(found[0])
                return found[0]
            name = f"{self._experiment}-{number}"
        raise unavailable(
            f"the MLflow experiments {self._experiment!r} to {name!r} are all deleted: "
            "restore one or use another project"
        )


def _find_user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return None
