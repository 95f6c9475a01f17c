"""A sweep: opened, and shared by any number of workers as a list of trials."""

from __future__ import annotations

import inspect
import logging
import os
import shlex
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from quark.sweeps.definition import (
    Proposal,
    Search,
    SweepDefinition,
    check_sweep_name,
    choose_best,
    choose_front,
    fill_values,
    find_difference,
)
from quark.sweeps.rank_agreement import GivenTrial, RankAgreement, find_agreement
from quark.sweeps.search_algorithms import choose_search, open_search
from quark.sweeps.sweep_store import StoreLink, close_links
from quark.sweeps.trial import SweepPart, Trial, current_trial
from quark_core.backends.coordination import (
    NewTrial,
    SupportsCoordination,
    TrialWish,
    unknown_trial,
)
from quark_core.config import settings
from quark_core.config.arguments import check_label, resolve_storage_dir
from quark_core.config.redaction import redact_text, redact_values
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records.sweeps import (
    StoredSweep,
    StoredTrial,
    SweepState,
    TrialClaim,
    derive_sweep_key,
    make_sweep_id,
)
from quark_core.runs.run_editing import find_user
from quark_core.runs.run_ids import name_store
from quark_core.search.parser import check_trial_where
from quark_core.sessions.banner import find_store_option, print_line
from quark_core.system.exit_status import call_last
from quark_core.system.process import current_process
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark.analysis.sweep_analysis import Importances, SweepVerdict

_log = logging.getLogger("quark")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_MOST_IDLE_TURNS = 12  # of waiting where no trial runs: some 13 s
_MOST_FIRST_FAILURES = 5
_UNSETTLED = ("waiting", "running", "suspended")

_held: set[Trial] = set()


