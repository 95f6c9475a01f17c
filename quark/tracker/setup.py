"""setup_tracker: names of backends in, a tracker out, whatever goes wrong on the way."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quark.tracker.call_lane import CallLane
from quark.tracker.multiplexer import NullTracker, Tracker
from quark_core.backends.contract import BackendDefinition
from quark_core.backends.registry import default_registry, find_missing_library
from quark_core.backends.tracker_backend import MirrorBackend, TrackerBackend
from quark_core.config import settings
from quark_core.config.snapshot import snapshot_config
from quark_core.errors import QuarkError, SchemaValidationError, UnknownBackendError
from quark_core.ranks.launches import detect_rank
from quark_core.runs.backend_choice import choose_backend
from quark_core.sessions.session import TrainingSession

_log = logging.getLogger("quark")

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
    """Make a TrackerBackend class known under a name, for `setup_tracker` of this process.

    It comes before Quark's own backend of that name, and before one that was
    registered earlier.

    Args:
        name: The name in `backends=`.
        cls: The class, or whatever makes a backend; it is called with the
            keywords `project_name`, `config`, `outdir`, `rank` and those that
            `setup_tracker` was given besides.

    Raises:
        SchemaValidationError: No name that `backends=` could hold, or nothing
            that can be called.
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
    """A tracker that logs to a new run, its mirrors and backends of one's own; never raises.

    What cannot be had (an unknown name, a library that is not installed, a
    constructor that raises) is left out with a warning. Where nothing of what
    was asked for is left, and on ranks other than 0, it is a `NullTracker`.

    Args:
        project_name: The run's project; by default WB_PROJECT, WANDB_PROJECT,
            WB_PROJECT_NAME, MLFLOW_EXPERIMENT_NAME or the script's name.
        backends: Names, separated by commas or in a sequence: `wandb`, `csv`,
            `mlflow`, any other mirror or its URI, what `register_backend` has
            made known, or `quark` for the run's own store alone, which is
            there beside all others. `none` does nothing. By default
            QUARK_TRACKER_BACKENDS, QUARK_BACKENDS, EZPZ_TRACKER_BACKENDS,
            EZPZ_TRACKERS or `wandb`.
        config: Hyperparameters, as of `start_run`.
        outdir: Folder of the run's store (`.quark`) and of what `csv` writes:
            metrics.csv, config.json and tables; the working directory by default.
        rank: Of this process; found by itself where it is None.
        kwargs: `name`, `notes` and `tags` are the run's; `storage_dir` is a
            folder of its store other than `outdir`; all but the latter go to
            the constructors of backends, and `mode`, `entity`, `group` and
            `job_type` to the W&B mirror.
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
        _log.warning("tracker: %s; the run has no configuration", error)
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
