"""Files on their way to a run's artifacts: kept here until MLflow has them.

An artifact store may fail while the tracking server takes records, and the
other way round, so files have retries of their own and hold no batch back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from quark_backends.mirroring.saved_state import replace_file
from quark_backends.mlflow.errors import Missing, Refused
from quark_core.api import BackendUnavailable

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