class Sweep:
    """Sweep as seen by one worker, returned by `quark.sweep`.

    `for trial in sweep:` claims one trial after another until all trials have ended. At the end it
    waits for trials of other workers, because a trial is reassigned if its worker is lost.

    Thread-safe, except that a loop belongs to one thread.
    """

    def __init__(
        self,
        link: StoreLink,
        stored: StoredSweep,
        definition: SweepDefinition,
        given_search: object = None,
    ) -> None:
        self._link = link
        self._stored = stored
        self._definition = definition
        self._given_search = given_search
        self._search: Search | None = None
        call_last(_let_go)

    @property
    def id(self) -> str:
        """ID of the sweep."""
        return self._stored.id

    @property
    def name(self) -> str:
        """Name of the sweep."""
        return self._stored.name

    @property
    def project(self) -> str:
        """Name of its project."""
        return self._stored.project

    @property
    def definition(self) -> SweepDefinition:
        """Definition of the sweep, as this worker has it."""
        return self._definition

    @property
    def store(self) -> SupportsCoordination:
        """Store of the trials.

        Raises:
            SessionStoreError: The store cannot be opened.
        """
        return self._link.store

    @property
    def search(self) -> Search:
        """Search algorithm that proposes trials.

        Raises:
            SchemaValidationError: The definition does not fit the algorithm.
        """
        if self._search is None:
            self._search = open_search(
                self._definition, self.id, self._link.store, self._given_search
            )
        return self._search

    def load(self) -> StoredSweep:
        """Read the stored record of the sweep.

        Raises:
            SessionStoreError: The store cannot be read.
        """
        self._stored = self._link.store.load_sweep(self.id)
        return self._stored

    @property
    def state(self) -> str:
        """`running`, `paused` or `cancelled`; read from the store on each access."""
        return self.load().state

    def trials(self) -> list[StoredTrial]:
        """List all trials in order, with the values of those that have ended.

        Raises:
            SessionStoreError: The store cannot be read.
        """
        link = self._link
        return fill_values(link.primary, link.store.list_trials(self.id), self._definition)

    @property
    def best(self) -> StoredTrial | None:
        """Completed trial with the best value of the first metric, or None.

        Trials that violate a constraint are ignored. After halving, only the trials with the most
        steps count.
        """
        return choose_best(self.trials(), self._definition)

    @property
    def best_trials(self) -> list[StoredTrial]:
        """Completed trials on the Pareto front of all metrics."""
        return choose_front(self.trials(), self._definition)

    @property
    def is_over(self) -> bool:
        """Whether all trials have ended.

        Raises:
            SessionStoreError: The store cannot be read.
        """
        stored = self.load()
        if any(stored.counts.get(state) for state in _UNSETTLED):
            return False
        return stored.state == "cancelled" or self._ask_search() is None

    def importances(self) -> tuple[Importances, ...]:
        """Estimate the importance of each parameter for each metric.

        Raises:
            SessionStoreError: The store cannot be read.
        """
        from quark.analysis.sweep_analysis import measure_importances

        return measure_importances(self.load(), self.trials())

    @property
    def verdicts(self) -> tuple[SweepVerdict, ...]:
        """Verdict per metric: whether the best configuration beats the second one.

        Raises:
            SessionStoreError: The store cannot be read.
        """
        from quark.analysis.sweep_analysis import judge_sweep

        return judge_sweep(self.load(), self.trials(), self._link.primary)

    def pause(self) -> Self:
        """Stop handing out trials; running trials continue."""
        return self._update("paused")

    def resume(self) -> Self:
        """Hand out trials again after a pause.

        Raises:
            SchemaValidationError: The sweep was cancelled.
        """
        return self._update("running")

    def cancel(self) -> Self:
        """Cancel all waiting trials; running trials continue to their end."""
        return self._update("cancelled")

    def add(self, *parameters: Mapping[str, Any]) -> list[StoredTrial]:
        """Add trials with given parameters.

        Args:
            *parameters: One mapping per trial, with a value for each parameter. Values may be
                outside the space: `sweep.add({"lr": 0.1}, {"lr": 0.2})`.

        Raises:
            SchemaValidationError: A value or name is invalid, or the sweep is cancelled.
            SessionStoreError: The store cannot be written.
        """
        names = set(self._definition.space.ranges)
        for place, given in enumerate(parameters):
            if not isinstance(given, Mapping) or set(given) != names:
                raise SchemaValidationError(
                    f"parameters[{place}] must have the names in space, "
                    f"{', '.join(sorted(names))}, got {given!r:.100}"
                )
        trials = [
            NewTrial(parameters=dict(given), origin={"source": "added"}) for given in parameters
        ]
        return self._add_new(trials, f"added-{uuid.uuid4().hex}")

    def retry(self, *numbers: int) -> list[StoredTrial]:
        """Retry broken or failed trials as new trials with the same parameters.

        The new trials have `retry_of` in their `origin`. A trial that is being retried is skipped.

        Args:
            *numbers: Numbers of the trials. Defaults to all broken trials.

        Returns:
            The new trials.

        Raises:
            SchemaValidationError: A trial does not exist, is neither broken nor failed, or is being
                retried, or the sweep is cancelled.
            SessionStoreError: The store cannot be written.
        """
        trials = self.store.list_trials(self.id)
        repeated = {
            of: trial.number
            for trial in trials
            if isinstance(of := trial.origin.get("retry_of"), int)
        }
        if numbers:
            chosen = [
                _find_retryable(trials, number, repeated) for number in dict.fromkeys(numbers)
            ]
        else:
            chosen = [t for t in trials if t.state == "broken" and t.number not in repeated]
        # Each by a call of its own: of several who ask for it at once, the first adds it.
        return [
            added
            for trial in chosen
            for added in self._add_new([_repeat(trial)], f"retry-{trial.number}")
        ]

    def _add_new(self, trials: list[NewTrial], key: str) -> list[StoredTrial]:
        return self._link.insist(
            lambda store: store.add_trials(self.id, trials, key=key), f"sweep {self.name}"
        )

    def claim(self, where: str | None = None, *, number: int | None = None) -> Trial | None:
        """Claim a trial for this worker, or return None if there is none at the moment.

        Does not wait. The claim lasts `lease_s` seconds. Before it expires, start the run with
        `trial.start_run()`, or call `complete`, `fail` or `suspend`.

        Args:
            where: Filter expression for trials, such as `param.lr < 0.01 and failures == 0`.
            number: Number of the trial. Defaults to the next one.

        Raises:
            SchemaValidationError: `where` is malformed, or names an unknown parameter or field. The
                message shows the position.
            SessionStoreError: The store does not answer.
        """
        if where is not None:
            check_trial_where(where, tuple(self._definition.space.ranges))
        wish = None if where is None and number is None else TrialWish(where=where, number=number)
        found = self._claim(wish)
        if found is None and number is None and self._propose():
            found = self._claim(wish)
        return found

    def __iter__(self) -> Iterator[Trial]:
        given = self._find_given()
        if given is not None:
            with _holding(given, keeps=False):
                yield given
            return
        agreement = find_agreement(self._link, self.id)
        if not _follows(agreement):
            _announce(self.project, self.name, self._link.storage_dir)
        while True:
            trial = self._follow(agreement) if _follows(agreement) else self._wait(agreement)
            if trial is None:
                return
            with _holding(trial):
                yield trial

    def run(self, train: Callable[..., Any]) -> StoredTrial | None:
        """Run a function for one trial after another, and return the best trial.

        Args:
            train: Function called as `train(trial)` or `train(trial, session)`. With two
                parameters, the run is started and ended for you. It may return the result if the
                run does not log it: a number, one number per metric, or a mapping of metrics. An
                exception fails the trial, which is retried up to `max_failures` times.
                KeyboardInterrupt ends the loop.

        Returns:
            The best trial, or None.

        Raises:
            Exception: `train` failed in each of this worker's first five trials.
            SessionStoreError: The store was unreachable for ten minutes.
        """
        takes_session = _takes_session(train)
        failures, has_worked = 0, False
        for trial in self:
            try:
                if takes_session:
                    with trial.start_run() as session:
                        trial.take_result(train(trial, session))
                else:
                    trial.take_result(train(trial))
                has_worked = True
            except Exception as error:
                if trial.catches(error):
                    continue
                failures += 1
                trial.end_failed(error)
                if failures >= _MOST_FIRST_FAILURES and not has_worked:
                    raise
                _log.warning(
                    "trial %d of sweep %s has failed: %s: %s",
                    trial.number, self.name, type(error).__name__, error,
                    exc_info=failures == 1,
                )  # fmt: skip
        return self.best

    def close(self) -> None:
        """Close the connection to the store; a later call reopens it."""
        search, self._search = self._search, None
        if search is not None:
            search.close()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        goals = ", ".join(f"{goal.metric} {goal.mode}" for goal in self._definition.goals)
        total = self._definition.trials
        trials = "trials without end" if total is None else f"{total:,} trials"
        search = self._definition.search
        return f"Sweep({self.name!r} of {self.project!r}, {search}, {trials}, {goals})"

    def hold_given(self, number: int, token: int, earlier_run_id: str | None = None) -> Trial:
        """Return a trial that another process has claimed for this one.

        Raises:
            SchemaValidationError: The trial does not exist, or was claimed again since.
            SessionStoreError: The store does not answer.
        """
        stored = self._load_trial(number)
        if stored.token != token:
            raise SchemaValidationError(
                f"trial {number} of sweep {self.name}: claim {token} expired, another worker has it"
            )
        part = self._part()
        try:
            agreement = find_agreement(self._link, self.id)
        except SchemaValidationError as error:
            # Each rank knows the trial all the same; only to stop they would have to agree.
            _log.warning("trial %d is not stopped early: %s", number, error)
            agreement, part = None, msgspec.structs.replace(part, search=None)
        if agreement is not None:
            agreement.join(number, token)
        if earlier_run_id is None:
            earlier_run_id = self._find_parent_run(stored)
        return Trial(part, stored, earlier_run_id=earlier_run_id, agreement=agreement)

    def _part(self) -> SweepPart:
        return SweepPart(
            self.id, self.project, self.name, self._definition, self._link, self.search
        )

    def _update(self, state: SweepState) -> Self:
        self._stored = self._link.store.update_sweep(self.id, state, by=find_user())
        return self

    def _find_given(self) -> Trial | None:
        """The trial of this sweep that QUARK_TRIAL names, or None."""
        return find_given(self.id, self._link.storage_dir)

    def _wait(self, agreement: RankAgreement | None) -> Trial | None:
        """The next trial, on a worker that claims; None where there will be none."""
        trial = self._wait_for_claim(agreement)
        if agreement is not None:
            given = None
            if trial is not None:
                given = GivenTrial(trial.number, trial.claim.token, trial.earlier_run_id)
            agreement.give(given)
        return trial

    def _wait_for_claim(self, agreement: RankAgreement | None) -> Trial | None:
        pause_s, has_told, idle_turns = _FIRST_PAUSE_S, False, 0
        while True:
            trial = self._claim(None, agreement)
            if trial is not None:
                return trial
            stored = self._link.insist(
                lambda store: store.load_sweep(self.id), f"sweep {self.name}"
            )
            if stored.state == "cancelled":
                return None
            if stored.state == "running":
                proposed = self._ask_search()
                if proposed:
                    self._add(proposed)
                    continue
                unsettled = sum(stored.counts.get(state, 0) for state in _UNSETTLED)
                if not unsettled:
                    # Whoever settled the last one may have done so since it was asked. A search
                    # that only waits may know of a trial which another worker is about to add.
                    idle_turns += 1
                    if proposed is None or idle_turns > _MOST_IDLE_TURNS:
                        return None
            if not has_told and pause_s >= _LONGEST_PAUSE_S:
                has_told = True
                self._tell_waiting(stored)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)

    def _tell_waiting(self, stored: StoredSweep) -> None:
        if stored.state == "paused":
            _log.info("sweep %s is paused, so this worker waits", self.name)
            return
        held = stored.counts.get("running", 0)
        _log.info(
            "sweep %s has no free trial; this worker waits for %d claimed ones",
            self.name, held
        )  # fmt: skip

    def _follow(self, agreement: RankAgreement | None) -> Trial | None:
        """The trial that the leading rank of this launch has claimed."""
        assert agreement is not None
        given = agreement.take()
        if given is None:
            return None
        stored = self._link.insist(lambda _: self._load_trial(given.number), f"sweep {self.name}")
        stored = msgspec.structs.replace(stored, token=given.token)
        return Trial(self._part(), stored, earlier_run_id=given.earlier_run_id, agreement=agreement)

    def _claim(
        self, wish: TrialWish | None, agreement: RankAgreement | None = None
    ) -> Trial | None:
        request_id, worker = uuid.uuid4().hex, current_process()
        lease_s = self._definition.lease_s
        stored = self._link.insist(
            lambda store: store.claim_trial(
                self.id, request_id=request_id, worker=worker, lease_s=lease_s, wish=wish
            ),
            f"sweep {self.name}",
        )
        if stored is None:
            return None
        return Trial(
            self._part(),
            stored,
            earlier_run_id=self._find_parent_run(stored),
            agreement=agreement,
        )

    def _find_parent_run(self, stored: StoredTrial) -> str | None:
        """The run of the trial that this one was promoted from, where it has none of its own."""
        parent = stored.origin.get("parent")
        if stored.run_id is not None or not isinstance(parent, int):
            return None
        try:
            return self._load_trial(parent).run_id
        except QuarkError as error:
            _log.debug("the run of trial %s is unknown: %s", parent, error)
            return None

    def _load_trial(self, number: int) -> StoredTrial:
        found = self._link.store.list_trials(self.id, start=number, limit=1)
        if not found or found[0].number != number:
            raise unknown_trial(self.id, number)
        return found[0]

    def _ask_search(self) -> list[Proposal] | None:
        trials = self._link.insist(lambda _: self.trials(), f"sweep {self.name}")
        return self.search.propose(trials)

    def _propose(self) -> bool:
        """Add what the search proposes; whether that was anything."""
        if self.load().state != "running":
            return False
        proposed = self._ask_search()
        if proposed:
            self._add(proposed)
        return bool(proposed)

    def _add(self, proposed: list[Proposal]) -> None:
        for proposal in proposed:
            self._link.insist(partial(self._add_to, proposal), f"sweep {self.name}")

    def _add_to(self, proposal: Proposal, store: SupportsCoordination) -> None:
        store.add_trials(self.id, proposal.trials, key=proposal.key)


