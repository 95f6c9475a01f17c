"""The MLflow client: the library imported late, its calls bounded, and their errors translated."""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from quark_backends.mlflow.points import Point
from quark_core.api import (
    BackendUnauthorized,
    BackendUnavailable,
    BackendUnusable,
    importing,
    redact_text,
    split_path,
)

# What a call to MLflow can end in, told apart by what is to be done about it.
#
# Refused              the call itself is bad: find the bad part, leave it out
# Missing              what it names is not there
# AlreadyExists        what it makes is there already
# BackendUnavailable   everything else: wait and call again
#
# Single records that are refused go into a file of the run's quarantine.

_REFUSED = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST"})
_CREDENTIALS = frozenset({"UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED"})
# Addresses of objects differ at each try, but a reason is logged once only where it is the same.
_VARYING = re.compile(r" object at 0x[0-9a-fA-F]+|\([^()]*0x[0-9a-fA-F]+[^()]*\)")
_MAX_REASON = 700
_HTTP_CODE = re.compile(r"failed with error code (\d{3})")
# Refused by what stands before the server too, such as a proxy that a request is too large for.
_REFUSED_HTTP = frozenset({400, 405, 406, 411, 413, 414, 415, 422, 431})


class Refused(Exception):
    """MLflow will never take this call."""


class Missing(Exception):
    """MLflow does not know the run or experiment that a call names."""


class AlreadyExists(Exception):
    """MLflow has one of that name."""


def unavailable(message: str) -> BackendUnavailable:
    """The error that makes the lane call again later."""
    return BackendUnavailable(message, backend="mlflow")


def unusable(message: str) -> BackendUnusable:
    """The error that makes the lane wait for a person."""
    return BackendUnusable(message, backend="mlflow")


def translate(error: Exception, uri: str) -> Exception:
    """The error to raise in place of one that the MLflow client has raised.

    Args:
        error: It.
        uri: The tracking URI, as it may be shown.
    """
    code = getattr(error, "error_code", None)
    status = _find_status(error)
    reason = _shorten(str(error) or type(error).__name__)
    if code in _REFUSED or status in _REFUSED_HTTP:
        return Refused(reason)
    if code == "RESOURCE_DOES_NOT_EXIST" or (code is None and status == 404):
        return Missing(reason)
    if code == "RESOURCE_ALREADY_EXISTS":
        return AlreadyExists(reason)
    if code in _CREDENTIALS or (code is None and status in (401, 403)):
        return BackendUnauthorized(
            f"MLflow at {uri} rejected the credentials ({code}). Set MLFLOW_TRACKING_TOKEN, or "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; the records wait",
            backend="mlflow",
        )
    if code == "ENDPOINT_NOT_FOUND":
        return unavailable(f"{uri} does not answer like an MLflow server. Check the address")
    if code is None and isinstance(error, (TypeError, ValueError, OverflowError)):
        # The client could not even write the request down.
        return Refused(f"{type(error).__name__}: {reason}")
    cause = error.__cause__ or error.__context__
    if isinstance(cause, OSError):
        # The connection itself failed; the text of that differs at each try.
        many = re.search(r"too many \d+ error responses", str(cause))
        what = many[0] if many else type(cause).__name__
        return unavailable(f"the MLflow server {uri} cannot be reached ({what})")
    return unavailable(f"the MLflow server {uri} cannot accept records now: {reason}")


