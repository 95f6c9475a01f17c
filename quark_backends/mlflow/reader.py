"""Reads runs out of MLflow: those that Quark has mirrored, and any other."""

from __future__ import annotations

import json
import math
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec

from quark_backends.mlflow.artifacts import name_loose_payload, name_payload
from quark_backends.mlflow.client import Missing, MlflowRun, Refused, Server
from quark_backends.mlflow.lifecycle import PARAM_LIMITS, USER_TAG, fit, flatten
from quark_backends.mlflow.quark_runs import OwnRun, SegmentCopies, find_extra
from quark_backends.mlflow.run import WHOLE_TAG
from quark_core.api import (
    RECORD_TYPES,
    ArtifactNotFoundError,
    ArtifactRecord,
    BackendUnavailable,
    Batch,
    ConfigSnapshot,
    EnvironmentSnapshot,
    JsonObject,
    LifecycleRecord,
    MetricRecord,
    ProjectRecord,
    RunEnding,
    RunNotFoundError,
    RunRecord,
    SessionStoreError,
    StoredRun,
    encode_name,
    encode_records,
    format_time,
    hide_superseded,
    parse_time,
    split_name,
)

if TYPE_CHECKING:
    from quark_core.api import Columns, Query

# Any MLflow run as Quark shows it: what MLflow itself knows, and nothing else.
#
# experiment                project
# params                    configuration; numbers, truth values and JSON as such
# tags                      tags as `key=value`, those of MLflow's own aside; all of
# them stand in the environment, under `mlflow`
# parent run                parent run, and the top of the tree as lineage root
# metrics                   metrics; a point's step is a step, its time has milliseconds
# RUNNING, SCHEDULED        running
# FINISHED, FAILED, KILLED  completed, failed, interrupted
#
# A negative step is no step, and stands in the metadata as `mlflow_step`.

LoadPoints = Callable[[str], Sequence[tuple[int, int, float]]]
"""Name in MLflow -> timestamp in ms, step and value of each of its points."""
Series = tuple[str, int, str]
"""Stored key, rank and name in MLflow of a metric."""

STATUSES = {"FINISHED": "completed", "FAILED": "failed", "KILLED": "interrupted"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?P<rest>\.\d+)?(?P<power>[eE][+-]?\d+)?")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_INT64_MAX = 2**63 - 1


def describe_run(
    run: MlflowRun, experiment: str, place: str, *, root_run_id: str | None = None
) -> StoredRun:
    """A run, by what MLflow knows of it.

    Args:
        run: It.
        experiment: Name of its experiment.
        place: The tracking URI, as it may be shown.
        root_run_id: The top of its tree of parents, where that is known.
    """
    own_id = run.tags.get("quark.run_id")
    started_us = (run.started_ms or 0) * 1000
    ended_us = None if run.ended_ms is None else run.ended_ms * 1000
    status = run.tags.get("quark.status", "") if own_id else ""
    if status not in ("running", *STATUSES.values()):
        status = STATUSES.get(run.status, "running")
    # A run that was taken up again keeps the time of its former end.
    ended_at = None if ended_us is None or status == "running" else format_time(ended_us)
    project = run.tags.get("quark.project", experiment) if own_id else experiment
    parent = run.tags.get("quark.parent_run_id" if own_id else "mlflow.parentRunId")
    run_id = own_id or run.id
    attempt = run.tags.get("quark.attempt", "0") if own_id else "0"
    number = int(attempt) if attempt.isdecimal() else 0
    code = run.tags.get("quark.exit_code", "")
    created_at = format_time(started_us)
    values = {name: parse_param(text) for name, text in sorted(run.params.items())}
    known = {
        "run_id": run.id,
        "experiment_id": run.experiment_id,
        "experiment": experiment,
        "status": run.status,
        "tags": dict(sorted(run.tags.items())),
    }
    return StoredRun(
        project=ProjectRecord(
            f"mlflow-{run.experiment_id}", project, place, created_at, created_at
        ),
        run=RunRecord(
            id=run_id,
            project_id=f"mlflow-{run.experiment_id}",
            project_name=project,
            status=status,
            parent_run_id=parent,
            lineage_root_run_id=root_run_id or parent or run_id,
            resume_count=number,
            run_path=f"{place}#{run.id}",
            git_commit=run.tags.get("mlflow.source.git.commit"),
            strict_mode=False,
            tags=_list_tags(run.tags, own=own_id is not None),
            attempt=number,
            name=run.name,
            notes=run.tags.get("mlflow.note.content"),
            created_at=created_at,
            updated_at=ended_at or created_at,
            ended_at=ended_at,
        ),
        state=status,
        config=ConfigSnapshot(JsonObject(values)) if values else None,
        environment=EnvironmentSnapshot(JsonObject({"mlflow": known})),
        heartbeat_at=run.tags.get("quark.heartbeat_at") if own_id else None,
        exit_code=int(code) if own_id and code.isdecimal() else None,
        ending=_read_ending(run.tags.get("quark.ending")) if own_id else None,
    )