@contextmanager
def _holding(trial: Trial, *, keeps: bool = True) -> Iterator[None]:
    """Around the work at a trial: whatever happens in it, the trial is given back or settled."""
    current_trial.set(trial)
    if keeps:
        _held.add(trial)
        trial.hold()
    try:
        yield
    except BaseException:
        # The loop was left: by an exception in its body, or by break.
        trial.release("its worker released it")
        raise
    else:
        trial.finish()
    finally:
        current_trial.set(None)
        _held.discard(trial)


def _announce(project: str, name: str, storage_dir: Path) -> None:
    """Say that this process begins to work at a sweep, and how to look at it.

    Args:
        project: Its project.
        name: What it is called there.
        storage_dir: Its storage root.
    """
    try:
        option = find_store_option(storage_dir)
        command = f"quark sweep show {shlex.quote(clean_line(name))}{option}"
        print_line(f"quark: sweep {clean_line(name)} of {clean_line(project)} — {command}")
    except Exception as error:  # noqa: BLE001 - a line is worth no sweep
        _log.debug("the start of the sweep cannot be shown: %s", error)


def _repeat(trial: StoredTrial) -> NewTrial:
    """A new trial with what an earlier one has tried, as far as it was to go."""
    origin = {"source": "added", "retry_of": trial.number}
    if "budget" in trial.origin:
        origin["budget"] = trial.origin["budget"]
    return NewTrial(parameters=dict(trial.parameters), origin=origin)


