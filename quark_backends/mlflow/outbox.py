"""Files that wait for MLflow to accept them, and batches kept exactly as segments among them.

An artifact store may fail while the tracking server takes records, and the
other way round, so files have retries of their own and hold no batch back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import xxhash

from quark_backends.mirror_state import make_file_name, replace_file
from quark_backends.mlflow.client import Missing, Refused
from quark_core.api import BackendUnavailable, Batch, FrameSearch

_SCRATCH = ".part"


class Outbox:
    """A folder that mirrors the part of a run's artifacts which is Quark's.

    Args:
        folder: Below which `outbox` and `uploaded` lie.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "outbox"
        self._marks = folder / "uploaded"
        self._known: dict[str, str] = {}
        # What of it lies nowhere else.
        self._refused: set[str] = set()

    def path_of(self, name: str) -> Path:
        """Where the file of an artifact lies here."""
        return self.root / name

    def put(self, name: str, data: bytes) -> None:
        """Keep an artifact in place of what it was; the same content changes nothing."""
        path = self.path_of(name)
        try:
            if path.read_bytes() == data:
                return
        except FileNotFoundError:
            pass
        replace_file(path, data)

    def put_file(self, name: str, source: Path) -> None:
        """Keep a file that stays as it is; without a copy, where the file system can do so."""
        path = self.path_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        _link_or_copy(source, path)

    def list_waiting(self, chosen: Callable[[str], bool] | None = None) -> list[str]:
        """Those chosen artifacts that MLflow does not have as they are now, sorted."""
        found = ((n, p) for n, p in self._list(self.root) if chosen is None or chosen(n))
        return [name for name, path in found if self._sign(path) != self._load_mark(name)]

    def send(
        self,
        upload: Callable[[Path, str], None],
        refuse: Callable[[str, str], None],
        disposable: Callable[[str], bool],
        chosen: Callable[[str], bool] | None = None,
    ) -> None:
        """Upload what waits.

        Args:
            upload: Puts a file into a folder of the artifacts.
            refuse: Told of an artifact that MLflow will never take, and why.
            disposable: Whether a file that was uploaded is no longer needed here.
            chosen: Which are meant; None is all.

        Raises:
            BackendUnavailable: The artifacts cannot be stored now; the rest waits.
        """
        for name in self.list_waiting(chosen):
            path = self.path_of(name)
            signature = self._sign(path)
            if not signature:
                continue  # another process has brought it there
            try:
                upload(path, os.path.dirname(name))
            except (Refused, Missing, BackendUnavailable) as error:
                if not path.exists():
                    continue  # it did so meanwhile
                if isinstance(error, BackendUnavailable):
                    raise
                refuse(name, str(error))
                self._refused.add(name)
            self._save_mark(name, signature)
            if disposable(name) and self._remove_taken(name, path):
                self._drop_mark(name)

    def clear(self, settled: Callable[[str], bool]) -> None:
        """Remove what MLflow has as it is, and the folders that are empty then.

        Args:
            settled: Whether nobody writes to a file any more.
        """
        for name, path in list(self._list(self.root)):
            if name not in self._refused and settled(name) and self._remove_taken(name, path):
                self._drop_mark(name)
        for root in (self.root, self._marks):
            for folder, *_ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):  # it holds something yet
                    os.rmdir(folder)

    def forget(self) -> None:
        """Nothing of it is in MLflow: the run is another one."""
        shutil.rmtree(self._marks, ignore_errors=True)
        self._known.clear()

    def _remove_taken(self, name: str, path: Path) -> bool:
        """Remove a file that MLflow has as it is; whoever is adding to it now loses nothing."""
        if self._sign(path) != self._load_mark(name):
            return False
        # Set aside first: who adds to it from here on sees that it is gone, see `write_at`.
        aside = path.with_name(f"{path.name}{_SCRATCH}{os.getpid()}-{threading.get_ident()}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(aside)
            if self._sign(aside) != self._load_mark(name):
                aside.rename(path)
                return False
            aside.unlink()
        return True

    def _list(self, root: Path) -> Iterator[tuple[str, Path]]:
        for path in sorted(root.rglob("*")):
            if path.is_file() and _SCRATCH not in path.suffix:
                yield path.relative_to(self.root).as_posix(), path

    @staticmethod
    def _sign(path: Path) -> str:
        """What tells two states of a file apart; "" where there is none."""
        try:
            found = path.stat()
        except FileNotFoundError:
            return ""
        return f"{found.st_size}:{found.st_mtime_ns}"

    def _load_mark(self, name: str) -> str:
        if name not in self._known:
            try:
                self._known[name] = (self._marks / name).read_text()
            except FileNotFoundError:
                self._known[name] = "none"
        return self._known[name]

    def _drop_mark(self, name: str) -> None:
        (self._marks / name).unlink(missing_ok=True)
        self._known.pop(name, None)

    def _save_mark(self, name: str, signature: str) -> None:
        replace_file(self._marks / name, signature.encode())
        self._known[name] = signature


def write_at(path: Path, size_bytes: int, data: bytes) -> bool:
    """Add to a file behind its first bytes, over what a write that was broken off has left.

    Args:
        path: The file; it is made where there is none and nothing comes before.
        size_bytes: How many bytes come before.
        data: What to add.

    Returns:
        False where it is gone, since another mirror of the run has sent and removed it:
        the data belongs into the next file.
    """
    try:
        with path.open("r+b" if size_bytes or path.exists() else "xb") as file:
            file.truncate(size_bytes)
            file.seek(size_bytes)
            file.write(data)
            file.flush()
            return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where that is not possible."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


# Batches in files, as they came: what MLflow has no place for is kept exactly in here.
#
# quark/records/<writer>-0001.qrec    one writer's batches, in order
#
# A file begins with `QREC1` and a newline. A batch is four bytes of length and
# eight of checksum (xxh3, both little-endian), then msgpack of the batch, with the body as
# `quark_core.records.codec` encodes it. Behind a damaged place the next whole batch is
# looked for. A file is added to by the opening of the mirror alone that began it.

_log = logging.getLogger("quark")

SUFFIX = ".qrec"
_MAGIC = b"QREC1\n"
_HEAD = struct.Struct("<IQ")
# A map of eight, `run_id` first.
_PAYLOAD_PATTERN = re.compile(rb"\x88\xa6run_id")
_LIMIT_BYTES = 8 * 1024 * 1024
# Size of a segment that another opening of the mirror has begun: nothing is added to it. Who
# began it may be sending it yet, and what is sent late would take the place of what is newer.
_LEFT_ALONE = -1


class SegmentFiles:
    """The segments of every writer of a run that this process delivers.

    Args:
        folder: Where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, tuple[Path, int, int]] = {}

    def append(self, batch: Batch, first_index: int = 1, *, is_late: bool = False) -> Path | None:
        """Keep a batch; one that is in the newest segment already is left out.

        Args:
            batch: It.
            first_index: Number of the writer's first segment, where none is here.
            is_late: Whether it comes after later ones, and is in none.

        Returns:
            The segment that was closed because it is full, or None.

        Raises:
            OSError: It cannot be written.
        """
        path, size, newest = self._find(batch.writer_id, first_index)
        if batch.number <= newest and not is_late:
            return None
        full = None
        if size >= _LIMIT_BYTES or size < 0:
            full = path
            path, size = _find_free(path, batch.writer_id), 0
        path.parent.mkdir(parents=True, exist_ok=True)
        data = _encode(batch) if size else _MAGIC + _encode(batch)
        while not write_at(path, size, data):
            path = _find_free(path, batch.writer_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            size, data = 0, _MAGIC + _encode(batch)
        self._open[batch.writer_id] = path, size + len(data), max(newest, batch.number)
        return full

    def has(self, writer_id: str) -> bool:
        """Whether anything of a writer is here."""
        return writer_id in self._open or bool(self._list(writer_id))

    def list_older(self, attempt: int) -> list[tuple[Path, str]]:
        """The segments of attempts before one, each with its writer's id."""
        found = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            frame = next(iter(_scan(path.read_bytes()).frames), None)
            if frame is not None and frame.attempt < attempt:
                found.append((path, frame.writer_id))
        return found

    def list_open(self) -> list[Path]:
        """The segments that are appended to by this process."""
        return [path for path, *_ in self._open.values()]

    def _find(self, writer_id: str, first_index: int) -> tuple[Path, int, int]:
        found = self._open.get(writer_id)
        if found is None:
            paths = self._list(writer_id)
            path = paths[-1] if paths else self._folder / name_segment(writer_id, first_index)
            scan = _scan(path.read_bytes() if paths else b"")
            newest = max(scan.numbers(writer_id), default=-1)
            if scan.damaged:
                scan.tell(path)
            found = self._open[writer_id] = path, _LEFT_ALONE if paths else 0, newest
        return found

    def _list(self, writer_id: str) -> list[Path]:
        name = re.compile(re.escape(_stem(writer_id)) + r"-\d{4,}" + re.escape(SUFFIX))
        paths = self._folder.glob(f"*{SUFFIX}")
        return sorted((path for path in paths if name.fullmatch(path.name)), key=_index_of)


def name_segment(writer_id: str, index: int) -> str:
    """File name of a writer's segment; the first is 1."""
    return f"{_stem(writer_id)}-{index:04d}{SUFFIX}"


def _find_free(path: Path, writer_id: str) -> Path:
    """The next segment after one that nobody has begun."""
    index = _index_of(path)
    while True:
        index += 1
        free = path.with_name(name_segment(writer_id, index))
        if not free.exists():
            return free


def read_segment(path: Path, run_id: str) -> Iterator[Batch]:
    """The whole batches of a segment; the log is told what damage has cost.

    Args:
        path: The segment.
        run_id: The run that they are of.

    Raises:
        OSError: It cannot be read.
    """
    scan = _scan(path.read_bytes())
    if scan.damaged:
        scan.tell(path)
    yield from (frame for frame in scan.frames if frame.run_id == run_id)


@dataclass(slots=True)
class _Scan:
    """What a segment holds.

    Attributes:
        frames: Its whole batches.
        damaged: Where there is anything else, and between which of the frames.
    """

    frames: list[Batch] = field(default_factory=list)
    damaged: list[tuple[int, int, int]] = field(default_factory=list)

    def numbers(self, writer_id: str) -> list[int]:
        """Numbers of a writer's batches."""
        return [frame.number for frame in self.frames if frame.writer_id == writer_id]

    def tell(self, path: Path) -> None:
        """Tell the log what damage has cost."""
        for start, end, place in self.damaged:
            before = self.frames[place - 1].number if place else -1
            if place == len(self.frames):
                gone = f"batches from {before + 1} on are missing"
            else:
                after = self.frames[place].number
                gone = f"batches {before + 1} to {after - 1} are missing"
                if after == before + 1:
                    gone = "nothing is missing"
            _log.warning("%s is damaged at bytes %d to %d; %s", path, start, end - 1, gone)


def _scan(data: bytes) -> _Scan:
    scan = _Scan()
    size = len(data)
    view = memoryview(data)

    def claim_end(position: int) -> int | None:
        if position + _HEAD.size > size:
            return None
        end: int = position + _HEAD.size + _HEAD.unpack_from(data, position)[0]
        return end if end <= size else None

    search = FrameSearch(
        data,
        head=_PAYLOAD_PATTERN,
        head_offset=_HEAD.size,
        claim_end=claim_end,
        is_whole=partial(_is_whole, view),
    )
    first = len(_MAGIC) if data.startswith(_MAGIC) else 0
    for start, end, is_frame, is_last in search.split(first):
        frame = _decode(data[start + _HEAD.size : end]) if is_frame else None
        if frame is not None:
            scan.frames.append(frame)
        elif not is_frame and not (is_last and claim_end(start) is None):
            scan.damaged.append((start, end, len(scan.frames)))
    return scan


def _is_whole(view: memoryview, position: int, end: int) -> bool:
    start = position + _HEAD.size
    if end <= start:
        return False
    checksum: int = _HEAD.unpack_from(view, position)[1]
    return checksum == xxhash.xxh3_64_intdigest(view[start:end])


def _decode(payload: bytes) -> Batch | None:
    try:
        return msgspec.msgpack.decode(payload, type=Batch)
    except msgspec.DecodeError:
        return None


def _encode(batch: Batch) -> bytes:
    payload = msgspec.msgpack.encode(batch)
    return _HEAD.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def _stem(writer_id: str) -> str:
    return make_file_name(writer_id)


def _index_of(path: Path | os.PathLike[str]) -> int:
    return int(Path(path).stem.rpartition("-")[2])
