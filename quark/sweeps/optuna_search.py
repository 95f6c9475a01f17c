"""A search by Optuna, whose journal is a log in the store of the sweep.

Optuna's trials and ours are two lists, each of which every worker sees alike. A worker asks Optuna
for a trial and adds it to the sweep under the key `optuna-<its number there>`. Whatever happens to
the worker, then or later, the others find out by comparing the lists:

- a trial of ours that has ended, however it did, is told to Optuna by whoever asks next;
- one that failed, was lost or is suspended, and shall be run again, stays the same trial there;
- a trial of Optuna's that was never added, since its worker died on the way, is added by another
  one after `patience_s`, or sooner where nobody works any more: under the same key, so that both
  may.
"""

from __future__ import annotations

import json
import logging
import math
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Annotated, Any, Protocol

import msgspec
import optuna
from msgspec import Meta
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    json_to_distribution,
)
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from quark.sweeps.definition import PATIENCE_S, Proposal, SweepDefinition
from quark.sweeps.optuna_samplers import Methods, OptunaSpace
from quark_core.backends.coordination import MOST_ENTRIES, AppendedEntries, NewTrial
from quark_core.errors import QuarkError, SessionStoreError
from quark_core.records.sweeps import StoredTrial

# Optuna's journal over a log of the store: what samplers and pruners know is kept beside the runs.
#
# Optuna replays the journal in every process, so all of them see the same trials in the same order.
# A store may be shared with strangers. Nothing of the journal is ever unpickled, and an entry that
# Optuna could not replay is passed over: in every process alike, so that all go on seeing the same.

_log = logging.getLogger("quark")

_TRIES = 3
_PAUSE_S = 0.05
_LONG_ANSWER = 500_000  # characters
_RUNNING, _WAITING = 0, 4  # of `optuna.trial.TrialState`, as entries have them
_PICKLED_PREFIX = "cma:"  # under these names Optuna's CmaEsSampler looks for pickles

_NOTHING = {"op_code": 8, "worker_id": "", "trial_id": -1, "user_attr": {"nothing": 0}}
"""What an entry is read as that cannot be replayed: an attribute of a trial that is never there."""


class EntryLog(Protocol):
    """The two methods of `SupportsCoordination` that a journal needs."""

    def append_entries(
        self, log: str, entries: Sequence[str], *, request_id: str
    ) -> AppendedEntries:
        """Append texts, all of them or none."""

    def read_entries(self, log: str, start: int, *, limit: int = MOST_ENTRIES) -> list[str]:
        """The entries from a number on."""


class EntryJournal(BaseJournalBackend):
    """Keeps Optuna's journal in a log of a store that can coordinate.

    It has no state but what saves questions, so any number of processes and threads have one
    each. What the store refuses is raised as the `SessionStoreError` that it is; a call that got
    no answer is repeated under the same request id, and so never counts twice.

    Args:
        store: The store.
        log: Name of the log.
        reopen: Opens the store anew, where the journal goes to another process as a pickle (which
            Optuna does with its storages); the journal there closes it when it is not needed any
            more. Must itself be something that can be pickled.
    """

    def __init__(
        self, store: EntryLog, log: str, *, reopen: Callable[[], EntryLog] | None = None
    ) -> None:
        self._store = store
        self._log = log
        self._reopen = reopen
        self._request_id: str | None = None
        self._count = 0  # how many entries the log has at least
        self._own: tuple[int, list[str]] | None = None
        self._is_holding = False
        self._has_read = False

    def __getstate__(self) -> tuple[str, Callable[[], EntryLog] | None]:
        if self._reopen is None:
            raise TypeError(
                "this journal uses an open store and cannot reopen it: pass reopen= to pickle it"
            )
        return self._log, self._reopen

    def __setstate__(self, state: tuple[str, Callable[[], EntryLog]]) -> None:
        log, reopen = state
        store = reopen()
        self.__init__(store, log, reopen=reopen)  # type: ignore[misc]
        close = getattr(store, "close", None)
        if close is not None:
            weakref.finalize(self, close)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """What stands in the journal from a number on, in its order."""
        own, self._own = self._own, None
        if own is not None and own[0] == log_number_from:
            # Nothing stood before what has just been appended, so the store need not be asked.
            for text in own[1]:
                yield _read_entry(text)
            return
        if self._is_holding and self._has_read and log_number_from >= self._count:
            return
        start = log_number_from
        while True:
            texts = self._store.read_entries(self._log, start, limit=MOST_ENTRIES)
            start += len(texts)
            for text in texts:
                yield _read_entry(text)
            # A store may answer in parts, when entries are long.
            is_whole = len(texts) < MOST_ENTRIES and sum(map(len, texts)) < _LONG_ANSWER
            if not texts or (is_whole and start >= self._count):
                self._count = max(self._count, start)
                self._has_read = True
                return

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append to the journal, all of it or nothing."""
        if not logs:
            return
        texts = [json.dumps(log, separators=(",", ":")) for log in logs]
        request_id = self._request_id or uuid.uuid4().hex
        for turn in range(_TRIES):
            try:
                appended = self._store.append_entries(self._log, texts, request_id=request_id)
                break
            except SessionStoreError:
                if turn == _TRIES - 1:
                    raise
                time.sleep(_PAUSE_S * (turn + 1) * (0.5 + random.random()))
        self._count = max(self._count, appended.first + appended.count)
        if self._request_id is None:
            self._own = (appended.first, texts)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Within, the store is asked once what is new, and again only for what it has not told.

        Optuna asks at each of its calls, and over a network each question costs.
        """
        self._is_holding, self._has_read = True, False
        try:
            yield
        finally:
            self._is_holding = False

    @contextmanager
    def appending_once(self, request_id: str) -> Iterator[None]:
        """What is appended within has this request id: of several who append it, the first does.

        One call that appends once must stand within, and no other thread may append meanwhile.
        """
        self._request_id = request_id
        try:
            yield
        finally:
            self._request_id = None


