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

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any

import msgspec

from quark.importing.conversion import FIRST_US, LAST_US, make_histogram
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
)
from quark_core.config.redaction import redact_values

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_UNKNOWN_PLUGIN = "this kind ({}) cannot be imported"
_PLAIN_PLUGIN = ""


class ValueReader:
    """Reads values of one run.

    Args:
        plugins: Name of a tag -> plugin of its tensors, as far as it is known already.
        losses: Told of what cannot be taken.

    Attributes:
        plugins: The same, with what was learnt since.
        config: Hyperparameters.
        losses: As given.
    """

    def __init__(self, plugins: Mapping[str, str], losses: Losses) -> None:
        self.plugins: dict[str, str] = dict(plugins)
        self.config: dict[str, Any] = {}
        self.losses = losses
        self._names: dict[str, str] = {}
        self._rename: Callable[[str], str] = str

    def begin_folder(self, rename: Callable[[str], str]) -> None:
        """What follows is of another folder.

        Args:
            rename: The name of a tag in the run.
        """
        self._rename, self._names = rename, {}

    def name(self, tag: str) -> str:
        """The name of a tag in the run."""
        known = self._names.get(tag)
        if known is None:
            known = self._names[tag] = self._rename(tag)
        return known

    def read(self, value: Any, step: int, time_s: float, taker: Gathered) -> None:
        """Read a value that is not in `simple_value`."""
        form = value.WhichOneof("value")
        name = self.name(value.tag)
        plugin = value.metadata.plugin_data.plugin_name
        if plugin == "hparams":
            self._read_hparams(value.metadata.plugin_data.content)
            return
        try:
            if form == "histo":
                self._read_histo(value.histo, name, step, time_s, taker)
            elif form == "image":
                self._add_image(value.image.encoded_image_string, name, step, time_s, taker)
            elif form == "audio":
                _add(taker, "audio", name, value.audio.encoded_audio_string, step, time_s)
            elif form == "tensor":
                self._read_tensor(value, name, step, time_s, taker)
            else:
                self.losses.add(form or "value", name, _UNKNOWN_PLUGIN.format(form or "none"))
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            self.losses.add(form or "value", name, f"it cannot be read: {error}")

    def _read_tensor(
        self, value: Any, name: str, step: int, time_s: float, taker: Gathered
    ) -> None:
        from tensorboard.util import tensor_util

        plugin = value.metadata.plugin_data.plugin_name
        if plugin:
            self.plugins[name] = plugin
        plugin = self.plugins.get(name, _PLAIN_PLUGIN)
        count = math.prod(dimension.size for dimension in value.tensor.tensor_shape.dim)
        if count > max(value.tensor.ByteSize(), 1):
            raise ValueError(f"it states {count} elements but does not contain them")
        array = tensor_util.make_ndarray(value.tensor)
        is_number = array.dtype.kind in "fiub"
        if plugin in ("scalars", _PLAIN_PLUGIN) and is_number and array.size == 1:
            taker.points.add(name, step, float(array.reshape(())), time_s)
        elif plugin == "histograms" and array.ndim == 2 and array.shape[1] == 3:
            rows = array.astype(float)
            self._add_histogram(
                name, [*rows[:1, 0], *rows[:, 1]], rows[:, 2].tolist(), step, time_s, taker
            )
        elif plugin == "images":
            # The first two are width and height.
            for place, data in enumerate(array.reshape(-1)[2:]):
                shown = name if array.size <= 3 else f"{name}/{place}"
                self._add_image(bytes(data), shown, step, time_s, taker)
        elif plugin == "audio":
            clips = array.reshape(len(array), -1)[:, 0] if array.ndim else array.reshape(-1)
            for place, data in enumerate(clips):
                shown = name if len(clips) == 1 else f"{name}/{place}"
                _add(taker, "audio", shown, bytes(data), step, time_s)
        elif plugin == "text":
            parts = [bytes(part).decode("utf-8", "replace") for part in array.reshape(-1)]
            _add(taker, "markdown", name, "\n\n".join(parts).encode(), step, time_s, "text")
        elif plugin == "pr_curves" and array.ndim == 2:
            self._add_curve(array, name, step, time_s, taker)
        else:
            told = plugin or f"a tensor of {array.dtype}, shape {array.shape}"
            self.losses.add("tensor", name, _UNKNOWN_PLUGIN.format(told))

    def _read_histo(self, histo: Any, name: str, step: int, time_s: float, taker: Gathered) -> None:
        """A histogram of the old form: its outermost edges say nothing, the extremes do."""
        counts, limits = list(histo.bucket), list(histo.bucket_limit)
        filled = [place for place, count in enumerate(counts) if count > 0]
        if not filled:
            self.losses.add("histogram", name, "it is empty")
            return
        first, last = filled[0], filled[-1]
        edges = [histo.min, *limits[first:last], histo.max]
        self._add_histogram(name, edges, counts[first : last + 1], step, time_s, taker)

    def _add_histogram(
        self,
        name: str,
        edges: list[float],
        counts: list[float],
        step: int,
        time_s: float,
        taker: Gathered,
    ) -> None:
        made = make_histogram(name, edges, counts, step=step, time_us=round(time_s * 1e6))
        if made is None:
            self.losses.add("histogram", name, "it is empty")
        else:
            taker.files.append(made)

    def _add_image(self, data: bytes, name: str, step: int, time_s: float, taker: Gathered) -> None:
        _add(taker, "image", name, data, step, time_s)

    def _add_curve(self, array: Any, name: str, step: int, time_s: float, taker: Gathered) -> None:
        columns = ["true_positives", "false_positives", "true_negatives", "false_negatives"]
        columns = [*columns, "precision", "recall"][: len(array)]
        table = {"columns": columns, "rows": array.T.astype(float).tolist()}
        _add(taker, "table", name, msgspec.json.encode(table), step, time_s, "json")

    def _read_hparams(self, content: bytes) -> None:
        from google.protobuf.message import DecodeError
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        try:
            data = HParamsPluginData.FromString(content)
        except DecodeError as error:
            self.losses.add("hparams", "hparams", f"they cannot be decoded: {error}")
            return
        if data.WhichOneof("data") != "session_start_info":
            return
        for key, value in data.session_start_info.hparams.items():
            form = value.WhichOneof("kind")
            found = (
                getattr(value, form)
                if form in ("number_value", "string_value", "bool_value")
                else None
            )
            if isinstance(found, float) and found.is_integer() and abs(found) < 2**53:
                # Numbers of this form are floats all, those of an int too.
                found = int(found)
            self.config[key] = found


