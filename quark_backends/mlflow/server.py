"""The calls to MLflow that the mirror makes, each bounded and with its errors translated.

The bounds hold while the mirror calls: the user's own calls keep theirs.
"""

from __future__ import annotations

import importlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quark_backends.mlflow.errors import AlreadyExists, Missing, translate
from quark_backends.mlflow.points import Point
from quark_core.api import redact_text, split_path

# MLflow's own retries take minutes; the lane waits and tries again itself.
_BOUNDS: Mapping[str, str] = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}

_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"

_lock = threading.Lock()
_callers = 0
_set: dict[str, str] = {}


@contextmanager
def bounded(timeout_s: int = 10) -> Iterator[None]:
    """Within it a call to MLflow ends after three tries, whatever the server does.

    MLflow reads these bounds from the environment at each request and takes
    them in no other way. What the user has set stays; what is set here is
    taken back when the last caller has left.

    Args:
        timeout_s: How long each try waits for an answer; of several callers at
            once the first one's counts.
    """
    global _callers
    with _lock:
        _callers += 1
        if _callers == 1:
            bounds = {**_BOUNDS, _TIMEOUT: str(timeout_s)}
            _set.clear()
            _set.update({n: text for n, text in bounds.items() if n not in os.environ})
            os.environ.update(_set)
    try:
        yield
    finally:
        with _lock:
            _callers -= 1
            if _callers == 0:
                _take_back()


def _take_back() -> None:
    for name, text in _set.items():
        # What somebody else has set meanwhile is theirs.
        if os.environ.get(name) == text:
            del os.environ[name]


def _forget_callers() -> None:
    """A forked child has none of the threads that were calling, but has their environment."""
    global _lock, _callers
    _lock = threading.Lock()
    if _callers:
        _callers = 0
        _take_back()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_callers)


_PAGE = 1000
_TIMEOUT_S = 10
# A server that takes artifacts itself answers when it has brought them to where it keeps them.
_TRANSFER_TIMEOUT_S = 120
_EXPERIMENTS_PER_SEARCH = 100


class MlflowRun(NamedTuple):
    """A run as MLflow has it; times are milliseconds since the epoch, or None."""

    id: str
    active: bool
    params: Mapping[str, str]
    tags: Mapping[str, str]
    experiment_id: str = ""
    name: str | None = None
    status: str = "RUNNING"
    started_ms: int | None = None
    ended_ms: int | None = None
    metric_names: tuple[str, ...] = ()


class ArtifactFile(NamedTuple):
    """A file among a run's artifacts."""

    path: str
    size_bytes: int


