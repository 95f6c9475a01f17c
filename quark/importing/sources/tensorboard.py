"""Runs in TensorBoard's event files, of whatever wrote them.

a folder with event files           a run, named by its path under the folder that is given
train, validation, test … in it     metrics under that name, where the folder has no event
                                    files of its own, or those as well: one run, as Keras means
loss_train beside it (add_scalars)  the metric loss/train of the folder's run
a folder of add_hparams in it       configuration of the folder's run
scalars, in both forms              metrics; a value that was a float32 is that float32
histograms                          parameter distributions
images, audio, text                 artifacts of these types
hparams                             configuration
SessionLog START with a step        an attempt from this step on: what was there is hidden
the time of an event                the time of the point
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quark.importing.columns import FIRST_US, LAST_US
from quark.importing.foreign import (
    PORTION_POINTS,
    ForeignFile,
    ForeignRun,
    ImportFailure,
    PointList,
    Portion,
    RunFacts,
)
from quark.importing.losses import Losses
from quark.importing.sources.event_values import ValueReader
from quark.importing.sources.record_frames import FrameReader
from quark_core.config.redaction import redact_values

_MARK = "tfevents"
_SPLITS = re.compile(r"(train|training|val|valid|validation|eval|evaluation|test|dev)([_-]\w+)?")
_HPARAMS_FOLDER = re.compile(r"\d{9,11}(\.\d+)?")
_HEAD_BYTES = 4096
_FIRST_S, _LAST_S = FIRST_US / 1e6, LAST_US / 1e6
_PORTION_FILES = 256
_PORTION_BYTES = 32 * 2**20


class _Piece:
    """What becomes a portion."""

    __slots__ = ("end", "files", "from_step", "points", "size_bytes")

    def __init__(self, from_step: int | None = None) -> None:
        self.points = PointList()
        self.files: list[ForeignFile] = []
        self.size_bytes = 0
        self.from_step = from_step
        self.end = 0

    @property
    def is_full(self) -> bool:
        heavy = len(self.files) >= _PORTION_FILES or self.size_bytes >= _PORTION_BYTES
        return heavy or len(self.points) >= PORTION_POINTS


@dataclass(slots=True)
class _Folder:
    """A folder of event files, and what its tags are called in the run."""

    path: Path
    prefix: str = ""
    series: tuple[str, str] | None = None
    files: list[Path] = field(default_factory=list)

    def rename(self, tag: str) -> str:
        """The name of a tag in the run."""
        if self.series is not None and tag == self.series[0]:
            return f"{tag}/{self.series[1]}"
        return f"{self.prefix}{tag}"


def find_runs(place: str | Path, *, project: str | None = None) -> Iterator[ForeignRun]:
    """The runs under a folder of event files; a single event file is a run too.

    Args:
        place: The folder.
        project: Their project; by default the folder's name.

    Raises:
        ImportFailure: There is no such folder, or TensorBoard is not installed.
    """
    root = Path(place).expanduser()
    try:
        from tensorboard.compat.proto import event_pb2  # noqa: F401
    except ImportError:
        raise ImportFailure(
            'event files are read by TensorBoard: pip install "quark-tracker[tensorboard]"'
        ) from None
    if not root.exists():
        raise ImportFailure(f"{root} does not exist")
    root = root.resolve()
    if root.is_file():
        yield EventRun(root.stem, project or root.parent.name, [_Folder(root.parent, files=[root])])
        return
    for path, folders in _group_folders(root):
        name = root.name if path == root else path.relative_to(root).as_posix()
        yield EventRun(name, project or root.name, folders)


def _group_folders(root: Path) -> Iterator[tuple[Path, list[_Folder]]]:
    """The folders of each run, by the folder that names it."""
    found: dict[Path, list[Path]] = {}
    for file in sorted(root.rglob(f"*{_MARK}*")):
        if file.is_file():
            found.setdefault(file.parent, []).append(file)
    groups: dict[Path, list[_Folder]] = {}
    for path, files in sorted(found.items()):
        above = path.parent
        inside = path != root and root in (above, *above.parents)
        if inside and _SPLITS.fullmatch(path.name) and _is_only_splits(above, found):
            groups.setdefault(above, []).append(_Folder(path, f"{path.name}/", files=files))
        elif inside and above in found and _HPARAMS_FOLDER.fullmatch(path.name):
            groups.setdefault(above, []).append(_Folder(path, files=files))
        elif inside and above in found and (series := _find_series(path, files)):
            groups.setdefault(above, []).append(_Folder(path, series=series, files=files))
        else:
            groups.setdefault(path, []).insert(0, _Folder(path, files=files))
    yield from groups.items()


def _is_only_splits(above: Path, found: Mapping[Path, Any]) -> bool:
    """Whether the folders with event files in a folder are all parts of one training."""
    return all(_SPLITS.fullmatch(path.name) for path in found if path.parent == above)


def _find_series(path: Path, files: Sequence[Path]) -> tuple[str, str] | None:
    """The tag and the name of a series that `add_scalars` has given a folder of its own."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    tags = set()
    try:
        for frames in FrameReader(files[0], 0).read():
            for data in frames.data[:8]:
                tags |= {value.tag for value in Event.FromString(data).summary.value}
            break
    except (DecodeError, OSError):
        # It fails as a run of its own, and costs no other one.
        return None
    if len(tags) != 1:
        return None
    tag = tags.pop()
    stem = tag.replace("/", "_") + "_"
    return (tag, path.name[len(stem) :]) if path.name.startswith(stem) else None