def _add(
    taker: Gathered,
    artifact_type: str,
    name: str,
    data: bytes,
    step: int,
    time_s: float,
    payload_format: str = "bytes",
) -> None:
    taker.size_bytes += len(data)
    taker.files.append(
        ForeignFile(
            artifact_type=artifact_type,
            name=name,
            content=data,
            payload_format=payload_format,
            step=None if step < 0 else step,
            time_us=round(time_s * 1e6),
        )
    )


# The frames of TFRecord files, as event files are made of them.
#
# A frame is the length of its data in 8 bytes, a checksum of these, the data and a checksum of
# it (CRC-32C, masked). Checksums of many frames of one length are computed at once, one byte
# of each after the other: one by one in Python, they would take longer than all the rest.

_CHUNK_BYTES = 4 * 2**20
_HEADER = Struct("<QI")
_FOOTER_BYTES = 4
_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8
# Of a frame of its own length only, each byte costs a call of numpy.
_MAX_CHECKED_BYTES = 16 * 1024
_MAX_FRAME_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames that follow each other.

    Attributes:
        data: What is in each.
        end: Offset behind each.
    """

    data: list[bytes]
    end: list[int]


class FrameReader:
    """Reads a file that may still be written.

    Args:
        path: The file.
        offset: Where to begin; a frame begins there.

    Attributes:
        offset: Behind the last frame that was given.
        damage: Why nothing behind the offset can be read, or None.
        rest: Bytes behind the offset that are no whole frame yet.
    """

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self.offset = offset
        self.damage: str | None = None
        self.rest = 0

    def read(self) -> Iterator[Frames]:
        """What there is now, a few megabytes at a time.

        Raises:
            OSError: The file cannot be read.
        """
        wanted = _CHUNK_BYTES
        with self._path.open("rb") as file:
            file.seek(self.offset)
            held = b""
            while True:
                piece = file.read(wanted)
                held += piece
                frames, used = self._cut(held)
                if frames.data:
                    yield frames
                held = held[used:]
                if self.damage is not None:
                    return
                if len(piece) < wanted:
                    self.rest = len(held)
                    return
                # A frame that is larger than a piece is read as a whole, not again and again.
                wanted = max(_CHUNK_BYTES, self._measure(held) - len(held))

    def _measure(self, held: bytes) -> int:
        if len(held) < _HEADER.size:
            return 0
        return int(_HEADER.unpack_from(held)[0]) + _HEADER.size + _FOOTER_BYTES

    def _cut(self, held: bytes) -> tuple[Frames, int]:
        """The whole frames at the beginning of bytes, and how many bytes they take."""
        data: list[bytes] = []
        begins: list[int] = []
        at, end, header_bytes = 0, len(held), _HEADER.size
        unpack = _HEADER.unpack_from
        while at + header_bytes <= end:
            (length, _) = unpack(held, at)
            behind = at + header_bytes + length + _FOOTER_BYTES
            if behind > end:
                # A length that is damaged must not be waited for.
                if length > _MAX_FRAME_BYTES or not _is_header_right(held[at : at + header_bytes]):
                    self.damage = "the length of a frame is damaged"
                break
            data.append(held[at + header_bytes : behind - _FOOTER_BYTES])
            begins.append(at)
            at = behind
        right = _count_right(held, begins, data)
        if right < len(data):
            self.damage = "the checksum of a frame is wrong"
            at = begins[right]
            del data[right:], begins[right:]
        ends = [*begins[1:], at] if data else []
        frames = Frames(data, [self.offset + one for one in ends])
        self.offset += at
        return frames, at


def _is_header_right(header: bytes) -> bool:
    import numpy as np

    rows = np.frombuffer(header[:8], np.uint8).reshape(1, 8)
    return bool(_checksum(rows)[0] == _HEADER.unpack(header)[1])


def _count_right(held: bytes, begins: list[int], data: list[bytes]) -> int:
    """How many frames, from the first on, have the checksums that they say."""
    import numpy as np

    if not data:
        return 0
    whole = np.frombuffer(held, np.uint8)
    starts = np.array(begins, np.int64)
    lengths = np.array([len(one) for one in data], np.int64)
    wrong = _find_wrong(whole, starts, 8)
    for length in np.unique(lengths).tolist():
        if length <= _MAX_CHECKED_BYTES:
            rows = np.flatnonzero(lengths == length)
            wrong[rows] |= _find_wrong(whole, starts[rows] + _HEADER.size, length)
    return int(np.argmax(wrong)) if wrong.any() else len(data)


def _find_wrong(
    whole: NDArray[np.uint8], starts: NDArray[np.int64], length: int
) -> NDArray[np.bool_]:
    """Which of the stretches of one length differ from the checksums behind them."""
    import numpy as np

    rows = whole[starts[:, None] + np.arange(length + 4)]
    said: Any = np.ascontiguousarray(rows[:, length:]).view("<u4")[:, 0]
    return np.asarray(_checksum(rows[:, :length]) != said)


def _checksum(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The masked CRC-32C of each row."""
    import numpy as np

    table = _make_table()
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in np.ascontiguousarray(rows.T):
        crc = table[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
    crc ^= np.uint32(0xFFFFFFFF)
    return np.asarray(((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_MASK))


@cache
def _make_table() -> NDArray[np.uint32]:
    import numpy as np

    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


_MARK = "tfevents"
_SPLITS = re.compile(r"(train|training|val|valid|validation|eval|evaluation|test|dev)([_-]\w+)?")
_HPARAMS_FOLDER = re.compile(r"\d{9,11}(\.\d+)?")
_HEAD_BYTES = 4096
_FIRST_S, _LAST_S = FIRST_US / 1e6, LAST_US / 1e6
_PORTION_FILES = 256


class _Piece(Gathered):
    """What becomes a portion."""

    def __init__(self, from_step: int | None = None) -> None:
        super().__init__(most_files=_PORTION_FILES)
        self.from_step = from_step
        self.end = 0


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
    root = find_place(place)
    try:
        from tensorboard.compat.proto import event_pb2  # noqa: F401
    except ImportError:
        raise ImportFailure(
            'event files require TensorBoard: pip install "quark-tracker[tensorboard]"'
        ) from None
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
            raise ImportFailure(f"{files[0]} contains no events yet")
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
            losses.add("bytes", file.name, "an event is incomplete; import it later", reader.rest)

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
        position = {
            "files": dict(offsets),
            "tags": dict(values.plugins),
            "config": redact_values(dict(values.config)),
            "span": self._span,
        }
        return piece.make_portion(position, piece.from_step)

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
        raise ImportFailure(f"{file} is not an event file") from None
    except OSError as error:
        raise ImportFailure(f"{file} cannot be read: {error.strerror or error}") from error