def _find_retryable(
    trials: Sequence[StoredTrial], number: object, repeated: Mapping[int, int]
) -> StoredTrial:
    if isinstance(number, bool) or not isinstance(number, int):
        raise SchemaValidationError(f"numbers must contain int, got {number!r:.60}")
    trial = trials[number] if 0 <= number < len(trials) else None
    if trial is None:
        raise SchemaValidationError(
            f"numbers: trial {number} does not exist; the sweep has {len(trials)} trials"
        )
    if trial.state not in ("broken", "failed"):
        raise SchemaValidationError(
            f"numbers: trial {number} is {trial.state}; only broken or failed ones can be retried"
        )
    if number in repeated:
        raise SchemaValidationError(
            f"numbers: trial {number} is already being retried as trial {repeated[number]}"
        )
    return trial


def _follows(agreement: RankAgreement | None) -> bool:
    return agreement is not None and not agreement.leads


def _takes_session(train: Callable[..., Any]) -> bool:
    """Whether a training function wants the session besides the trial."""
    if not callable(train):
        raise SchemaValidationError(f"train must be a function of a trial, not {train!r:.60}")
    try:
        parameters = inspect.signature(train).parameters.values()
    except (TypeError, ValueError):
        return False
    wanted = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        and each.default is each.empty
    ]
    return len(wanted) > 1


