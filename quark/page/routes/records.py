"""Events, log lines and console output; artifacts, pictures and the payloads behind them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, get_args

from quark.page.routes.parameters import MAX_ROWS, Parameters
from quark.page.routes.table_files import identify_table
from quark_core.artifacts.payload_formats import HEAD_BYTES, identify_media
from quark_core.backends.contract import SupportsArtifacts
from quark_core.errors import ArtifactNotFoundError, SchemaValidationError
from quark_core.records import ArtifactRecord, EventRecord
from quark_core.records.kinds.basic import EventSeverity
from quark_core.records.names import decode_name, is_sha256
from quark_core.records.query import Query
from quark_core.runs.artifact_versions import HIDDEN_TYPES, ArtifactVersion, list_lineage
from quark_core.runs.console_lines import find_key, read_lines
from quark_core.runs.reading import read_rows

if TYPE_CHECKING:
    from quark.page.routes.page_source import PageSource
    from quark_core.records.columns import Columns
    from quark_core.records.kinds.console import ConsoleRecord

# What an artifact is shown as, what lies over a picture, and where a version comes from and goes.
#
# Metadata is whoever's logged it, or wrote the store: of it only what has the right form is sent.

AUDIO = ("audio/wav", "audio/mpeg", "audio/ogg", "audio/flac", "audio/mp4", "audio/aac")
"""What browsers play as sound."""

VIDEO = ("video/mp4", "video/webm")
"""What browsers play as a video."""

_BY_TYPE = {
    "point_cloud": "points",
    "html": "html",
    "markdown": "markdown",
    "confusion_matrix": "matrix",
    "pr_curve": "curves",
    "roc_curve": "curves",
    "histogram": "histogram",
    "directory": "directory",
    "reference": "reference",
}
_PLAIN_FACTS = ("caption", "width", "height", "duration_s", "sample_rate_hz", "channels", "fps",
    "frames", "points", "files", "total_bytes", "skipped", "accuracy", "samples", "classes",
    "clipped", "non_finite", "boxes_left_out", "changed_while_read")  # fmt: skip
_MOST_BOXES, _MOST_GROUPS, _MOST_LABELS = 1_000, 20, 1_000
_MOST_CHARACTERS = 2_000
_LABEL_CHARACTERS = 200
_MOST_VERSIONS = 500
_SIDES = 4
_FARTHEST = 1e300
_ENCODINGS = ("L", "RGB")
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")
# What asks the network for something of its own, whatever a policy says of what it loads, or
# changes how the rest is read.
_LOADING = re.compile(rb"<(/?)(link|meta|base|iframe|frame|object|embed|portal)\b", re.I)


def choose_view(record: ArtifactRecord, media_type: str | None) -> str | None:
    """What an artifact is shown as beside images, tables and texts; None for nothing of these."""
    if media_type in AUDIO:
        return "audio"
    if media_type in VIDEO:
        return "video"
    return _BY_TYPE.get(record.artifact_type)


def describe_facts(record: ArtifactRecord) -> dict[str, Any]:
    """The figures and the caption that were noted of an artifact."""
    noted: Mapping[str, Any] = record.metadata or {}
    facts: dict[str, Any] = {}
    for name in _PLAIN_FACTS:
        value = noted.get(name)
        if isinstance(value, str):
            facts[name] = value[:_MOST_CHARACTERS]
        elif isinstance(value, bool) or _is_number(value):
            facts[name] = value
    return facts


def describe_over(record: ArtifactRecord) -> dict[str, Any]:
    """Boxes and masks over a picture, and the names of their classes."""
    noted: Mapping[str, Any] = record.metadata or {}
    boxes, masks, labels = (noted.get(name) for name in ("boxes", "masks", "class_labels"))
    groups = {
        str(name)[:_LABEL_CHARACTERS]: [
            box for box in map(_read_box, group[:_MOST_BOXES]) if box is not None
        ]
        for name, group in list(_as_mapping(boxes).items())[:_MOST_GROUPS]
        if isinstance(group, (list, tuple))
    }
    listed = masks[:_MOST_GROUPS] if isinstance(masks, (list, tuple)) else ()
    return {
        "boxes": groups,
        "masks": [mask for mask in map(_read_mask, listed) if mask is not None],
        "labels": {
            str(number): str(name)[:_LABEL_CHARACTERS]
            for number, name in list(_as_mapping(labels).items())[:_MOST_LABELS]
        },
    }


def tell_lineage(source: PageSource, run_id: str) -> dict[str, Any]:
    """The versions that a run has made and used, with their aliases and users.

    Raises:
        RunNotFoundError: There is no such run.
        SessionStoreError: The store cannot be read.
    """
    found = list_lineage(source.reader, run_id)
    made = found.made[-_MOST_VERSIONS:]
    return {
        "made": [_describe_version(version) for version in made],
        "made_count": len(found.made),
        "used": [_describe_version(version) for version in found.used[:_MOST_VERSIONS]],
        "gone": list(found.gone[:_MOST_VERSIONS]),
    }


def defuse_html(data: bytes) -> bytes:
    """HTML in which no element is left that loads something, or leads elsewhere, by itself.

    The policy that it is sent with keeps scripts from running and anything from being loaded;
    this takes away what asks for a connection or another page all the same.
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        data = data.decode("utf-16", "replace").encode()
    return _LOADING.sub(rb"<\1x-\2", data)


