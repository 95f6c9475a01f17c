"""Runs as their store knows them, and notes of what this machine knows of them.

There is a note for each run whose store lies across a network, in
`storage_dir/.quark/known_runs`: enough to take the run up again while its
store is out of reach. A note is believed only of a run at the same place
(`KnownRun.is_at`), and nobody must keep it: without one a resumption needs the
store, as that of a run of another machine does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from quark_core.backends.contract import StoredRun
from quark_core.errors import InvalidRunStateError, SessionStoreError
from quark_core.records import ProjectRecord, RunRecord
from quark_core.records.runs import RunContext
from quark_core.runs.open_run import open_runs
from quark_core.runs.primary_reach import PrimaryReach
from quark_core.runs.run_ids import LEAST_CHARACTERS, find_run, shorten_run_id
from quark_core.system.process import ProcessIdentity, current_process, is_alive
from quark_core.system.terminal_text import clean_line

_log = logging.getLogger("quark")

_KEPT_S = 90 * 86400.0
_MAX_ATTEMPT = 2**31


class KnownRun(msgspec.Struct, frozen=True):
    """A run as the process that led it here last knew it.

    Attributes:
        project: Its project.
        run: Its record, with the status and the attempt of that process.
        process: The process.
    """

    project: ProjectRecord
    run: RunRecord
    process: ProcessIdentity

    def is_at(self, run_path: str) -> bool:
        """Whether it is the run of that id that lies there, as a path or URI."""
        return self.run.run_path == run_path

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended the run, and is alive as far as can be told."""
        return self.run.status == "running" and is_alive(self.process) is True

    def to_stored(self) -> StoredRun:
        """The run as a store would tell of it."""
        state = self.run.status
        if state == "running" and not self.is_running:
            state = "lost"
        return StoredRun(project=self.project, run=self.run, state=state)


def note_run(context: RunContext) -> None:
    """Note a run that this process leads, as it is now; a disk that fails is no error."""
    folder = _find_folder(context.storage_dir)
    known = KnownRun(context.project, context.run, current_process())
    scratch = folder / f".{os.urandom(6).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder)
        try:
            scratch.write_bytes(msgspec.json.encode(known))
            os.replace(scratch, folder / f"{context.run_id}.json")
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        _log.debug("run %s is not noted on this machine: %s", context.run_id, error)


def find_known_run(storage_dir: Path, run_id: str) -> KnownRun | None:
    """What is noted here of a run, at whatever place; None where there is nothing."""
    try:
        data = (_find_folder(storage_dir) / f"{run_id}.json").read_bytes()
        known = msgspec.json.decode(data, type=KnownRun)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _log.debug("what is noted of run %s cannot be read: %s", run_id, error)
        return None
    is_good = known.run.id == run_id and 0 <= known.run.attempt < _MAX_ATTEMPT
    return known if is_good else None


def complete_known_id(storage_dir: Path, given: str) -> str:
    """The id of the one run noted here that begins so; what was given where there is no one."""
    folder = _find_folder(storage_dir)
    if len(given) < LEAST_CHARACTERS or (folder / f"{given}.json").exists():
        return given
    found = [path.stem for path in folder.glob(f"{given}*.json")]
    return found[0] if len(found) == 1 else given


def _find_folder(storage_dir: Path) -> Path:
    return storage_dir / ".quark" / "known_runs"


def _prune(folder: Path) -> None:
    oldest = time.time() - _KEPT_S
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()


def check_resumable(stored: StoredRun, *, reopen: bool) -> None:
    """Refuse to continue a run that is alive, or completed and not to be reopened.

    Raises:
        InvalidRunStateError: It is one of these.
    """
    run_id = stored.run.id
    if stored.state == "running":
        if open_runs.find(run_id) is not None:
            raise InvalidRunStateError(
                f"run_id {run_id} is alive in this process, so it cannot be resumed: end it first, "
                "by end_run() of its session"
            )
        short = shorten_run_id(run_id or "")
        raise InvalidRunStateError(
            f"run_id {run_id} is alive in another process{_describe_process(stored)}, so it cannot "
            f"be resumed. Wait until it ends, ask it to stop by `quark stop {short}`, or look at "
            f"it meanwhile by `quark follow {short}` or quark.open_run({short!r})"
        )
    if stored.state == "completed" and not reopen:
        raise InvalidRunStateError(
            f"run_id {run_id} is completed, so it cannot be resumed "
            "(reopen=True allows a final evaluation)"
        )


def _describe_process(stored: StoredRun) -> str:
    """Which process has a run, where, since when, as far as its store knows."""
    values = {} if stored.environment is None else stored.environment.values
    process, host = values.get("process"), values.get("host")
    known = []
    if isinstance(process, Mapping) and "pid" in process:
        known.append(f"pid {clean_line(str(process['pid']))}")
    if isinstance(host, Mapping) and host.get("name"):
        known.append(f"on {clean_line(str(host['name']))}")
    parts = [" ".join(known)] if known else []
    if stored.run.attempt == 0:
        parts.append(f"since {_show_time(stored.run.created_at)}")
    if stored.heartbeat_at:
        parts.append(f"last heard of at {_show_time(stored.heartbeat_at)}")
    return f" ({', '.join(parts)})" if parts else ""


def _show_time(moment: str) -> str:
    return f"{clean_line(moment[:19]).replace('T', ' ')} UTC"


def find_parent(
    reach: PrimaryReach, parent_run_id: str, argument: str = "parent_run_id"
) -> StoredRun:
    """The run that another one descends from.

    Raises:
        RunNotFoundError: The store has no such run.
        SessionStoreError: It cannot say.
    """
    primary = reach.primary
    if primary is None:
        raise SessionStoreError(f"{argument} {parent_run_id}: this process has no primary store")
    return reach.ask(lambda: find_run(primary, parent_run_id, argument))