if hasattr(os, "register_at_fork"):  # Windows has no fork
    # What a process holds is not its children's to give back.
    os.register_at_fork(after_in_child=_held.clear)


def _let_go() -> None:
    """Give back what this process holds, as it ends; its runs have ended by then."""
    for trial in list(_held):
        trial.release("its process has ended")
    close_links()


_lock = threading.Lock()
_given: dict[str, Trial] = {}


def open_given_trial(text: str, storage_dir: str | Path | None) -> Trial:
    """The trial that a text names; the same object for the same text.

    Args:
        text: As QUARK_TRIAL has it.
        storage_dir: The storage root, where somebody says; else QUARK_SWEEP_STORAGE_DIR, else as
            of any run.

    Raises:
        SchemaValidationError: It names no trial of the store, or one that was claimed again.
        SessionStoreError: The store cannot say.
    """
    claim = TrialClaim.from_text(text, settings.TRIAL)
    with _lock:
        found = _given.get(text)
        if found is None:
            if storage_dir is None:
                storage_dir = os.environ.get(settings.SWEEP_STORAGE_DIR, "").strip() or None
            link = StoreLink(resolve_storage_dir(storage_dir))
            try:
                stored = link.store.load_sweep(claim.sweep_id)
                sweep = Sweep(link, stored, SweepDefinition.build(stored.definition))
                found = _given[text] = sweep.hold_given(claim.number, claim.token)
            except BaseException:
                link.close()
                raise
        return found


