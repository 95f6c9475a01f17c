"""The values in a row of W&B's history, by W&B's types."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quark.importing.conversion import make_histogram
from quark.importing.neutral_run import ForeignFile, Gathered, Losses
from quark.importing.safe_files import read_document
from quark_core.artifacts.payload_folder import is_plain_file
from quark_core.records import EventRecord, GpuReading, SystemTelemetryRecord
from quark_core.records.base import start_fields
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.findings import ALERT_RAISED, complete_alert
from quark_core.records.names import split_path

if TYPE_CHECKING:
    from quark_core.records import StreamRecord

_FILE_TYPES = {
    "image-file": "image",
    "audio-file": "audio",
    "video-file": "video",
    "html-file": "html",
    "object3D-file": "object3d",
    "plotly-file": "figure",
    "molecule-file": "molecule",
    "graph-file": "graph",
    "bokeh-file": "bokeh",
}
_LISTS = {"images": "image", "audio": "audio", "videos": "video", "html": "html"}
_LEVELS = {"INFO": "info", "WARN": "warning", "ERROR": "error"}
NONFINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_OWN_KEY = "quark"
_MEBIBYTE = 2**20
_CHUNK_BYTES = 2**20
# The dot of W&B's nested names; that of a number, such as in `mAP_0.5`, is none.
_NESTED = re.compile(r"(?<=[^\W\d])\.(?=\w)|(?<=\d)\.(?=[^\W\d])")


class WandbValues(Gathered):
    """Collects what rows hold.

    Args:
        folder: Where the run's files are.
        losses: Told of what cannot be taken.
        root: The place that is imported; links that lead out of it are not followed.
    """

    def __init__(self, folder: Path, losses: Losses, root: Path | None = None) -> None:
        super().__init__()
        self._folder = folder
        self._root = (root or folder).resolve()
        self._losses = losses

    def take(self, key: str, value: Any, step: int, time_s: float) -> None:
        """Take one value of a row; one that holds others is taken apart."""
        if isinstance(value, (bool, int, float)):
            self._add_point(key, step, value, time_s)
        elif isinstance(value, str) and value in NONFINITE:
            self.points.add(_name_metric(key), step, NONFINITE[value], time_s)
        elif isinstance(value, dict):
            if "_type" in value:
                self._take_typed(key, value, step, time_s)
                return
            for name, inner in value.items():
                self.take(f"{key}/{name}", inner, step, time_s)
        elif value is not None and key != _OWN_KEY:
            self._losses.add("value", key, f"{type(value).__name__} is not a metric")

    def _add_point(self, key: str, step: int, value: float, time_s: float) -> None:
        number = self._losses.read_number("value", key, value)
        self.points.add(_name_metric(key), step, number, time_s)

    def _take_typed(self, key: str, value: Mapping[str, Any], step: int, time_s: float) -> None:
        form = str(value["_type"])
        time_us = round(time_s * 1e6)
        group = form.partition("/")[0]
        if form == "histogram":
            self._take_histogram(key, value, step, time_us)
        elif form == "table-file":
            self._take_table(key, value, step, time_us)
        elif form in _FILE_TYPES:
            self._take_file(key, _FILE_TYPES[form], value.get("path"), value, step, time_us)
        elif form == "images/separated" or group in _LISTS:
            names = value.get("filenames") or [
                one.get("path") for one in value.get("items", ()) if isinstance(one, dict)
            ]
            captions = value.get("captions")
            for place, name in enumerate(names if isinstance(names, list) else ()):
                facts: dict[str, Any] = {}
                if isinstance(captions, list) and place < len(captions):
                    facts["caption"] = captions[place]
                self._take_file(
                    f"{key}/{place}", _LISTS.get(group, "image"), name, facts, step, time_us
                )
        else:
            self._losses.add(form, key, f"the W&B type {form} cannot be imported")

    def _take_histogram(self, key: str, value: Mapping[str, Any], step: int, time_us: int) -> None:
        counts, edges = value.get("values"), value.get("bins")
        packed = value.get("packedBins")
        try:
            if edges is None and packed:
                low, width = float(packed["min"]), float(packed["size"])
                count = int(packed["count"])
                if count != len(counts or ()):
                    raise ValueError(f"it has {len(counts or ())} counts, but {count} bins")
                edges = [low + place * width for place in range(count + 1)]
            made = make_histogram(
                key,
                [float(edge) for edge in edges or ()],
                [float(count) for count in counts or ()],
                step=step,
                time_us=time_us,
            )
        except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
            self._losses.add("histogram", key, f"it cannot be read: {error}")
            return
        if made is None:
            self._losses.add("histogram", key, "it is empty")
        else:
            self.files.append(made)

    def _take_table(self, key: str, value: Mapping[str, Any], step: int, time_us: int) -> None:
        path = self._find(value.get("path"))
        if path is None:
            self._losses.add("table", key, f"its file is missing: {value.get('path')}")
            return
        try:
            table = json.loads(read_document(path) or b"")
            content = {"columns": [str(name) for name in table["columns"]], "rows": table["data"]}
            data = msgspec.json.encode(content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._losses.add("table", key, f"it cannot be read: {error}")
            return
        self._add_file(key, "table", data, {}, step, time_us, "json")

    def _take_file(
        self,
        key: str,
        artifact_type: str,
        name: Any,
        facts: Mapping[str, Any],
        step: int | None,
        time_us: int | None,
    ) -> None:
        path = self._find(name)
        if path is None:
            self._losses.add(artifact_type, key, f"its file is missing: {name}")
            return
        payload_format = "bytes"
        if artifact_type in ("html", "figure"):
            payload_format = {"html": "text", "figure": "json"}[artifact_type]
        shown = {
            fact: facts[fact]
            for fact in ("caption", "width", "height", "boxes", "masks")
            if facts.get(fact) is not None
        }
        if artifact_type == "figure":
            shown["library"] = "plotly"
        self._add_file(key, artifact_type, path, shown, step, time_us, payload_format)

    def _add_file(
        self,
        key: str,
        artifact_type: str,
        content: bytes | Path,
        facts: Mapping[str, Any],
        step: int | None,
        time_us: int | None,
        payload_format: str = "bytes",
        aliases: Sequence[str] = (),
    ) -> None:
        self.files.append(
            ForeignFile(
                artifact_type=artifact_type,
                name=key,
                content=content,
                payload_format=payload_format,
                step=step if step is not None and step >= 0 else None,
                time_us=time_us,
                metadata=facts,
                aliases=tuple(aliases),
            )
        )

    def _find(self, name: Any) -> Path | None:
        """A file in the run's folder; nothing that is named leads out of it."""
        if not isinstance(name, str) or split_path(name) is None:
            return None
        path = self._folder / name
        inside = self._folder.resolve() in path.resolve().parents
        return path if inside and is_plain_file(path) else None

    def take_alert(self, alert: Any, step: int | None, time_us: int | None) -> None:
        """An alert as an alert that somebody has raised."""
        fields = start_fields(None)
        self.records.append(
            EventRecord(
                *fields[:5],
                time_us or fields[5],
                ALERT_RAISED,
                _LEVELS.get(alert.level, "info"),
                step,
                None,
                None,
                complete_alert({"title": alert.title, "message": alert.text}, step),
            )
        )

    def take_saved(self, files: Any, own_root: Path | None, time_us: int | None) -> None:
        """Files that the user has saved; W&B's own, and what the history names, are left out.

        Args:
            files: W&B's record of them.
            own_root: The folder that W&B's lies in, where the run was logged there.
            time_us: When.
        """
        for item in files.files:
            if item.type != item.OTHER or item.path.startswith("media/"):
                continue
            target = self._follow(item.path, own_root)
            if target is None:
                self._take_file(item.path, "file", item.path, {}, None, time_us)
            elif isinstance(target, str):
                self._losses.add("file", item.path, target)
            else:
                self._add_file(item.path, "file", target, {}, None, time_us)

    def _follow(self, name: str, own_root: Path | None) -> Path | str | None:
        """The file that a saved one is a link to, or why it is not taken; None where it is none."""
        link = self._folder / name
        if split_path(name) is None or not link.is_symlink():
            return None
        target = link.resolve()
        inside = target.is_relative_to(self._root)
        if not inside and own_root is not None and target.is_relative_to(own_root):
            # What is hidden there was not logged: keys, for one.
            inside = not any(part[0] == "." for part in target.relative_to(own_root).parts)
        if not inside:
            return f"it is a link to {target}. Import a folder that has both, or copy it"
        return target if is_plain_file(target) else f"it is a link to {target}, which is not a file"

    def take_artifact(self, artifact: Any, time_us: int | None) -> None:
        """The files of an artifact that are on this machine, and are what the artifact says."""
        if artifact.type == "run_table":
            return  # a table of the history once more
        if artifact.type == "job":
            self._losses.add("artifact", artifact.name, "it is W&B's note about the program")
            return
        for entry in artifact.manifest.contents:
            name = f"{artifact.name}/{entry.path}"
            path = Path(entry.local_path)
            if entry.ref:
                self._losses.add("artifact", name, f"it is stored elsewhere: {entry.ref}")
            elif not entry.local_path or not is_plain_file(path):
                self._losses.add("artifact", name, "its file is not on this machine")
            elif not _is_what_it_says(path, entry):
                # The file may name any path of whoever imports it.
                self._losses.add("artifact", name, "its content differs from the artifact's hash")
            else:
                facts = {"artifact": artifact.name, "digest": artifact.digest}
                self._add_file(
                    name,
                    _make_type(artifact.type),
                    path,
                    facts,
                    None,
                    time_us,
                    aliases=artifact.aliases,
                )