class _Operation(msgspec.Struct, tag_field="op_code"):
    worker_id: str


_Number = Annotated[int, Meta(ge=0)]
_State = Annotated[int, Meta(ge=0, le=4)]
_OneItem = Annotated[dict[str, Any], Meta(min_length=1, max_length=1)]
_SOME_TIME = "2000-01-01"


class _CreateStudy(_Operation, tag=0):
    study_name: str
    directions: list[Annotated[int, Meta(ge=0, le=2)]]


class _DeleteStudy(_Operation, tag=1):
    study_id: _Number


class _StudyUserAttribute(_Operation, tag=2):
    study_id: _Number
    user_attr: _OneItem


class _StudySystemAttribute(_Operation, tag=3):
    study_id: _Number
    system_attr: _OneItem


class _CreateTrial(_Operation, tag=4):
    study_id: _Number
    datetime_start: str | None
    datetime_complete: str = _SOME_TIME
    state: _State = 0
    value: int | float | None = None
    values: list[int | float] | None = None
    distributions: dict[str, str] = {}
    params: dict[str, int | float] = {}
    user_attrs: dict[str, Any] = {}
    system_attrs: dict[str, Any] = {}
    intermediate_values: dict[int, int | float] = {}


class _Parameter(_Operation, tag=5):
    trial_id: _Number
    param_name: str
    param_value_internal: int | float
    distribution: str


class _StateAndValues(_Operation, tag=6):
    trial_id: _Number
    state: _State
    values: list[int | float] | None
    datetime_start: str = _SOME_TIME
    datetime_complete: str = _SOME_TIME


class _IntermediateValue(_Operation, tag=7):
    trial_id: _Number
    step: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    intermediate_value: int | float


class _TrialUserAttribute(_Operation, tag=8):
    trial_id: _Number
    user_attr: _OneItem


class _TrialSystemAttribute(_Operation, tag=9):
    trial_id: _Number
    system_attr: _OneItem


_ANY_OPERATION = (
    _CreateStudy
    | _DeleteStudy
    | _StudyUserAttribute
    | _StudySystemAttribute
    | _CreateTrial
    | _Parameter
    | _StateAndValues
    | _IntermediateValue
    | _TrialUserAttribute
    | _TrialSystemAttribute
)


def _read_entry(text: str) -> dict[str, Any]:
    """One entry as Optuna is given it; what it could not replay is an entry that does nothing."""
    try:
        entry: dict[str, Any] = json.loads(text)
        _check_operation(msgspec.convert(entry, _ANY_OPERATION, str_keys=True), entry)
    except Exception:  # noqa: BLE001 - whatever is wrong with it, and in whatever part of Optuna
        _log.debug("an entry of a sweep's journal is ignored: %.200r", text)
        return _NOTHING
    return entry


