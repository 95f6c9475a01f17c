"""The files of the CSV mirror: append-only tables, run.json and config.json."""

from __future__ import annotations

import csv
import io
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from quark_backends.mirror_records import change_belonging
from quark_backends.mirror_state import load_state, replace_file
from quark_core.api import (
    RECORD_TYPES,
    ConfigSnapshot,
    DecodedBody,
    EnvironmentSnapshot,
    EventRecord,
    LifecycleRecord,
    MetricRecord,
    ProcessIdentity,
    ProjectRecord,
    RecordField,
    RunEnding,
    RunNotFoundError,
    RunRecord,
    SessionStoreError,
    StoredRun,
    StreamRecord,
    current_process,
    decode_json,
    describe_fields,
    encode_json,
    find_loss,
    format_time,
    is_alive,
    parse_time,
    renew_process,
    split_name,
)

if TYPE_CHECKING:
    from quark_core.api import Columns, Query

_OWNER = "owner.json"
# Windows would translate line ends without it.
_BINARY = getattr(os, "O_BINARY", 0)


class CsvWriter(msgspec.Struct):
    """A writer that has sent batches, and the newest that is acknowledged."""

    attempt: int
    rank: int
    started_us: int
    head: int = -1
    digest: str = ""


class CsvState(msgspec.Struct):
    """What is acknowledged: one entry per writer; length and number of columns of each file."""

    writers: dict[str, CsvWriter] = {}
    sizes_bytes: dict[str, int] = {}
    widths: dict[str, int] = {}


def load_csv_state(path: Path) -> CsvState:
    """What was last acknowledged; a damaged file must not cost the rows that it speaks of.

    Raises:
        OSError: The file cannot be read.
        msgspec.DecodeError: It is damaged.
    """
    return load_state(path, CsvState, forgives=False)


class AppendOnlyTable:
    """One CSV file with a header. What lies beyond the acknowledged size is cut off.

    Args:
        path: The file; it is made with its header when the first rows come.
        header: Names of the columns.

    Attributes:
        size_bytes: How much of it is acknowledged.
        width: How many columns the file has as far as that is acknowledged, or 0.
    """

    def __init__(self, path: Path, header: Sequence[str]) -> None:
        self.path = path
        self.size_bytes = 0
        self.width = 0
        self._header = list(header)
        self._written = list(header)

    def widen(self) -> bool:
        """Take one step towards a file that has all columns, which another version's may lack.

        The file is replaced whole. Returns whether `size_bytes` or `width`
        has changed; they count only when the caller has saved them, and then
        it calls again.
        """
        self._written = self._header
        if self.size_bytes == 0:
            return False
        try:
            with self.path.open("rb") as file:
                first = file.readline().decode("utf-8", "replace")
        except FileNotFoundError:
            return False
        there = next(csv.reader([first]), [])
        if not first.endswith("\n") or there[-1:] != self._header[-1:]:
            # Nothing of ours, or nothing whole.
            return False
        if self.width == 0:
            # Saved before the file is replaced: it tells afterwards whether that was done.
            self.width = len(there)
            return True
        if self.width != len(there):
            # It was replaced, and the process died before that was saved.
            self.size_bytes, self.width = self.path.stat().st_size, len(there)
            return True
        known = set(there)
        blanks = [name for name in self._header if name not in known]
        self._written = [*there[:-1], *blanks, there[-1]]
        if not blanks:
            return False
        acknowledged = self.path.read_bytes()[: self.size_bytes].decode("utf-8", "replace")
        rows = csv.reader(io.StringIO(acknowledged, newline="\n"))
        next(rows)
        wider = ([*row[:-1], *("" for _ in blanks), row[-1]] for row in rows)
        data = encode_rows([self._written, *wider])
        replace_file(self.path, data, is_synced=True)
        self.size_bytes, self.width = len(data), len(self._written)
        return True

    def append(self, rows: Iterable[Sequence[Any]]) -> int:
        """Write rows after the acknowledged part and sync them; returns the new size.

        The new size counts only when the caller has saved it and sets `size_bytes`.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | _BINARY, 0o666)
        try:
            size_bytes = self._find_end(descriptor)
            if size_bytes == 0:
                self._written = self._header
                data = encode_rows([self._header, *rows])
            else:
                data = encode_rows(self._arrange(rows))
            # An attempt that failed half way has left rows that nobody acknowledged.
            os.ftruncate(descriptor, size_bytes)
            os.lseek(descriptor, 0, os.SEEK_END)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.width = len(self._written)
        return size_bytes + len(data)

    def _arrange(self, rows: Iterable[Sequence[Any]]) -> Iterable[Sequence[Any]]:
        """Rows in the order of the file's columns, empty where it has one that is not ours."""
        if self._written == self._header:
            return rows
        places = {name: place for place, name in enumerate(self._header)}
        order = [places.get(name) for name in self._written]
        return (["" if place is None else row[place] for place in order] for row in rows)

    def _find_end(self, descriptor: int) -> int:
        """Where to go on: after what is acknowledged, or what somebody has left of it."""
        there = os.fstat(descriptor).st_size
        if there >= self.size_bytes:
            return self.size_bytes
        os.lseek(descriptor, 0, os.SEEK_SET)
        left = b""
        while len(left) < there and (piece := os.read(descriptor, there - len(left))):
            left += piece
        return left.rfind(b"\n") + 1


