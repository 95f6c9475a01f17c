"""Files of a delivery worker: its position, its owner, and what it has delivered."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import xxhash

from quark_core.system.folders import decode_foreign, read_plain_file
from quark_core.system.process import ProcessIdentity, current_process, is_alive

# Windows has no fdatasync, and would translate line ends without O_BINARY.
_SYNC = getattr(os, "fdatasync", os.fsync)
_BINARY = getattr(os, "O_BINARY", 0)


def identify_file(descriptor: int) -> tuple[int, int]:
    """Which file a descriptor is of; a number that was closed may come to mean another.

    Raises:
        OSError: It is of none.
    """
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


class Files:
    """Plain appends and whole reads: no lock, no mmap, no O_APPEND, so that NFS and Lustre do."""

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents; one that exists is fine."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Make a file that must not exist, open for writing; returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)

    def identify(self, descriptor: int) -> tuple[int, int]:
        """Which file a descriptor is of."""
        return identify_file(descriptor)

    def locate(self, descriptor: int) -> Path | None:
        """Where an open file lies by now; None where it was deleted, or no system tells."""
        try:
            if not os.fstat(descriptor).st_nlink:
                return None
            return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            return None

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        """Write at the descriptor's place; returns how many bytes were written."""
        return os.write(descriptor, data)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        """Cut a file and put the descriptor's place at its end."""
        os.ftruncate(descriptor, size_bytes)
        os.lseek(descriptor, size_bytes, os.SEEK_SET)

    def sync(self, descriptor: int) -> None:
        """Bring a file's data to the disk."""
        _SYNC(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def read(self, path: Path) -> bytes:
        """All of a regular file."""
        return read_plain_file(path)

    def exists(self, path: Path) -> bool:
        """Whether a file is there."""
        return path.exists()

    def remove(self, path: Path) -> None:
        """Remove a file; one that is gone is fine."""
        path.unlink(missing_ok=True)

    def list_names(self, path: Path) -> list[str]:
        """Names in a directory, sorted; none where it does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []


# What a lane keeps on disk: how far it is, who drives it, and what it has delivered.
#
# The last stays when the run's journals are gone: one line per writer and lane in
# `delivered.jsonl` of the run's directory, made only where a run has mirrors.

LEASE_STALE_S = 60.0
"""A lease of another host is stale after this long without a beat; they come every 10 s."""

# A name of a file has 255, of which some are for what is put behind it.
_MAX_NAME_BYTES = 200
_MARK = struct.Struct("<QQQ")
# A link is not followed, and nobody waits for the reader of a pipe.
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def lane_folder_name(lane: str) -> str:
    """Name of a lane as a file name."""
    kept = "".join(c if c.isalnum() or c in "._-" else "_" for c in lane)
    if kept == lane and kept.strip(".") and len(kept.encode()) <= _MAX_NAME_BYTES:
        return kept
    kept = kept.encode()[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
    return f"{kept}-{xxhash.xxh3_64_hexdigest(lane.encode('utf-8', 'replace'))[:8]}"


class LaneMark:
    """How far a lane is: what was acknowledged, and up to where sending was begun.

    Rewritten in place, with a checksum and without a sync: where it is lost,
    batches are sent again, which a backend that is idempotent does not mind.

    Args:
        path: The mark's file; made at the first change.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._identity: tuple[int, int] | None = None
        self.done = 0
        """Number after the last acknowledged batch."""
        self.begun = 0
        """Number after the last batch whose sending was begun."""
        self._load()

    def _load(self) -> None:
        try:
            data = read_plain_file(self._path)
        except OSError:
            return
        if len(data) == _MARK.size:
            done, begun, checksum = _MARK.unpack(data)
            if checksum == xxhash.xxh3_64_intdigest(data[:16]):
                self.done, self.begun = done, max(done, begun)

    def begin(self, number: int) -> None:
        """Note that batches before a number are about to be sent."""
        self.begun = max(self.begun, number)
        self._save()

    def finish(self, number: int) -> None:
        """Note that batches before a number are done with."""
        self.done = number
        self.begun = max(self.begun, number)
        self._save()

    def close(self) -> None:
        """Give up the file."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                # Other code may have closed it, and the number mean another file by now.
                if identify_file(descriptor) == self._identity:
                    os.close(descriptor)

    def _save(self) -> None:
        head = struct.pack("<QQ", self.done, self.begun)
        data = head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))
        try:
            if self._descriptor is not None and not self._path.exists():
                self.close()  # deleted with its folder: nobody would see what is written there
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                binary = getattr(os, "O_BINARY", 0)
                self._descriptor = os.open(
                    self._path, os.O_WRONLY | os.O_CREAT | binary | _PLAIN, 0o666
                )
                self._identity = identify_file(self._descriptor)
            elif identify_file(self._descriptor) != self._identity:
                self._descriptor = None
                return
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            os.write(self._descriptor, data)
        except OSError:
            # A mark that is behind only costs that batches are sent again.
            self.close()


class _Held(msgspec.Struct, frozen=True):
    process: ProcessIdentity
    token: str


class Lease:
    """Who drives a lane: one process at a time, told by a file that is made exclusively.

    No file locks, which network file systems may lack. A lease is stale when
    its process is gone or, on another host, when its heartbeat has stopped.

    Args:
        path: The lease's file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token: str | None = None

    def take(self) -> bool:
        """Take the lease if it is free or stale; whether it is ours now."""
        if self._token is not None:
            return True
        token = os.urandom(8).hex()
        if not self._make(token):
            stale_token = self._read()[1]
            if not self.is_stale():
                return False
            aside = self._path.with_name(f"{self._path.name}.stale-{token}")
            try:
                # Of several that find it stale, one moves it away.
                os.rename(self._path, aside)
            except OSError:
                return False
            if Lease(aside)._read()[1] != stale_token:
                # Another one was quicker, and this is its new lease: put it back.
                with contextlib.suppress(OSError):
                    os.link(aside, self._path)
                aside.unlink(missing_ok=True)
                return False
            aside.unlink(missing_ok=True)
            if not self._make(token):
                return False
        self._token = token
        return True

    def beat(self) -> None:
        """Say that the holder lives."""
        if self._token is not None:
            try:
                os.utime(self._path)
            except FileNotFoundError:
                # Deleted with its folder; another process that has taken it since keeps it.
                self._make(self._token)
            except OSError:
                return

    def release(self) -> None:
        """Give the lease up, if it is still ours."""
        if self._token is not None:
            if self._read()[1] == self._token:
                self._path.unlink(missing_ok=True)
            self._token = None

    def forget(self) -> None:
        """Drop the lease without touching the file: it is a parent process's."""
        self._token = None

    def is_stale(self) -> bool:
        """Whether nobody drives the lane any more."""
        holder, _ = self._read()
        try:
            age_s = time.time() - self._path.stat().st_mtime
        except OSError:
            return True
        if holder is None:
            # Torn while it was made; the maker would have finished it by now.
            return age_s > 1.0
        alive = is_alive(holder)
        return not alive if alive is not None else age_s > LEASE_STALE_S

    @property
    def is_there(self) -> bool:
        """Whether there is a lease, whoever holds it."""
        return os.path.lexists(self._path)

    @property
    def holder(self) -> ProcessIdentity | None:
        """The process that holds the lease, or None."""
        return self._read()[0]

    def _make(self, token: str) -> bool:
        data = msgspec.json.encode(_Held(current_process(), token))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError:
            return False
        try:
            os.write(descriptor, data)
        except OSError:
            self._path.unlink(missing_ok=True)
            return False
        finally:
            os.close(descriptor)
        return True

    def _read(self) -> tuple[ProcessIdentity | None, str | None]:
        try:
            said = decode_foreign(read_plain_file(self._path), _Held)
        except (OSError, msgspec.DecodeError):
            return None, None
        return said.process, said.token


_log = logging.getLogger("quark")
_NAME = "delivered.jsonl"


class LedgerLine(msgspec.Struct, frozen=True):
    """One writer's stream to one backend, as it ended.

    Attributes:
        writer_id, attempt, rank: The writer.
        lane: Name of the lane.
        specification: How to ask for its backend, without secrets.
        primary: Whether it is the run's primary.
        batches: How many batches were passed to it.
        unknown: Records that it may or may not have.
        begun: Whether this says only that a replay was begun.
    """

    writer_id: str
    attempt: int
    rank: int
    lane: str
    specification: str
    primary: bool = False
    batches: int = 0
    unknown: int = 0
    begun: bool = False


def append_lines(run_path: Path, lines: Iterable[LedgerLine]) -> None:
    """Add lines; where they cannot be written, a log entry is all that is lost."""
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    try:
        run_path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(
            run_path / _NAME,
            os.O_WRONLY
            | os.O_CREAT
            | os.O_APPEND
            | getattr(os, "O_BINARY", 0)
            | getattr(os, "O_NOFOLLOW", 0),
            0o666,
        )
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.debug("the delivery state cannot be saved in %s: %s", run_path, error)


def read_lines(run_path: Path) -> list[LedgerLine]:
    """All lines of a run; a torn one is left out."""
    try:
        data = read_plain_file(run_path / _NAME)
    except OSError:
        return []
    lines = []
    for line in data.splitlines():
        try:
            lines.append(decode_foreign(line, LedgerLine))
        except msgspec.DecodeError:
            continue
    return lines
