"""Tracker: one object that logs to everything at once."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quark.tracker.call_worker import CallLane, CallReport
from quark.tracker.run_log import RunLog, snapshot_values
from quark_core.backends.contract import BackendDefinition, MirrorRun
from quark_core.backends.registry import default_registry, find_missing_library
from quark_core.backends.tracker_backend import MirrorBackend, TrackerBackend
from quark_core.config import settings
from quark_core.config.snapshot import snapshot_config
from quark_core.errors import (
    QuarkError,
    SchemaValidationError,
    StopRequested,
    TrainingHalted,
    UnknownBackendError,
)
from quark_core.ranks.launches import detect_rank
from quark_core.runs.backend_choice import choose_backend
from quark_core.sessions.session import TrainingSession

_log = logging.getLogger("quark")
_START_TIMEOUT_S = 5.0
_WATCH_TIMEOUT_S = 5.0
_MAX_REASONS = 100


class Tracker:
    """Tracker that logs to a run, its mirrors and custom backends.

    Calls do not wait for a backend. They do not raise errors: each cause is logged once. The
    exceptions are TrainingHalted and StopRequested.

    As a context manager, it ends the run: as completed, as failed after an exception, or as
    interrupted on KeyboardInterrupt and SystemExit. An open tracker is finished at process exit.
    Thread-safe.

    Args:
        backends: TrackerBackend objects: `CSVBackend`, `WandbBackend`, `MLflowBackend` or custom
            ones. Without backends and session, all calls do nothing.
        session: Run to log to; the tracker ends it. By default, a run is started if there are
            backends. Its store is in the `outdir` of the first backend that has one, else in the
            working directory.

    Example:
        with quark.setup_tracker("digits", backends="csv", outdir="out") as tracker:
            tracker.log({"loss": 0.5, "lr": 1e-3})
    """

    def __init__(
        self, backends: Iterable[TrackerBackend] = (), *, session: TrainingSession | None = None
    ) -> None:
        given = list(backends)
        mirrors = [each for each in given if isinstance(each, MirrorBackend) and each.active]
        lanes = [CallLane.of(each) for each in given if not isinstance(each, MirrorBackend)]
        if session is None and (mirrors or lanes):
            session = start_session(mirrors)
        self._assemble(session, mirrors, lanes)

    @classmethod
    def assemble(
        cls,
        session: TrainingSession | None,
        mirrors: Sequence[MirrorBackend],
        lanes: Sequence[CallLane],
    ) -> Tracker:
        """Create a tracker from parts that `setup_tracker` has made."""
        tracker = cls.__new__(cls)
        tracker._assemble(session, mirrors, lanes)
        return tracker

    def __repr__(self) -> str:
        run = "no run" if self._session is None else self._session.context.describe()
        return f"{type(self).__name__}({run})"

    def _assemble(
        self,
        session: TrainingSession | None,
        mirrors: Sequence[MirrorBackend],
        lanes: Sequence[CallLane],
    ) -> None:
        self._session = session
        self._run = None if session is None else RunLog(session)
        self._mirrors = {mirror.name: mirror for mirror in mirrors}
        self._reasons: set[str] = set()
        self._finishing = threading.Lock()
        self._finished = False
        for mirror in mirrors:
            mirror.attach(self, lambda mirror=mirror: self._describe(mirror))  # type: ignore[misc]
        deadline = time.monotonic() + _START_TIMEOUT_S
        self._lanes = []
        for lane in lanes:
            made = lane.start(max(0.0, deadline - time.monotonic()))
            if lane.failure is not None:
                _log.warning("%s", lane.describe_failure())
                continue
            if not made:
                _log.warning("tracker backend %s is not created yet; its calls wait", lane.name)
            self._lanes.append(lane)
        if self.active:
            _open_trackers.append(self)
            _watch_exit()

    @property
    def active(self) -> bool:
        """Whether the tracker logs anywhere."""
        return self._run is not None or bool(self._lanes)

    @property
    def session(self) -> TrainingSession | None:
        """Session of the run, or None if nothing is stored."""
        return self._session

    @property
    def run_id(self) -> str | None:
        """ID of the run, or None."""
        return None if self._session is None else self._session.run_id

    def log(self, metrics: Mapping[str, Any], step: int | None = None, commit: bool = True) -> None:
        """Log a row of values, in microseconds.

        Numbers become metrics, booleans 0 and 1, and mappings metrics of a namespace. Other values,
        such as strings and lists, go into one `tracker_values` event per row.

        Args:
            metrics: Name -> value.
            step: Step of the row. Defaults to `metrics["step"]` if that is a step, else to the
                previous step plus one, from 0.
            commit: If False, the row is merged into the next committed row. A row with another step
                or a repeated name is written separately. Defaults to True.
        """
        if self._finished:
            return
        for lane in self._lanes:
            try:
                lane.submit("log", snapshot_values(metrics), step=step, commit=commit)
            except Exception as error:  # noqa: BLE001 - a foreign object may raise anything
                self._tell("log", error)
        if self._run is not None:
            self._guard("log", self._run.log, metrics, step, commit)

    def log_config(self, config: Any) -> None:
        """Merge hyperparameters into the run's config, with secrets redacted.

        Args:
            config: A mapping, or another type that `start_run` accepts.
        """
        self._submit("log_config", dict(config) if isinstance(config, Mapping) else config)
        if self._run is not None and not self._finished:
            self._guard("log_config", self._run.log_config, config)

    def log_table(self, key: str, columns: Sequence[str], data: Iterable[Iterable[Any]]) -> None:
        """Log a table.

        Args:
            key: Name of the table.
            columns: Column names.
            data: Rows.
        """
        try:
            names, rows = list(columns), [list(row) for row in data]
        except Exception as error:  # noqa: BLE001 - as in log
            self._tell("log_table", error)
            return
        self._submit("log_table", key, names, rows)
        if self._run is not None and not self._finished:
            self._guard("log_table", self._run.log_table, key, names, rows)

    def log_image(self, key: str, image_path: Any, caption: str | None = None) -> None:
        """Log an image.

        Args:
            key: Name of the image.
            image_path: Path of an image file. The run also accepts the other types of
                `ArtifactStore.log_image`.
            caption: Caption, or None.
        """
        self._submit("log_image", key, image_path, caption=caption)
        if self._run is not None and not self._finished:
            self._guard("log_image", self._run.log_image, key, image_path, caption)

    def log_artifacts(self, paths: Mapping[str, Any]) -> None:
        """Log files; files that do not exist are skipped.

        Args:
            paths: Label -> file or folder. A file becomes the artifact `label/file name` of type
                `file`.
        """
        try:
            found = {str(label): Path(path) for label, path in paths.items()}
        except Exception as error:  # noqa: BLE001 - as in log
            self._tell("log_artifacts", error)
            return
        self._submit("log_artifacts", {label: str(path) for label, path in found.items()})
        for label, path in found.items():
            if not path.exists():
                self._tell("log_artifacts", FileNotFoundError(f"{path} does not exist"))
            elif self._run is not None and not self._finished:
                self._guard("log_artifacts", self._run.log_file, label, path)

    def watch(self, model: Any, **kwargs: Any) -> Any:
        """Watch layers, parameters and system metrics, as `quark.watch` does.

        Each committed row ends a step, so call `log` once at the end of each step.

        Args:
            model: A torch module.
            **kwargs: Arguments of `quark.watch`. `log_freq` and `log="parameters"` of `wandb.watch`
                are supported; its other arguments are ignored.

        Returns:
            The TrainingWatch, or None if nothing is watched.
        """
        if self._finished:
            return None
        for lane in self._lanes:
            # It puts hooks on the model, which must not happen in the middle of a step.
            if not lane.call(_WATCH_TIMEOUT_S, "watch", model, **kwargs):
                self._tell("watch", TimeoutError(f"{lane.name} has not answered yet"))
        if self._run is None:
            return None
        return self._guard("watch", self._run.watch, model, **kwargs)

    def finish(self) -> None:
        """End the run as completed, and close each backend; a second call does nothing.

        Waits as `TrainingSession.end_run` does. Records that a backend has not accepted by then
        stay in the journal.
        """
        self._finish(None)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was logged before is delivered; mainly for tests.

        Custom backends have then returned from their calls, and the primary store has the records.
        Mirrors may be behind; see `session.report_delivery`. An uncommitted row is not flushed.

        Args:
            timeout_s: Timeout in seconds. Defaults to QUARK_PERSISTENCE_TIMEOUT_SECONDS (15).

        Returns:
            Whether everything was delivered in time. The rest is delivered later.
        """
        try:
            timeout_s = settings.persistence_timeout_s() if timeout_s is None else float(timeout_s)
        except Exception as error:  # noqa: BLE001 - as in log
            self._tell("flush", error)
            return False
        deadline = time.monotonic() + timeout_s
        there = [lane.wait(deadline) for lane in self._lanes]
        if self._session is not None and not self._finished:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                self._session.flush("stored", left_s)
            except Exception as error:  # noqa: BLE001 - as in log
                self._tell("flush", error)
                there.append(False)
        return all(there)

    def get_backend(self, name: str) -> TrackerBackend | None:
        """Return a backend by name, or None if it is not active.

        A custom backend is the object itself, which runs in its own thread. A mirror is a
        `MirrorBackend`. If several have the name, the last one is returned.

        Args:
            name: Name of the backend.
        """
        for lane in reversed(self._lanes):
            backend = lane.backend
            if backend is not None and name in (lane.name, backend.name):
                return backend
        return self._mirrors.get(name)

    @property
    def wandb_run(self) -> MirrorRun | None:
        """Read-only data of the W&B run, or None without a W&B mirror.

        Not a `wandb.Run`, which exists in another process.
        """
        return self._find_mirror_run("wandb")

    @property
    def mlflow_run(self) -> MirrorRun | None:
        """Read-only data of the MLflow run, or None without an MLflow mirror.

        Not an `mlflow.ActiveRun`.
        """
        return self._find_mirror_run("mlflow")

    def report_calls(self) -> tuple[CallReport, ...]:
        """Return delivery counts of the calls of custom backends.

        For the other backends, see `session.report_delivery`.
        """
        return tuple(lane.report() for lane in self._lanes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._finish(error)

    def finish_at_exit(self) -> None:
        """Flush and close custom backends at process exit; the run ends as other runs do."""
        self._finish(None, end_run=False)

    def become_child(self) -> None:
        """Adapt to a fork: the child can log to the run; the backends are the parent's."""
        self._lanes = []
        if self._run is not None:
            self._run.become_child()

    def _finish(self, error: BaseException | None, *, end_run: bool = True) -> None:
        with self._finishing:
            if self._finished:
                return
            self._finished = True
        if self in _open_trackers:
            _open_trackers.remove(self)
        try:
            deadline = time.monotonic() + settings.exit_timeout_s()
        except Exception as bad:  # noqa: BLE001 - as in log
            self._tell("finish", bad)
            deadline = time.monotonic() + 10.0
        for lane in self._lanes:
            lane.close()
        if self._run is not None and self._session is not None:
            self._guard("finish", self._run.close)
            if end_run:
                # The session's own way out: it does nothing where the run has ended already.
                kind = None if error is None else type(error)
                self._guard("finish", self._session.__exit__, kind, error, None)
        for lane in self._lanes:
            lane.join(deadline)

    def _submit(self, method: str, *arguments: Any, **keywords: Any) -> None:
        if not self._finished:
            for lane in self._lanes:
                lane.submit(method, *arguments, **keywords)

    def _guard(self, call: str, act: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return act(*arguments, **keywords)
        except (StopRequested, TrainingHalted):
            raise
        except Exception as error:  # noqa: BLE001 - as in log
            self._tell(call, error)
            return None

    def _tell(self, call: str, error: Exception) -> None:
        """Log what went wrong, once per reason."""
        try:
            reason = f"{call}: {type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - not even its text can be had
            reason = f"{call}: {type(error).__name__}"
        if reason not in self._reasons and len(self._reasons) < _MAX_REASONS:
            self._reasons.add(reason)
            _log.warning("tracker: %s", reason)
            _log.debug("%s", "".join(traceback.format_exception(error)))

    def _find_mirror_run(self, name: str) -> MirrorRun | None:
        mirror = self._mirrors.get(name)
        return None if mirror is None else self._describe(mirror)

    def _describe(self, mirror: MirrorBackend) -> MirrorRun | None:
        if self._session is None:
            return None
        found: MirrorRun | None = self._guard(
            "run", _describe_mirror_run, self._session, mirror.name, mirror.specification
        )
        return found


class NullTracker(Tracker):
    """Tracker that does nothing, for example on ranks other than 0."""

    def __init__(self) -> None:
        super().__init__()


def _describe_mirror_run(session: TrainingSession, backend: str, specification: str) -> MirrorRun:
    """What is known of a session's run in a mirror, as of now.

    Args:
        session: The session.
        backend: Name of the mirror.
        specification: How it was asked for.
    """
    run = session.context.run
    choice = choose_backend(specification, default_registry())
    describe = choice.definition.describe_run
    if describe is None:
        return MirrorRun(backend, run.id, run.name, session.project_name)
    run_path = session.run_path if isinstance(session.run_path, Path) else Path(run.run_path)
    config = choice.configure(
        session.context.storage_dir, run_id=run.id, project=session.project_name
    )
    return describe(replace(config, run_path=run_path), run)


_open_trackers: list[Tracker] = []
_watched = False


def _watch_exit() -> None:
    global _watched
    if not _watched:
        # Registered after that of the sessions, so it comes before it.
        _watched = True
        atexit.register(_finish_open_trackers)


def _finish_open_trackers() -> None:
    for tracker in _open_trackers.copy():
        tracker.finish_at_exit()


def _become_child() -> None:
    for tracker in _open_trackers:
        tracker.become_child()
    _open_trackers.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_become_child)


# A mirror that is given to no tracker has one of its own.
MirrorBackend.make_tracker = Tracker


_NOTHING = "none"
_STORE_ALONE = "quark"
# Where a script that comes from ezpz says what it logs to; ours first.
_VARIABLES = (
    settings.TRACKER_BACKENDS,
    settings.BACKENDS,
    "EZPZ_TRACKER_BACKENDS",
    "EZPZ_TRACKERS",
)
_FALLBACK_PROJECT = "quark"
_SESSION_OPTIONS = ("name", "notes", "tags")

_registered: dict[str, Callable[..., TrackerBackend]] = {}


def register_backend(name: str, cls: Callable[..., TrackerBackend]) -> None:
    """Register a TrackerBackend class under a name for `setup_tracker`.

    The registration is valid in this process. It takes precedence over a built-in backend of that
    name, and over an earlier registration.

    Args:
        name: Name for `backends=`.
        cls: Class or factory. It is called with the keywords `project_name`, `config`, `outdir`,
            `rank` and the further arguments of `setup_tracker`.

    Raises:
        SchemaValidationError: The name is not valid in `backends=`, or `cls` is not callable.
    """
    if not isinstance(name, str) or not name.strip() or "," in name:
        raise SchemaValidationError(f"name must be a str without a comma, got {name!r:.60}")
    if not callable(cls):
        raise SchemaValidationError(f"cls must be a class, not {type(cls).__name__}")
    _registered[name.strip()] = cls


def setup_tracker(
    project_name: str | None = None,
    backends: str | Sequence[str] | None = None,
    config: Any = None,
    outdir: str | os.PathLike[str] | None = None,
    rank: int | None = None,
    **kwargs: Any,
) -> Tracker:
    """Create a tracker that logs to a new run, its mirrors and custom backends.

    Does not raise. Backends that cannot be created, for example because of a missing library, are
    skipped with a warning. If no backend is left, and on ranks other than 0, the result is a
    `NullTracker`.

    Args:
        project_name: Name of the project. Defaults to WB_PROJECT, WANDB_PROJECT, WB_PROJECT_NAME,
            MLFLOW_EXPERIMENT_NAME, then to the name of the script.
        backends: Names, as a list or separated by commas: `wandb`, `csv`, `mlflow`, any other
            mirror or its URI, or a name given to `register_backend`. `quark` uses the run's own
            store alone. `none` does nothing. Defaults to QUARK_TRACKER_BACKENDS, QUARK_BACKENDS,
            EZPZ_TRACKER_BACKENDS, EZPZ_TRACKERS, then to `wandb`.
        config: Hyperparameters, in a form that `start_run` accepts.
        outdir: Folder of the run's store and of the files of `csv`: metrics.csv, config.json and
            tables. Defaults to the working directory.
        rank: Rank of this process. Defaults to the detected rank.
        **kwargs: `name`, `notes` and `tags` of the run, and `storage_dir` if its store is not in
            `outdir`. All except `storage_dir` are passed to the constructors of backends. `mode`,
            `entity`, `group` and `job_type` go to the W&B mirror.
    """
    if (detect_rank().rank if rank is None else rank) != 0:
        return NullTracker()
    names = _split(backends)
    if not names or names == [_NOTHING]:
        return NullTracker()
    storage_dir = kwargs.pop("storage_dir", None)
    arguments = {
        "project_name": project_name,
        "config": config,
        "outdir": outdir,
        "rank": 0 if rank is None else rank,
        **kwargs,
    }
    mirrors, lanes = _make_parts(names, arguments)
    if not (mirrors or lanes or _STORE_ALONE in names):
        return NullTracker()
    place = storage_dir if storage_dir is not None else outdir
    options = {option: kwargs[option] for option in _SESSION_OPTIONS if option in kwargs}
    # As `mlflow.start_run` calls them.
    options.setdefault("name", kwargs.get("run_name"))
    options.setdefault("notes", kwargs.get("description"))
    session = start_session(
        mirrors, project_name=project_name, config=config, storage_dir=place, **options
    )
    tracker = Tracker.assemble(session, mirrors if session is not None else (), lanes)
    if session is not None:
        _tell_start(
            session, [*(m.name for m in mirrors), *(c.backend for c in tracker.report_calls())]
        )
    return tracker if tracker.active else NullTracker()


def start_session(
    mirrors: Sequence[MirrorBackend],
    *,
    project_name: str | None = None,
    config: Any = None,
    storage_dir: str | os.PathLike[str] | None = None,
    name: Any = None,
    notes: Any = None,
    tags: Any = None,
) -> TrainingSession | None:
    """Start a run with these mirrors; None, with a warning, where that cannot be done."""
    for mirror in mirrors:
        storage_dir = mirror.storage_dir if storage_dir is None else storage_dir
        project_name = project_name or mirror.project_name
        config = mirror.config if config is None else config
    try:
        snapshot_config(config)
    except SchemaValidationError as error:
        _log.warning("tracker: %s; the run has no config", error)
        config = None
    try:
        return TrainingSession.start_run(
            project=project_name or _find_project(),
            config=config,
            storage_dir=None if storage_dir is None else Path(storage_dir),
            # Without a mirror it must not be what QUARK_BACKENDS says.
            backends=[mirror.specification for mirror in mirrors],
            name=None if name is None else str(name),
            notes=None if notes is None else str(notes),
            tags=_read_tags(tags),
        )
    except Exception as error:  # noqa: BLE001 - nothing of ours may end a training
        _log.warning("tracker: the run could not be started: %s: %s", type(error).__name__, error)
        return None


def _tell_start(session: TrainingSession, names: Sequence[str]) -> None:
    """Say where the run is; its page in another tool is told by the mirror, once it has one."""
    _log.info(
        "tracker: run %s of project %s is in %s%s",
        session.run_id,
        session.project_name,
        session.context.store_root,
        f", and goes to {', '.join(names)}" if names else "",
    )


def _split(backends: str | Iterable[str] | None) -> list[str]:
    if backends is None:
        given = (os.environ.get(name) for name in _VARIABLES)
        backends = next((text for text in given if text is not None), None)
    if backends is None:
        forms = default_registry().list_tracker_forms()
        backends = [name for name, form in forms[:1] if form.is_default]
    names = backends.split(",") if isinstance(backends, str) else map(str, backends)
    return list(dict.fromkeys(name.strip() for name in names if name.strip()))


def _make_parts(
    names: Sequence[str], arguments: Mapping[str, Any]
) -> tuple[list[MirrorBackend], list[CallLane]]:
    """What the names ask for: mirrors of the run, and lanes of backends of one's own."""
    mirrors: list[MirrorBackend] = []
    lanes: list[CallLane] = []
    for name in names:
        cls = _registered.get(name)
        if cls is not None:
            lanes.append(CallLane(name, partial(cls, **arguments)))
        elif name != _STORE_ALONE and (definition := _find_definition(name)) is not None:
            mirrors.append(_make_mirror(name, definition, arguments))
    return mirrors, lanes


def _find_definition(name: str) -> BackendDefinition | None:
    """The backend of a name that can be had; None, with a warning, where there is none."""
    try:
        definition = choose_backend(name, default_registry()).definition
    except QuarkError as error:
        _warn_of_unknown(name, error)
        return None
    missing = find_missing_library(definition)
    if missing is None:
        return definition
    _log.warning(
        "tracker backend %r is not available (missing dependency: No module named %r)",
        name,
        missing,
    )
    return None


def _make_mirror(
    name: str, definition: BackendDefinition, arguments: Mapping[str, Any]
) -> MirrorBackend:
    """The mirror that a name asks for; a URI is taken as it is."""
    if name == definition.name and definition.tracker is not None:
        made: MirrorBackend = definition.tracker.make(**arguments)
        return made
    return MirrorBackend(definition.name, name)


def _warn_of_unknown(name: str, error: QuarkError) -> None:
    known = ", ".join(sorted({*_registered, *default_registry().names}))
    # That there is none is said by this line; a plugin that was left out has more to say.
    more = "" if isinstance(error, UnknownBackendError) else f": {error}"
    _log.warning("Unknown tracker backend %r (registered: %s)%s", name, known, more)


def _find_project() -> str:
    """The project where none is given: what the environment says, or the script's name."""
    forms = default_registry().list_tracker_forms()
    for variable in (name for _, form in forms for name in form.project_variables):
        given = os.environ.get(variable, "").strip()
        if given:
            return given
    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    stem = Path(main).stem
    return Path(main).parent.name if stem == "__main__" else stem or _FALLBACK_PROJECT


def _read_tags(tags: Any) -> tuple[str, ...] | None:
    """Tags of a sequence, or of a mapping as MLflow has them."""
    if tags is None:
        return None
    if isinstance(tags, Mapping):
        return tuple(f"{key}={value}" for key, value in tags.items())
    if isinstance(tags, str):
        return tuple(tag.strip() for tag in tags.split(",") if tag.strip())
    return tuple(map(str, tags))
