"""Brings to a primary store what processes that are gone have left for it, before it is read.

Whoever reads first on the machine of a process that was killed does what `quark sync` would do,
for the primary alone: mirrors may take long, and what waits for them stays in the journal. A
journal that the primary has all of is marked, so that nobody looks into it again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from quark_core.config import settings
from quark_core.delivery.crash_buffer import find_box_path
from quark_core.delivery.crash_buffer_recovery import OpenLane, revive_journals
from quark_core.delivery.journal_folder import JournalFolder, Manifest, find_folders, join_parts
from quark_core.delivery.sending import order_journals
from quark_core.delivery.sync import sync_folder
from quark_core.errors import describe_error
from quark_core.system.process import is_alive, start_thread

_log = logging.getLogger("quark")

_TIMEOUT_S = 5.0
_POLL_S = 0.02
# A reader that stays open spends a fiftieth of its time on looking.
_REST_TIMES = 50
_told: set[Path] = set()


class Takeover:
    """Delivers to a primary store what processes that are gone have left, for one that reads it.

    What cannot be delivered now stays where it is, and is said on the log once.

    Args:
        storage_dir: The storage root.
        specification: How journals ask for the store; those of another one are left alone.
        open_lane: Opens backends.
        run_id: Only what is left of this run, where something is.
        boxes_only: The journals are the store, which lacks only what is in black boxes.
    """

    def __init__(
        self,
        storage_dir: Path,
        specification: str,
        open_lane: OpenLane,
        *,
        run_id: str | None = None,
        boxes_only: bool = False,
    ) -> None:
        self._storage_dir = storage_dir
        self._specification = specification
        self._open_lane = open_lane
        self._run_id = run_id
        self._boxes_only = boxes_only
        self._waiting: dict[Path, str] = {}
        self._at_work = threading.Lock()
        self._next_s = 0.0

    def look(self) -> None:
        """Take over what is left by now, unless this was looked for a moment ago; raises nothing.

        Takes 5 s at most; what is under way then goes on beside the reader.
        """
        if time.monotonic() < self._next_s or not self._at_work.acquire(blocking=False):
            return
        try:
            began_s = time.monotonic()
            self._take_over()
            ended_s = time.monotonic()
            self._next_s = ended_s + _REST_TIMES * (ended_s - began_s)
        finally:
            self._at_work.release()

    def _take_over(self) -> None:
        self._waiting = {}
        try:
            left = self._find()
        except OSError as error:
            _log.debug("the waiting records in %s are unknown: %s", self._storage_dir, error)
            return
        if left:
            deadline = time.monotonic() + _TIMEOUT_S
            thread = start_thread(self._run, args=(left, deadline), name="quark-takeover")
            if thread is None:
                return
            thread.join(_TIMEOUT_S)
        self._tell()

    def _find(self) -> list[tuple[JournalFolder, Manifest]]:
        """The journals that are left, in the order in which they are to be delivered."""
        revive_journals(self._storage_dir)
        names = list(self._list_runs())
        if self._run_id is not None:
            # It may be the run's name, or only the beginning of its id.
            names = [name for name in names if name.startswith(self._run_id)] or names
        return order_journals(self._filter(names))

    def _list_runs(self) -> Iterator[str]:
        """Ids of runs that have journals. There may be many runs that have none."""
        runs = self._storage_dir / ".quark" / "runs"
        for name in _list_names(runs):
            if os.path.isdir(f"{runs}/{name}/journal"):
                yield name
        root = os.environ.get(settings.JOURNAL_DIR, "").strip()
        if root:
            yield from _list_names(Path(root).expanduser())

    def _filter(self, names: Iterable[str]) -> Iterator[JournalFolder]:
        for name in dict.fromkeys(names):
            for folder in join_parts(find_folders(self._storage_dir, name)):
                if not folder.is_stored and self._is_left(folder):
                    yield folder

    def _is_left(self, folder: JournalFolder) -> bool:
        manifest = folder.read_manifest()
        if manifest is None or manifest.generation:
            return False
        if not any(e.primary and e.specification == self._specification for e in manifest.lanes):
            return False
        box = find_box_path(manifest.run_id, manifest.writer_id)
        if self._boxes_only and (box is None or not os.path.lexists(box)):
            return False
        # What was left on another host is for `quark sync`: its black box is there.
        if is_alive(manifest.process) is None or folder.is_written(manifest):
            return False
        if not os.access(folder.path, os.W_OK):
            self._waiting[folder.path] = "this process cannot write to its folder"
            return False
        return True

    def _run(self, left: list[tuple[JournalFolder, Manifest]], deadline: float) -> None:
        """Deliver journals; those that another process is at are waited for."""
        self._waiting.update({folder.path: "it is being delivered" for folder, _ in left})
        while left:
            left = [each for each in left if self._deliver(*each)]
            if not left or time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)

    def _deliver(self, folder: JournalFolder, manifest: Manifest) -> bool:
        """Deliver one journal; whether another process has it, and it may be tried again."""
        try:
            results = sync_folder(folder, manifest, self._open_lane, primary_only=True)
        except Exception as error:  # noqa: BLE001 - who reads must not fail by what was left
            _log.debug("the journal %s is not taken over", folder.path, exc_info=True)
            self._waiting[folder.path] = describe_error(error)
            return False
        unfinished = [each for each in results if each.state in ("held", "waiting")]
        if not unfinished:
            self._waiting.pop(folder.path, None)
            return False
        self._waiting[folder.path] = unfinished[0].reason or "its store does not accept it"
        return unfinished[0].state == "held"

    def _tell(self) -> None:
        """Say once of each journal that it waits."""
        waiting = dict(self._waiting)
        fresh = [path for path in waiting if path not in _told]
        if fresh:
            _told.update(fresh)
            _log.warning(
                "some records of ended processes are not in the store yet: %d journals wait "
                "(%s). To deliver them, run: quark sync %s",
                len(waiting),
                waiting[fresh[0]],
                self._storage_dir,
            )


def _list_names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
