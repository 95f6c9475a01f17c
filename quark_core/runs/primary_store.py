"""The primary store while a run begins: reached within a bound, and asked for known runs."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import xxhash

from quark_core.backends.contract import SupportsPrimary, SupportsRead, SupportsSearch
from quark_core.backends.run_summary import StoredRun
from quark_core.config import settings
from quark_core.config.arguments import (
    EXCHANGED_FIELD,
    REVISION_FIELD,
    UID_FIELD,
    VERSION_FIELD,
    IfExists,
)
from quark_core.config.redaction import redact_text
from quark_core.delivery.delivery_state import Lease
from quark_core.errors import (
    InvalidRunStateError,
    QuarkError,
    SchemaValidationError,
    SessionStoreError,
    StoreUnauthorizedError,
    StoreUnavailableError,
)
from quark_core.records import ConfigSnapshot, ProjectRecord, RunRecord
from quark_core.records.json_object import JsonObject, flatten_json
from quark_core.records.runs import RunContext, digest_config, is_seed
from quark_core.runs import backend_choice
from quark_core.runs.backend_choice import Plan, remember
from quark_core.runs.open_run import OpenRun, open_runs
from quark_core.runs.run_ids import LEAST_CHARACTERS, find_run, shorten_run_id
from quark_core.system.process import ProcessIdentity, current_process, is_alive, start_thread
from quark_core.system.terminal_text import clean_line

# The primary while a run begins: asked within a bound, or gone without.
#
# All that a start asks of a primary across a network ends with one deadline,
# whatever the network does. What becomes of a start whose primary is out of
# reach then:
#
# a new run                          raises, within 5 s
# a new run, QUARK_OFFLINE=allow     begins within 2 s; a refused key still raises
# a restart                          begins within 2 s, with a refused key too
# strict, or QUARK_REQUIRE_SERVICE   raises, within 5 s
#
# A restart is a later attempt of a launch, or the resumption of a run that this
# machine knows. A run that begins so is journaled, and delivered like after any
# outage.

T = TypeVar("T")

_log = logging.getLogger("quark")

# Within 5 s and 2 s, with what a start does besides and what it takes back where it fails.
_FIRST_S = 4.0
_RESTART_S = 1.3
# Nothing is asked for, and so it takes no time, but for a machine that is busy elsewhere.
_UNASKED_S = 0.5
_GRACE_S = 0.1
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class StartPolicy:
    """What a start does where its primary is out of reach.

    Attributes:
        goes_without: Whether it begins all the same.
        goes_unauthorized: Whether it does so where its key is refused.
        advice: What the error says besides where it does not.
        joins: Whether another process begins the run: then nothing that the primary
            cannot be opened for is an error, and the lane tries again.
    """

    goes_without: bool
    goes_unauthorized: bool
    advice: str = ""
    joins: bool = False


ATTACHING = StartPolicy(True, True)
"""Of a process that takes part in a run which another one holds open."""

JOINING = StartPolicy(True, True, joins=True)
"""Of a process that joins a run: it must not fail where the one that leads it trains."""


def choose_policy(*, restarts: bool, strict: bool = False) -> StartPolicy:
    """The policy of a start.

    Args:
        restarts: Whether the run has begun before.
        strict: Whether the run is to fail with its primary.

    Raises:
        SchemaValidationError: QUARK_OFFLINE is no good.
    """
    wanted = settings.allows_offline() or restarts
    if settings.requires_service():
        return StartPolicy(False, False, f"; {settings.REQUIRE_SERVICE} is set")
    if strict:
        return StartPolicy(False, False, ". With strict_mode=True, a run does not start without it")
    if not wanted:
        return StartPolicy(False, False, f". To start runs offline, set {settings.OFFLINE}=allow")
    return StartPolicy(True, restarts)


class PrimaryReach:
    """The primary of a plan while a run begins, on the thread that begins it.

    A primary that nobody has taken over when its context is left is closed.

    Args:
        plan: The backends; where they have no primary, there is nothing to reach.
        root: The storage root.
        policy: What to do where it is out of reach.
        read_only: Whether nothing is to be written yet.
        began_s: When the start began, on the clock of `time.monotonic`; now by default.

    Attributes:
        outage: Why the run begins without the primary; None while it does not.
        given_s: How long the whole start may wait for it.
        left_writer: Writer of a start that was given up when it was not acknowledged, and
            that the primary may have all the same; or None.

    Raises:
        StoreUnavailableError: It is out of reach, and the policy waits for it.
        SessionStoreError: It cannot be opened.
    """

    def __init__(
        self,
        plan: Plan,
        root: Path,
        policy: StartPolicy,
        *,
        read_only: bool = False,
        began_s: float | None = None,
    ) -> None:
        self.outage: StoreUnavailableError | None = None
        self.left_writer: str | None = None
        self._choice = plan.primary
        self._root = root
        self._policy = policy
        self.given_s = _RESTART_S if policy.goes_without else _FIRST_S
        self.given_s = min(self.given_s, settings.persistence_timeout_s())
        self._deadline = (time.monotonic() if began_s is None else began_s) + self.given_s
        self._primary: SupportsPrimary | None = None
        self._taken: object = None
        # What an earlier attempt has left may be delivered before the stream is opened.
        remember(plan.choices, root)
        self._open(read_only=read_only)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(self._primary)

    def hand_over(self, run: OpenRun) -> None:
        """Leave the primary to a run that was opened with it."""
        self._taken = run.reader

    @property
    def primary(self) -> SupportsPrimary | None:
        """The primary, open; one that is out of reach answers again when it is back."""
        return self._primary

    @property
    def is_remote(self) -> bool:
        """Whether it lies across a network."""
        return self._choice is not None and self._choice.definition.remote

    @property
    def left_s(self) -> float:
        """How long the start may wait for the primary yet."""
        if not self.is_remote:
            return settings.persistence_timeout_s()
        return max(0.0, self._deadline - time.monotonic())

    def open_for_writing(self) -> None:
        """Open for writing what was open for reading.

        Raises:
            SessionStoreError: As the class.
        """
        before = self._primary
        self._open(read_only=False)
        if before is not self._primary:
            self._close(before)

    def load_run(self, run_id: str) -> StoredRun:
        """A run of the primary.

        Raises:
            RunNotFoundError: It has no such run.
            StoreUnavailableError: It is out of reach, as `outage` says from then on.
            SessionStoreError: It cannot say.
        """
        primary = self._primary
        if primary is None:
            raise SessionStoreError(f"run {run_id}: this process has no primary store")
        return self.ask(lambda: primary.load_run(run_id))

    def ask(self, call: Callable[[], T]) -> T:
        """Call the primary, within what is left of the start's time.

        Raises:
            StoreUnavailableError: It is out of reach, as `outage` says from then on.
            Exception: Whatever else it raises.
        """
        if self.outage is not None:
            raise self.outage
        if not self.is_remote:
            return call()
        try:
            return self._bound(call, self.left_s)
        except StoreUnavailableError as error:
            raise self.settle(error) from error.__cause__

    def settle(self, error: StoreUnavailableError) -> StoreUnavailableError:
        """Go on without the primary where that is allowed; returns what to raise where not."""
        policy = self._policy
        refused = isinstance(error, StoreUnauthorizedError)
        if not policy.goes_without or (refused and not policy.goes_unauthorized):
            return error if refused else type(error)(f"{error}{policy.advice}")
        self.outage = error
        self._open(read_only=False)
        return error

    def _open(self, *, read_only: bool) -> None:
        choice = self._choice
        if choice is None:
            return
        config = replace(
            choice.configure(self._root), read_only=read_only, unasked=self.outage is not None
        )

        def open_it() -> SupportsPrimary:
            return backend_choice.open_primary(choice, config, written=not read_only)

        try:
            if self.outage is None:
                self._primary = self.ask(open_it)
            else:
                self._primary = self._bound(open_it, max(_UNASKED_S, self.left_s))
        except Exception as error:
            if self.outage is None and not self._policy.joins:
                raise
            if self.outage is not error:
                _log.warning("the store cannot be opened now: %s", error)

    def _close(self, primary: SupportsPrimary | None) -> None:
        if primary is None or primary is self._taken:
            return
        try:
            self._bound(primary.close, _CLOSE_S)
        except Exception as error:  # noqa: BLE001 - nothing was written, and nothing is lost
            _log.debug("%s could not be closed: %s", self.describe(), error)

    def _bound(self, call: Callable[[], T], timeout_s: float) -> T:
        """Call on a thread of its own, which may hang there without being waited for."""
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:  # noqa: BLE001 - raised by who waits for it
                errors.append(error)

        thread = start_thread(work, name="quark-reach")
        if thread is None:
            return call()
        # A backend whose own time is over now says more than can be said here.
        thread.join(timeout_s + _GRACE_S)
        if results:
            return results[0]
        if errors:
            raise errors[0]
        raise StoreUnavailableError(f"{self.describe()} does not answer within {self.given_s:g} s")

    def describe(self) -> str:
        """Which store it is, for messages; without secrets."""
        choice = self._choice
        place = "" if choice is None else redact_text(choice.specification)
        return f"the primary store {place}"


# Runs as their store knows them, and notes of what this machine knows of them.
#
# There is a note for each run whose store lies across a network, in
# `storage_dir/.quark/known_runs`: enough to take the run up again while its
# store is out of reach. A note is believed only of a run at the same place
# (`KnownRun.is_at`), and nobody must keep it: without one a resumption needs the
# store, as that of a run of another machine does.

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
        _log.debug("run %s could not be noted on this machine: %s", context.run_id, error)


def find_known_run(storage_dir: Path, run_id: str) -> KnownRun | None:
    """What is noted here of a run, at whatever place; None where there is nothing."""
    try:
        data = (_find_folder(storage_dir) / f"{run_id}.json").read_bytes()
        known = msgspec.json.decode(data, type=KnownRun)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _log.debug("the local note about run %s cannot be read: %s", run_id, error)
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
                f"run_id {run_id} is running in this process, so it cannot be resumed. End it "
                "first with end_run() of its session"
            )
        short = shorten_run_id(run_id or "")
        raise InvalidRunStateError(
            f"run_id {run_id} is running in another process{_describe_process(stored)}, so it "
            f"cannot be resumed. Wait until it ends, or stop it with `quark stop {short}`. To "
            f"view it meanwhile, use `quark follow {short}` or quark.open_run({short!r})"
        )
    if stored.state == "completed" and not reopen:
        raise InvalidRunStateError(
            f"run_id {run_id} is completed, so it cannot be resumed. Pass reopen=True to "
            "continue it anyway"
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
        parts.append(f"last heartbeat at {_show_time(stored.heartbeat_at)}")
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


# Earlier runs of a configuration: what `start_run(if_exists=)` asks for, and decides by.
#
# Two runs are of one configuration where the project, the configuration and its seeds are the
# same, and the version where the start names one. What counts is what a run was started with,
# which its field `uid` says, whatever was changed later; of runs that were started without
# `if_exists` it is what they have now. Archived runs do not count, so that archiving
# one is how it is done anew.

_FINISHED = "completed"
_ALIVE = "running"
# How long a start waits for another one of the same configuration on this storage root.
_HOLD_S = 5.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class EarlierRuns:
    """What is to be done where a configuration has been run before.

    Attributes:
        done: The run that has done it, or is doing it now; None where there is work.
        unfinished: The run that is to be continued, or None.
        fields: What a new run has to note of itself: its `uid`, and its `revision`, from 1 on.
    """

    done: StoredRun | None = None
    unfinished: StoredRun | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


def look_back(
    if_exists: IfExists,
    reach: PrimaryReach,
    project: str,
    config: ConfigSnapshot,
    version: str | None,
) -> EarlierRuns | None:
    """What is known of a configuration that is about to be run; None where nobody can say.

    Args:
        if_exists: What is wished.
        reach: The store.
        project: The project.
        config: The configuration.
        version: What the code is called, or None for any.
    """
    primary = reach.primary
    if primary is None:
        return None
    try:
        runs = reach.ask(lambda: _find_runs(primary, project, config, version))
    except QuarkError as error:
        _log.warning(
            "if_exists=%r: the store does not report if this config was run before (%s), so the "
            "run starts",
            if_exists,
            error,
        )
        return None
    return _decide(if_exists, runs, _make_uid(config))


def _find_runs(
    reader: SupportsRead, project: str, config: ConfigSnapshot, version: str | None
) -> list[StoredRun]:
    uid = _make_uid(config)
    return [
        run
        for run in _find_candidates(reader, project, config, uid)
        if run.run.archived_at is None
        and _find_uid(run, version) == uid
        # Its configuration may be this one; what it has of another run is not.
        and EXCHANGED_FIELD not in run.fields
    ]


def _find_candidates(
    reader: SupportsRead, project: str, config: ConfigSnapshot, uid: str
) -> list[StoredRun]:
    """Runs that were started as this one, or have its settings now; newest first."""
    from quark_core.runs.run_search import build_search, find_runs

    if not isinstance(reader, SupportsSearch):
        return list(reader.list_runs(project=project))
    found: dict[str, StoredRun] = {}
    digest = f"'{digest_config(config.values)}'" if config.values else "null"
    for where in (f"config_digest == {digest}", f"field.{UID_FIELD} == '{uid}'"):
        try:
            runs = find_runs(reader, build_search(project=project, where=where))
        except SchemaValidationError:
            continue  # no run has the field
        found.update((run.run_id, run.stored) for run in runs)
    return sorted(
        found.values(), key=lambda run: (run.run.created_at, run.run.id or ""), reverse=True
    )


def _find_uid(run: StoredRun, version: str | None) -> str:
    """What a stored run was started as, as far as a start that names this version looks."""
    if version is not None and run.fields.get(VERSION_FIELD) != version:
        return ""
    noted = run.fields.get(UID_FIELD)
    if isinstance(noted, str):
        return noted
    return _make_uid(run.config or ConfigSnapshot(JsonObject()))


def _make_uid(config: ConfigSnapshot) -> str:
    """A text that is equal for runs of one configuration with the same seeds."""
    seeds = sorted(_list_seeds(config.values))
    said = f"{digest_config(config.values)}\0{seeds!r}"
    return xxhash.xxh3_128_hexdigest(said.encode("utf-8", "replace"))


def _decide(if_exists: IfExists, runs: Sequence[StoredRun], uid: str) -> EarlierRuns:
    """What is to be done, of the runs of one configuration, newest first."""
    numbers = [run.fields.get(REVISION_FIELD) for run in runs]
    known = [number for number in numbers if isinstance(number, int)]
    fields = {UID_FIELD: uid, REVISION_FIELD: max([len(runs), *known]) + 1}
    if if_exists == "again":
        return EarlierRuns(fields=fields)
    for state in (_FINISHED, _ALIVE):
        for run in runs:
            if run.state == state:
                return EarlierRuns(done=run)
    unfinished = runs[0] if runs and if_exists == "resume" else None
    return EarlierRuns(unfinished=unfinished, fields=fields)


def _list_seeds(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Path and value of each seed of a configuration; 1 and 1.0 are one."""
    for path, value in flatten_json(values):
        if is_seed(path):
            whole = isinstance(value, float) and value.is_integer()
            yield path, str(int(value) if whole else value)


@contextlib.contextmanager
def hold_configuration(root: Path, project: str, config: ConfigSnapshot) -> Iterator[None]:
    """Let one start at a time look whether a configuration was run, and begin it.

    It holds among the processes that share a storage root. Who comes second waits until the
    first one has begun, 5 s at most; where there can be no file, nobody waits.
    """
    name = xxhash.xxh3_64_hexdigest(f"{project}\0{_make_uid(config)}".encode("utf-8", "replace"))
    path = root / ".quark" / "launches" / f"{name}.starting"
    lease = Lease(path)
    deadline = time.monotonic() + _HOLD_S
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Where nobody holds it and it cannot be taken, there can be no file.
        while not lease.take() and path.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    except OSError as error:
        _log.debug("concurrent starts of one config are not coordinated: %s", error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lease.release()