def _check_operation(operation: _Operation, entry: dict[str, Any]) -> None:
    """Raise whatever Optuna would raise that replays an operation."""
    if isinstance(operation, _CreateTrial):
        _check_new_trial(operation)
    elif isinstance(operation, _Parameter):
        found = json_to_distribution(operation.distribution)
        _check_value(found, operation.param_value_internal)
    elif isinstance(operation, _StateAndValues):
        if operation.state == _RUNNING:
            datetime.fromisoformat(entry["datetime_start"])
        elif operation.state != _WAITING:
            datetime.fromisoformat(entry["datetime_complete"])
    elif isinstance(operation, _TrialSystemAttribute):
        _refuse_pickles(operation.system_attr)


def _check_new_trial(operation: _CreateTrial) -> None:
    if operation.value is not None and operation.values is not None:
        raise ValueError("a trial has value or values")
    for time_text in (operation.datetime_start, operation.datetime_complete):
        if time_text is not None:
            datetime.fromisoformat(time_text)
    found = {name: json_to_distribution(text) for name, text in operation.distributions.items()}
    for name, value in operation.params.items():
        _check_value(found[name], value)
    _refuse_pickles(operation.system_attrs)


def _check_value(distribution: BaseDistribution, value: float) -> None:
    # What is not finite, or too large for a float, no sampler can compute with.
    if not math.isfinite(value):
        raise ValueError("a parameter must be finite")
    distribution.to_external_repr(value)


def _refuse_pickles(attributes: dict[str, Any]) -> None:
    if any(name.startswith(_PICKLED_PREFIX) for name in attributes):
        raise ValueError("a pickle from another process may be unsafe")


_IDLE_PATIENCE_S = 2.0

_NUMBER = "optuna"  # in the origin of a trial of ours: its number there
_ADDED = "quark:trial"  # in an attribute of Optuna's: number of a trial that a user has added
_SURPLUS = "quark:surplus"
_EXHAUSTED = "quark:exhausted"
_TALKATIVE = ("optuna.storages.journal._storage", "optuna.study._tell", "optuna.study.study")