def _find_status(error: Exception) -> int | None:
    """The HTTP status that an error tells of, or None."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status
    found = _HTTP_CODE.search(str(error))
    return int(found[1]) if found else None


def _shorten(text: str) -> str:
    # What follows "[SQL:" are the statement and its values.
    line = " ".join(_VARYING.sub("", redact_text(text)).partition("[SQL:")[0].split())
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + "…"


_log = logging.getLogger("quark")


class RefusedRecords:
    """`refused-records.jsonl`: one refused record per line, with the reason.

    A batch that is tried again may put its refused records there again; their
    `id` tells.

    Args:
        folder: The mirror's folder in the run's quarantine; made when needed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "refused-records.jsonl"
        self._reasons: set[str] = set()

    def add(self, kind: str, record: dict[str, Any], reason: str) -> None:
        """Keep a record and why it was refused.

        Args:
            kind: What was refused: `metric`, `param` or `tag`.
            record: It, as JSON-like values.
            reason: What MLflow said.
        """
        if kind not in self._reasons:
            self._reasons.add(kind)
            _log.warning(
                "backend mlflow: the server rejected a %s, which is kept in %s (%s)",
                kind,
                self._path,
                reason,
            )
        # msgspec writes NaN and the infinities as null.
        record = {key: str(v) if isinstance(v, float) else v for key, v in record.items()}
        line = msgspec.json.encode({"kind": kind, "reason": reason, "record": record})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(line + b"\n")


# Makes the SQLite file of an MLflow store: whole, by one process at a time, or not at all.
#
# MLflow makes its tables one after the other in the file itself. Two runs that start at once
# collide there, and a process that is killed meanwhile leaves a file that no MLflow opens.

try:
    import fcntl
except ImportError:  # Windows has none: there the first file that is whole stays
    fcntl = None  # type: ignore[assignment]

# Two minutes on a busy machine with one slow disk.
_WAIT_S = 120.0
_LOOK_EVERY_S = 0.1


def make_database(path: Path, make_tables: Callable[[str], object]) -> None:
    """Make the file, unless it is there.

    Args:
        path: The file.
        make_tables: Makes MLflow's tables in a database, given by its tracking URI.

    Raises:
        BackendUnavailable: It cannot be made, or another process is at it for too long.
    """
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(path.parent):
            if not path.exists():
                _make(path, make_tables)
    except OSError as error:
        raise unavailable(f"the MLflow store {path} cannot be created: {error}") from error


