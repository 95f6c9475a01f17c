"""Runs a command for one trial of a sweep after another: what `quark sweep run` does.

The agent claims, starts, and looks on. What becomes of a trial is said by the run that the
command begins; the agent says it only where there is no such run, or where its process was
killed. It renews the lease of what it has started, and gives back what it is told to end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from quark.cli.sweep_children import TrialProcess, describe_exit
from quark.cli.sweep_commands import ArgumentForm, build_command, describe_value, repeat_name
from quark.cli.texts import describe_duration, describe_number
from quark.sweeps.definition import fill_values
from quark_core.config import settings
from quark_core.errors import QuarkError, SchemaValidationError, SessionStoreError
from quark_core.ranks.launches import leave_launch
from quark_core.records.sweeps import StoredTrial, TrialResult

if TYPE_CHECKING:
    from quark.sweeps.sweep import Sweep

ALL_FAILED = 3
INTERRUPTED = 130
_TERMINATED = 128

_POLL_S = 0.05
_CLAIM_S, _LONGEST_CLAIM_S = 0.5, 5.0
_LAST_CLAIM_S = 2.0  # as long is a claim waited for that was on its way at the end
_RENEWALS = 3  # in each lease
_UNBEGUN = 3  # in a row, after which it is the command that is wrong
_SHOWN_PARAMETERS = 6


@dataclass(frozen=True)
class AgentChoices:
    """How an agent goes about it.

    Attributes:
        command: What is run for each trial.
        form: How parameters are appended to it.
        workers: How many trials run at once.
        limit: How many trials are taken at most; None for all there are.
        waits: Whether it stays as long as trials may still come.
        storage_dir: The storage root of the sweep.
    """

    command: tuple[str, ...]
    storage_dir: Path
    form: ArgumentForm = "flags"
    workers: int = 1
    limit: int | None = None
    waits: bool = True


@dataclass
class _Holding:
    """A trial that a process is at work on, and when its lease is to be renewed."""

    trial: StoredTrial
    process: TrialProcess
    renew_at: float
    is_lost: bool = False


class SweepAgent:
    """Works on a sweep until nothing is left to do, or a signal comes.

    The first SIGINT or SIGTERM is passed on to all that runs, which has as long as it takes to
    end; nothing more is claimed. The second kills it. Either way its trials are given back as
    suspended, and somebody goes on with them later.

    Args:
        sweep: The sweep, opened.
        choices: See there.
        say: Takes a line for people.
    """

    def __init__(self, sweep: Sweep, choices: AgentChoices, say: Callable[[str], None]) -> None:
        self._sweep = sweep
        self._choices = choices
        self._say = say
        self._lease_s = sweep.definition.lease_s
        self._held: list[_Holding] = []
        self._signal = 0
        self._signals = 0
        self._taken = 0
        self._good = 0
        self._unbegun = 0
        self._claim_at = 0.0
        self._claim_wait_s = _CLAIM_S
        self._claiming: _Claiming | None = None
        self._waits_for = ""
        self._error: SchemaValidationError | None = None

    def run(self) -> int:
        """Work; returns the exit status of the command.

        Raises:
            SessionStoreError: The store cannot be used.
            SchemaValidationError: The command and the parameters do not go together.
        """
        # A store that cannot be written at all is told now; one that goes away later is waited for.
        _ = self._sweep.store
        before = {number: signal.signal(number, self._note) for number in _list_signals()}
        try:
            while self._go_on():
                time.sleep(_POLL_S)
        except BaseException:
            for holding in self._held:
                holding.process.kill()
            raise
        finally:
            self._give_back_claimed()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._error is not None:
            raise self._error
        if self._signals:
            return INTERRUPTED if self._signal == signal.SIGINT else _TERMINATED + self._signal
        return ALL_FAILED if self._taken and not self._good else 0

    def _give_back_claimed(self) -> None:
        """Give back a trial that was on its way when the work ended, and is begun by nobody."""
        claiming, self._claiming = self._claiming, None
        if claiming is None:
            return
        deadline_s = time.monotonic() + _LAST_CLAIM_S
        while not claiming.is_done and time.monotonic() < deadline_s and self._signals < 2:
            time.sleep(_POLL_S)
        if claiming.trial is not None:
            # A store that is away now gives it to somebody else when its lease is over.
            with suppress(QuarkError):
                result = TrialResult(state="suspended", reason="it was not begun")
                self._say_state(claiming.trial, result)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler of signals: the processes get it at once, whatever this one waits for."""
        del frame
        self._signals += 1
        self._signal = number
        for holding in list(self._held):
            self._end(holding)

    def _end(self, holding: _Holding) -> None:
        if self._signals > 1:
            holding.process.kill()
        elif self._signals or holding.is_lost or self._error is not None:
            # Python ends by SIGINT as by an exception; SIGTERM it does not notice by itself.
            holding.process.interrupt(self._signal or signal.SIGINT)

    def _go_on(self) -> bool:
        """One turn; whether another one is needed."""
        if self._signals == 1 and self._waits_for != "signal":
            self._waits_for = "signal"
            if self._held:
                self._say(
                    f"waits for {_count(len(self._held), 'trial')} to end; once more kills "
                    f"{'it' if len(self._held) == 1 else 'them'}"
                )
        for holding in list(self._held):
            self._end(holding)
            status = holding.process.poll()
            if status is not None:
                self._settle(holding, status)
            elif time.monotonic() >= holding.renew_at:
                self._renew(holding)
        if self._signals or self._error is not None:
            return bool(self._held)
        if self._has_room() and time.monotonic() >= self._claim_at:
            return self._claim() or bool(self._held)
        return bool(self._held) or self._has_room()

    def _has_room(self) -> bool:
        limit = self._choices.limit
        return len(self._held) < self._choices.workers and (limit is None or self._taken < limit)

    def _claim(self) -> bool:
        """Claim a trial and begin it; whether there may be more to do.

        Raises:
            SessionStoreError: The store cannot be used.
        """
        if self._claiming is None:
            self._claiming = _Claiming(self._sweep)
        if not self._claiming.is_done:
            return True
        claiming, self._claiming = self._claiming, None
        if claiming.error is not None:
            if self._held:
                self._put_off()  # what runs is not ended by it
                return True
            raise claiming.error
        if claiming.trial is None:
            if claiming.is_over or not (self._choices.waits or self._held):
                return False
            self._wait_for_trials()
            return True
        self._claim_wait_s, self._waits_for = _CLAIM_S, ""
        self._taken += 1
        self._begin(claiming.trial)
        return True

    def _wait_for_trials(self) -> None:
        self._put_off()
        if self._held:
            return  # what comes next depends on what runs here
        if self._sweep.state == "paused":
            name = repeat_name(self._sweep.name, self._sweep.id)
            said = f"is paused: quark sweep resume {name} goes on; Ctrl-C ends this"
        else:
            said = "has nothing to do until trials that run elsewhere have ended; Ctrl-C ends this"
        if said != self._waits_for:
            self._waits_for = said
            self._say(f"the sweep {said}")

    def _put_off(self) -> None:
        """Claim again later, and not at the same time as all others who wait."""
        self._claim_at = time.monotonic() + self._claim_wait_s * random.uniform(0.5, 1.0)
        self._claim_wait_s = min(self._claim_wait_s * 1.5, _LONGEST_CLAIM_S)

    def _begin(self, trial: StoredTrial) -> None:
        try:
            command = build_command(self._choices.command, trial.parameters, self._choices.form)
        except SchemaValidationError as error:
            # Of this trial alone: the next one has other values.
            self._say(f"trial {trial.number}: failed: {error}")
            self._say_state(trial, TrialResult(state="failed", reason=str(error)))
            return
        try:
            process = TrialProcess(command, self._make_environment(trial), self._label(trial))
        except OSError as error:
            # The trial is as good as before.
            self._say_state(trial, TrialResult(state="suspended", reason="it was not begun"))
            program = self._choices.command[0]
            self._error = SchemaValidationError(f"{program!r} cannot be started: {error}")
            return
        renew_at = time.monotonic() + self._lease_s / _RENEWALS
        self._held.append(_Holding(trial, process, renew_at))
        self._say(f"trial {trial.number}: {_describe_parameters(trial)}")
        if self._signals:
            self._end(self._held[-1])

    def _label(self, trial: StoredTrial) -> str:
        return f"{trial.number}| " if self._choices.workers > 1 else ""

    def _make_environment(self, trial: StoredTrial) -> dict[str, str]:
        # An agent may be a task of a job itself; what it starts is a training of its own.
        environment = leave_launch(os.environ)
        environment.pop(settings.RUN_ID, None)
        return {
            **environment,
            settings.TRIAL: trial.claim.to_text(),
            settings.PARAMETERS: json.dumps(trial.parameters),
            settings.SWEEP_STORAGE_DIR: str(self._choices.storage_dir),
        }

    def _renew(self, holding: _Holding) -> None:
        holding.renew_at = time.monotonic() + self._lease_s / _RENEWALS
        trial = holding.trial
        try:
            known = self._sweep.store.settle_trial(
                trial.sweep_id, trial.number, trial.token, None, lease_s=self._lease_s
            )
        except SessionStoreError:
            holding.renew_at = time.monotonic() + _LONGEST_CLAIM_S
            return
        if known.token != trial.token and not holding.is_lost:
            holding.is_lost = True
            self._say(f"trial {trial.number} is another worker's now: it is ended here")

    def _settle(self, holding: _Holding, status: int) -> None:
        """A process has ended: see what its run has said of the trial, or say it."""
        process, trial = holding.process, holding.trial
        try:
            known = self._load(trial)
            if self._is_open(known, trial):
                # A process that was killed has left what it said last in its journal.
                self._deliver_leftovers()
                known = self._load(trial)
            if self._is_open(known, trial):
                known = self._say_end(known, holding, status)
        except QuarkError as error:
            self._held.remove(holding)
            self._say(f"trial {trial.number}: what became of it is not known now: {error}")
            return
        self._held.remove(holding)
        self._count(known, trial)
        self._tell(known, trial, process)

    def _say_end(self, known: StoredTrial, holding: _Holding, status: int) -> StoredTrial:
        process, trial = holding.process, holding.trial
        has_run = self._has_run(known, trial)
        if process.was_interrupted or process.was_killed:
            result = TrialResult(state="suspended", reason=f"{describe_exit(status)} when asked to")
        elif status == 0 and has_run:
            return known  # its end waits in a journal, for a store that is out of reach
        else:
            reason = describe_exit(status)
            if not has_run:
                reason += " before it began a run"
                self._unbegun += 1
            if process.last_line:
                reason += f": {process.last_line}"
            # Without a mistake there is none to try again.
            result = TrialResult(state="waiting" if status else "failed", reason=reason)
        return self._say_state(trial, result)

    def _say_state(self, trial: StoredTrial, result: TrialResult) -> StoredTrial:
        return self._sweep.store.settle_trial(
            trial.sweep_id, trial.number, trial.token, result, lease_s=self._lease_s
        )

    def _load(self, trial: StoredTrial) -> StoredTrial:
        store: Any = self._sweep.store
        found = store.list_trials(trial.sweep_id, start=trial.number, limit=1)
        return fill_values(store, found, self._sweep.definition)[0]

    @staticmethod
    def _is_open(known: StoredTrial, trial: StoredTrial) -> bool:
        """Whether nobody has said what became of a claim."""
        return known.token == trial.token and known.state == "running"

    def _has_run(self, known: StoredTrial, trial: StoredTrial) -> bool:
        if known.run_id is None:
            return False
        reader: Any = self._sweep.store
        claim = reader.load_run(known.run_id).trial
        return claim is not None and claim.token == trial.token

    def _deliver_leftovers(self) -> None:
        from quark_core.runs import recovery

        recovery.sync(self._choices.storage_dir)

    def _count(self, known: StoredTrial, trial: StoredTrial) -> None:
        is_own = known.token == trial.token
        if not is_own or known.state in ("completed", "pruned", "suspended"):
            self._good += 1
        if "before it began a run" not in (known.reason or ""):
            self._unbegun = 0
        elif self._unbegun >= _UNBEGUN:
            self._error = SchemaValidationError(
                f"{_UNBEGUN} trials in a row ended before they began a run, so nothing more is "
                f"tried; the last one {known.reason}. Run the command once by itself until it "
                "trains; it must call quark.start_run(…), or quark.sweep(…) with a loop over it"
            )

    def _tell(self, known: StoredTrial, trial: StoredTrial, process: TrialProcess) -> None:
        said = known.state if known.token == trial.token else "given to another worker"
        if known.values and known.token == trial.token:
            names = [goal.metric for goal in self._sweep.definition.goals]
            pairs = zip(names, known.values, strict=False)
            said += "".join(f", {name} {describe_number(value)}" for name, value in pairs)
        elif known.state == "waiting":
            said = "failed, and is tried again"
        if known.reason and known.state not in ("completed", "running"):
            said += f": {known.reason}"
        self._say(f"trial {trial.number}: {said} ({describe_duration(process.duration_s)})")


class _Claiming:
    """A claim that is on its way, on a thread of its own: it may wait for a store for long."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self.trial: StoredTrial | None = None
        self.is_over = False
        self.error: QuarkError | None = None
        self._thread = threading.Thread(target=self._work, name="quark-claim", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether there is an answer."""
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            claimed = self._sweep.claim()
            if claimed is None:
                self.is_over = self._sweep.is_over
            else:
                self.trial = claimed.stored
        except QuarkError as error:
            self.error = error


def _list_signals() -> Sequence[int]:
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _describe_parameters(trial: StoredTrial) -> str:
    pairs = [f"{name}={describe_value(value)}" for name, value in trial.parameters.items()]
    shown = " ".join(pairs[:_SHOWN_PARAMETERS])
    more = len(pairs) - _SHOWN_PARAMETERS
    return f"{shown} and {more} more" if more > 0 else shown or "no parameters"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
