"""Runs in the Parquet files that Neptune's exporter writes (`neptune-exporter export`).

    project_id, sys/name, sys/description   project, name, notes
    sys/tags, sys/group_tags                tags
    sys/creation_time, sys/failed           start, status
    float, int, string, bool, datetime, string_set outside of sys, monitoring, source_code
                                            configuration, nested as the path is
    float_series                            metrics; steps with a fraction are told, or scaled
    histogram_series, file_series, file     artifacts; files from the folder of files
    string_series                           a table of step, value and timestamp

A run is read from all of its parts (`…_part_0.parquet`); a new part, as of an export that is
made again elsewhere, is a new place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quark.importing.conversion import make_histogram
from quark.importing.neutral_run import (
    PORTION_POINTS,
    ForeignFile,
    ForeignRun,
    ImportFailure,
    Losses,
    Points,
    Portion,
    RunFacts,
    find_place,
)
from quark.importing.safe_files import find_files
from quark_core.artifacts.payload_folder import is_plain_file
from quark_core.records.names import split_path

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_INSTALL = 'Parquet files require pyarrow: pip install "quark-tracker[arrow]"'
_PART = re.compile(r"(?P<run>.+)_part_(?P<number>\d+)")
_COLUMNS = ("project_id", "run_id", "attribute_path", "attribute_type", "step", "timestamp")
_PLAIN = {
    "float": "float_value",
    "int": "int_value",
    "string": "string_value",
    "bool": "bool_value",
    "datetime": "datetime_value",
    "string_set": "string_set_value",
}
_ASIDE = ("sys/", "monitoring/", "source_code/")
_SERIES = "float_series"


def find_runs(
    place: str | Path,
    *,
    files: str | Path | None = None,
    step_multiplier: int = 1,
    project: str | None = None,
) -> Iterator[ForeignRun]:
    """The runs in an export.

    Args:
        place: The folder of its data, or one above it.
        files: The folder of its files; by default `files` beside the folder `data`.
        step_multiplier: What steps are multiplied by, for steps with a fraction.
        project: Their project; by default Neptune's.

    Raises:
        ImportFailure: There is no such folder, or pyarrow is not installed.
    """
    root = find_place(place)
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]  # noqa: F401
    except ImportError:
        raise ImportFailure(_INSTALL) from None
    grouped: dict[tuple[Path, str], list[Path]] = {}
    for path in find_files(root, "*.parquet"):
        found = _PART.fullmatch(path.stem)
        run = path.stem if found is None else found["run"]
        grouped.setdefault((path.parent, run), []).append(path)
    for (folder, _), parts in grouped.items():
        parts.sort(key=_number_part)
        yield NeptuneRun(parts, _find_files(folder, files), step_multiplier, project)


def _number_part(path: Path) -> int:
    found = _PART.fullmatch(path.stem)
    return 0 if found is None else int(found["number"])


def _find_files(folder: Path, given: str | Path | None) -> Path:
    if given is not None:
        return Path(given).expanduser().resolve()
    # exports/data/PROJECT lies beside exports/files/PROJECT.
    above = folder.parent
    return above.parent / "files" if above.name == "data" else above / "files"


class NeptuneRun(ForeignRun):
    """One run; its position is how many row groups of each part were taken."""

    def __init__(
        self, parts: list[Path], files: Path, step_multiplier: int, project: str | None
    ) -> None:
        self.key = str(parts[0])
        self._parts = parts
        self._files = files
        self._multiplier = step_multiplier
        self._project = project
        self._facts: RunFacts | None = None

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        if self._facts is None:
            self._facts = self._read_facts()
        return self._facts

    def mark(self) -> str | None:
        """See `ForeignRun`."""
        return "".join(f"{path.name}:{path.stat().st_size};" for path in self._parts)

    def _read_facts(self) -> RunFacts:
        config: dict[str, Any] = {}
        known: dict[str, Any] = {}
        ids: tuple[str, str] | None = None
        last_us: int | None = None
        for path in self._parts:
            for table in self._read_groups(path, 0):
                if ids is None and table.num_rows:
                    ids = str(table["project_id"][0]), str(table["run_id"][0])
                newest = _find_newest_us(table)
                last_us = newest if last_us is None else max(last_us, newest or last_us)
                for name, value in _list_plain(table):
                    if name.startswith("sys/"):
                        known[name.removeprefix("sys/")] = value
                    elif not name.startswith(_ASIDE):
                        _put(config, name.split("/"), value)
        if ids is None:
            raise ImportFailure(f"{self._parts[0]} contains no records")
        created = known.get("creation_time")
        return RunFacts(
            identity="/".join(ids),
            project=self._project or ids[0],
            name=known.get("name") or ids[1],
            notes=known.get("description"),
            tags=[*(known.get("tags") or ()), *(known.get("group_tags") or ())],
            config=config,
            environment={"neptune": {"run_id": ids[1], **_make_plain(known)}},
            status="failed" if known.get("failed") else "completed",
            started_us=_to_us(created),
            ended_us=_to_us(known.get("modification_time")) or last_us,
        )

    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """See `ForeignRun`."""
        groups: dict[str, int] = dict(position.get("groups", {}))
        rows = int(position.get("rows", 0))
        for path in self._parts:
            begun = groups.get(path.name, 0)
            for number, table in enumerate(self._read_groups(path, begun), begun):
                for offset in range(rows, max(table.num_rows, 1), PORTION_POINTS):
                    part = table.slice(offset, PORTION_POINTS)
                    rows = offset + PORTION_POINTS
                    is_last = rows >= table.num_rows
                    if is_last:
                        groups[path.name], rows = number + 1, 0
                    yield Portion(
                        position={"groups": dict(groups), "rows": rows},
                        points=self._make_points(part, losses),
                        files=self._make_files(part, losses),
                    )

    def _read_groups(self, path: Path, begin: int) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as file:
                missing = [name for name in _COLUMNS if name not in file.schema_arrow.names]
                if missing:
                    raise ImportFailure(
                        f"{path} is not a file of Neptune's exporter: it has no column {missing[0]}"
                    )
                for number in range(begin, file.num_row_groups):
                    yield file.read_row_group(number)
        except (pa.ArrowException, OSError) as error:
            raise ImportFailure(f"{path} cannot be read: {error}") from error

    def _make_points(self, table: Any, losses: Losses) -> Points | None:
        import numpy as np

        table = _keep_type(table, (_SERIES,))
        if not table.num_rows:
            return None
        encoded = table["attribute_path"].combine_chunks().dictionary_encode()
        names = [str(name) for name in encoded.dictionary.to_pylist()]
        which = np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)
        scaled = _read_steps(table) * self._multiplier
        values = table["float_value"].to_numpy().astype(np.float64)
        steps = np.floor(scaled)
        whole = steps == scaled
        for place in np.unique(which[~whole]).tolist():
            count = int((~whole & (which == place)).sum())
            reason = "its step has a fraction. --step-multiplier makes it a whole number"
            losses.add("point", names[place], reason, count)
        rows = np.flatnonzero(whole)
        return Points(
            names, which[rows], steps[rows].astype(np.int64), values[rows], _read_times(table)[rows]
        )

    def _make_files(self, table: Any, losses: Losses) -> list[ForeignFile]:
        found: list[ForeignFile] = []
        wanted = ("histogram_series", "file", "file_series", "string_series")
        chosen = _keep_type(table, wanted)
        texts: dict[str, list[list[Any]]] = {}
        for row in chosen.to_pylist():
            name, form, step = row["attribute_path"], row["attribute_type"], row["step"]
            place = None if step is None else int(step * self._multiplier)
            time_us = _to_us(row["timestamp"])
            if form == "string_series":
                moment = None if row["timestamp"] is None else row["timestamp"].isoformat()
                texts.setdefault(name, []).append([place, row["string_value"], moment])
            elif form == "histogram_series":
                value = row["histogram_value"] or {}
                made = make_histogram(
                    name,
                    value.get("edges") or (),
                    value.get("values") or (),
                    step=place,
                    time_us=time_us or 0,
                )
                if made is None:
                    losses.add("histogram", name, "it is empty")
                else:
                    found.append(made)
            else:
                found += self._make_file(name, row["file_value"], place, time_us, losses)
        for name, rows in texts.items():
            table_bytes = msgspec.json.encode(
                {"columns": ["step", "value", "timestamp"], "rows": rows}
            )
            found.append(
                ForeignFile(
                    artifact_type="table", name=name, content=table_bytes, payload_format="json"
                )
            )
        return found

    def _make_file(
        self, name: str, value: Any, step: int | None, time_us: int | None, losses: Losses
    ) -> list[ForeignFile]:
        said = (value or {}).get("path") or ""
        path = self._files / said
        inside = split_path(said) is not None and self._files in path.resolve().parents
        if not inside or not is_plain_file(path):
            losses.add("file", name, f"its file is not in {self._files}: {said}")
            return []
        suffix = path.suffix.lower()
        kind = "image" if suffix in (".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg") else "file"
        facts = {"file_name": path.name}
        return [
            ForeignFile(
                artifact_type=kind,
                name=name,
                content=path,
                step=step,
                time_us=time_us,
                metadata=facts,
            )
        ]


def _keep_type(table: Any, wanted: tuple[str, ...]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    return table.filter(pc.is_in(table["attribute_type"].cast(pa.string()), pa.array(wanted)))


def _list_plain(table: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of each single value."""
    for row in _keep_type(table, tuple(_PLAIN)).to_pylist():
        yield row["attribute_path"], row.get(_PLAIN[row["attribute_type"]])