class Server:
    """A tracking server or store, through `MlflowClient` and nothing global.

    Every method raises `BackendUnavailable` where it must be called again
    later, and `Refused` where MLflow will never take the call.

    Args:
        mlflow: The imported library.
        uri: Tracking URI.
        artifact_root: Where experiments that are made here have their
            artifacts; None leaves it to the server.
    """

    def __init__(self, mlflow: ModuleType, uri: str, artifact_root: str | None = None) -> None:
        self.uri = redact_text(uri)
        self._pages = _find_pages(uri)
        self._artifact_root = artifact_root
        self._entities: Any = mlflow.entities
        with self._translated():
            self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        _silence(self._client)
        _route_artifacts(mlflow, self._client, uri)

    def find_page(self, run: MlflowRun) -> str | None:
        """Address of a run's page; None of a store that no server stands before."""
        if self._pages is None:
            return None
        return f"{self._pages}/#/experiments/{run.experiment_id}/runs/{run.id}"

    def find_experiment(self, name: str) -> tuple[str, bool] | None:
        """Id of an experiment and whether it is active, or None where there is none."""
        with self._translated():
            found = self._client.get_experiment_by_name(name)
        return found and (found.experiment_id, found.lifecycle_stage == "active")

    def create_experiment(self, name: str) -> str | None:
        """Make an experiment; its id, or None where another process was faster."""
        try:
            with self._translated():
                place = self._artifact_root
                return str(self._client.create_experiment(name, artifact_location=place))
        except AlreadyExists:
            return None

    def restore_experiment(self, experiment_id: str) -> None:
        """Take a deleted experiment back, with its runs."""
        with self._translated():
            self._client.restore_experiment(experiment_id)

    def find_run(self, experiment_id: str, quark_run_id: str, *, deleted: bool) -> MlflowRun | None:
        """The oldest run of an experiment that mirrors a run, or None.

        Args:
            experiment_id: The experiment.
            quark_run_id: The run that is mirrored.
            deleted: Whether a deleted one counts.
        """
        if not _is_searchable(quark_run_id):
            return None
        views = self._entities.ViewType
        with self._translated():
            found = self._client.search_runs(
                [experiment_id],
                f"tags.`quark.run_id` = '{quark_run_id}'",
                run_view_type=views.ALL if deleted else views.ACTIVE_ONLY,
                max_results=1,
                order_by=["attributes.start_time ASC"],
            )
        return _to_run(found[0]) if found else None

    def list_children(self, experiment_id: str, quark_run_id: str) -> list[MlflowRun]:
        """The active runs of an experiment that mirror children of a run."""
        if not _is_searchable(quark_run_id):
            return []
        return self.list_runs([experiment_id], f"tags.`quark.parent_run_id` = '{quark_run_id}'")

    def list_experiments(self) -> list[tuple[str, str]]:
        """Id and name of every active experiment."""
        with self._translated():
            return [
                (str(one.experiment_id), str(one.name))
                for one in _turn_pages(
                    lambda token: self._client.search_experiments(
                        view_type=self._entities.ViewType.ACTIVE_ONLY,
                        max_results=_PAGE,
                        page_token=token,
                    )
                )
            ]

    def list_runs(
        self, experiment_ids: Sequence[str], condition: str = "", limit: int | None = None
    ) -> list[MlflowRun]:
        """Active runs of experiments, newest first, asked for a page at a time."""
        found: list[MlflowRun] = []
        for begin in range(0, len(experiment_ids), _EXPERIMENTS_PER_SEARCH):
            part = list(experiment_ids[begin : begin + _EXPERIMENTS_PER_SEARCH])
            with self._translated():
                pages = _turn_pages(
                    lambda token, part=part: self._client.search_runs(  # type: ignore[misc]
                        part,
                        condition,
                        run_view_type=self._entities.ViewType.ACTIVE_ONLY,
                        max_results=_PAGE if limit is None else min(_PAGE, max(1, limit)),
                        order_by=["attributes.start_time DESC"],
                        page_token=token,
                    )
                )
                for number, run in enumerate(pages):
                    if limit is not None and number >= limit:
                        break
                    found.append(_to_run(run))
        found.sort(key=lambda run: run.started_ms or 0, reverse=True)
        return found[:limit]

    def load_points(self, run_id: str, name: str) -> list[tuple[int, int, float]]:
        """Timestamp in ms, step and value of every point of a metric, as MLflow orders them.

        The client asks for a page at a time; the points of one metric are in
        memory at once.
        """
        with self._translated():
            history = self._client.get_metric_history(run_id, name)
            return [(int(p.timestamp), int(p.step), float(p.value)) for p in history]

    def load_run(self, run_id: str) -> MlflowRun | None:
        """A run, deleted or not; None where there is none."""
        try:
            with self._translated():
                return _to_run(self._client.get_run(run_id))
        except Missing:
            return None

    def create_run(
        self, experiment_id: str, name: str, started_ms: int, tags: Mapping[str, str]
    ) -> MlflowRun:
        """Make a run, which is running."""
        with self._translated():
            return _to_run(
                self._client.create_run(
                    experiment_id, start_time=started_ms, tags=dict(tags), run_name=name
                )
            )

    def restore_run(self, run_id: str) -> None:
        """Take a deleted run back."""
        with self._translated():
            self._client.restore_run(run_id)

    def set_running(self, run_id: str) -> None:
        """Mark a run as running, whatever it was."""
        with self._translated():
            self._client.update_run(run_id, status="RUNNING")

    def rename_run(self, run_id: str, name: str) -> None:
        """Give a run another name."""
        with self._translated():
            self._client.update_run(run_id, name=name)

    def set_ended(self, run_id: str, status: str, ended_ms: int) -> None:
        """Mark a run as ended."""
        with self._translated():
            self._client.set_terminated(run_id, status=status, end_time=ended_ms)

    def log_metrics(self, run_id: str, points: Sequence[Point]) -> None:
        """Store points; those that are there already stay as they are."""
        make = self._entities.Metric
        with self._translated():
            self._client.log_batch(
                run_id,
                metrics=[make(p.name, p.value, p.timestamp_ms, p.step) for p in points],
                synchronous=True,
            )

    def log_params(self, run_id: str, params: Sequence[tuple[str, str]]) -> None:
        """Store params, which cannot be changed later."""
        make = self._entities.Param
        with self._translated():
            self._client.log_batch(run_id, params=[make(*p) for p in params], synchronous=True)

    def set_tags(self, run_id: str, tags: Sequence[tuple[str, str]]) -> None:
        """Set tags, in place of what they were."""
        make = self._entities.RunTag
        with self._translated():
            self._client.log_batch(run_id, tags=[make(*t) for t in tags], synchronous=True)

    def delete_tag(self, run_id: str, key: str) -> None:
        """Delete a tag.

        Raises:
            Missing: The run has no such tag.
        """
        with self._translated():
            self._client.delete_tag(run_id, key)

    def upload(self, run_id: str, path: Path, folder: str) -> None:
        """Store a file among a run's artifacts, in place of one of that name.

        Args:
            run_id: The run.
            path: The file.
            folder: Where it goes, "" for the top.
        """
        with self._translated(_TRANSFER_TIMEOUT_S):
            self._client.log_artifact(run_id, str(path), folder or None)

    def find_artifacts(self, run_id: str) -> str:
        """Where the artifacts of a run are, as MLflow says it."""
        with self._translated():
            return str(self._client.get_run(run_id).info.artifact_uri)

    def list_files(self, run_id: str, folder: str) -> list[ArtifactFile]:
        """Files in one folder of a run's artifacts, sorted; none where there is no such folder."""
        try:
            with self._translated():
                found = self._client.list_artifacts(run_id, folder)
        except Missing:
            return []
        files = [
            ArtifactFile(one.path, int(one.file_size or 0))
            for one in found
            if not one.is_dir and split_path(one.path) is not None
        ]
        return sorted(files)

    def list_tree(self, run_id: str, limit: int) -> list[ArtifactFile]:
        """Files among a run's artifacts, in every folder, as far as `limit` of them."""
        found: list[ArtifactFile] = []
        folders = [""]
        while folders and len(found) < limit:
            folder = folders.pop(0)
            try:
                with self._translated():
                    listed = list(self._client.list_artifacts(run_id, folder or None))
            except Missing:
                continue
            for one in sorted(listed, key=lambda one: str(one.path)):
                if split_path(one.path) is None or not one.path.startswith(folder):
                    continue
                if one.is_dir and len(one.path) > len(folder):
                    folders.append(one.path)
                elif not one.is_dir:
                    found.append(ArtifactFile(one.path, int(one.file_size or 0)))
        return found[:limit]

    def download(self, run_id: str, path: str, target: Path) -> None:
        """Copy one artifact to a file.

        Raises:
            Missing: The run has no such artifact, or the path leads elsewhere.
        """
        if split_path(path) is None:
            raise Missing(f"{path!r:.120} is no path among a run's artifacts")
        scratch = target.with_name(f"{target.name}.parts")
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            with self._translated(_TRANSFER_TIMEOUT_S):
                given = self._client.download_artifacts(run_id, path, str(scratch))
            # A store on this machine may give the artifact itself, which must stay.
            shutil.copyfile(given, target)
        except FileNotFoundError as error:
            raise Missing(f"{path} is not there") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    @contextmanager
    def _translated(self, timeout_s: int = _TIMEOUT_S) -> Iterator[None]:
        try:
            with bounded(timeout_s):
                yield
        except Exception as error:
            raise translate(error, self.uri) from error


