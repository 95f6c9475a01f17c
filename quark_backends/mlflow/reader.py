"""Reads runs out of MLflow: those that Quark has mirrored, and any other."""

from __future__ import annotations

import json
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from quark_backends.mlflow.errors import Missing, Refused
from quark_backends.mlflow.files import name_loose_payload, name_payload
from quark_backends.mlflow.own_runs import OwnRun, SegmentCopies, find_extra
from quark_backends.mlflow.plain_runs import (
    STATUSES,
    Series,
    describe_run,
    make_columns,
    name_series,
)
from quark_backends.mlflow.run import WHOLE_TAG
from quark_backends.mlflow.server import MlflowRun, Server
from quark_core.api import (
    ArtifactNotFoundError,
    ArtifactRecord,
    BackendUnavailable,
    MetricRecord,
    RunNotFoundError,
    SessionStoreError,
    StoredRun,
    hide_superseded,
    parse_time,
)

if TYPE_CHECKING:
    from quark_core.api import Columns, Query

_MAX_DEPTH = 50


class MlflowReader:
    """Runs of one tracking server or store. Every method may be called from any thread.

    A run of Quark's is read from the segments among its artifacts; where those
    do not have all, or cannot be had, from MLflow's own points, which
    have no epochs beside steps and no infinities.

    Args:
        server: Where the runs are.
        project: Name of the project that most of them are of, or None.
    """

    def __init__(self, server: Server, *, project: str | None = None) -> None:
        self._server = server
        self._project = project
        self._copies = SegmentCopies()
        self._ids: dict[str, str] = {}
        self._lock = threading.RLock()

    def close(self) -> None:
        """Delete what was copied to this machine."""
        with self._lock:
            self._copies.remove()

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`."""
        from quark_core.api import Columns

        with self._reading(run_id):
            found = self._find(run_id)
            own = self._open_own(found)
            if own is None:
                if kind != MetricRecord.KIND:
                    return Columns.empty(kind)
                return self._read_points(found, query).select(query)
            columns = own.read_all(kind)
            if kind == MetricRecord.KIND and (own.story.is_running or not _is_whole(found)):
                columns = self._add_newest(found, own, columns)
            if not query.all_attempts:
                columns = hide_superseded(columns, own.story.from_steps)
            return columns.make_all().select(query)

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        with self._reading(run_id):
            found = self._find(run_id)
            own = self._open_own(found)
            if own is None or own.story.attempt < 0:
                experiment = self._load_experiments().get(found.experiment_id, "")
                root = self._find_root(found)
                return describe_run(found, experiment, self._server.uri, root_run_id=root)
            beaten = found.tags.get("quark.heartbeat_at")
            if beaten:
                own.story.heartbeat_us = max(own.story.heartbeat_us, parse_time(beaten))
            status = found.tags.get("quark.status") or STATUSES.get(found.status, "running")
            if own.story.is_running and status != "running" and found.ended_ms is not None:
                # The end has come to MLflow, but not to the artifacts.
                own.story.end(status, found.ended_ms * 1000)
            return own.story.to_stored(own.run_id)

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """See `SupportsRead`."""
        with self._reading("the list of runs"):
            names = self._load_experiments()
            # A run whose experiment was deleted is in one that ends in a number.
            wanted = [
                one
                for one, name in names.items()
                if project is None or name == project or _is_successor(name, project)
            ]
            runs = self._server.list_runs(wanted, limit=limit) if wanted else []
            found = [(run, names[run.experiment_id]) for run in runs]
            described = [(describe_run(run, name, self._server.uri), name) for run, name in found]
            # A run may lie in an experiment that is not named like its project.
            return [one for one, name in described if project in (None, one.project.name, name)]

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """See `SupportsArtifacts`."""
        with self._reading(run_id):
            found = self._find(run_id)
            own = self._open_own(found)
            records = [] if own is None else own.list_records(ArtifactRecord.KIND)
            names = [
                name_payload(record)
                for record in records
                if isinstance(record, ArtifactRecord) and record.sha256 == sha256
            ]
            for name in (*names, name_loose_payload(sha256)):
                with tempfile.TemporaryDirectory(prefix="quark-mlflow-") as folder:
                    target = Path(folder) / "payload"
                    try:
                        self._server.download(found.id, name, target)
                    except (Missing, BackendUnavailable) as error:
                        # Stores say in many ways that something is not there.
                        if self._has_artifact(found.id, name):
                            raise SessionStoreError(f"{name} cannot be read: {error}") from error
                        continue
                    # The caller closes it.
                    copy: BinaryIO = cast(
                        BinaryIO,
                        tempfile.TemporaryFile(prefix="quark-mlflow-"),  # noqa: SIM115
                    )
                    with target.open("rb") as file:
                        while piece := file.read(1024 * 1024):
                            copy.write(piece)
                    copy.seek(0)
                    return copy
        raise ArtifactNotFoundError(
            f"payload {sha256} is not among the artifacts of MLflow run {found.id}"
        )

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except (BackendUnavailable, Refused, Missing, OSError) as error:
            raise SessionStoreError(f"{what} cannot be read from MLflow: {error}") from error

    def _has_artifact(self, mlflow_run_id: str, name: str) -> bool:
        files = self._server.list_files(mlflow_run_id, name.rpartition("/")[0])
        return any(file.path == name for file in files)

    def _find(self, run_id: str) -> MlflowRun:
        """The MLflow run that an id means: its own, or that of the run that it mirrors."""
        for known in (self._ids.get(run_id), run_id):
            if known is None:
                continue
            try:
                found = self._server.load_run(known)
            except Refused:
                continue  # not in the form of MLflow's ids
            if found is not None and found.active:
                return found
        condition = f"tags.`quark.run_id` = '{run_id}'"
        experiments = self._load_experiments()
        likely = [one for one, name in experiments.items() if name == self._project]
        for places in (likely, list(experiments)):
            if places and "'" not in run_id:
                runs = self._server.list_runs(places, condition, limit=1)
                if runs:
                    self._ids[run_id] = runs[0].id
                    return runs[0]
        raise RunNotFoundError(f"MLflow at {self._server.uri} has no run {run_id}")

    def _open_own(self, found: MlflowRun) -> OwnRun | None:
        """The run out of its segments; None where it has none."""
        run_id = found.tags.get("quark.run_id")
        if run_id is None:
            return None
        paths = self._copies.fetch(self._server, found.id)
        return OwnRun(run_id, paths) if paths else None

    def _read_points(self, found: MlflowRun, query: Query) -> Columns:
        own_id = found.tags.get("quark.run_id")
        names = self._load_names(found) if own_id else {}
        series = [one for one in name_series(found.metric_names, names) if _fits(one, query)]
        return make_columns(
            own_id or found.id, found.id, series, lambda name: self._load_points(found, name)
        )

    def _add_newest(self, found: MlflowRun, own: OwnRun, columns: Columns) -> Columns:
        """Also the points that only MLflow has: it keeps them well, or the segments are older."""
        names = self._load_names(found)
        known = own.count_points(names)
        extra = [
            (key, rank, point)
            for key, rank, name in name_series(found.metric_names, names)
            if name in known or name in names.values()
            for point in find_extra(self._load_points(found, name), known.get(name, Counter()))
        ]
        return own.continue_from(columns, extra)

    def _load_points(self, found: MlflowRun, name: str) -> list[tuple[int, int, float]]:
        return self._server.load_points(found.id, name)

    def _load_names(self, found: MlflowRun) -> Mapping[str, str]:
        with tempfile.TemporaryDirectory(prefix="quark-mlflow-") as folder:
            target = Path(folder) / "names"
            try:
                self._server.download(found.id, "quark/name_map.json", target)
                loaded: dict[str, Any] = json.loads(target.read_text("utf-8"))
            except (Missing, BackendUnavailable, ValueError):
                return {}  # as of a run of others: names are as MLflow has them
        names: dict[str, str] = loaded.get("metrics", {})
        return names

    def _load_experiments(self) -> dict[str, str]:
        return dict(self._server.list_experiments())

    def _find_root(self, found: MlflowRun) -> str | None:
        """Climb to the top of a tree of parents."""
        parent = found.tags.get("mlflow.parentRunId")
        root = None
        for _ in range(_MAX_DEPTH):
            if not parent:
                break
            above = self._server.load_run(parent)
            if above is None:
                return parent
            root = above.tags.get("quark.run_id") or above.id
            parent = above.tags.get("mlflow.parentRunId")
        return root


def _is_whole(found: MlflowRun) -> bool:
    """Whether the segments have all of a run that has ended."""
    return WHOLE_TAG in found.tags


def _is_successor(name: str, project: str) -> bool:
    return name.startswith(f"{project}-") and name.removeprefix(f"{project}-").isdecimal()


def _fits(series: Series, query: Query) -> bool:
    """Whether a query that asks for keys may want a metric."""
    wanted = query.equals.get("metric_key")
    any_of = query.any_of.get("metric_key")
    return (wanted is None or series[0] == wanted) and (any_of is None or series[0] in any_of)
