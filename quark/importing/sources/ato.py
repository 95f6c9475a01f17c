"""Experiments in the SQLite databases of Ato (`SQLLogger`).

    project, tags, config     the same
    structural hash           the field `ato_structural_hash`
    metrics                   the same, with their steps and times
    traces                    fingerprints: of code (static) and of outputs (runtime)
    artifacts                 files, where they lie under the folder of the database; events else
    status, start, end        the same

Ato's times are those at which its module was imported, unless it was told others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quark.importing.neutral_run import (
    PORTION_POINTS,
    ForeignFile,
    ForeignRun,
    Gathered,
    ImportFailure,
    Losses,
    Portion,
    RunFacts,
    find_place,
    start_at,
)
from quark.importing.safe_files import Database
from quark_core.config import settings
from quark_core.records import EventRecord, StreamRecord, parse_time
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.provenance import FingerprintRecord

_TABLES = ("projects", "experiments", "metrics", "artifacts", "fingerprints")
_FAILED = frozenset({"failed", "error", "crashed", "exception", "broken"})
_COMPLETED = frozenset({"completed", "finished", "done", "success", "succeeded"})
_RUNNING = "running"
_SUBJECTS = {"static": "code", "runtime": "output"}
_TYPES = frozenset({"image", "audio", "video", "table", "model", "checkpoint", "text"})


def find_runs(place: str | Path, *, project: str | None = None) -> Iterator[ForeignRun]:
    """The experiments of a database, or of the databases in a folder.

    Args:
        place: The database, such as `experiments.db`, or the folder.
        project: Their project; by default the one that they are in.

    Raises:
        ImportFailure: There is no such place, or no database of Ato's.
    """
    root = find_place(place)
    if root.is_file():
        databases = [_Database(root)]
    else:
        paths = sorted(one for one in root.glob("*.db") if one.is_file())
        databases = [found for path in paths if (found := _open(path)) is not None]
    if not databases:
        raise ImportFailure(f"{root} does not contain an Ato database (*.db)")
    for database in databases:
        for number in database.list_runs():
            yield AtoRun(database, number, project)


def _open(path: Path) -> _Database | None:
    try:
        return _Database(path)
    except ImportFailure:
        return None


class _Database(Database):
    def __init__(self, path: Path) -> None:
        super().__init__(path, "Ato", _TABLES)
        for table in _TABLES:
            if not self.has(table):
                raise ImportFailure(f"{path} is not an Ato database: it has no table {table}")

    def list_runs(self) -> list[int]:
        """The number of each experiment, the oldest first."""
        rows = self.ask("SELECT id FROM experiments ORDER BY id")
        return [number for (number,) in rows if isinstance(number, int)]


class AtoRun(ForeignRun):
    """One experiment; its position is the last row of each table that was taken."""

    def __init__(self, database: _Database, number: int, project: str | None) -> None:
        self.key = f"{database.path}\0{number}"
        self._database = database
        self._number = number
        self._project = project

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        rows = self._database.ask(
            "SELECT name, description, config, structural_hash, tags, status, start_time, end_time"
            " FROM experiments LEFT JOIN projects ON projects.id = project_id"
            " WHERE experiments.id = ?",
            self._number,
        )
        if not rows:
            raise ImportFailure(f"{self._database.path} no longer has experiment {self._number}")
        project, description, config, structure, tags, status, start, end = rows[0]
        listed = _read_json(tags)
        named = str(project) if project else self._database.path.stem
        known = {"database": str(self._database.path), "id": self._number, "status": status}
        return RunFacts(
            identity=f"{self._database.path.name}/{named}/{self._number}/{start}",
            project=self._project or named,
            name=f"{named}-{self._number}",
            tags=[str(tag) for tag in listed] if isinstance(listed, list) else [],
            config=found if isinstance(found := _read_json(config), dict) else {},
            environment={"ato": {**known, "description": description}},
            fields={"ato_structural_hash": structure} if isinstance(structure, str) else {},
            status=_read_status(status, end),
            started_us=_read_time(start),
            ended_us=_read_time(end),
        )

    def mark(self) -> str | None:
        """See `ForeignRun`."""
        heads = [
            self._database.ask(f"SELECT max(id) FROM {table} WHERE run_id = ?", self._number)
            for table in _TABLES[2:]
        ]
        state = self._database.ask(
            "SELECT status, end_time FROM experiments WHERE id = ?", self._number
        )
        return repr((heads, state))

    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """See `ForeignRun`."""
        at = {table: int(position.get(table, 0)) for table in _TABLES[2:]}
        while rows := self._ask("metrics", "key, value, step, timestamp", at, PORTION_POINTS):
            found = Gathered()
            for number, key, value, step, moment in rows:
                at["metrics"] = number
                if not isinstance(value, (int, float)) or not isinstance(step, int):
                    losses.add("metric", str(key), "its value or its step is not a number")
                    continue
                kept = losses.read_number("metric", str(key), value)
                found.points.add(str(key), step, kept, (_read_time(moment) or 0) / 1e6)
            yield found.make_portion(dict(at))
        started_us = self.describe().started_us or 0
        found, was = Gathered(), dict(at)
        for number, trace, form, digest in self._ask(
            "fingerprints", "trace_id, trace_type, fingerprint", at
        ):
            at["fingerprints"] = number
            subject = _SUBJECTS.get(form)
            if subject is None or not isinstance(digest, str) or not digest or not trace:
                losses.add("fingerprint", str(trace), f"it is not a fingerprint: {form!r:.40}")
                continue
            said = JsonObject({"tool": "ato", "trace_type": form})
            # Ato's digests say nothing beside ours.
            fields = (*start_at(started_us), subject, str(trace), digest, "ato")
            found.records.append(FingerprintRecord(*fields, metadata=said))
        for number, path, form, said in self._ask("artifacts", "path, data_type, data_info", at):
            at["artifacts"] = number
            taken = self._take_file(str(path), form, _read_json(said), started_us)
            if isinstance(taken, ForeignFile):
                found.files.append(taken)
            else:
                found.records.append(taken)
        if at != was:
            yield found.make_portion(dict(at))

    def _take_file(
        self, path: str, form: Any, said: Any, time_us: int
    ) -> ForeignFile | StreamRecord:
        """The file of an artifact; an event that tells of it where it is none of this folder."""
        facts = {"path": path, "data_type": form, "metadata": said}
        folder = self._database.path.parent
        try:
            place = (folder / path).resolve()
            is_here = place.is_file() and place.is_relative_to(folder)
            # What a stranger's database names elsewhere on this machine is nobody's to take.
            if is_here and place.stat().st_size <= settings.artifact_limit_bytes():
                return ForeignFile(
                    artifact_type=form if form in _TYPES else "file",
                    name=place.relative_to(folder).as_posix(),
                    content=place,
                    time_us=time_us,
                    metadata={"ato": facts},
                )
        except (OSError, ValueError):
            pass
        payload = JsonObject({"message": f"artifact {path}", **facts})
        return EventRecord(*start_at(time_us), "ato_artifact", "info", None, None, None, payload)

    def _ask(
        self, table: str, fields: str, at: Mapping[str, int], limit: int = -1
    ) -> list[tuple[Any, ...]]:
        return self._database.ask(
            f"SELECT id, {fields} FROM {table} WHERE run_id = ? AND id > ? ORDER BY id LIMIT ?",
            self._number,
            at[table],
            limit,
        )


def _read_status(status: Any, ended: Any) -> str:
    word = str(status).strip().lower()
    if word in _COMPLETED:
        return "completed"
    if word in _FAILED:
        return "failed"
    if word == _RUNNING:
        return "running"
    return "completed" if ended else "interrupted"


def _read_json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _read_time(text: Any) -> int | None:
    """A moment, as SQLite has Python's: in UTC, without saying so."""
    if not isinstance(text, str):
        return None
    moment = text.strip().replace(" ", "T", 1)
    for spelled in (moment, f"{moment}+00:00"):
        try:
            return parse_time(spelled)
        except (TypeError, ValueError, OverflowError):
            continue
    return None