def encode_rows(rows: Iterable[Sequence[Any]]) -> bytes:
    """Rows as CSV in UTF-8, each ended by a line feed; cells of line breaks are quoted."""
    kept = rows if isinstance(rows, list) else list(rows)
    plain = _join_plain(kept)
    if plain is not None:
        return plain
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerows(kept)
    text = buffer.getvalue()
    if "\r" in text:
        lines: list[str] = []
        csv.writer(_Lines(lines)).writerows(kept)
        text = "".join(lines)
    return text.encode("utf-8", "replace")


def _join_plain(rows: list[Sequence[Any]]) -> bytes | None:
    """What csv.writer would write, in a quarter of its time; None where a cell must be quoted."""
    try:
        text = "\n".join(map(",".join, rows)) + "\n"
    except TypeError:
        return None  # numbers
    separators = sum(map(len, rows)) - len(rows)
    if '"' in text or "\r" in text or text.count("\n") != len(rows):
        return None
    if text.count(",") != separators or (rows and min(map(len, rows)) < 2):
        return None
    return text.encode("utf-8", "replace")


class _Lines:
    """Takes what csv.writer writes, and ends each row by a line feed alone.

    The writer quotes a carriage return only where that is part of its line
    end, and a row at a time takes it longer.
    """

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def write(self, row: str) -> None:
        self._lines.append(f"{row[:-2]}\n")


class FolderClaim:
    """A process's hold on a run's folder in the mirror.

    The first process has the files of plain names. Another one, while that
    lives, gets files of its own beside them. Mirrors of one process share
    what it has, one write at a time.

    Args:
        folder: The run's folder; made if it is not there.

    Attributes:
        suffix: What the files' names end in; "" for the first process.
        lock: Held while the files are changed.
    """

    _counts: ClassVar[Counter[Path]] = Counter()
    _locks: ClassVar[dict[Path, threading.Lock]] = {}
    _guard = threading.Lock()

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        own = current_process()
        path = folder / _OWNER
        with self._guard:
            self.suffix = "" if _take_folder(path, own) else f"-{own.pid}-{own.started}"
            self._counts[folder] += 1
            self.lock = self._locks.setdefault(folder, threading.Lock())

    def release(self) -> None:
        """Give it up; with the last one of this process the next process may have the folder."""
        with self._guard:
            self._counts[self._folder] -= 1
            if self._counts[self._folder] <= 0 and self.suffix == "":
                (self._folder / _OWNER).unlink(missing_ok=True)


def _take_folder(path: Path, own: ProcessIdentity) -> bool:
    """Make a process the owner that a file names, if nobody else is it; whether it is now."""
    for _ in range(3):  # several processes of a launch may begin at the same moment
        if _add(path, msgspec.json.encode(own)):
            return True
        owner = _load_owner(path)
        if owner == own:
            return True
        if owner is not None and is_alive(owner) is not False:
            return False
        aside = path.with_name(f"{_OWNER}.gone{os.getpid()}-{os.urandom(3).hex()}")
        try:
            # Of several that find the owner gone, one moves its file away.
            os.rename(path, aside)
        except OSError:
            continue
        moved = _load_owner(aside)
        if moved != owner and moved is not None:
            _add(path, msgspec.json.encode(moved))  # somebody was quicker: put it back
        aside.unlink(missing_ok=True)
    return False


def _load_owner(path: Path) -> ProcessIdentity | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProcessIdentity)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _add(path: Path, data: bytes) -> bool:
    """Make a file whole if there is none; whether it was made."""
    scratch = path.with_name(f"{path.name}.part{os.getpid()}-{os.urandom(3).hex()}")
    try:
        scratch.write_bytes(data)
        os.link(scratch, path)
    except FileExistsError:
        return False
    except OSError:
        # A file system without links.
        try:
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError:
            return False
    finally:
        scratch.unlink(missing_ok=True)
    return True