def _describe_version(version: ArtifactVersion) -> dict[str, Any]:
    record = version.record
    return {
        "name": version.name,
        "aliases": list(version.aliases),
        "type": record.artifact_type,
        "size_bytes": record.size_bytes,
        "step": record.step,
        "at": record.timestamp,
        "sha256": record.sha256,
        "run_id": record.run_id,
        "run_name": version.run_name,
        "used_by": list(version.used_by),
    }


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read_box(found: Any) -> dict[str, Any] | None:
    sides = _as_mapping(found).get("box")
    if not isinstance(sides, (list, tuple)) or len(sides) != _SIDES:
        return None
    if not all(_is_number(side) for side in sides):
        return None
    box: dict[str, Any] = {"box": list(sides)}
    label, score = found.get("label"), found.get("score")
    if isinstance(label, (int, str)):
        box["label"] = str(label)[:_LABEL_CHARACTERS]
    if _is_number(score):
        box["score"] = score
    return box


def _read_mask(found: Any) -> dict[str, Any] | None:
    mask = _as_mapping(found)
    sha256, encoding = mask.get("sha256"), mask.get("encoding")
    if not isinstance(sha256, str) or not is_sha256(sha256) or encoding not in _ENCODINGS:
        return None
    return {
        "name": str(mask.get("mask"))[:_LABEL_CHARACTERS],
        "sha256": sha256,
        "encoding": encoding,
    }


def _is_number(value: Any) -> bool:
    is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Whole numbers of any length too: a float they would not all be.
    return is_plain and -_FARTHEST <= value <= _FARTHEST


def read_range(text: str | None, size_bytes: int) -> tuple[int, int] | None:
    """The first byte that a `Range` header asks for, and the one after the last; None for all.

    Only one range of bytes is served; what cannot be read counts as none.

    Raises:
        ArtifactNotFoundError: It begins behind the end.
    """
    found = _RANGE.fullmatch(text.strip()) if text else None
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        first, end = max(0, size_bytes - int(found[2])), size_bytes
    else:
        first = int(found[1])
        end = min(size_bytes, int(found[2]) + 1) if found[2] else size_bytes
        if found[2] and int(found[2]) < first:
            return None
    if first >= size_bytes:
        raise ArtifactNotFoundError(f"the payload has {size_bytes} bytes")
    return first, end


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
_TEXT_CHARACTERS = 20_000


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
    if len(text) <= _TEXT_CHARACTERS:
        return text
    return f"{text[:_TEXT_CHARACTERS]}\n… {len(text) - _TEXT_CHARACTERS} characters more"


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
        raise ArtifactNotFoundError("an artifact is requested by its SHA-256 in hexadecimal")
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
        raise ArtifactNotFoundError("this backend does not store payloads")
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
        raise SchemaValidationError(f"{name} must be a cursor from the server, got {text!r:.40}")
    return int(text)


