"""Trials in the files of Track (`TrackClient("file:FILE.json")`).

    project, name, description    the same; of the project itself in the environment
    group, version                the group; the field `version`
    parameters, tags              configuration; tags as `key=value`
    metadata                      fields
    metrics with steps            the same
    metrics without steps         points by their place; of a single value at the newest step
    statistics, chronos           aggregates, of the observations that Track has not skipped
    errors                        events
    status                        completed, failed (exception, broken) or interrupted

Track keeps no time of a point: all have that of the trial's last change. Of a ring the values
that are in it when it is first read are taken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quark.importing.conversion import LAST_US
from quark.importing.neutral_run import (
    ForeignRun,
    Gathered,
    ImportFailure,
    Losses,
    Portion,
    RunFacts,
    find_place,
    start_at,
)
from quark.importing.safe_files import DOCUMENT_BYTES, find_files, read_document
from quark_core.records import EventRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.provenance import AggregateRecord

_RUNNING, _FAILED, _FINISHED = 100, 200, 300
_STATUSES = {201: "interrupted", 301: "interrupted"}
_OWN_METADATA = frozenset({"_update_count", "_last_change", "heartbeat"})
_STATISTIC = "statstream"
_RUNTIME = "runtime"
_PAIR = 2


def find_runs(place: str | Path, *, project: str | None = None) -> Iterator[ForeignRun]:
    """The trials in a file, or in the files of a folder.

    Args:
        place: A file that Track has written, or a folder of them.
        project: Their project; by default the one that they are in.

    Raises:
        ImportFailure: There is no such place, or a file that is none of Track's.
    """
    root = find_place(place)
    for path in find_files(root, "*.json"):
        file = _File(path)
        try:
            trials = file.load()
        except ImportFailure:
            if root.is_file():
                raise
            continue  # many things end so
        for key in trials:
            yield TrackTrial(file, key, project)


class _File:
    """One file, which Track replaces as a whole whenever anything is logged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Each trial with its project, by what tells it from the others of the file.

        Raises:
            ImportFailure: It cannot be read, or is none of Track's.
        """
        data = read_document(self.path)
        if data is None:
            raise ImportFailure(
                f"{self.path} is not a readable file of at most {DOCUMENT_BYTES} bytes"
            )
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ImportFailure(f"{self.path} is not a Track file: {error}") from error
        items = [one for one in found if _is(one, "project", "trial")] if _is_list(found) else []
        if not items or len(items) != len(found):
            raise ImportFailure(f"{self.path} is not a Track file: it has no list of projects")
        trials: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        for item in items:
            if item["dtype"] == "trial":
                trials.setdefault(f"/{_find_uid(item)}", (item, {}))
                continue
            for trial in _list(item.get("trials")):
                if _is(trial, "trial"):
                    trials.setdefault(
                        f"{_text(item.get('name'))}/{_find_uid(trial)}", (trial, item)
                    )
        return trials


class TrackTrial(ForeignRun):
    """One trial; its position is how much of each metric was taken."""

    def __init__(self, file: _File, key: str, project: str | None) -> None:
        self.key = f"{file.path}\0{key}"
        self._file = file
        self._trial_key = key
        self._project = project

    def _load(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        found = self._file.load().get(self._trial_key)
        if found is None:
            raise ImportFailure(f"{self._file.path} no longer has trial {self._trial_key}")
        return found

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        trial, project = self._load()
        metadata = _mapping(trial.get("metadata"))
        status = _mapping(trial.get("status"))
        version = _text(trial.get("version"))
        fields = {name: value for name, value in metadata.items() if name not in _OWN_METADATA}
        ended_s = _find_change(metadata)
        runtime_s = _number(_mapping(trial.get("chronos")).get(_RUNTIME)) or 0.0
        known = {
            "uid": _find_uid(trial),
            "revision": trial.get("revision"),
            "status": status.get("name"),
            "file": str(self._file.path),
            "project": {name: project.get(name) for name in ("description", "metadata")},
        }
        return RunFacts(
            identity=f"{self._file.path.name}/{self._trial_key}",
            project=self._project or _text(project.get("name")) or self._file.path.stem,
            name=_text(trial.get("name")),
            notes=_text(trial.get("description")),
            tags=[f"{name}={value}" for name, value in _mapping(trial.get("tags")).items()],
            config=_mapping(trial.get("parameters")),
            environment={"track": known},
            groups=_find_groups(trial, project),
            fields={**fields, **({"version": version} if version else {})},
            status=_read_status(status.get("value")),
            started_us=None if ended_s is None else _to_us(ended_s - runtime_s),
            ended_us=None if ended_s is None else _to_us(ended_s),
        )

    def mark(self) -> str | None:
        """See `ForeignRun`."""
        try:
            found = self._file.path.stat()
        except OSError:
            return None
        return f"{found.st_mtime_ns} {found.st_size} {found.st_ino}"

    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """See `ForeignRun`."""
        trial, _ = self._load()
        metadata = _mapping(trial.get("metadata"))
        values = _Values(position, _find_change(metadata) or 0.0, losses)
        metrics = _mapping(trial.get("metrics"))
        values.newest = max(map(_find_newest, metrics.values()), default=0)
        # What has one value only stands where the others have come to.
        for name, container in sorted(metrics.items(), key=lambda item: _is_single(item[1])):
            values.take_metric(name, container)
            if values.is_full:
                yield values.take()
        for name, container in _mapping(trial.get("chronos")).items():
            values.take_chrono(name, container)
        values.take_errors(_list(trial.get("errors")))
        if values.is_new:
            yield values.take()


class _Values(Gathered):
    """Turns what a trial holds into points and records, each once."""

    def __init__(self, position: Mapping[str, Any], time_s: float, losses: Losses) -> None:
        super().__init__()
        self._taken = dict(_mapping(position.get("metrics")))
        self._sums = dict(_mapping(position.get("sums")))
        self._errors = int(position.get("errors", 0))
        self._time_s = time_s
        self._losses = losses
        self.newest = 0
        self.is_new = False

    def take_metric(self, name: str, container: Any) -> None:
        """One metric: by step, in a row, summed up, or a single value."""
        if _is(container, _STATISTIC):
            self._take_sums(name, container, None)
            return
        if isinstance(container, Mapping):
            entries: Sequence[tuple[Any, Any]] = list(container.items())
        elif isinstance(container, list):
            entries = [
                (one[0], one[1]) if isinstance(one, list) and len(one) == _PAIR else (place, one)
                for place, one in enumerate(container)
            ]
        else:
            entries = [(self.newest, container)]
        for step, value in entries[int(self._taken.get(name, 0)) :]:
            self._add(name, step, value)
        if len(entries) > int(self._taken.get(name, 0)):
            self._taken[name] = len(entries)
            self.is_new = True

    def take_chrono(self, name: str, container: Any) -> None:
        """One timer."""
        if _is(container, _STATISTIC):
            self._take_sums(f"chrono/{name}", container, "s")
            return
        seconds = _number(container)
        if seconds is None:
            if container is not None:
                self._losses.add("chrono", name, "it is not a number of seconds")
        elif name not in self._sums:
            self._write_sums(f"chrono/{name}", (1, seconds, 0.0), (seconds, seconds, seconds), "s")
            self._sums[name] = [1, seconds, 0.0]
            self.is_new = True

    def take_errors(self, errors: Sequence[Any]) -> None:
        """What went wrong, in words."""
        for error in errors[self._errors :]:
            said = ("track_error", "error", None, None, None, JsonObject({"message": str(error)}))
            self.records.append(EventRecord(*start_at(_to_us(self._time_s)), *said))
        if len(errors) > self._errors:
            self._errors, self.is_new = len(errors), True

    def take(self) -> Portion:
        """What there is by now, and where the next portion begins."""
        self.is_new = False
        return self.make_portion(
            {"metrics": self._taken, "sums": self._sums, "errors": self._errors}
        )

    def _add(self, name: str, step: Any, value: Any) -> None:
        number, place = _number(value, finite=False), _read_step(step)
        if number is None:
            self._losses.add("metric", name, "its value is not a number")
        elif place is None:
            self._losses.add("metric", name, f"its step is not a whole number: {step!r:.40}")
        else:
            self.points.add(name, place, number, self._time_s)

    def _take_sums(self, name: str, container: Mapping[str, Any], unit: str | None) -> None:
        """Statistics of a stream: what has come to them since they were taken last."""
        whole = _read_statistic(container)
        if whole is None:
            self._losses.add("statistic", name, "its values are not numbers")
            return
        known = _list(self._sums.get(name)) or [0, 0.0, 0.0]
        added = _subtract(whole[0], (int(known[0]), float(known[1]), float(known[2])))
        if added is None:
            return
        self._write_sums(name, added, whole[1], unit)
        self._sums[name] = list(whole[0])
        self.is_new = True

    def _write_sums(
        self,
        name: str,
        sums: tuple[int, float, float],
        ends: tuple[float | None, float | None, float | None],
        unit: str | None,
    ) -> None:
        count, mean, m2 = sums
        low, high, last = ends
        time_us = _to_us(self._time_s)
        self.records.append(
            AggregateRecord(
                *start_at(time_us),
                key=name,
                keep="stat" if unit is None else "timer",
                unit=unit,
                clock=None if unit is None else "wall_clock",
                started_us=time_us,
                count=count,
                mean=mean,
                m2=m2,
                low=None if low is None else min(low, mean),
                high=None if high is None else max(high, mean),
                last=last,
            )
        )


def _read_statistic(
    data: Mapping[str, Any],
) -> tuple[tuple[int, float, float], tuple[float | None, float | None, float | None]] | None:
    """Count, mean and squared deviations as Track tells them; low, high and last."""
    names = ("sum", "sum_sqr", "first_obs", "current_count", "current_obs", "drop_obs")
    found = [_number(data.get(name)) for name in names]
    if None in found:
        return None
    total, squares, first, seen, current, dropped = (float(one or 0.0) for one in found)
    if seen < 1 or seen < dropped or seen > 2**53:
        return None
    count = max(int(seen) - int(dropped), 1)
    mean, m2 = total / count + first, max(squares - total * total / count, 0.0)
    if not (math.isfinite(mean) and math.isfinite(m2)):
        return None
    return (count, mean, m2), (_number(data.get("min")), _number(data.get("max")), current + first)


def _subtract(
    whole: tuple[int, float, float], part: tuple[int, float, float]
) -> tuple[int, float, float] | None:
    """Of figures of all values those of the values that are not in a part; None for none."""
    count = whole[0] - part[0]
    if count <= 0:
        return None
    if not part[0]:
        return whole
    mean = (whole[0] * whole[1] - part[0] * part[1]) / count
    between = (mean - part[1]) ** 2 * part[0] * count / whole[0]
    return count, mean, max(whole[2] - part[2] - between, 0.0)


def _find_groups(trial: Mapping[str, Any], project: Mapping[str, Any]) -> list[str]:
    """The names of the groups that a trial says or that say it; Track lets it be in several."""
    uid, wanted = _find_uid(trial), trial.get("group_id")
    return [
        name
        for group in _list(project.get("groups"))
        if isinstance(group, Mapping) and (name := _text(group.get("name")))
        if (wanted is not None and group.get("uid") == wanted) or uid in _list(group.get("trials"))
    ]


def _find_change(metadata: Mapping[str, Any]) -> float | None:
    """When the trial was changed last, in seconds since the epoch."""
    seconds = _number(metadata.get("_last_change"))
    return seconds if seconds is not None and 0 <= seconds * 1e6 <= LAST_US else None


def _find_uid(trial: Mapping[str, Any]) -> str:
    return _text(trial.get("uid")) or f"{trial.get('hash')}_{trial.get('revision')}"


def _read_status(value: Any) -> str:
    """By the hundreds that also a status of one's own belongs to."""
    number = _number(value) or 0
    if number in _STATUSES:
        return _STATUSES[int(number)]
    if number >= _FINISHED:
        return "completed"
    if number >= _FAILED:
        return "failed"
    return "running" if number >= _RUNNING else "interrupted"


def _find_newest(container: Any) -> int:
    """The highest step of a metric, 0 where it has none."""
    if _is_single(container) or _is(container, _STATISTIC):
        return 0
    if isinstance(container, list):
        return max(len(container) - 1, 0)
    steps = [step for step in map(_read_step, container) if step is not None]
    return max(steps, default=0)


def _is_single(container: Any) -> bool:
    return not isinstance(container, (Mapping, list))


def _read_step(step: Any) -> int | None:
    """A step as a whole number: JSON has made text of what was one."""
    if isinstance(step, bool):
        return None
    try:
        number = float(step) if not isinstance(step, int) else step
        return int(number) if number == int(number) else None
    except (TypeError, ValueError, OverflowError):
        return None


def _number(value: Any, *, finite: bool = True) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) or not finite else None


def _to_us(seconds: float) -> int:
    return round(min(max(seconds * 1e6, 0.0), LAST_US))


def _is(value: Any, *forms: str) -> bool:
    return isinstance(value, Mapping) and value.get("dtype") in forms


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
