"""A disk that takes no more, from any one call on that storing an artifact makes."""

import errno
import os
from pathlib import Path

from quark_core.artifacts import payload_folder
from quark_core.writers import artifact_writing


class FailingDisk:
    """Counts the calls that need room, and fails one of them, or all from there on.

    Attributes:
        calls: Names of the calls since `arm`.
        failed: Those that were made to fail.
        committed: Whether the payload had its name when the first one failed.
    """

    def __init__(self, monkeypatch, root):
        self._root = root
        self._armed = None
        self.arm(None)
        monkeypatch.setattr(payload_folder, "os", Proxy(self, "payload"))
        monkeypatch.setattr(artifact_writing, "os", Proxy(self, "name"))
        for name in ("mkdir", "write_bytes"):
            monkeypatch.setattr(Path, name, self._guard_path(name, getattr(Path, name)))

    def arm(self, place, *, stays_full=False, error=errno.ENOSPC):
        """Fail the call at a place, counted from now; None lets all succeed."""
        self._place, self._stays_full, self._errno = place, stays_full, error
        self.calls, self.failed, self.committed = [], [], False
        self._done = False

    def step(self, name):
        """One call that needs room is about to be made."""
        place = len(self.calls)
        self.calls.append(name)
        if self._place is None or place < self._place:
            return
        if place > self._place and not self._stays_full:
            return
        if not self.failed:
            self.committed = self._done
        self.failed.append(name)
        raise OSError(self._errno, os.strerror(self._errno))

    def note_commit(self):
        self._done = True

    def _guard_path(self, name, real):
        def guarded(path, *arguments, **options):
            inside = path.is_relative_to(self._root) and "artifacts" in path.parts
            if inside and not (name == "mkdir" and path.is_dir()):
                self.step(name)
            return real(path, *arguments, **options)

        return guarded


class Proxy:
    """Stands for the module `os` in one module."""

    def __init__(self, disk, where):
        self._disk, self._where = disk, where

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, *arguments):
        self._disk.step(f"{self._where} open")
        return os.open(path, *arguments)

    def write(self, descriptor, data):
        self._disk.step(f"{self._where} write")
        # As a disk does that has little room left.
        return os.write(descriptor, data[:700_000])

    def fsync(self, descriptor):
        self._disk.step(f"{self._where} fsync")
        os.fsync(descriptor)

    def close(self, descriptor):
        os.close(descriptor)
        self._disk.step(f"{self._where} close")

    def replace(self, source, target):
        self._disk.step(f"{self._where} replace")
        os.replace(source, target)
        if self._where == "payload":
            self._disk.note_commit()

    def symlink(self, source, target):
        self._disk.step(f"{self._where} symlink")
        os.symlink(source, target)