# How records of each kind stand in the mirror's tables: one row per record.
#
# A cell is empty where the record has None. A text that may be None and is
# empty, or made of quotes alone, has two quotes more in its cell. Floats are
# spelled so that they come back bit by bit, NaN and the infinities as `nan`,
# `inf` and `-inf`; times are ISO 8601 in UTC; truth values `true` and `false`;
# everything that is no plain value is JSON.
#
# The writer is the last column of every table: it has no line break, so that a
# row that was cut off is never taken for a whole one.

_WRITER = "writer"
_ORIGIN_COLUMNS = {"writer_id": _WRITER, "attempt": "attempt", "rank": "rank"}
# Tables that are older than the rule for all others.
_SPECIAL_HEADERS = {
    MetricRecord.KIND: (
        *("step", "epoch", "key", "value", "timestamp", "attempt", "rank", "sequence"),
        *("description", "metadata", _WRITER),
    ),
    EventRecord.KIND: (
        *("step", "epoch", "event_type", "severity", "status", "payload"),
        *("timestamp", "attempt", "rank", "sequence", _WRITER),
    ),
}
_RENAMED = {"time_us": "timestamp", "metric_key": "key", **_ORIGIN_COLUMNS}
_FIELDS = {column: field for field, column in _RENAMED.items()}


class RowForm:
    """The columns of one kind's table, and the way there and back.

    Args:
        kind: Kind of the records.

    Attributes:
        header: Names of the columns.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        # In the order of the record's fields, after those of its origin.
        own = describe_fields(kind)
        self.header: tuple[str, ...] = _SPECIAL_HEADERS.get(kind) or (
            *(_RENAMED.get(name, name) for name in own if name != "sequence"),
            *("attempt", "rank", "sequence", _WRITER),
        )
        # A record may have a field of a name that a table gives to another one.
        self._fields = [
            column if column in own else _FIELDS.get(column, column) for column in self.header
        ]
        self._type: Any = RECORD_TYPES[kind]
        self._parsers = [
            (_RENAMED.get(name, name), _make_parser(name, field), field.default)
            for name, field in own.items()
        ]
        names = list(own)
        self._key = names.index("metric_key") if kind == MetricRecord.KIND else None

    def encode(
        self, body: DecodedBody, *, writer_id: str, attempt: int, rank: int
    ) -> Iterable[Sequence[str]]:
        """Rows of a batch.

        Raises:
            ValueError: What is in the batch cannot be read.
            OverflowError: A time that no calendar has.
        """
        origin = {"writer_id": writer_id, "attempt": attempt, "rank": rank}
        columns = [
            [str(origin[name])] * body.count if name in origin else _format_column(body, name)
            for name in self._fields
        ]
        return zip(*columns, strict=True)

    def decode(self, run_id: str, row: Mapping[str, str]) -> StreamRecord:
        """The record of a row; a column that an older table lacks is read as its default.

        Raises:
            ValueError: A cell that holds something else.
            KeyError: A column is missing that every table has.
        """
        values = [
            parse(row[column]) if column in row else default
            for column, parse, default in self._parsers
        ]
        if self._key is not None:
            # What follows the key in the record is made of it.
            values[self._key + 1 : self._key + 3] = split_name(values[self._key])
        return self._type(  # type: ignore[no-any-return]
            run_id, row[_WRITER], int(row["attempt"]), int(row["rank"]), *values
        )


@cache
def find_form(kind: str) -> RowForm:
    """The form of a kind's rows."""
    return RowForm(kind)


def _format_column(body: DecodedBody, name: str) -> list[str]:
    """A column's cells."""
    field = describe_fields(body.kind)[name]
    column = body.column(name)
    if field.encoding == "j":
        if column.encoding == "j":
            return ["" if item is None else str(item, "utf-8") for item in column.head]
        spell: Callable[[Any], str] = _spell_json
    elif name == "time_us":
        spell = format_time
    elif field.encoding == "f":
        spell = repr
    elif field.is_boolean:
        spell = _spell_truth
    elif field.encoding == "t" and field.is_optional:
        spell = _spell_optional_text
    else:
        spell = str
    values = column.to_list(body.count) if field.encoding == "j" else body.to_list(name)
    if column.encoding == "c":
        return [spell(value) if value is not None else "" for value in values[:1]] * body.count
    if name == "time_us":
        # What is logged by one call has one time.
        spelled = {time_us: format_time(time_us) for time_us in dict.fromkeys(values)}
        return [spelled[time_us] for time_us in values]
    if spell is str and None not in values:
        return list(map(str, values))
    return ["" if value is None else spell(value) for value in values]