class OptunaSearch:
    """A `Search` by a sampler and a pruner of Optuna.

    Args:
        definition: What the sweep was opened with.
        sweep_id: The sweep; its log `<sweep_id>/optuna` has Optuna's journal.
        store: The store of both.
        methods: The sampler and the pruner.
        patience_s: How long a trial that another worker has asked for may take to be added.
    """

    def __init__(
        self,
        definition: SweepDefinition,
        sweep_id: str,
        store: EntryLog,
        methods: Methods,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._space = OptunaSpace(definition.space)
        self._name = definition.search.name
        self._directions = [
            StudyDirection.MAXIMIZE if goal.mode == "max" else StudyDirection.MINIMIZE
            for goal in definition.goals
        ]
        self._constraints = [str(each) for each in definition.constraints]
        self._limit = definition.trials
        self._methods = methods
        self._sweep_id = sweep_id
        # Hyperband draws a trial's bracket from it: with one seed the same in every store.
        self._study_name = f"seed-{definition.seed}"
        self._journal_of = (store, f"{sweep_id}/optuna")
        self._patience_s = patience_s
        # A report that was not waited for to its end may still go on when the next call comes.
        self._lock = threading.RLock()
        self._first_seen: dict[tuple[str, int], float] = {}
        self._unfit: set[int] = set()
        self._trial_ids: dict[int, int] = {}
        self._opened: tuple[_SweepStudy, JournalStorage, EntryJournal] | None = None

    def propose(self, trials: Sequence[StoredTrial]) -> list[Proposal] | None:
        """As `Search.propose`."""
        with self._guarding():
            named = _name_trials(trials)
            self._tell_ended(named)
            self._add_foreign(trials)
            own = self._list_own()[: self._limit]
            waits = [number for number in own if self._is_waiting(number, named)]
            patience_s = self._patience_s
            if all(trial.is_final for trial in trials):
                patience_s = min(patience_s, _IDLE_PATIENCE_S)
            try:
                for number in waits:
                    if self._lasts(("unnamed", number), patience_s):
                        return [self._propose(self._complete(number))]
                proposal = self._ask(len(own))
            except UpdateFinishedTrialError:
                # This worker was so slow that another one has completed its trial, and ended it.
                return []
            if proposal is None:
                return [] if waits else None
            return [proposal]

    def list_rungs(self, trial: StoredTrial) -> tuple[int, ...] | None:
        """As `Search.list_rungs`."""
        if len(self._directions) > 1 or _read_number(trial) is None:
            return ()
        return self._methods.rungs

    def report(self, trial: StoredTrial, values: tuple[float | None, ...], step: int) -> bool:
        """As `Search.report`."""
        number = _read_number(trial)
        if number is None or len(self._directions) > 1 or not values:
            return False
        value = math.nan if values[0] is None else values[0]
        with self._guarding():
            study, storage, _ = self._open()
            trial_id = self._find_trial_id(number)
            try:
                storage.set_trial_intermediate_value(trial_id, step, value)
                return bool(study.pruner.prune(study, storage.get_trial(trial_id)))
            except UpdateFinishedTrialError:
                return False

    def close(self) -> None:
        """As `Search.close`."""
        self._opened = None

    def _open(self) -> tuple[_SweepStudy, JournalStorage, EntryJournal]:
        if self._opened is None:
            journal = EntryJournal(*self._journal_of)
            storage = JournalStorage(journal)
            if self._study_name not in {study.study_name for study in storage.get_all_studies()}:
                with suppress(DuplicatedStudyError):
                    storage.create_new_study(self._directions, self._study_name)
            study = _SweepStudy(
                study_name=self._study_name,
                storage=storage,
                sampler=self._methods.sampler,
                pruner=self._methods.pruner,
            )
            self._opened = (study, storage, journal)
        return self._opened

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        """Nothing is printed, and what fails inside of Optuna has the name of the sweep."""
        try:
            with self._lock, _quietly():
                _, _, journal = self._open()
                with journal.holding():
                    yield
        except QuarkError:
            raise
        except Exception as error:
            raise SessionStoreError(
                f"sweep {self._sweep_id}: its search by Optuna failed: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _list_own(self) -> list[int]:
        """Numbers of Optuna's trials that are ours or shall be, in the order of the journal.

        Without those of a user, and those that somebody has asked for when there were enough.
        """
        study, _, _ = self._open()
        return [
            trial.number
            for trial in study.get_trials(deepcopy=False)
            if not trial.user_attrs.keys() & {_ADDED, _SURPLUS}
        ]

    def _find_trial_id(self, number: int) -> int:
        if number not in self._trial_ids:
            _, storage, _ = self._open()
            study_id = storage.get_study_id_from_name(self._study_name)
            found = storage.get_trial_id_from_study_id_trial_number(study_id, number)
            self._trial_ids[number] = found
        return self._trial_ids[number]

    def _is_waiting(self, number: int, named: Mapping[int, StoredTrial]) -> bool:
        """Whether one of Optuna's trials is on its way into the sweep, or was lost there."""
        study, _, _ = self._open()
        state = study.get_trials(deepcopy=False)[number].state
        return number not in named and state == TrialState.RUNNING

    def _lasts(self, what: tuple[str, int], patience_s: float) -> bool:
        """Whether something has been so for longer than patience lasts, by this worker's clock."""
        since = self._first_seen.setdefault(what, time.monotonic())
        return time.monotonic() - since >= patience_s

    def _ask(self, count: int) -> Proposal | None:
        """One more trial, or None where there are enough; `count` is how many there were."""
        study, _, _ = self._open()
        if study.is_exhausted() or (self._limit is not None and count >= self._limit):
            return None
        asked = study.ask(self._space.distributions)
        if self._limit is not None and self._list_own().index(asked.number) >= self._limit:
            asked.set_user_attr(_SURPLUS, True)  # others have asked meanwhile
            study.tell(asked.number, state=TrialState.FAIL)
            return None
        return self._propose(asked)

    def _complete(self, number: int) -> optuna.Trial:
        """A trial that another worker has asked for, with what it had not chosen yet."""
        study, _, _ = self._open()
        trial = optuna.Trial(study, self._find_trial_id(number))
        for name, found in self._space.distributions.items():
            if isinstance(found, FloatDistribution):
                trial.suggest_float(name, found.low, found.high, step=found.step, log=found.log)
            elif isinstance(found, IntDistribution):
                trial.suggest_int(name, found.low, found.high, step=found.step, log=found.log)
            elif isinstance(found, CategoricalDistribution):
                trial.suggest_categorical(name, found.choices)
        return trial

    def _propose(self, asked: optuna.Trial) -> Proposal:
        new = NewTrial(
            parameters=self._space.to_parameters(asked.params),
            origin={"source": self._name, _NUMBER: asked.number},
        )
        return Proposal(f"optuna-{asked.number}", [new])

    def _tell_ended(self, named: Mapping[int, StoredTrial]) -> None:
        """Tell Optuna of all trials that have ended and that it does not know of yet."""
        study, _, _ = self._open()
        for known in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            trial = named.get(known.number)
            if trial is None or not trial.is_final:
                continue
            state = self._judge(trial)
            if state is None:
                continue
            with suppress(UpdateFinishedTrialError):  # another worker has told it just now
                self._tell(known, trial, state)

    def _judge(self, trial: StoredTrial) -> TrialState | None:
        """What a trial has become for Optuna; None where its values may still come."""
        if trial.state == "pruned":
            return TrialState.PRUNED
        if trial.state != "completed":
            return TrialState.FAIL
        figures = [*(trial.values or ()), *(trial.constraints or ())]
        wanted = len(self._directions) + len(self._constraints)
        # A figure that is not finite says that the training has failed, whatever it thinks.
        if len(figures) == wanted and all(f is not None and math.isfinite(f) for f in figures):
            return TrialState.COMPLETE
        is_late = self._lasts(("without figures", trial.number), self._patience_s)
        return TrialState.FAIL if is_late or len(figures) == wanted else None

    def _tell(self, known: FrozenTrial, trial: StoredTrial, state: TrialState) -> None:
        study, storage, _ = self._open()
        params = self._space.to_params(trial.parameters)
        if params is None:
            state = TrialState.FAIL
        elif params != known.params:  # two workers have completed it, and the other one was first
            for name, value in params.items():
                found = self._space.distributions[name]
                storage.set_trial_param(known._trial_id, name, found.to_internal_repr(value), found)
        if state == TrialState.COMPLETE:
            handle = optuna.Trial(study, known._trial_id)
            for name, how_far in self._name_constraints(trial).items():
                if name not in handle.constraints:
                    handle.set_constraint(name, how_far)
        values = list(trial.values or ()) if state == TrialState.COMPLETE else None
        is_bare = state == TrialState.PRUNED and not known.intermediate_values
        if is_bare and trial.values and len(self._directions) == 1:
            value = trial.values[0]
            storage.set_trial_intermediate_value(known._trial_id, trial.step or 0, value)
        study.tell(known.number, values, state, skip_if_finished=True)

    def _name_constraints(self, trial: StoredTrial) -> dict[str, float]:
        figures = trial.constraints or ()
        names = self._constraints
        return {
            (names[place] if place < len(names) else str(place)): how_far
            for place, how_far in enumerate(figures)
        }

    def _add_foreign(self, trials: Sequence[StoredTrial]) -> None:
        """Let Optuna know of trials that a user has added, once they have ended."""
        study, _, journal = self._open()
        known = {t.user_attrs.get(_ADDED) for t in study.get_trials(deepcopy=False)}
        for trial in trials:
            is_foreign = _read_number(trial) is None and trial.is_final
            if not is_foreign or trial.number in known or trial.number in self._unfit:
                continue
            state = self._judge(trial)
            params = self._space.to_params(trial.parameters)
            if state is None:
                continue
            if params is None or state == TrialState.FAIL:
                self._unfit.add(trial.number)
                continue
            values = None if trial.values is None else list(trial.values)
            made = optuna.trial.create_trial(
                state=state,
                values=values,
                params=params,
                distributions=self._space.distributions,
                user_attrs={_ADDED: trial.number},
                constraints=self._name_constraints(trial) or None,
            )
            # Where another worker has added it just now, Optuna looks in vain for what it made.
            with journal.appending_once(f"added-{trial.number}"), suppress(AttributeError):
                study.add_trial(made)


class _SweepStudy(Study):
    """A study that ends for all workers where its sampler says that there is nothing more."""

    def stop(self) -> None:
        self.set_user_attr(_EXHAUSTED, True)

    def is_exhausted(self) -> bool:
        return bool(self.user_attrs.get(_EXHAUSTED))


def _name_trials(trials: Sequence[StoredTrial]) -> dict[int, StoredTrial]:
    """Trials of ours by their number in Optuna; of two that name the same, the first."""
    named: dict[int, StoredTrial] = {}
    for trial in trials:
        number = _read_number(trial)
        if number is not None:
            named.setdefault(number, trial)
    return named


def _read_number(trial: StoredTrial) -> int | None:
    number = trial.origin.get(_NUMBER)
    return number if isinstance(number, int) and not isinstance(number, bool) else None


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what Optuna says of each study and trial: Quark says it in its own words."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