def _is_searchable(run_id: str) -> bool:
    """Whether it is no more than a text to a search; every id of a run is."""
    return "'" not in run_id and "\\" not in run_id


def _to_run(found: Any) -> MlflowRun:
    return MlflowRun(
        str(found.info.run_id),
        found.info.lifecycle_stage == "active",
        dict(found.data.params),
        dict(found.data.tags),
        str(found.info.experiment_id),
        getattr(found.info, "run_name", None) or found.data.tags.get("mlflow.runName"),
        str(found.info.status),
        found.info.start_time,
        found.info.end_time,
        tuple(sorted(found.data.metrics)),
    )


def _find_pages(uri: str) -> str | None:
    """Where a tracking server has its pages, without a user's name and password."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    if parts.scheme.lower() not in ("http", "https") or not parts.netloc:
        return None
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"


def _turn_pages(ask: Callable[[str | None], Any]) -> Iterator[Any]:
    token: str | None = None
    while True:
        page = ask(token)
        yield from page
        token = getattr(page, "token", None)
        if not token:
            return


def _silence(client: Any) -> None:
    """Keep this client from printing where an ended run is to be seen.

    It prints before it sets the status, so a closed standard output, or one
    that takes no emoji, would keep the status from being set. MLflow 3 has a
    variable for it, which would silence the user's own runs as well.
    """
    tracking: Any = getattr(client, "_tracking_client", None)
    if hasattr(tracking, "_log_url"):
        tracking._log_url = lambda _run_id: None


_PROXIED = "mlflow-artifacts:"


def _route_artifacts(mlflow: ModuleType, client: Any, uri: str) -> None:
    """Make a client take its own tracking URI to a server's artifacts.

    MLflow 2 takes the one that is set for the whole process, which is the
    user's. MLflow 3 does right by itself and is left alone.

    Args:
        mlflow: The imported library.
        client: An `MlflowClient`.
        uri: Its tracking URI.
    """
    tracking: Any = getattr(client, "_tracking_client", None)
    find = getattr(tracking, "_get_artifact_repo", None)
    if not str(mlflow.__version__).startswith("2.") or find is None:
        return
    found: dict[str, Any] = {}

    def find_proxied(run_id: str) -> Any:
        if run_id not in found:
            place = client.get_run(run_id).info.artifact_uri
            if not place.startswith(_PROXIED):
                return find(run_id)
            proxied = importlib.import_module("mlflow.store.artifact.mlflow_artifacts_repo")
            plain = importlib.import_module("mlflow.store.artifact.http_artifact_repo")
            resolved = proxied.MlflowArtifactsRepository.resolve_uri(place, uri)
            found[run_id] = plain.HttpArtifactRepository(resolved)
        return found[run_id]

    tracking._get_artifact_repo = find_proxied