def _make(path: Path, make_tables: Callable[[str], object]) -> None:
    prefix = f".{path.name}.new-"
    for left in path.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        make_tables(f"sqlite:///{(folder / 'store.db').absolute()}")
        # MLflow holds that file open for as long as the process lives.
        whole = folder / "whole.db"
        shutil.copyfile(folder / "store.db", whole)
        with suppress(FileExistsError):
            _put_in_place(whole, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(whole: Path, path: Path) -> None:
    """Give a file its name, unless another one has it."""
    try:
        os.link(whole, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        os.rename(whole, path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep others out who make a database in a folder; the lock leaves no file behind."""
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise unavailable(
                        f"another process has held the MLflow store in {folder} for {_WAIT_S:g} s"
                    ) from None
                time.sleep(_LOOK_EVERY_S)
            except OSError:  # a file system without locks: the first whole file stays
                break
        yield
    finally:
        os.close(descriptor)


# The calls to MLflow that the mirror makes, each bounded and with its errors translated.
#
# The bounds hold while the mirror calls: the user's own calls keep theirs.

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
            raise Missing(f"{path!r:.120} is not a path in a run's artifacts")
        scratch = target.with_name(f"{target.name}.parts")
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            with self._translated(_TRANSFER_TIMEOUT_S):
                given = self._client.download_artifacts(run_id, path, str(scratch))
            # A store on this machine may give the artifact itself, which must stay.
            shutil.copyfile(given, target)
        except FileNotFoundError as error:
            raise Missing(f"{path} does not exist") from error
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


_URI_VARIABLE = "MLFLOW_TRACKING_URI"
_CREDENTIAL_VARIABLES = (
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_AUTH",
)
_SQLITE = "sqlite:///"


def find_uri(location: str) -> str:
    """The tracking URI that a backend's location means.

    Raises:
        BackendUnusable: None is given, here or in the environment.
    """
    uri = location or os.environ.get(_URI_VARIABLE, "").strip()
    if not uri:
        raise unusable(
            f"no MLflow server URL is set. Set {_URI_VARIABLE}, or pass "
            'backends="mlflow+http://HOST:PORT"; the records wait'
        )
    return uri


def check_credentials_are_for(uri: str) -> None:
    """See that MLflow's credentials may be shown to a server that a run's folder names.

    MLflow shows those of the environment to any server; they are for that of
    MLFLOW_TRACKING_URI, where that is set.

    Raises:
        BackendUnusable: They are for another server.
    """
    own = os.environ.get(_URI_VARIABLE, "").strip()
    has_any = any(os.environ.get(name, "").strip() for name in _CREDENTIAL_VARIABLES)
    if not own or not has_any or "://" not in uri or _find_origin(own) == _find_origin(uri):
        return
    raise unusable(
        f"the run's folder names the server {redact_text(uri)}, but the credentials in "
        f"MLFLOW_TRACKING_* belong to the server in {_URI_VARIABLE} and are not sent to another "
        "one. Set both to the server of the run, and try again"
    )


def _find_origin(uri: str) -> tuple[str, str, int | None]:
    try:
        parts = urlsplit(uri)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme.lower())
    except ValueError:
        return uri, "", None
    return parts.scheme.lower(), (parts.hostname or "").lower(), port


def open_server(uri: str, *, read_only: bool = False) -> Server:
    """A tracking server or store; nothing is asked of a server yet.

    Args:
        uri: Its tracking URI.
        read_only: Make no store where there is none.

    Raises:
        BackendUnusable: MLflow is not installed.
        BackendUnavailable: It does not open it.
    """
    if read_only and (missing := _find_missing_store(uri)) is not None:
        raise unavailable(f"no MLflow store exists at {missing}")
    mlflow = _import_mlflow()
    if _is_folder(uri) and not read_only:
        _log.warning(
            "backend mlflow: %s is a file store, which MLflow only maintains and which may "
            "store points twice. mlflow+sqlite:///FILE stores them once",
            uri,
        )
    try:
        path = _find_sqlite_file(uri)
        if path is not None and not read_only:
            make_database(path, lambda scratch: Server(mlflow, scratch))
        return Server(mlflow, uri, _find_artifact_root(uri))
    except (Refused, Missing) as error:
        raise unavailable(f"MLflow cannot open {redact_text(uri)}: {error}") from error


def _is_folder(uri: str) -> bool:
    return uri.startswith("file:") or ("://" not in uri and Path(uri).is_absolute())


def _find_artifact_root(uri: str) -> str | None:
    """Beside a SQLite file; MLflow would make a folder in the working directory."""
    path = _find_sqlite_file(uri)
    return None if path is None else (path.resolve().parent / "mlartifacts").as_uri()


def _find_sqlite_file(uri: str) -> Path | None:
    name = uri.removeprefix(_SQLITE).partition("?")[0]
    if not uri.startswith(_SQLITE) or not name or name.startswith((":memory:", "file:")):
        return None
    return Path(name)


def _find_missing_store(uri: str) -> Path | None:
    """Where a store of files would be made, were it opened; MLflow makes one for whoever reads."""
    path = _find_sqlite_file(uri)
    if path is None and _is_folder(uri):
        path = Path(uri.removeprefix("file:").removeprefix("//"))
    return None if path is None or path.exists() else path


class _QuietLane(logging.Filter):
    """Drops what lanes make urllib3 say: the lane itself reports an outage, once."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is said."""
        return not (record.threadName or "").startswith("quark-lane-")


_QUIET_LANE = _QuietLane()


def _import_mlflow() -> ModuleType:
    logging.getLogger("urllib3.connectionpool").addFilter(_QUIET_LANE)
    try:
        mlflow = importlib.import_module("mlflow")
        with importing():
            importlib.import_module("mlflow.entities")
    except ModuleNotFoundError as error:
        if error.name != "mlflow":
            raise translate(error, "") from error
        raise unusable(
            'mlflow is not installed: pip install "quark-tracker[mlflow]"; the records wait'
        ) from error
    except Exception as error:
        # Foreign code: a wrong protobuf ends in a TypeError, for one.
        raise unavailable(
            f"MLflow is installed but cannot be imported ({type(error).__name__}: {error})"
        ) from error
    return mlflow