def _name_metric(key: str) -> str:
    """A metric's name: to W&B `a.b` is `b` in `a`, which is `a/b` here."""
    return key if "/" in key else _NESTED.sub("/", key)


def _make_type(text: str) -> str:
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in text)
    return kept.lstrip("._-")[:100] or "file"


def _is_what_it_says(path: Path, entry: Any) -> bool:
    """Whether a file has the size and the digest that the artifact notes of it."""
    try:
        if entry.size and path.stat().st_size != entry.size:
            return False
        digest = hashlib.md5(usedforsecurity=False)
        with path.open("rb") as file:
            while piece := file.read(_CHUNK_BYTES):
                digest.update(piece)
        return base64.b64encode(digest.digest()).decode() == str(entry.digest)
    except OSError:
        return False


def read_stats(stats: Any, losses: Losses) -> list[StreamRecord]:
    """Figures of the machine as telemetry; those that it has no field for are in its metadata."""
    found: dict[str, float] = {}
    for item in stats.item:
        try:
            found[item.key] = losses.read_number(
                "system metric", item.key, json.loads(item.value_json)
            )
        except (ValueError, TypeError):
            losses.add("system metric", item.key, "it is not a number")
    taken: dict[str, Any] = {
        "cpu_usage_percent": found.pop("cpu", None),
        "ram_usage_percent": found.pop("memory_percent", found.pop("memory", None)),
        "process_rss_bytes": _scale(found.pop("proc.memory.rssMB", None)),
    }
    gpus = _read_gpus(found)
    # What telemetry has no field for.
    metadata = JsonObject({"wandb": found}) if found else None
    time_us = stats.timestamp.seconds * 1_000_000 + stats.timestamp.nanos // 1000
    return [
        SystemTelemetryRecord(
            None, "", 0, 0, 0, time_us, "time", **taken, gpus=gpus, metadata=metadata
        )
    ]


_GPU_FIELDS = {
    "gpu": "utilization_percent",
    "memoryAllocated": "memory_usage_percent",
    "memoryAllocatedBytes": "memory_used_bytes",
    "temp": "temperature_celsius",
    "powerWatts": "power_watts",
}


def _read_gpus(found: dict[str, float]) -> tuple[GpuReading, ...] | None:
    """The GPUs' figures, taken out of those that were found."""
    readings: dict[int, dict[str, Any]] = {}
    for key in list(found):
        parts = key.split(".")
        if len(parts) == 3 and parts[0] == "gpu" and parts[1].isdecimal():
            field = _GPU_FIELDS.get(parts[2])
            if field is not None:
                value = found.pop(key)
                whole = field == "memory_used_bytes"
                readings.setdefault(int(parts[1]), {})[field] = int(value) if whole else value
    gpus = tuple(GpuReading(index, **values) for index, values in sorted(readings.items()))
    return gpus or None


def _scale(mebibytes: float | None) -> int | None:
    return None if mebibytes is None else int(mebibytes * _MEBIBYTE)
