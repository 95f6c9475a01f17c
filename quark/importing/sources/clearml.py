"""Runs in the archives of ClearML's offline mode: `offline-ID.zip` with task.json, metrics.jsonl.

    project_name, name, comment, tags   project, name, notes, tags
    hyperparams                         configuration, by section
    scalars                             metrics `title/series`; single values at the last step
    plots                               artifacts of the type figure
    artifacts                           artifacts, of those whose files are in the archive

How a task ended is not in the archive: it counts as completed, and ends with its last event.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quark.importing.neutral_run import (
    ForeignFile,
    Gathered,
    ImportFailure,
    Losses,
    Portion,
    RunFacts,
)
from quark.importing.safe_files import (
    Archive,
    open_archive,
    read_entry,
    read_entry_lines,
    unpack_entry,
)

_TASK = "task.json"
_METRICS = "metrics.jsonl"
_SCALAR = "training_stats_scalar"
_PLOT = "plot"
_NO_STEP = -(2**31)
"""The iteration of what ClearML calls a single value."""


class ClearmlRun(Archive):
    """One archive; its position is how many events were taken, and whether its artifacts were."""

    _span: tuple[int, int] | None = None

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        task = self._read_task()
        script = task.get("script") or {}
        config: dict[str, Any] = {}
        for section, values in (task.get("hyperparams") or {}).items():
            place = config if section == "General" else config.setdefault(section, {})
            for name, entry in values.items():
                place[name] = _parse(entry)
        if self._span is None and (first := next(self._read_events(Losses()), None)):
            self._note_time(_read_time(first))
        span = self._span
        return RunFacts(
            identity=str(task["id"]),
            project=self._project or task.get("project_name") or "clearml",
            name=task.get("name"),
            notes=task.get("comment") or None,
            tags=[*(task.get("tags") or ()), *(task.get("system_tags") or ())],
            config=config,
            environment={
                "clearml": {"archive": str(self._path), "entry": script.get("entry_point")}
            },
            is_told=False,
            started_us=None if span is None else span[0],
            ended_us=None if span is None else span[1],
            git_commit=script.get("version_num") or None,
        )

    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """See `ForeignRun`."""
        taken = int(position.get("events", 0))
        found = Gathered()
        single: list[tuple[str, float, float]] = []
        told = int(position.get("singles", 0))
        number, last_step = 0, 0
        for event in self._read_events(losses):
            number += 1
            time_us = _read_time(event)
            time_s = time_us / 1e6
            self._note_time(time_us)
            step = event.get("iter")
            step = step if isinstance(step, int) else 0
            last_step = max(last_step, step)
            name = "/".join(str(event[key]) for key in ("metric", "variant") if event.get(key))
            if step == _NO_STEP and event.get("type") == _SCALAR:
                # At the last step, which is known at the end: counted apart.
                value = _read_value(event.get("value"), name, losses)
                single += [] if value is None else [(name, value, time_s)]
            elif number > taken:
                self._take(event, name, step, time_us, found, losses)
            if found.is_full:
                yield found.make_portion({**position, "events": number})
                taken = number
        for name, value, time_s in single[told:]:
            found.points.add(name, last_step, value, time_s)
        done = bool(position.get("artifacts"))
        if done and number <= taken and not len(found.points) and not found.files:
            return
        with (
            open_archive(self._path) as archive,
            tempfile.TemporaryDirectory(prefix="quark-import-") as folder,
        ):
            if not done:
                found.files += self._read_artifacts(archive, Path(folder), losses)
            yield found.make_portion({"events": number, "artifacts": True, "singles": len(single)})

    def _take(
        self,
        event: Mapping[str, Any],
        name: str,
        step: int,
        time_us: int,
        found: Gathered,
        losses: Losses,
    ) -> None:
        form = event.get("type")
        if form == _SCALAR:
            value = _read_value(event.get("value"), name, losses)
            if value is not None:
                found.points.add(name, step, value, time_us / 1e6)
        elif form == _PLOT:
            found.files.append(_make_plot(name, event, step, time_us))
        else:
            losses.add("event", name, f"{form} of ClearML is not imported")

    def _note_time(self, time_us: int) -> None:
        low, high = self._span or (time_us, time_us)
        self._span = (min(low, time_us), max(high, time_us))

    def _read_task(self) -> dict[str, Any]:
        try:
            with open_archive(self._path) as archive:
                task = json.loads(read_entry(archive, _TASK))
            return {"id": task["id"], **task}
        except (OSError, zipfile.BadZipFile, KeyError, ValueError, TypeError) as error:
            raise ImportFailure(f"{self._path} is not a ClearML archive: {error}") from None

    def _read_events(self, losses: Losses) -> Iterator[dict[str, Any]]:
        with open_archive(self._path) as archive:
            if _METRICS not in archive.namelist():
                return
            for line in read_entry_lines(archive, _METRICS):
                try:
                    events = list(json.loads(line))
                except (ValueError, TypeError):
                    losses.add("event", "event", "it cannot be decoded")
                    continue
                yield from (one for one in events if isinstance(one, dict))

    def _read_artifacts(
        self, archive: zipfile.ZipFile, folder: Path, losses: Losses
    ) -> list[ForeignFile]:
        task, found = self._read_task(), []
        above = f"{task.get('offline_folder') or ''}/"
        for place, entry in enumerate((task.get("execution") or {}).get("artifacts") or ()):
            name, inside = str(entry.get("key")), str(entry.get("uri")).removeprefix(above)
            target = folder / str(place)
            if (reason := unpack_entry(archive, inside, target)) is not None:
                losses.add("artifact", name, reason)
                continue
            facts = {"file_name": inside.rpartition("/")[2]}
            found.append(
                ForeignFile(artifact_type="file", name=name, content=target, metadata=facts)
            )
        return found


find_runs = ClearmlRun.find_runs


def _read_time(event: Mapping[str, Any]) -> int:
    time_ms = event.get("timestamp")
    return round(time_ms * 1000) if isinstance(time_ms, (int, float)) else 0


def _read_value(value: Any, name: str, losses: Losses) -> float | None:
    try:
        return losses.read_number("point", name, value)
    except (TypeError, ValueError):
        losses.add("point", name, "its value is not a number")
        return None


def _make_plot(name: str, event: Mapping[str, Any], step: int, time_us: int) -> ForeignFile:
    return ForeignFile(
        artifact_type="figure",
        name=name,
        content=str(event.get("plot_str") or "{}").encode(),
        payload_format="json",
        step=step if step >= 0 else None,
        time_us=time_us,
        metadata={"library": "plotly"},
    )


def _parse(entry: Any) -> Any:
    """The value of a parameter, of the type that ClearML notes beside its text."""
    if not isinstance(entry, dict):
        return entry
    text = entry.get("value")
    if entry.get("type") in ("int", "float", "bool") and isinstance(text, str):
        from quark_backends.mlflow.reader import parse_param

        return parse_param(text)
    return text