def _read_ending(text: str | None) -> RunEnding | None:
    try:
        return RunEnding.from_data(json.loads(text or "null"))
    except (ValueError, RecursionError):
        return None


def parse_param(text: str) -> Any:
    """The value that a param's text stands for; what could mean another text stays text."""
    if text in _WORDS:
        return _WORDS[text]
    found = _NUMBER.fullmatch(text)
    if found is not None:
        if found["rest"] or found["power"]:
            number = float(text)
            return number if abs(number) != float("inf") else text
        return int(text) if abs(int(text)) <= _INT64_MAX else text
    if text[:1] in "[{" and text[-1:] in "]}":
        try:
            return json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return text
    return text


def make_columns(
    run_id: str, mlflow_run_id: str, names: Sequence[Series], load: LoadPoints
) -> Columns:
    """The points of metrics, in the order of their times.

    Args:
        run_id: Id of the run, as readers know it.
        mlflow_run_id: Its id in MLflow, which stands for the writer.
        names: The metrics.
        load: Returns the points of one.
    """
    import numpy as np

    from quark_core.api import Columns

    times, steps, values, indexes = [], [], [], []
    for index, (_, _, name) in enumerate(names):
        points = load(name)
        # Arrays at once: the points as objects take many times the room.
        times.append(np.array([point[0] for point in points], dtype=np.int64))
        steps.append(np.array([point[1] for point in points], dtype=np.int64))
        values.append(np.array([point[2] for point in points], dtype=np.float64))
        indexes.append(np.full(len(points), index))
    if not sum(map(len, times)):
        return Columns.empty(MetricRecord.KIND)
    time, step = np.concatenate(times), np.concatenate(steps)
    value, which = np.concatenate(values), np.concatenate(indexes)
    ranks = np.array([rank for _, rank, _ in names])[which]
    order = np.lexsort((step, time, ranks))
    time, step, value = time[order], step[order], value[order]
    which, ranks = which[order], ranks[order]
    count = len(time)

    def spread(texts: Sequence[str | None]) -> Any:
        out = np.empty(len(texts), dtype=object)
        out[:] = texts
        return out[which]

    metadata = np.empty(count, dtype=object)
    for row in np.flatnonzero(step < 0).tolist():
        metadata[row] = JsonObject({"mlflow_step": int(step[row])})
    keys = [key for key, _, _ in names]
    given: Mapping[str, Any] = {
        "run_id": np.full(count, run_id, dtype=object),
        "writer_id": np.full(count, mlflow_run_id, dtype=object),
        "attempt": np.zeros(count, dtype=np.int64),
        "rank": ranks.astype(np.int64),
        "sequence": np.arange(count, dtype=np.int64),
        "time_us": time * 1000,
        "metric_key": spread(keys),
        "namespace": spread([split_name(key)[0] for key in keys]),
        "metric_name": spread([split_name(key)[1] for key in keys]),
        "value": value,
        "step": np.where(step < 0, -1, step),
        "epoch": np.full(count, -1, dtype=np.int64),
        "description": np.empty(count, dtype=object),
        "metadata": metadata,
    }
    order_of_fields = [name for name in Columns.empty(MetricRecord.KIND) if name != "finite"]
    return Columns(MetricRecord.KIND, count, {name: given[name] for name in order_of_fields})


