"""Events and log lines, artifacts, and the payloads behind these."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, get_args

from quark.page.api.media import choose_view, describe_facts
from quark.page.api.parameters import MAX_ROWS, Parameters
from quark.page.api.table_files import identify_table
from quark_core.artifacts.payload_formats import HEAD_BYTES, identify_media
from quark_core.backends.contract import SupportsArtifacts
from quark_core.errors import ArtifactNotFoundError, SchemaValidationError
from quark_core.records import ArtifactRecord, EventRecord
from quark_core.records.kinds.basic import EventSeverity
from quark_core.records.names import decode_name
from quark_core.records.query import Query
from quark_core.runs.artifact_versions import HIDDEN_TYPES
from quark_core.runs.reading import read_rows

if TYPE_CHECKING:
    from quark.page.api.source import PageSource
    from quark_core.records.columns import Columns

IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml", "image/avif")
"""What browsers draw."""

_ROWS = 100
_SEVERITIES: tuple[str, ...] = get_args(EventSeverity)
_CURSOR = re.compile(r"[0-9]{1,12}")
_MEDIA_TYPE = re.compile(r"[a-z]+/[a-z0-9.+-]+(?:; ?charset=[a-z0-9-]+)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_SENT, _MOST_BYTES = 20, 16 * 1024 * 1024
_PART_BYTES = 256 * 1024
# Of so long a message or value the rest is cut off in a list.
_MOST_CHARACTERS = 20_000


def list_events(source: PageSource, run_id: str, parameters: Parameters) -> dict[str, Any]:
    """A page of events, the newest by default, oldest first.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    import numpy as np

    level = parameters.get_word("level", _SEVERITIES[0], _SEVERITIES)
    text = (parameters.get_text("text") or "").lower()
    event_type = parameters.get_text("type")
    before = _read_cursor(parameters, "before")
    limit = parameters.get_bounded("limit", _ROWS, MAX_ROWS)
    equals = {} if event_type is None else {"event_type": event_type}
    severities = _SEVERITIES[_SEVERITIES.index(level) :]
    any_of = {} if level == _SEVERITIES[0] else {"severity": severities}
    query = Query(equals=equals, any_of=any_of)
    rows = read_rows(source.reader, run_id, EventRecord.KIND, query)
    # Of several writers each has its own order.
    order = np.argsort(rows["time_us"], kind="stable")
    last = len(order) if before is None else min(before, len(order))
    found: list[dict[str, Any]] = []
    place = last
    while place > 0 and len(found) < limit:
        first = max(0, place - _ROWS)
        records: Any = rows.take(order[first:place]).to_records()
        for offset in range(len(records) - 1, -1, -1):
            event = _describe_event(records[offset])
            if not text or _has_text(event, text):
                found.append(event)
            if len(found) == limit:
                place = first + offset
                break
        else:
            place = first
    return {"events": found[::-1], "next": str(place) if place > 0 else None}


def _describe_event(record: EventRecord) -> dict[str, Any]:
    payload: dict[str, Any] = dict(record.payload or {})
    message = payload.pop("message", None)
    traceback = payload.pop("traceback", None)
    payload.pop("identifier", None)
    logger = payload.get("logger")
    return {
        "id": record.id,
        "at": record.timestamp,
        "type": record.event_type,
        "severity": record.severity,
        "step": record.step,
        "epoch": record.epoch,
        "rank": record.rank,
        "attempt": record.attempt,
        "status": record.status,
        "message": _cut(message),
        "logger": logger if isinstance(logger, str) else None,
        "traceback": _cut(traceback),
        "payload": payload or None,
    }


def _cut(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else str(value)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}\n… {len(text) - _MOST_CHARACTERS} characters more"


def _has_text(event: dict[str, Any], text: str) -> bool:
    return any(
        isinstance(event[name], str) and text in event[name].lower()
        for name in ("type", "message", "logger", "traceback")
    )