_CONSOLE_ROWS = 200
_STREAMS = ("", "stdout", "stderr")


def list_console(source: PageSource, run_id: str, parameters: Parameters) -> dict[str, Any]:
    """A page of lines, the newest by default, oldest first.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    stream = parameters.get_word("stream", "", _STREAMS) or None
    text = (parameters.get_text("text") or "").lower()
    before = parameters.get_text("before")
    rank = parameters.get_integer("rank")
    limit = parameters.get_bounded("limit", _CONSOLE_ROWS, MAX_ROWS)
    is_wanted: Callable[[ConsoleRecord], bool] | None = None
    if text:
        is_wanted = lambda line: text in line.text.lower()  # noqa: E731
    # One more says whether there are older ones. Those before a line are looked for among all.
    tail = limit + 1 if before is None else None
    lines = read_lines(
        source.reader, run_id, stream=stream, rank=rank, tail=tail, is_wanted=is_wanted
    )
    if before is not None:
        place = next((at for at, line in enumerate(lines) if _name(line) == before), len(lines))
        lines = lines[:place]
    shown = lines[max(0, len(lines) - limit) :]
    return {
        "lines": [_describe(line) for line in shown],
        "next": _name(shown[0]) if len(lines) > len(shown) else None,
    }


def _name(line: ConsoleRecord) -> str:
    """A name that a line keeps while it goes on, which the record's id is not."""
    return "-".join(map(str, find_key(line)))


def _describe(line: ConsoleRecord) -> dict[str, Any]:
    return {
        "id": _name(line),
        "at": line.timestamp,
        "stream": line.stream,
        "rank": line.rank,
        "attempt": line.attempt,
        "text": line.text,
        "is_whole": line.is_whole,
        "left_out": line.left_out,
    }


_MOST_RECORDS = 20_000
_MOST_STEPS = 2_000
_MOST_NAMES = 60
_DRAWN_TYPES = ("image", "figure")


def list_images(source: PageSource, run_id: str, parameters: Parameters) -> dict[str, Any]:
    """The steps at which there are pictures, and of each name the newest up to one of them.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    at = parameters.get_integer("at")
    text = (parameters.get_text("text") or "").lower()
    source.load_run(run_id)
    rows = read_rows(source.reader, run_id, ArtifactRecord.KIND, Query())
    left_out = max(0, rows.count - _MOST_RECORDS)
    records: Any = rows.take(slice(left_out, rows.count)).to_records()
    found = list(_find_images(source, run_id, records, text))
    steps = sorted({record.step for record in found if record.step is not None})
    newest: dict[str, ArtifactRecord] = {}
    for record in sorted(found, key=lambda record: -1 if record.step is None else record.step):
        if record.step is None or at is None or record.step <= at:
            newest[record.artifact_key] = record
    shown = [newest[key] for key in sorted(newest)]
    # Evenly, with the first and the last one.
    stride = -(-len(steps) // _MOST_STEPS) or 1
    return {
        "steps": steps[-1::-stride][::-1],
        "step_count": len(steps),
        "images": [
            {**describe_artifact(source, run_id, record), **describe_over(record)}
            for record in shown[:_MOST_NAMES]
        ],
        "count": len(shown),
        "left_out": left_out,
    }


def _find_images(
    source: PageSource, run_id: str, records: Any, text: str
) -> Iterator[ArtifactRecord]:
    looks = Looks(source, run_id)
    for record in records:
        if record.artifact_type in HIDDEN_TYPES:
            continue
        if text and text not in decode_name(record.artifact_key).lower():
            continue
        noted: Mapping[str, Any] = record.metadata or {}
        media_type = noted.get("media_type")
        if media_type is None and record.artifact_type in _DRAWN_TYPES:
            media_type = describe_artifact(source, run_id, record, looks)["media_type"]
        if media_type in IMAGES and record.payload_relative_path is not None:
            yield record
