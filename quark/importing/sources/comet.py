"""Runs in the archives of Comet's OfflineExperiment: `KEY.zip` with experiment.json, messages.json.

    workspace/project_name, Name, tags   project, name, tags
    parameters                           configuration; `a|b` is nested
    metrics                              metrics, with their steps, epochs and times
    uploaded images, audio, files        artifacts
    others                               environment

Without a step a metric has that of the moment. Lines of the console, code and what Comet
says of the machine are not taken.
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
    PointList,
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

_EXPERIMENT = "experiment.json"
_MESSAGES = "messages.json"
_AUTO = ("curr_step", "curr_epoch")
_TYPES = {"visualization": "image", "image": "image", "audio": "audio", "video": "video"}
_CONSOLE = "standard_output"
_MACHINE = frozenset(
    "system_details os_packages installed_packages cloud_details git_metadata set_code "
    "set_filename cpu_static_info gpu_static_info system_info model_graph".split()
)


class CometRun(Archive):
    """One archive; its position is how many messages were taken."""

    def __init__(self, path: Path, project: str | None) -> None:
        super().__init__(path, project)
        self._said: dict[str, Any] = {"config": {}, "others": {}}

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        with open_archive(self._path) as archive:
            try:
                known = json.loads(read_entry(archive, _EXPERIMENT))
                key = str(known.get("offline_id") or known["experiment_key"])
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise ImportFailure(f"{self._path} is not a Comet archive: {error!r}") from None
        others = self._said["others"]
        names = [name for name in (known.get("workspace"), known.get("project_name")) if name]
        return RunFacts(
            identity=key,
            project=self._project or "/".join(names) or "general",
            name=others.get("Name") or key[:9],
            tags=list(known.get("tags") or ()),
            config=self._said["config"],
            environment={"comet": {"archive": str(self._path), "others": others}},
            is_told=False,
            started_us=_to_us(known.get("start_time")),
            ended_us=_to_us(known.get("stop_time")),
        )

    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """See `ForeignRun`."""
        taken = int(position.get("messages", 0))
        found = Gathered(in_us=True)
        moment = [-1, -1]
        number = 0
        with (
            open_archive(self._path) as archive,
            tempfile.TemporaryDirectory(prefix="quark-import-") as folder,
        ):
            for number, line in enumerate(self._read_lines(archive), 1):
                form, payload = _parse(line, losses)
                self._note(form, payload, moment)
                if number <= taken:
                    continue
                if form == "metric_msg":
                    _take_metric(payload, moment, found.points, losses)
                elif form == "file_upload":
                    target = Path(folder) / str(len(found.files))
                    made = _extract(archive, payload, target, losses)
                    found.files += [] if made is None else [made]
                    found.size_bytes += target.stat().st_size if target.exists() else 0
                elif form == _CONSOLE:
                    losses.add("console", "output", "console lines are not imported")
                elif form not in ("parameter_msg", "log_other", "") and form not in _MACHINE:
                    losses.add("message", form, "this type of Comet message is not imported")
                if found.is_full:
                    yield found.make_portion({"messages": number})
                    taken = number
            if number > taken:
                yield found.make_portion({"messages": number})

    def _read_lines(self, archive: zipfile.ZipFile) -> Iterator[bytes]:
        try:
            yield from read_entry_lines(archive, _MESSAGES)
        except KeyError:
            raise ImportFailure(
                f"{self._path} is not a Comet archive: it has no {_MESSAGES}"
            ) from None

    def _note(self, form: str, payload: Mapping[str, Any], moment: list[int]) -> None:
        """What a message says of the run itself, taken before or not."""
        if form == "log_other":
            self._said["others"][str(payload.get("key"))] = payload.get("value")
            return
        param = payload.get("param")
        if form != "parameter_msg" or not isinstance(param, dict):
            return
        name, value = str(param.get("paramName")), param.get("paramValue")
        if name in _AUTO:
            if isinstance(value, int):
                moment[_AUTO.index(name)] = value
            return
        place = self._said["config"]
        *above, last = name.split("|")
        for part in above:
            inner = place.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = place[part] = {}
            place = inner
        place[last] = value


find_runs = CometRun.find_runs


def _parse(line: bytes, losses: Losses) -> tuple[str, Mapping[str, Any]]:
    try:
        message = json.loads(line)
        return str(message["type"]), dict(message["payload"])
    except (ValueError, KeyError, TypeError):
        losses.add("message", "message", "it cannot be decoded")
        return "", {}


def _take_metric(
    payload: Mapping[str, Any], moment: list[int], points: PointList, losses: Losses
) -> None:
    metric = payload.get("metric")
    if not isinstance(metric, dict):
        return
    name = str(metric.get("metricName"))
    try:
        value = losses.read_number("point", name, metric.get("metricValue"))
    except (TypeError, ValueError):
        losses.add("point", name, "its value is not a number")
        return
    step, epoch = metric.get("step"), metric.get("epoch")
    if not isinstance(step, int):
        step = moment[0] if moment[0] >= 0 or isinstance(epoch, int) else 0
    time_ms = payload.get("local_timestamp")
    time_us = time_ms * 1000 if isinstance(time_ms, int) else 0
    points.add(name, step, value, time_us, epoch if isinstance(epoch, int) else -1)


def _extract(
    archive: zipfile.ZipFile, upload: Mapping[str, Any], target: Path, losses: Losses
) -> ForeignFile | None:
    """A file of the archive, put beside; what it is called in there leads nowhere."""
    facts = upload.get("additional_params")
    facts = facts if isinstance(facts, dict) else {}
    kind = str(upload.get("upload_type") or "file")
    name = str(facts.get("fileName") or facts.get("figName") or kind)
    inside = str(upload.get("file_path") or "").rpartition("/")[2]
    if (reason := unpack_entry(archive, inside, target)) is not None:
        losses.add(kind, name, reason)
        return None
    step, time_ms = facts.get("step"), upload.get("local_timestamp")
    return ForeignFile(
        artifact_type=_TYPES.get(kind, "file"),
        name=name,
        content=target,
        step=step if isinstance(step, int) and step >= 0 else None,
        time_us=time_ms * 1000 if isinstance(time_ms, int) else None,
        metadata={"upload_type": kind},
    )


def _to_us(time_ms: Any) -> int | None:
    return round(time_ms * 1000) if isinstance(time_ms, (int, float)) else None