def list_artifacts(source: PageSource, run_id: str, parameters: Parameters) -> dict[str, Any]:
    """A page of the artifacts, in the order in which they were logged.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    text = (parameters.get_text("text") or "").lower()
    artifact_type = parameters.get_text("type")
    import numpy as np

    start = _read_cursor(parameters, "after") or 0
    limit = parameters.get_bounded("limit", _ROWS, MAX_ROWS)
    equals = {} if artifact_type is None else {"artifact_type": artifact_type}
    rows = read_rows(source.reader, run_id, ArtifactRecord.KIND, Query(equals=equals))
    if artifact_type is None:
        # Parts of others, which are shown with these.
        types = rows["artifact_type"].tolist()
        rows = rows.take(np.asarray([kind not in HIDDEN_TYPES for kind in types], dtype=bool))
    if text:
        keys = rows["artifact_key"].tolist()
        rows = rows.take(np.asarray([text in decode_name(key).lower() for key in keys], dtype=bool))
    shown: Any = rows.take(slice(start, start + limit)).to_records()
    end = start + len(shown)
    looks = Looks(source, run_id)
    return {
        "artifacts": [describe_artifact(source, run_id, record, looks) for record in shown],
        "next": str(end) if end < rows.count else None,
        "count": rows.count,
    }


class Looks:
    """How many more payloads may be opened for one answer, to see what they are.

    Of what lies elsewhere each is sent as a whole, however large it is; what was not looked at
    can be saved.

    Args:
        source, run_id: Whose payloads.
    """

    def __init__(self, source: PageSource, run_id: str) -> None:
        reader: object = source.reader
        is_here = isinstance(reader, SupportsArtifacts) and reader.payload_directory(run_id)
        self._left = MAX_ROWS if is_here else _MOST_SENT
        self._most_bytes = None if is_here else _MOST_BYTES

    def take(self, size_bytes: int | None) -> bool:
        """Whether one more may be opened."""
        is_large = self._most_bytes is not None and (size_bytes or 0) > self._most_bytes
        if self._left <= 0 or is_large:
            return False
        self._left -= 1
        return True


def describe_artifact(
    source: PageSource, run_id: str, record: ArtifactRecord, looks: Looks | None = None
) -> dict[str, Any]:
    """An artifact as the page has it, with what its bytes are."""
    name = decode_name(record.artifact_key)
    kept = record.payload_relative_path is not None and source.capabilities["artifacts"]
    kept = kept and _SHA256.fullmatch(record.sha256) is not None
    looks = looks or Looks(source, run_id)
    media_type = _find_media_type(source, run_id, record, looks) if kept else None
    return {
        "id": record.id,
        "type": record.artifact_type,
        "key": record.artifact_key,
        "name": name,
        "group": name.rpartition("/")[0],
        "format": record.payload_format,
        "size_bytes": record.size_bytes,
        "sha256": record.sha256,
        "step": record.step,
        "epoch": record.epoch,
        "at": record.timestamp,
        "media_type": media_type,
        "is_image": media_type in IMAGES,
        "view": choose_view(record, media_type) if kept else None,
        "facts": describe_facts(record),
        "table": identify_table(record.artifact_name, record.artifact_type, media_type),
        "url": f"artifacts/{run_id}/{record.sha256}" if kept else None,
    }


def _find_media_type(
    source: PageSource, run_id: str, record: ArtifactRecord, looks: Looks
) -> str | None:
    """From the bytes, as whoever logged it noted; it is told anew where a payload is served."""
    noted = dict(record.metadata or {}).get("media_type")
    if isinstance(noted, str) and _MEDIA_TYPE.fullmatch(noted):
        return noted
    if record.payload_format == "json":
        return "application/json"
    if not looks.take(record.size_bytes):
        return None
    try:
        with open_artifact(source, run_id, record.sha256) as file:
            return identify_media(file.read(HEAD_BYTES))
    except (ArtifactNotFoundError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload on its way to the browser.

    Attributes:
        media_type: What its bytes are.
        size_bytes: How many.
        name: What a copy of it is called.
        artifact_type: As it was logged.
        file: The bytes.
        close: Gives up the file, however much of it was read.
    """

    media_type: str
    size_bytes: int
    name: str
    artifact_type: str
    file: BinaryIO
    close: Callable[[], None]


def open_payload(source: PageSource, run_id: str, sha256: str) -> Payload:
    """The payload of one of a run's artifacts.

    Raises:
        ArtifactNotFoundError: The run has no artifact with this hash, or it is not kept.
        RunNotFoundError: There is no such run.
    """
    record = find_artifact(source, run_id, sha256)
    file = open_artifact(source, run_id, sha256)
    try:
        head = file.read(HEAD_BYTES)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return Payload(
        media_type=identify_media(head),
        size_bytes=record.size_bytes,
        name=record.artifact_name,
        artifact_type=record.artifact_type,
        file=file,
        close=file.close,
    )


def find_artifact(source: PageSource, run_id: str, sha256: str) -> ArtifactRecord:
    """The record of one of a run's artifacts, the newest with this hash.

    Raises:
        ArtifactNotFoundError: The run has no artifact with this hash.
        RunNotFoundError: There is no such run.
    """
    if not _SHA256.fullmatch(sha256):
        raise ArtifactNotFoundError("an artifact is asked for by its SHA-256 in hexadecimal")
    query = Query(equals={"sha256": sha256}, limit=1)
    source.load_run(run_id)
    rows: Columns = read_rows(source.reader, run_id, ArtifactRecord.KIND, query)
    if not rows.count:
        raise ArtifactNotFoundError(f"run {run_id} has no artifact {sha256}")
    found: Any = rows.to_records()[0]
    record: ArtifactRecord = found
    return record


def open_artifact(source: PageSource, run_id: str, sha256: str) -> BinaryIO:
    """A payload, open for reading from any place of it.

    Raises:
        ArtifactNotFoundError: It is not kept.
    """
    reader: object = source.reader
    if not isinstance(reader, SupportsArtifacts):
        raise ArtifactNotFoundError("this backend keeps no payloads")
    return reader.open_payload(run_id, sha256)


def iterate_payload(payload: Payload, first: int, end: int) -> Iterator[bytes]:
    """The bytes of a payload from one place to another, in parts."""
    payload.file.seek(first)
    left = end - first
    while left > 0 and (part := payload.file.read(min(_PART_BYTES, left))):
        left -= len(part)
        yield part


def _read_cursor(parameters: Parameters, name: str) -> int | None:
    text = parameters.get_text(name)
    if text is None:
        return None
    if not _CURSOR.fullmatch(text):
        raise SchemaValidationError(f"{name} must be a cursor that was given, got {text!r:.40}")
    return int(text)