def _read_steps(table: Any) -> NDArray[np.float64]:
    import numpy as np
    import pyarrow as pa

    steps = table["step"].cast(pa.float64()).to_numpy()
    return np.asarray(np.nan_to_num(steps.astype(np.float64), nan=-1.0), np.float64)


def _read_times(table: Any) -> NDArray[np.int64]:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    times = pc.fill_null(table["timestamp"].cast(pa.timestamp("us", "UTC")).cast(pa.int64()), 0)
    return np.asarray(times.to_numpy(), np.int64)


def _find_newest_us(table: Any) -> int | None:
    import pyarrow.compute as pc

    return _to_us(pc.max(table["timestamp"]).as_py())


def _to_us(moment: Any) -> int | None:
    try:
        return None if moment is None else round(moment.timestamp() * 1e6)
    except (AttributeError, OverflowError, ValueError):
        return None


def _put(config: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a value in a nested configuration; by its whole name where another is in its way."""
    place = config
    for part in path[:-1]:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            config["/".join(path)] = value
            return
        place = inner
    if isinstance(place.get(path[-1]), dict):
        config["/".join(path)] = value
    else:
        place[path[-1]] = value


def _make_plain(known: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.isoformat() if hasattr(value, "isoformat") else value
        for name, value in known.items()
    }
