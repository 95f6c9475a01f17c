"""A search by Optuna: what it proposes, what it is told, and where it stops a trial.

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

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from quark.sweeps.definition import SweepDefinition
from quark.sweeps.optuna_journal import EntryJournal, EntryLog
from quark.sweeps.optuna_samplers import Methods
from quark.sweeps.optuna_space import OptunaSpace
from quark.sweeps.search import PATIENCE_S, Proposal
from quark_core.backends.coordination import NewTrial
from quark_core.errors import QuarkError, SessionStoreError
from quark_core.records.sweeps import StoredTrial

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
