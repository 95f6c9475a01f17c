"""Makes the SQLite file of an MLflow store: whole, by one process at a time, or not at all.

MLflow makes its tables one after the other in the file itself. Two runs that start at once
collide there, and a process that is killed meanwhile leaves a file that no MLflow opens.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quark_backends.mlflow.errors import unavailable

try:
    import fcntl
except ImportError:  # Windows has none: there the first file that is whole stays
    fcntl = None  # type: ignore[assignment]

# Two minutes on a busy machine with one slow disk.
_WAIT_S = 120.0
_LOOK_EVERY_S = 0.1


def make_database(path: Path, make_tables: Callable[[str], object]) -> None:
    """Make the file, unless it is there.

    Args:
        path: The file.
        make_tables: Makes MLflow's tables in a database, given by its tracking URI.

    Raises:
        BackendUnavailable: It cannot be made, or another process is at it for too long.
    """
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(path.parent):
            if not path.exists():
                _make(path, make_tables)
    except OSError as error:
        raise unavailable(f"the MLflow store {path} cannot be made: {error}") from error


def _make(path: Path, make_tables: Callable[[str], object]) -> None:
    prefix = f".{path.name}.new-"
    for left in path.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        make_tables(f"sqlite:///{(folder / 'store.db').absolute()}")
        # MLflow holds that file open for as long as the process lives.
        whole = folder / "whole.db"
        shutil.copyfile(folder / "store.db", whole)
        with suppress(FileExistsError):
            _put_in_place(whole, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(whole: Path, path: Path) -> None:
    """Give a file its name, unless another one has it."""
    try:
        os.link(whole, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        os.rename(whole, path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep others out who make a database in a folder; the lock leaves no file behind."""
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise unavailable(
                        f"another process makes an MLflow store in {folder} for {_WAIT_S:g} s"
                    ) from None
                time.sleep(_LOOK_EVERY_S)
            except OSError:  # a file system without locks: the first whole file stays
                break
        yield
    finally:
        os.close(descriptor)
