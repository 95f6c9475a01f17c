"""Any MLflow run as Quark shows it: what MLflow itself knows, and nothing else.

    experiment                project
    params                    configuration; numbers, truth values and JSON as such
    tags                      tags as `key=value`, those of MLflow's own aside; all of
                              them stand in the environment, under `mlflow`
    parent run                parent run, and the top of the tree as lineage root
    metrics                   metrics; a point's step is a step, its time has milliseconds
    RUNNING, SCHEDULED        running
    FINISHED, FAILED, KILLED  completed, failed, interrupted

A negative step is no step, and stands in the metadata as `mlflow_step`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quark_backends.mlflow.lifecycle import OLD_USER_TAG
from quark_backends.mlflow.server import MlflowRun
from quark_core.api import (
    ConfigSnapshot,
    EnvironmentSnapshot,
    JsonObject,
    MetricRecord,
    ProjectRecord,
    RunEnding,
    RunRecord,
    StoredRun,
    encode_name,
    format_time,
    split_name,
)

if TYPE_CHECKING:
    from quark_core.api import Columns

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
        old = [key.removeprefix(OLD_USER_TAG) for key in tags if key.startswith(OLD_USER_TAG)]
        # A tag without a value is `true` there.
        found = [key if text in ("", "true") else f"{key}={text}" for key, text in shown]
        return tuple(sorted({*old, *found}))
    return tuple(sorted(f"{key}={text}" if text else key for key, text in shown))


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