def name_series(names: Sequence[str], name_map: Mapping[str, str]) -> list[Series]:
    """The metrics that names in MLflow stand for; curves of other records are left out.

    Args:
        names: Names in MLflow.
        name_map: Keys and their names, as `NameMap` has them; empty for a run of others.
    """
    keys = {name: key for key, name in name_map.items()}
    found = []
    for name in names:
        key = keys.get(name)
        if key is None:
            found.append((encode_name(name), 0, name))
            continue
        match = re.fullmatch(r"(?:rank(\d+):)?(.*)", key, re.DOTALL)
        if match is not None and not match[2].startswith("="):
            found.append((match[2], int(match[1] or 0), name))
    return found


def _list_tags(tags: Mapping[str, str], *, own: bool) -> tuple[str, ...]:
    hidden = ("mlflow.", "quark.") if own else ("mlflow.",)
    shown = [item for item in tags.items() if not item[0].startswith(hidden)]
    if own:
        old = [key.removeprefix(USER_TAG) for key in tags if key.startswith(USER_TAG)]
        # A tag without a value is `true` there.
        found = [key if text in ("", "true") else f"{key}={text}" for key, text in shown]
        return tuple(sorted({*old, *found}))
    return tuple(sorted(f"{key}={text}" if text else key for key, text in shown))


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


# Which records analyzers read and MLflow does not give back as they were.
#
# They go among the artifacts, see `segments`, so that a run that is read from MLflow is
# judged as its store judges it. A run that MLflow holds whole has no such file.


def reduce_batch(batch: Batch, records: Sequence[Any]) -> Batch | None:
    """The part of a batch that is kept, under its number; None where nothing of it is.

    Args:
        batch: It.
        records: Its records.
    """
    if batch.kind == LifecycleRecord.KIND:
        if not any(record.action == "environment" for record in records):
            return batch
        return msgspec.structs.replace(batch, body=encode_records(list(map(_reduce, records))))
    if batch.kind == MetricRecord.KIND:
        return None if all(map(_is_given_back, records)) else batch
    known = RECORD_TYPES.get(batch.kind)
    return batch if known and known.HAS_FIGURES and not known.IS_ANALYSIS else None


def needs_file(kept: Batch, records: Sequence[Any]) -> bool:
    """Whether a kept batch is worth a file: analyzers would miss it.

    The lifecycle of a run that was begun once stands in MLflow's own fields.
    """
    if kept.kind != LifecycleRecord.KIND:
        return True
    return any(
        record.attempt > 0
        or (record.action == "config" and not _is_given_back_as_params(record.data or {}))
        for record in records
    )


def _reduce(record: LifecycleRecord) -> LifecycleRecord:
    """The record without the particulars of the machine and its packages."""
    if record.action != "environment":
        return record
    data: Mapping[str, Any] = record.data or {}
    return msgspec.structs.replace(record, data=JsonObject({"imported": data.get("imported")}))


def _is_given_back(record: MetricRecord) -> bool:
    """Whether a point of MLflow says all of a metric: it has one axis, and no infinity."""
    return record.step is not None and record.epoch is None and not math.isinf(record.value)


def _is_given_back_as_params(data: Mapping[str, Any]) -> bool:
    values = data.get("values") or {}
    texts = {path: fit(text, PARAM_LIMITS[0]) for path, text in flatten(values)}
    return {path[0]: parse_param(text) for path, text in texts.items()} == values


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
            if kind == MetricRecord.KIND and (own.is_running or not _is_whole(found)):
                columns = self._add_newest(found, own, columns)
            if not query.all_attempts:
                columns = hide_superseded(columns, own.from_steps)
            return columns.make_all().select(query)

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        with self._reading(run_id):
            found = self._find(run_id)
            own = self._open_own(found)
            if own is None or own.attempt < 0:
                experiment = self._load_experiments().get(found.experiment_id, "")
                root = self._find_root(found)
                return describe_run(found, experiment, self._server.uri, root_run_id=root)
            beaten = found.tags.get("quark.heartbeat_at")
            status = found.tags.get("quark.status") or STATUSES.get(found.status, "running")
            has_ended = status != "running" and found.ended_ms is not None
            stored = own.describe(
                parse_time(beaten) if beaten else None,
                # It may have come to MLflow, but not to the artifacts.
                (status, (found.ended_ms or 0) * 1000) if has_ended else None,
            )
            if _is_whole(found):
                return stored
            # Without the particulars of its machine, its environment has another digest.
            digests = msgspec.structs.replace(stored.digests, environment=None)
            return replace(stored, digests=digests)

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
