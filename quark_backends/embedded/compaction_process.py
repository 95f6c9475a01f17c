"""The process that compacts a store for those who cannot: they log too fast, or have ended.

A loop that logs without a pause leaves too little of its interpreter to
compaction, and a run may end, or be killed, with more of it left than its end
may wait for. Then a process of its own does it, with low priority: started by
whoever writes, at the end of a run, or by whoever reads what was left. One at
a time works at a store, and while it does nobody else compacts there. It ends
by itself; where it is killed, the next one goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from quark_core.config import settings
from quark_core.delivery.delivery_state import Lease
from quark_core.system.process import importing

if TYPE_CHECKING:
    from quark_backends.store.databases.connection import StoreConnection
    from quark_backends.store.databases.layout import StoreLayout
    from quark_backends.store.upkeep.compaction import Compactor, Work

_log = logging.getLogger("quark")

LEASE = "compaction.lease"
"""The file in the store's folder that says which process compacts it."""

# It has its lease by then, or never will.
_STARTING_S = 5.0
# Where one ends at once, because its store is full or gone, not every reader starts another.
_AGAIN_AFTER_S = 60.0
# How long it waits for more, where runs are being written.
_IDLE_S = 10.0
# How long the end of a run may take whose journal is to be indexed.
_CLOSING_S = 30.0
_POLL_S = 0.2
_TRIES = 5
_BETWEEN_TRIES_S = 2.0
# What a session of its own is on Windows.
_NEW_GROUP = int(getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0))

# By the store's folder and by process.
_started_at: dict[Path, float] = {}
_started: dict[int, Path] = {}


def find_helper(layout: StoreLayout, *, start: bool) -> bool:
    """Whether a process of its own compacts a store now; returns at once and never raises.

    Args:
        layout: The store.
        start: Start one where there is none: not where `QUARK_HELPER_PROCESSES` is 0, where
            this process has started one a moment ago, or where the store cannot be written.
    """
    _reap()
    lease = layout.root / LEASE
    if lease.exists() and not Lease(lease).is_stale():
        return True
    now = time.monotonic()
    age_s = now - _started_at.get(layout.root, -_AGAIN_AFTER_S)
    if age_s < _STARTING_S and layout.root in _started.values():
        return True
    if not start or age_s < _AGAIN_AFTER_S or not settings.uses_helpers() or not sys.executable:
        return False
    if not all(os.access(path, os.W_OK) for path in (layout.root, layout.db_path) if path.exists()):
        return False
    _started_at[layout.root] = now
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    try:
        with importing():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(layout.root.parent)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
                # No folder is kept busy by it, and Ctrl-C in the terminal does not reach it.
                cwd=os.path.abspath(os.sep),
                start_new_session=True,
                creationflags=_NEW_GROUP,
            )
    except (OSError, ValueError) as error:
        _log.debug("the compaction process for %s cannot be started: %s", layout.root, error)
        return False
    _started[process.pid] = layout.root
    # It outlives this process, and nobody waits for it: that must not look like a mistake.
    process.returncode = 0
    return True


def compact_store(layout: StoreLayout, *, idle_s: float = 0.0) -> bool:
    """Compact what is worth it, here and now; whether nothing of it is left.

    Args:
        layout: The store; another process may be at it, which is left to it then.
        idle_s: How long to wait for more where a run is being written.

    Raises:
        SessionStoreError: The store cannot be opened.
        sqlite3.Error: It is busy, full or out of reach; nothing is lost.
    """
    from quark_backends.store.databases.sqlite import connect
    from quark_backends.store.upkeep.background_compaction import LeftWork, find_work
    from quark_backends.store.upkeep.compaction import Compactor

    lease = Lease(layout.root / LEASE)
    if not lease.take():
        return False
    try:
        connection = connect(layout)
        try:
            compactor = Compactor(connection)
            left = LeftWork()
            worked_at = time.monotonic()
            while True:
                lease.beat()
                work = left.leave_out(find_work(compactor))
                for item in work:
                    lease.beat()
                    left.note(item, _compact_one(compactor, item))
                    worked_at = time.monotonic()
                if work:
                    continue
                if time.monotonic() - worked_at >= idle_s or not _is_written(connection):
                    return not left
                time.sleep(_POLL_S)
        finally:
            connection.close()
    finally:
        lease.release()


def _index_journals(layout: StoreLayout, idle_s: float) -> bool:
    from quark_backends.embedded.segment_index_builder import index_root

    lease = Lease(layout.root / LEASE)
    if not lease.take():
        return False
    try:
        index_root(layout.root.parent, lease.beat, idle_s=_CLOSING_S if idle_s else 0.0)
    finally:
        lease.release()
    return True


def _is_written(connection: StoreConnection) -> bool:
    """Whether a run says that it is being written."""
    found = connection.execute("SELECT 1 FROM run WHERE status = 'running' LIMIT 1").fetchone()
    return found is not None


def _compact_one(compactor: Compactor, item: Work) -> bool | None:
    """One turn; whether it did anything, None where it cannot be done."""
    import sqlite3

    try:
        return compactor.compact(item) > 0
    except sqlite3.Error:
        raise
    except Exception:  # noqa: BLE001 - the rest of the store is compacted all the same
        _log.exception("compaction of %s records failed; they stay uncompacted", item.kind)
        return None


def _reap() -> None:
    """Take note of helpers that have ended: the system keeps their entries until then."""
    if not hasattr(os, "WNOHANG"):  # Windows has no such entries
        return
    for pid, root in list(_started.items()):
        status = 1
        with contextlib.suppress(OSError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
        # Another thread that looks at the same moment may have taken it out; one of the two has
        # its status.
        _started.pop(pid, None)
        if status == 0:
            # It did its work, so the next one will.
            _started_at.pop(root, None)


def _forget() -> None:
    """In a forked child: they are the parent's."""
    _started.clear()


def compact_root(storage_dir: Path, *, idle_s: float = 0.0) -> bool:
    """Compact the store under a root, if there is one; whether nothing of it is left.

    On a network file system, where the journals are the store, their indexes are made.
    Returns as well where another process is at it.

    Args:
        storage_dir: The storage root.
        idle_s: As `compact_store`.
    """
    import sqlite3

    from quark_backends.store.databases.layout import find_network_filesystem
    from quark_backends.store.databases.sqlite import find_store
    from quark_core.errors import SessionStoreError

    for _ in range(_TRIES):
        try:
            layout = find_store(storage_dir)
            if layout is None:
                return True
            if find_network_filesystem(storage_dir) is not None:
                return _index_journals(layout, idle_s)
            return not layout.db_path.exists() or compact_store(layout, idle_s=idle_s)
        except sqlite3.OperationalError as error:
            _log.debug("compaction waits: %s", error)
            time.sleep(_BETWEEN_TRIES_S)
        except (SessionStoreError, sqlite3.Error, OSError) as error:
            _log.debug("compaction ends: %s", error)
            return False
    return False


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget)

if __name__ == "__main__":
    from quark_core.hosting.protocol import lower_priority

    lower_priority()
    sys.exit(0 if compact_root(Path(sys.argv[1]), idle_s=_IDLE_S) else 1)