def find_given(sweep_id: str, storage_dir: Path) -> Trial | None:
    """The trial of a sweep that QUARK_TRIAL names, or None.

    Raises:
        SchemaValidationError, SessionStoreError: As of `open_given_trial`.
    """
    text = os.environ.get(settings.TRIAL, "").strip()
    if not text or TrialClaim.from_text(text, settings.TRIAL).sweep_id != sweep_id:
        return None
    return open_given_trial(text, storage_dir)


def sweep(
    name: str,
    *,
    project: str | None = None,
    space: Mapping[str, Any] | None = None,
    metric: str | Sequence[str] | None = None,
    mode: str | Sequence[str] | None = None,
    search: object = None,
    trials: int | None = None,
    budget: int | None = None,
    constraints: str | Sequence[str] | None = None,
    max_failures: int = 3,
    stop: bool = False,
    stop_broken: bool = False,
    seed: int = 0,
    lease_s: float | None = None,
    storage_dir: str | Path | None = None,
) -> Sweep:
    """Create a sweep, or join an existing one.

    Any number of processes and machines can work on a sweep. The first call creates the sweep.
    Later calls with the same project and name join it. Without `space`, the call joins an existing
    sweep.

    Args:
        name: Name of the sweep. Its runs are in the group `sweeps/<name>`.
        project: Name of the project. Optional if the sweep's name is unique.
        space: Parameter -> `quark.uniform(…)`, `quark.integers(…)`, a list of values, or a
            constant.
        metric: Name of the logged metric to optimize, or a list of several.
        mode: "min" or "max", or one per metric.
        search: "random", "grid", "halving" or "asha", with options as in "halving(rate=0.3,
            least=3)". With Optuna: "tpe", "hyperband", "cmaes", a sampler, or a sampler and a
            pruner. Defaults to "random".
        trials: Number of trials. Defaults to all for a grid, else unlimited. It can be raised
            later, except for halving.
        budget: Steps of one complete trial, for searches that stop trials early.
        constraints: Conditions on metrics, such as `["latency_ms <= 20"]`.
        max_failures: Number of failed runs after which a trial is broken. Defaults to 3.
        stop: Whether `metrics.log` ends a trial at a rung by raising `StopRequested`. The exception
            ends the `with` block of the run and goes no further. The call waits up to 5 s for the
            store. Defaults to False.
        stop_broken: Whether to end a trial in the same way if a monitor finds that it is broken.
            Defaults to False.
        seed: Seed of the search. Defaults to 0.
        lease_s: Seconds without a heartbeat before a trial is reassigned. Defaults to 60.
        storage_dir: Folder of the `.quark` store. Defaults to the working directory, or the nearest
            parent that has a store.

    Raises:
        SchemaValidationError: An argument is invalid or looks like a secret, a different sweep has
            this name, or the sweep to join does not exist.
        SessionStoreError: The store cannot be opened, or does not support sweeps.
    """
    checked = check_sweep_name(name)
    project = None if project is None else check_label(project, "project")
    root = resolve_storage_dir(storage_dir)
    if space is None:
        return join_sweep(checked, project, root, lease_s=lease_s, given_search=search)
    if project is None:
        raise SchemaValidationError("project is required to create a sweep")
    choice = choose_search("random" if search is None else search)
    given = {
        "space": space, "metric": metric, "mode": mode, "search": str(choice),
        "trials": trials, "budget": budget, "constraints": constraints,
        "max_failures": max_failures, "stop": stop, "stop_broken": stop_broken, "seed": seed,
        "lease_s": 60.0 if lease_s is None else lease_s,
    }  # fmt: skip
    definition = SweepDefinition.build(given)
    _refuse_secrets(definition)
    link = StoreLink(root)
    try:
        # A search that the definition does not fit must leave no sweep behind.
        open_search(definition, make_sweep_id(), link.store, search).close()
        stored = _open(link, project, checked, definition)
        kept = SweepDefinition.build(stored.definition)
        return Sweep(link, stored, kept.with_local(definition), search)
    except BaseException:
        link.close()
        raise


