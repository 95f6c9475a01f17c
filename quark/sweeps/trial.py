"""A trial that this process holds, the renewal of its lease, and the watch of its metrics."""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from quark.configuration.setting_origins import note_source
from quark.sweeps.definition import Search, SweepDefinition
from quark.sweeps.rank_agreement import RankAgreement
from quark.sweeps.sweep_store import StoreLink
from quark_core.backends.coordination import SupportsCoordination
from quark_core.config.arguments import describe_argument
from quark_core.config.objective import Objective
from quark_core.config.redaction import redact_text
from quark_core.delivery.channel import MetricKey
from quark_core.errors import InvalidRunStateError, QuarkError, SchemaValidationError, StopRequested
from quark_core.records import ConfigSnapshot, MetricRecord, RunStatus, format_time
from quark_core.records.base import now_us
from quark_core.records.json_object import JsonObject
from quark_core.records.query import find_whole
from quark_core.records.runs import StopRequest
from quark_core.records.sweeps import StoredTrial, TrialClaim, TrialResult, describe_parameters
from quark_core.runs.open_run import OpenRun, RunDraft, RunExtension, open_runs
from quark_core.sessions.session import TrainingSession
from quark_core.writers.scalars import to_float

if TYPE_CHECKING:
    from quark_core.records.sweeps import TrialState

_log = logging.getLogger("quark")

# Heartbeats of a run come every 10 s, which is too seldom for a shorter lease than this.
_BEATS_HOLD_S = 30.0