class EventRun(ForeignRun):
    """One run, of one folder of event files or several.

    Its position is, by the name of each file, the offset behind the last event that was
    taken, and what was learnt of tags on the way: later events of a tag leave it out.
    """

    def __init__(self, name: str, project: str, folders: list[_Folder]) -> None:
        self.key = self._name = name
        self._project = project
        self._folders = folders
        self._values: ValueReader | None = None
        self._span: tuple[float, float] | None = None
        self._starts: dict[Path, float] = {}

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        files = [file for folder in self._folders for file in folder.files]
        begun = [
            (began_s, file.name)
            for file in files
            if (began_s := self._find_start(file)) and _FIRST_S <= began_s <= _LAST_S
        ]
        if not begun:
            raise ImportFailure(f"{files[0]} holds no event yet")
        # Files that come later begin later, wherever their names are in the alphabet.
        first_s, first = min(begun)
        values = self._values
        began_s = first_s if self._span is None else min(first_s, self._span[0])
        return RunFacts(
            # The name of an event file has the host, the process and the moment in it.
            identity=f"{self._name.rpartition('/')[2]}/{first}@{first_s!r}",
            project=self._project,
            name=self._name,
            config={} if values is None else values.config,
            environment={"tensorboard": {"folder": str(self._folders[0].path)}},
            is_told=False,
            started_us=round(began_s * 1e6),
            ended_us=None if self._span is None else round(self._span[1] * 1e6),
        )

    def mark(self) -> str | None:
        """See `ForeignRun`."""
        return "".join(
            f"{file.name}:{file.stat().st_size};" for one in self._folders for file in one.files
        )

    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """See `ForeignRun`."""
        offsets: dict[str, int] = dict(position.get("files", {}))
        self._values = values = ValueReader(position.get("tags", {}), losses)
        values.config.update(position.get("config", {}))
        span = position.get("span")
        self._span = None if span is None else (span[0], span[1])
        for folder in self._folders:
            for file in folder.files:
                yield from self._read_file(folder, file, offsets, values, losses)

    def _read_file(
        self,
        folder: _Folder,
        file: Path,
        offsets: dict[str, int],
        values: ValueReader,
        losses: Losses,
    ) -> Iterator[Portion]:
        known = f"{folder.prefix}{folder.path.name}/{file.name}"
        reader = FrameReader(file, offsets.get(known, 0))
        values.begin_folder(folder.rename)
        try:
            for frames in reader.read():
                for portion in self._read_frames(frames.data, frames.end, values):
                    offsets[known] = portion.end
                    yield self._make_portion(portion, offsets, values)
        except OSError as error:
            raise ImportFailure(f"{file} cannot be read: {error.strerror or error}") from error
        if reader.damage is not None:
            lost = file.stat().st_size - reader.offset
            losses.add("bytes", file.name, f"{reader.damage}, and what follows it", lost)
        elif reader.rest:
            losses.add(
                "bytes", file.name, "an event is half written; taken when whole", reader.rest
            )

    def _read_frames(
        self, frames: Sequence[bytes], ends: Sequence[int], values: ValueReader
    ) -> Iterator[_Piece]:
        """Events in pieces, each of which becomes a portion."""
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        piece = _Piece()
        parse, points, read_value = Event.FromString, piece.points, values.read
        first_s, last_s, count, is_full = float("inf"), 0.0, 0, False
        for data, end in zip(frames, ends, strict=True):
            try:
                event = parse(data)
            except DecodeError:
                values.losses.add("event", "event", "it cannot be decoded")
                continue
            time_s = event.wall_time
            if _FIRST_S <= time_s <= _LAST_S:
                first_s, last_s = min(first_s, time_s), max(last_s, time_s)
            step = event.step
            is_start = (
                event.HasField("session_log") and event.session_log.status == SessionLog.START
            )
            if is_start and step > 0:
                if piece.end:
                    yield self._end_piece(piece, first_s, last_s)
                piece, count, is_full = _Piece(from_step=step), 0, False
                points = piece.points
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    points.add(values.name(value.tag), step, value.simple_value, time_s)
                    count += 1
                else:
                    read_value(value, step, time_s, piece)
                    is_full = piece.is_full
            piece.end = end
            if is_full or count >= PORTION_POINTS:
                yield self._end_piece(piece, first_s, last_s)
                piece, count, is_full = _Piece(), 0, False
                points = piece.points
        if piece.end:
            yield self._end_piece(piece, first_s, last_s)

    def _end_piece(self, piece: _Piece, first_s: float, last_s: float) -> _Piece:
        if first_s <= last_s:
            span = self._span or (first_s, last_s)
            self._span = (min(span[0], first_s), max(span[1], last_s))
        return piece

    def _make_portion(
        self, piece: _Piece, offsets: Mapping[str, int], values: ValueReader
    ) -> Portion:
        return Portion(
            position={
                "files": dict(offsets),
                "tags": dict(values.plugins),
                "config": redact_values(dict(values.config)),
                "span": self._span,
            },
            points=piece.points.take() if len(piece.points) else None,
            files=piece.files,
            from_step=piece.from_step,
        )

    def _find_start(self, file: Path) -> float | None:
        """When the first event of a file was, in seconds; None where there is none yet."""
        if file not in self._starts:
            found = _read_first(file)
            if found is None:
                return None
            self._starts[file] = found
        return self._starts[file]


def _read_first(file: Path) -> float | None:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD_BYTES)
        length = int.from_bytes(head[:8], "little")
        if not 0 < length <= len(head) - 16:
            return None
        return float(Event.FromString(head[12 : 12 + length]).wall_time)
    except DecodeError:
        raise ImportFailure(f"{file} is no event file") from None
    except OSError as error:
        raise ImportFailure(f"{file} cannot be read: {error.strerror or error}") from error