def _spell_json(value: Any) -> str:
    return encode_json(value).decode()


def _spell_truth(value: bool) -> str:
    return str(value).lower()


def _spell_optional_text(value: str) -> str:
    return value if value.strip('"') else f'{value}""'


def _make_parser(name: str, field: RecordField) -> Callable[[str], Any]:
    parse = _choose_parser(name, field)
    if not field.is_optional:
        return parse
    return lambda text: parse(text) if text else None


def _choose_parser(name: str, field: RecordField) -> Callable[[str], Any]:
    if name == "time_us":
        return parse_time
    if field.is_boolean:
        return _parse_truth
    if field.encoding == "i":
        return int
    if field.encoding == "f":
        return float
    if field.encoding == "j":
        restore = field.restore
        if restore is not None:
            return lambda text: restore(decode_json(text.encode()))
        return lambda text: decode_json(text.encode())
    return _parse_optional_text if field.is_optional else str


def _parse_optional_text(text: str) -> str:
    return text if text.strip('"') else text[:-2]


def _parse_truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


_RUN = "run.json"
_CONFIG = "config.json"


class RunFile:
    """A run's state as JSON files that are replaced whole.

    Args:
        folder: The run's folder in the mirror.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def apply(self, record: LifecycleRecord) -> None:
        """Apply one lifecycle record; applying it twice changes nothing more."""
        known = self._load()
        data: dict[str, Any] = dict(record.data or {})
        if record.action == "start":
            if known and record.attempt < known["attempt"]:
                return
            created_us = known["created_us"] if known else record.time_us
            tags = known["tags"] if known else sorted(set(data["run"]["tags"]))
            from_steps = known.get("from_steps", {})
            if data.get("from_step") is not None:
                from_steps = {**from_steps, str(record.attempt): data["from_step"]}
            known = {
                **{name: known[name] for name in ("groups", "fields") if name in known},
                **data["run"],
                "id": record.run_id,
                "writer": record.writer_id,
                "project": data["project"],
                "process": data["process"],
                "tags": tags,
                "status": "running",
                "attempt": record.attempt,
                "created_us": created_us,
                "ended_us": None,
                "exit_code": None,
                "ending": None,
                "environment": known.get("environment"),
                "from_steps": from_steps,
            }
        elif not known:
            return
        elif record.action == "tag":
            known["tags"] = sorted({*known["tags"], data["tag"]})
        elif record.action in ("group", "fields", "edit"):
            known.update(change_belonging(known, record))
        elif record.attempt != known["attempt"]:
            return
        elif record.action == "heartbeat" and known.get("writer") != record.writer_id:
            return  # of a process that joined, and may have read what is no longer so
        elif record.action == "heartbeat":
            known["process"] = renew_process(known["process"], data)
        elif record.action == "status":
            known["status"] = data["status"]
            known["ended_us"] = record.time_us
            known["exit_code"] = data.get("exit_code")
            known["ending"] = data.get("ending")
        elif record.action == "environment":
            known["environment"] = data
        elif record.action == "config":
            self._save(_CONFIG, data)
        if record.action != "heartbeat":
            known["updated_us"] = record.time_us
        known["heartbeat_us"] = time.time_ns() // 1000
        self._save(_RUN, known)

    def load_from_steps(self) -> dict[int, int]:
        """Attempt -> the step that it was resumed from."""
        from_steps = self._load().get("from_steps", {})
        return {int(attempt): step for attempt, step in from_steps.items()}

    def load(self) -> StoredRun | None:
        """The run, or None where there is none."""
        known = self._load()
        if not known:
            return None
        project = known["project"]
        loss = find_loss(
            known["status"],
            msgspec.convert(known["process"], ProcessIdentity),
            known["heartbeat_us"],
        )
        created_at, updated_at = format_time(known["created_us"]), format_time(known["updated_us"])
        config, environment = self._load(_CONFIG), known["environment"]
        return StoredRun(
            project=ProjectRecord(
                project["id"], project["name"], project["root_path"], created_at, updated_at
            ),
            run=RunRecord(
                id=known["id"],
                project_id=project["id"],
                project_name=project["name"],
                status=known["status"],
                parent_run_id=known["parent_run_id"],
                lineage_root_run_id=known["lineage_root_run_id"],
                resume_count=known["attempt"],
                run_path=known["run_path"],
                git_commit=known["git_commit"],
                strict_mode=known["strict_mode"],
                tags=tuple(known["tags"]),
                attempt=known["attempt"],
                name=known["name"],
                notes=known["notes"],
                created_at=created_at,
                updated_at=updated_at,
                ended_at=None if known["ended_us"] is None else format_time(known["ended_us"]),
                groups=tuple(known.get("groups") or ()),
            ),
            state=known["status"] if loss is None else "lost",
            config=ConfigSnapshot.from_data(config) if config else None,
            environment=EnvironmentSnapshot.from_data(environment) if environment else None,
            heartbeat_at=format_time(known["heartbeat_us"]),
            lost_reason=None if loss is None else loss.message,
            exit_code=known.get("exit_code"),
            ending=loss or RunEnding.from_data(known.get("ending")),
            fields=known.get("fields") or {},
        )

    def _load(self, name: str = _RUN) -> dict[str, Any]:
        try:
            loaded: dict[str, Any] = json.loads((self._folder / name).read_text("utf-8"))
        except FileNotFoundError:
            return {}
        return loaded

    def _save(self, name: str, data: dict[str, Any]) -> None:
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        replace_file(self._folder / name, text.encode(), is_synced=True)


_RUN_FOLDER = "csv"
# As long as a 32-bit C long can say.
_LONGEST_CELL = 2**31 - 1


class CsvReader:
    """Reads runs out of a folder that holds one folder per run.

    Args:
        root: That folder.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root or Path()

    def folder_of(self, run_id: str) -> Path:
        """The mirror's folder of a run."""
        nested = self._root.name == "runs" and self._root.parent.name == ".quark"
        return self._root / run_id / _RUN_FOLDER if nested else self._root / run_id

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """Rows of one kind that fit the query, in persistence order.

        Raises:
            RunNotFoundError: No such run here.
            SessionStoreError: A file cannot be read.
        """
        from quark_core.api import Columns, hide_superseded

        folder = self.folder_of(run_id)
        if not folder.is_dir():
            raise RunNotFoundError(f"the CSV mirror {self._root} has no run {run_id}")
        form = find_form(kind)
        try:
            rows = read_in_order(folder, RECORD_TYPES[kind].TABLE)
            records = [form.decode(run_id, row) for row in rows]
        except (OSError, ValueError, KeyError, csv.Error) as error:
            raise SessionStoreError(f"the CSV mirror {folder} cannot be read: {error}") from error
        columns = Columns.from_records(kind, records)
        if not query.all_attempts:
            columns = hide_superseded(columns, RunFile(folder).load_from_steps())
        return columns.select(query)

    def load_run(self, run_id: str) -> StoredRun:
        """One run.

        Raises:
            RunNotFoundError: No such run here.
        """
        found = RunFile(self.folder_of(run_id)).load()
        if found is None:
            raise RunNotFoundError(f"the CSV mirror {self._root} has no run {run_id}")
        return found

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """Runs, newest first."""
        if not self._root.is_dir():
            return []
        loaded = [
            RunFile(self.folder_of(entry.name)).load()
            for entry in self._root.iterdir()
            if entry.is_dir()
        ]
        runs = [run for run in loaded if run is not None and project in (None, run.project.name)]
        runs.sort(key=lambda stored: stored.run.created_at, reverse=True)
        return runs[:limit]


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """Rows of one of the mirror's files; an unfinished last line is left out.

    Raises:
        OSError, csv.Error: It cannot be read.
    """
    # A cell of JSON may be longer than what the module lets through by itself.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    with path.open(newline="\n", encoding="utf-8") as file:
        for row in csv.DictReader(_finished_lines(file)):
            if None not in row.values() and None not in row:
                yield row


def _finished_lines(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if line.endswith("\n"))


def read_in_order(folder: Path, name: str) -> list[dict[str, str]]:
    """Rows of all processes' files of one name, in persistence order."""
    started = _find_starts(folder)
    paths = [path for path in (folder / f"{name}.csv",) if path.exists()]
    paths += sorted(folder.glob(f"{name}-*.csv"))
    rows = [row for path in paths for row in read_rows(path)]
    rows.sort(
        key=lambda row: (
            int(row["attempt"]),
            int(row["rank"]),
            started.get(row["writer"], 0),
            row["writer"],
            int(row["sequence"]),
        )
    )
    # What a killed process has written and not acknowledged came again by another one.
    pairs = zip([None, *rows], rows, strict=False)
    return [row for before, row in pairs if before is None or _identify(before) != _identify(row)]


def _identify(row: dict[str, str]) -> tuple[str, str]:
    return row["writer"], row["sequence"]


def _find_starts(folder: Path) -> dict[str, int]:
    starts: dict[str, int] = {}
    for path in folder.glob("state*.json"):
        for writer_id, writer in load_csv_state(path).writers.items():
            starts[writer_id] = writer.started_us
    return starts