class LeaseRenewer:
    """Renews a lease from a thread of its own, from the claim until a run does it.

    Args:
        renew: Renews it once; may raise.
        lease_s: How long it holds.

    Attributes:
        has_run: Whether a run's heartbeats hold the trial, so that a long lease needs no more.
    """

    def __init__(self, renew: Callable[[], None], lease_s: float) -> None:
        self.has_run = False
        self._renew = renew
        self._lease_s = lease_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
        if self._thread is not None or self._ended.is_set():
            return
        self._thread = threading.Thread(target=self._keep, name="quark-lease", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None  # none to spare; the lease holds as long as it holds

    def stop(self) -> None:
        """End; does not wait for a renewal that is on its way."""
        self._ended.set()

    def _keep(self) -> None:
        while not self._ended.wait(self._lease_s / 3):
            if self.has_run and self._lease_s >= _BEATS_HOLD_S:
                continue
            try:
                self._renew()
            except QuarkError as error:
                _log.debug("a lease is not renewed: %s", error)
            except Exception:  # noqa: BLE001 - the store may be closing
                _log.debug("a lease is not renewed", exc_info=True)


_MOST_WAITING = 100_000
_MOST_SHAPES = 1_000

# The keys of a row, and of each watched metric in it its index there and its place here.
_Shape: TypeAlias = tuple[tuple[MetricKey, ...], tuple[tuple[int, int], ...]]


class MetricWatch:
    """Keeps the newest value of some metrics, and notes when their first one reaches a rung.

    Noting takes no lock, but at a rung, and makes no system call. Several threads may log; the
    newest value of a metric is the one that came last.

    Args:
        keys: Stored keys of the metrics; the first one is the one that rungs are about.
        rungs: Rising steps; None for each step that is logged.
        on_rung: Called where a rung was reached, by the thread that has logged; or None.

    Attributes:
        newest: The newest value of each metric; None where there is none or it is not finite.
        step: The highest step of any of them, or None.
        waiting: Rungs that were reached and nobody has looked at, with the values there.
    """

    def __init__(
        self,
        keys: Sequence[str],
        rungs: Sequence[int] | None,
        on_rung: Callable[[], None] | None = None,
    ) -> None:
        self.newest: list[float | None] = [None] * len(keys)
        self.step: int | None = None
        self.waiting: deque[tuple[int, tuple[float | None, ...]]] = deque(maxlen=_MOST_WAITING)
        self._places = {key: place for place, key in enumerate(keys)}
        self._shapes: dict[int, _Shape] = {}
        self._rungs = None if rungs is None else deque(rungs)
        self._on_rung = on_rung
        self._reaching = threading.Lock()
        self._next: float = -1 if rungs is None else math.inf
        if self._rungs:
            self._next = self._rungs[0]

    def install(self, run: OpenRun) -> None:
        """See what is logged in this process from now on, by loggers that are made later."""
        channel = run.stream.channel(MetricRecord.KIND)
        channel.append = self.wrap(channel.append)

    def wrap(self, append: Callable[[Any], None]) -> Callable[[Any], None]:
        """What takes an item of the stream, and looks at it behind that."""
        places, note, shapes = self._places, self._note, self._shapes

        def see(item: Any) -> None:
            append(item)
            if type(item) is tuple:
                _, _, step, epoch, keys, values = item
                known = shapes.get(id(keys))
                if known is None or known[0] is not keys:
                    known = self._learn_shape(keys)
                for index, place in known[1]:
                    note(place, values[index], epoch if step is None else step)
            else:
                watched = places.get(item.metric_key)
                if watched is not None:
                    step = item.step
                    note(watched, item.value, item.epoch if step is None else step)

        return see

    def _learn_shape(self, keys: tuple[MetricKey, ...]) -> _Shape:
        """Where metrics stand in rows of these keys; the first one last, as it may reach a rung.

        A logger has one tuple of keys for all rows of a shape. It is kept here, so that no other
        object gets its id.
        """
        found = ((index, self._places.get(key.metric_key)) for index, key in enumerate(keys))
        seen = [(index, place) for index, place in found if place is not None]
        seen.sort(key=itemgetter(1), reverse=True)
        if len(self._shapes) >= _MOST_SHAPES:
            self._shapes.clear()
        shape = self._shapes[id(keys)] = (keys, tuple(seen))
        return shape

    def note(self, values: Sequence[float | None], step: int) -> None:
        """Note values that somebody reports, the first one last: the rung is about all of them."""
        for place in reversed(range(len(values))):
            value = values[place]
            if value is not None:
                self._note(place, value, step)

    def _note(self, place: int, value: float, step: int | None) -> None:
        self.newest[place] = value if math.isfinite(value) else None
        if step is None:
            return
        if self.step is None or step > self.step:
            self.step = step
        if place == 0 and step >= self._next:
            self._reach(step)

    def _reach(self, step: int) -> None:
        values = tuple(self.newest)
        if self._rungs is None:
            self._next = step + 1
            self.waiting.append((step, values))
        else:
            with self._reaching:
                while self._rungs and step >= self._rungs[0]:
                    self.waiting.append((self._rungs.popleft(), values))
                self._next = self._rungs[0] if self._rungs else math.inf
        if self._on_rung is not None:
            self._on_rung()


STOPPED_BY = "quark sweep"
"""Who asks a training to stop, where its sweep does."""

_DECISION_S = 5.0
# How long nobody is asked after a question that had no answer; twice as long each time.
_FIRST_SILENCE_S, _LONGEST_SILENCE_S = 30.0, 600.0
_told_missing: set[str] = set()
_MOST_REASON = 1_000


class SweepPart(msgspec.Struct, frozen=True):
    """What a trial knows of its sweep.

    Attributes:
        sweep_id, project, name: Which one.
        definition: What it is, as this worker has it.
        link: Its store.
        search: What decides at rungs; None where nobody does.
    """

    sweep_id: str
    project: str
    name: str
    definition: SweepDefinition
    link: StoreLink
    search: Search | None = None

    @property
    def group(self) -> str:
        """Path of the group that its runs are in."""
        parts = (part.strip() for part in self.name.split("/"))
        return "/".join(("sweeps", *(part for part in parts if part)))


current_trial: ContextVar[Trial | None] = ContextVar("quark_current_trial", default=None)
"""The trial that a loop over a sweep works at here, or None; the first run that begins is its."""


class Trial(RunExtension):
    """Trial of a sweep that this process holds.

    Made by a loop over a sweep, by `sweep.claim()`, or by QUARK_TRIAL. `trial["lr"]` is the value
    of a parameter, and `{**trial}` is a dict of all of them. Thread-safe.

    Attributes:
        number: Number of the trial in the sweep, from 0.
        earlier_run_id: ID of a run to continue from, or None. It is the run of the promoted trial
            or of the previous worker. You can load its checkpoint.
    """

    def __init__(
        self,
        sweep: SweepPart,
        stored: StoredTrial,
        *,
        earlier_run_id: str | None = None,
        agreement: RankAgreement | None = None,
    ) -> None:
        self.number = stored.number
        self.earlier_run_id = earlier_run_id or stored.run_id
        self._sweep = sweep
        self._stored = stored
        self._agreement = agreement
        self._lock = threading.RLock()
        self._told: TrialResult | None = None
        self._stop_reason: str | None = None
        self._stop_error: StopRequested | None = None
        self._run: OpenRun | None = None
        self._session: TrainingSession | None = None
        self._has_ended = False
        self._has_settled = False
        self._has_warned = False
        self._silent_s, self._silent_until = 0.0, -math.inf
        definition = sweep.definition
        keys = [goal.key for goal in definition.goals]
        keys += [each.key for each in definition.constraints if each.key not in keys]
        self._keys = keys
        rungs = () if sweep.search is None else sweep.search.list_rungs(stored)
        on_rung = self._meet_rung if definition.stop else None
        self._watch = MetricWatch(keys, rungs, on_rung)
        self._keeper = LeaseRenewer(self._renew, definition.lease_s)

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters by name; a copy."""
        return copy.deepcopy(dict(self._stored.parameters))

    def __getitem__(self, name: str) -> Any:
        try:
            return copy.deepcopy(self._stored.parameters[name])
        except KeyError:
            known = ", ".join(self._stored.parameters)
            raise KeyError(
                f"trial {self.number} has no parameter {name!r}. Its parameters are {known}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored.parameters)

    def __len__(self) -> int:
        return len(self._stored.parameters)

    def keys(self) -> list[str]:
        """Return the names of the parameters, so that `{**trial}` works."""
        return list(self._stored.parameters)

    @property
    def budget(self) -> int | None:
        """Number of steps to train, or None without a budget."""
        found = self._stored.origin.get("budget", self._sweep.definition.budget)
        return found if isinstance(found, int) else None

    @property
    def rung(self) -> int:
        """Number of halvings that the trial survived; 0 in other sweeps."""
        found = self._stored.origin.get("rung", 0)
        return found if isinstance(found, int) else 0

    @property
    def origin(self) -> dict[str, Any]:
        """Origin of the trial, as recorded by the search."""
        return copy.deepcopy(dict(self._stored.origin))

    @property
    def claim(self) -> TrialClaim:
        """Claim that holds the trial."""
        return self._stored.claim

    @property
    def stored(self) -> StoredTrial:
        """Stored state of the trial when it was claimed."""
        return self._stored

    @property
    def sweep_name(self) -> str:
        """Name of the sweep."""
        return self._sweep.name

    @property
    def session(self) -> TrainingSession | None:
        """Session of its run, or None before the run starts."""
        return self._session

    def start_run(self, **arguments: Any) -> TrainingSession:
        """Start the run of the trial.

        The project and store are the sweep's, the run is in the sweep's group, and the parameters
        are added to the config.

        Args:
            **arguments: Arguments of `quark.start_run`.

        Raises:
            InvalidRunStateError: The trial already has a run.
            SchemaValidationError: An argument is invalid. The message names it.
            SessionStoreError: The store cannot be opened.
        """
        if self._run is not None:
            raise InvalidRunStateError(
                f"start_run: trial {self.number} already has run {self._run.context.run_id}"
            )
        arguments.setdefault("project", self._sweep.project)
        before = current_trial.get()
        current_trial.set(self)
        try:
            return TrainingSession.start_run(**arguments)
        finally:
            current_trial.set(before)

    def report(self, values: float | Sequence[float] | Mapping[str, float], *, step: int) -> None:
        """Report intermediate values, if the run does not log the sweep's metrics.

        Args:
            values: Value of the metric. For several metrics, one value each, in order or by name.
            step: Step of the values.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
        """
        if (whole := find_whole(step)) is None or whole < 0:
            raise SchemaValidationError(
                f"step must be a whole number of at least 0, got {describe_argument(step)}"
            )
        found = self._read_values(values, "values")
        self._watch.note(found, whole)

    def should_stop(self) -> bool:
        """Return whether to stop: the sweep stopped the trial, or a user asked for it.

        At a rung the call asks the store, for up to 5 s. If the store does not answer, training
        continues. Between rungs it takes about a microsecond. Call it on all ranks of a launch; all
        ranks stop at the same rung.
        """
        if self._watch.waiting:
            self._decide()
        if self._stop_reason is not None:
            return True
        run = self._run
        return run is not None and run.stop_request is not None

    def complete(self, values: float | Sequence[float] | Mapping[str, float] | None = None) -> None:
        """Mark the trial as completed, with values that differ from the logged ones.

        Takes effect when the run ends, or at once without a run.

        Args:
            values: Values, as in `report`. Defaults to the values that the run logged.

        Raises:
            SchemaValidationError: A value is invalid.
        """
        found = None if values is None else self._read_values(values, "values")
        if found is not None:
            for place, value in enumerate(found):
                if value is not None:
                    self._watch.newest[place] = value
        self._say("completed", None)

    def fail(self, reason: str) -> None:
        """Mark the trial as failed, so that it is not retried.

        Takes effect when the run ends, or at once without a run.

        Args:
            reason: Reason for the failure.
        """
        self._say("failed", reason)

    def suspend(self, reason: str | None = None) -> None:
        """Release the trial so that another worker can continue it.

        Takes effect when the run ends.

        Args:
            reason: Reason for the release, or None.
        """
        self._say("suspended", reason)

    def stop_with(self, state: TrialState, reason: str) -> None:
        """Set the final state, and stop the training at its next logging call.

        Args:
            state: A final state, such as `pruned` or `failed`.
            reason: Reason for the state.
        """
        with self._lock:
            self._say(state, reason)
            self._stop_reason = reason
            run = self._run
            if run is not None and not run.is_over:
                run.halt(self._make_stop(reason))

    # What its run asks of it.

    is_announced = False

    @property
    def storage_dir(self) -> Path:
        """Storage folder of the sweep."""
        return self._sweep.link.storage_dir

    @property
    def objective(self) -> Objective:
        """Objective of the run."""
        goal = self._sweep.definition.goals[0]
        return Objective(goal.metric, "max" if goal.mode == "max" else "min")

    def describe_start(self) -> Mapping[str, Any]:
        """Return the claim, for the record of the run's start."""
        claim = self.claim
        said = {"sweep_id": claim.sweep_id, "number": claim.number, "token": claim.token}
        return {"trial": said}

    def bind(self, draft: RunDraft) -> None:
        """Attach the trial to a run that is starting, unless it has one."""
        if self._run is not None:
            return
        draft.extensions[Trial] = self
        draft.launch_key = self.claim.to_text()
        if draft.storage_dir is None:
            draft.storage_dir = self.storage_dir
        if draft.config is not None:
            draft.config = self._join_config(draft.config)
            draft.objective = draft.objective or self.objective
            draft.groups = tuple(sorted({*draft.groups, self._sweep.group}))

    def _join_config(self, given: ConfigSnapshot) -> ConfigSnapshot:
        """A run's configuration with the parameters; what was given stays as it is."""
        values = dict(given.values)
        added = {}
        for name, value in self._stored.parameters.items():
            found = _find_setting(values, name)
            if found is _MISSING:
                added[name] = value
            elif found != value:
                _log.warning(
                    "trial %d of sweep %s has %s = %r, but the run's config has %r. Use "
"trial[%r] in the config, or remove it from the config",
                    self.number, self._sweep.name, name, value, found, name
                )  # fmt: skip
        source = f"trial {self.number} of {self._sweep.name}"
        if not added:
            return note_source(given, self._stored.parameters, source)
        raw = None if given.raw is None else JsonObject({**given.raw, **added})
        joined = msgspec.structs.replace(given, values=JsonObject({**values, **added}), raw=raw)
        return note_source(joined, self._stored.parameters, source)

    def take(self, session: TrainingSession) -> bool:
        """Attach the trial to a run that has just started in this process.

        Returns:
            Whether problems that a monitor finds stop the run.
        """
        run = session.open_run
        with self._lock:
            self._run, self._session = run, session
            self._keeper.has_run = True
        if run.already_done is not None:
            figures = run.already_done.metrics
            for place, key in enumerate(self._keys):
                figure = figures.get(key)
                self._watch.newest[place] = None if figure is None else figure.last
            return False
        self._watch.install(run)
        return self._sweep.definition.stop_broken and run.leads

    def describe_end(self, run: OpenRun, status: RunStatus) -> Mapping[str, Any]:
        """Return the result, for the record of the run's end."""
        if run is not self._run:
            return {}
        result = self._conclude(status, None if run.ending is None else run.ending.message)
        with self._lock:
            self._told = result
            self._has_ended = True
        return {"trial": msgspec.to_builtins(result)}

    def summarize(self) -> str:
        """Return the result in one line, after the run has ended."""
        result = self._told or self._conclude("completed", None)
        goals = self._sweep.definition.goals
        values = result.values or ()
        figures = ", ".join(
            f"{goal.metric} {value:.4g}" for goal, value in zip(goals, values, strict=False)
        )
        state = "failed" if result.state == "waiting" else result.state
        told = f"trial {self.number} of {self._sweep.name} {state}"
        why = result.reason if state not in ("completed", "failed") else None
        said = "; ".join(each for each in (figures, why) if each)
        parameters = describe_parameters(self._stored.parameters)
        return f"{told}{': ' if said else ''}{said} ({parameters})"

    def catches(self, error: BaseException) -> bool:
        """Return whether an error is the one with which the sweep stops this trial."""
        return error is self._stop_error

    # What its worker does with it.

    def hold(self) -> None:
        """Renew the claim until the trial is settled."""
        self._keeper.start()

    def finish(self) -> None:
        """Settle the trial after its work ended without an exception.

        Raises:
            SessionStoreError: The run cannot be ended.
        """
        session = self.session
        if session is not None and session in open_runs.sessions:
            session.end_run("completed")
        result = self._told or self._conclude("completed", None)
        if result.state == "completed" and self._run is not None:
            self._tell_missing(result)
        self._settle(result)

    def _tell_missing(self, result: TrialResult) -> None:
        """Say once for a sweep that a trial has come to no figure: its best would be None."""
        definition = self._sweep.definition
        wanted = () if result.values is not None else definition.goals
        limits = () if result.constraints is not None else definition.constraints
        newest = dict(zip(self._keys, self._watch.newest, strict=True))
        named = [*((g.metric, g.key) for g in wanted), *((c.metric, c.key) for c in limits)]
        missing = list(dict.fromkeys(metric for metric, key in named if newest[key] is None))
        if not missing or self._sweep.sweep_id in _told_missing:
            return
        _told_missing.add(self._sweep.sweep_id)
        _log.warning(
            "trial %d of sweep %s ended without a metric value, so it cannot be the best: this "
"process has logged no finite value of %s. Log the metric with the name in metric=, "
"return it from the training function, or call trial.complete(value)",
            self.number, self._sweep.name, ", ".join(map(repr, missing))
        )  # fmt: skip

    def end_failed(self, error: Exception) -> None:
        """Mark the trial as failed, unless its run has done so."""
        if self._told is None and (self._run is None or not self._has_ended):
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            session = self.session
            if session is not None and session in open_runs.sessions:
                session.log_error(error, "failed")
                session.end_run("failed")
            else:
                self._told = TrialResult(state="waiting", reason=self._clean(said))

    def release(self, reason: str, *, state: TrialState = "suspended") -> None:
        """Release an unsettled trial; does not raise.

        Args:
            reason: Reason for the release.
            state: `suspended`, or `waiting` if the release counts as a failure.
        """
        if self._sweep.link.is_forked:
            return  # its parent's, which goes on with it
        result = self._told
        if result is None:
            result = TrialResult(state=state, reason=self._clean(reason))
        try:
            if self._run is None or self._has_ended:
                self._settle(result, is_patient=False)
            else:
                self._keeper.stop()
        except QuarkError as error:
            _log.warning("trial %d of sweep %s was not released (%s). Its lease ends in %g s",
                         self.number, self._sweep.name, error,
                         self._sweep.definition.lease_s)  # fmt: skip

    def take_result(self, returned: object) -> None:
        """Use the return value of a training function as the trial's values.

        Raises:
            SchemaValidationError: The value is neither None nor numbers.
        """
        if returned is None:
            return
        found = self._read_values(returned, "the return value of the training function")
        for place, value in enumerate(found):
            self._watch.newest[place] = value
        if self._told is not None and self._told.state == "completed":
            said = self._conclude("completed", None)
            self._told = msgspec.structs.replace(
                self._told, values=said.values, constraints=said.constraints
            )

    def __repr__(self) -> str:
        told = describe_parameters(self._stored.parameters)
        return f"Trial({self.number} of {self._sweep.name!r}, {told})"

    def _settle(self, result: TrialResult, *, is_patient: bool = True) -> None:
        if self._agreement is not None and not self._agreement.leads:
            self._keeper.stop()
            return
        with self._lock:
            if self._has_settled:
                return
            self._has_settled = True
        self._keeper.stop()
        if not is_patient:
            # Whoever leaves, perhaps by Ctrl-C, waits for no store: the lease ends by itself.
            self._settle_in(self._sweep.link.store, result)
            return
        self._sweep.link.insist(
            lambda store: self._settle_in(store, result),
            f"trial {self.number} of sweep {self._sweep.name}",
        )

    def _settle_in(self, store: SupportsCoordination, result: TrialResult) -> None:
        claim, lease_s = self.claim, self._sweep.definition.lease_s
        if self._run is not None and self._run.already_done is None:
            # Its run has said it, unless it lives in another store, or its records are on the way.
            found = store.list_trials(claim.sweep_id, start=claim.number, limit=1)
            known = found[0] if found else None
            if known is None or known.token != claim.token:
                return
            lacks = known.state == "completed" and known.values is None
            if known.state != "running" and not (lacks and result.values is not None):
                return
        store.settle_trial(claim.sweep_id, claim.number, claim.token, result, lease_s=lease_s)

    def _say(self, state: TrialState, reason: str | None) -> None:
        with self._lock:
            self._told = TrialResult(state=state, reason=self._clean(reason))
            open_here = self._run is not None and not self._has_ended
        if not open_here:
            self._settle(self._conclude("completed", None))

    def _conclude(self, status: RunStatus, error: str | None) -> TrialResult:
        """What has become of it, by what was said, or else by how its run ends."""
        told, stopped = self._told, self._stop_reason
        run = self._run
        request = None if run is None else run.stop_request
        state: TrialState
        if told is not None:
            state, reason = told.state, told.reason
        elif stopped is not None:
            state, reason = "pruned", stopped
        elif request is not None:
            state, reason = "pruned", self._clean(request.describe())
        elif status == "completed":
            state, reason = "completed", None
        elif status == "failed":
            state, reason = "waiting", self._clean(error or "its run failed")
        else:
            state, reason = "suspended", self._clean(error)
        values, constraints = self._measure()
        return TrialResult(
            state=state,
            values=values,
            constraints=constraints,
            step=self._watch.step,
            reason=reason,
        )

    def _measure(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """Figures and broken constraints, each where all of them are known."""
        definition = self._sweep.definition
        newest = dict(zip(self._keys, self._watch.newest, strict=True))
        values = [newest[goal.key] for goal in definition.goals]
        limits = [(each, newest[each.key]) for each in definition.constraints]
        known = tuple(value for value in values if value is not None)
        broken = tuple(each.measure(value) for each, value in limits if value is not None)
        return (
            known if len(known) == len(values) else None,
            broken if limits and len(broken) == len(limits) else None,
        )

    def _meet_rung(self) -> None:
        """Ask at a rung, in the call that has logged it, and end the training there if told to."""
        self._decide()
        reason = self._stop_reason
        run = self._run
        if reason is not None and run is not None and self._stop_error is None:
            raise self._make_stop(reason)

    def _make_stop(self, reason: str) -> StopRequested:
        request = StopRequest("", STOPPED_BY, format_time(now_us()), reason)
        self._stop_error = StopRequested(
            f"sweep {self._sweep.name} ends trial {self.number}: {reason}", request
        )
        return self._stop_error

    def _decide(self) -> None:
        """Say what rungs were reached, and learn whether it shall stop there."""
        agreement = self._agreement
        while self._stop_reason is None:
            try:
                step, values = self._watch.waiting.popleft()
            except IndexError:  # none is left, or another thread has taken it
                return
            if agreement is None:
                stops = self._ask(step, values)
            elif agreement.leads:
                stops = agreement.announce(step, stops=self._ask(step, values))
            else:
                stops = agreement.wait_for(step)
            if stops:
                self._stop_reason = f"not among the best at step {step}"

    def _ask(self, step: int, values: tuple[float | None, ...]) -> bool:
        """What the search says at a rung; it is not waited for beyond a few seconds."""
        search = self._sweep.search
        if search is None or self._sweep.link.is_forked:
            return False
        if time.monotonic() < self._silent_until:
            return False  # a store that is out of reach must not cost so much at each rung
        goals = len(self._sweep.definition.goals)
        answers: list[bool] = []
        failed: list[Exception] = []

        def work() -> None:
            try:
                answers.append(bool(search.report(self._stored, values[:goals], step)))
            except Exception as error:  # noqa: BLE001 - the training goes on
                failed.append(error)
                answers.append(False)
                self._warn(f"no decision at step {step}: {error}")

        thread = threading.Thread(target=work, name="quark-rung", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        thread.join(_DECISION_S)
        if not answers or failed:
            self._silent_s = min(max(self._silent_s * 2, _FIRST_SILENCE_S), _LONGEST_SILENCE_S)
            self._silent_until = time.monotonic() + self._silent_s
        else:
            self._silent_s = 0.0
        if not answers:
            self._warn(f"the store has not answered at step {step} within {_DECISION_S:g} s")
        return bool(answers) and answers[0]

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "trial %d of sweep %s is running: %s",
                self.number,
                self._sweep.name,
                redact_text(text),
            )

    def _renew(self) -> None:
        claim = self.claim
        store: SupportsCoordination = self._sweep.link.store
        store.settle_trial(
            claim.sweep_id,
            claim.number,
            claim.token,
            None,
            lease_s=self._sweep.definition.lease_s,
        )

    def _read_values(self, given: object, argument: str) -> list[float | None]:
        """Figures of the metrics in their order; None of what is not finite or not given.

        Raises:
            SchemaValidationError: No figures, or not as many as there are metrics.
        """
        goals = self._sweep.definition.goals
        if isinstance(given, Mapping):
            names = [goal.metric for goal in goals]
            missing = [name for name in names if name not in given]
            if missing:
                raise SchemaValidationError(
                    f"{argument} must contain the metrics of the sweep, but lacks {missing[0]!r}"
                )
            constraints = [each.metric for each in self._sweep.definition.constraints]
            wanted = dict.fromkeys([*names, *constraints])
            return [
                _read_figure(given[name], f"{argument}[{name!r}]") if name in given else None
                for name in wanted
            ]
        is_many = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        listed = list(given) if is_many else [given]  # type: ignore[call-overload]
        if len(listed) != len(goals):
            raise SchemaValidationError(
                f"{argument} must be {len(goals)} numbers, one for each metric, got {len(listed)}"
            )
        return [_read_figure(value, argument) for value in listed]

    @staticmethod
    def _clean(reason: str | None) -> str | None:
        return None if reason is None else redact_text(str(reason))[:_MOST_REASON]


_MISSING = object()


def _find_setting(values: Mapping[str, Any], name: str) -> Any:
    """What a configuration has under a parameter's name, which may be a path through it."""
    if name in values:
        return values[name]
    found: Any = values
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _MISSING
        found = found[part]
    return found


def _read_figure(value: object, argument: str) -> float | None:
    number = to_float(value, argument, "trial.report")
    return number if math.isfinite(number) else None