def _refuse_secrets(definition: SweepDefinition) -> None:
    """See that all of a definition is kept as it is: trials are drawn from what is kept.

    Raises:
        SchemaValidationError: Something of it looks like a secret; the message says what.
    """
    wanted = definition.to_dict()
    kept = redact_values(wanted)
    part = next((part for part in wanted if kept.get(part) != wanted[part]), None)
    if part is None:
        return
    if part == "space":
        space = kept.get("space", {})
        name = next((n for n, each in wanted[part].items() if space.get(n) != each), "")
        part = f"space[{redact_text(name)!r}]"
    raise SchemaValidationError(
        f"{part} looks like a secret. Sweeps are stored without redaction, for all workers. "
        "Pass secrets in environment variables. If it is none, rename it"
    )


def join_sweep(
    name: str,
    project: str | None,
    root: Path,
    *,
    lease_s: float | None = None,
    given_search: object = None,
) -> Sweep:
    """A sweep that is there already, by its name or id.

    Raises:
        SchemaValidationError: There is none of that name, or one in each of several projects.
        SessionStoreError: There is no store.
    """
    looking = StoreLink(root, read_only=True)
    try:
        stored = _find(looking, name, project)
    finally:
        looking.close()
    definition = dict(stored.definition)
    if lease_s is not None:
        definition["lease_s"] = lease_s
    return Sweep(StoreLink(root), stored, SweepDefinition.build(definition), given_search)


def _find(link: StoreLink, name: str, project: str | None) -> StoredSweep:
    if project is not None:
        try:
            return link.store.load_sweep(derive_sweep_key(project, name))
        except SchemaValidationError:
            raise SchemaValidationError(
                f"name: sweep {name!r} does not exist in project {project!r} of "
                f"{name_store(link.store)}. To create it, pass space=, metric= and mode="
            ) from None
    found = [each for each in link.store.list_sweeps() if name in (each.name, each.id)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise SchemaValidationError(
            f"name: sweep {name!r} does not exist in {name_store(link.store)}. To create it, "
            "call quark.sweep(name, project=…, space=…, metric=…, mode=…)"
        )
    projects = ", ".join(repr(each.project) for each in found)
    raise SchemaValidationError(
        f"name: sweep {name!r} exists in several projects ({projects}). Choose one with project="
    )


def _open(link: StoreLink, project: str, name: str, definition: SweepDefinition) -> StoredSweep:
    """The sweep of this name, which is made where there is none."""
    wanted = definition.to_dict()
    key = derive_sweep_key(project, name)
    try:
        stored = link.store.load_sweep(key)
    except SchemaValidationError:
        try:
            return link.store.open_sweep(
                project, name, wanted, max_failures=definition.max_failures
            )
        except SchemaValidationError:
            # Somebody else was first, perhaps with another definition.
            stored = link.store.load_sweep(key)
    difference = find_difference(SweepDefinition.build(stored.definition), definition)
    if difference is not None:
        raise SchemaValidationError(
            f"name: sweep {name!r} already exists with a different definition: {difference}. "
            "Choose another name, or omit space= to join the existing sweep"
        )
    return stored
