"""Conformance of backends that give trials to many workers: a dozen of them, and what befalls them.

Each test is there twice: `short`, and `long` with more of everything.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from quark_core.backends.contract import BackendConfig, BackendDefinition, Capability
from quark_core.backends.coordination import AppendedEntries
from quark_core.records import parse_time
from quark_core.testing.coordination_conformance import SweepKit
from quark_core.testing.fakes import BatchMaker
from quark_core.testing.kit import RUN_ID, Opener, needs
from quark_core.testing.trial_workers import (
    Note,
    TrialWorkers,
    WorkerTask,
    begin_run,
    end_run,
    run_id_of,
    value_of,
)

_SIZES = ("short", "long")
_WORKERS = 12
_SHIFTS_S = (0.0, 3600.0, -3600.0)
_LEASE_S = 2.0


class WorkersConformance(SweepKit):
    """Standard tests of backends that declare COORDINATION, with many processes."""

    @pytest.fixture
    def workers(
        self,
        definition: BackendDefinition,
        config: BackendConfig,
        open_backend: Opener,
        tmp_path: Path,
    ) -> Iterator[TrialWorkers]:
        """Other processes, which open the backend for themselves."""
        if sys.platform == "win32":
            pytest.skip("workers are forked, which Windows cannot")
        open_backend().close()
        with TrialWorkers(tmp_path / "workers", definition, config) as workers:
            yield workers

    @pytest.mark.parametrize("size", _SIZES)
    @needs(Capability.COORDINATION)
    def test_a_dozen_workers_have_each_trial_once(
        self, workers: TrialWorkers, store: Any, size: str
    ) -> None:
        """Also where every call comes twice, as after a lost reply."""
        trials = 36 if size == "short" else 400
        sweep_id = self._make_sweep(store, trials)
        for index in range(_WORKERS):
            workers.start(
                WorkerTask(
                    name=f"w{index}",
                    what="trials",
                    sweep_id=sweep_id,
                    repeats=index % 2 == 0,
                    clock_shift_s=_SHIFTS_S[index % 3],
                )
            )
        workers.wait()
        notes = workers.read()
        self._check_trials(store, sweep_id, trials, notes)
        claims = _gather(notes, "claimed")
        assert sorted(claims) == [(number, 1) for number in range(trials)]
        assert sorted(_gather(notes, "counted")) == sorted(claims)

    @pytest.mark.parametrize("size", _SIZES)
    @needs(Capability.COORDINATION)
    def test_killed_and_stopped_workers_lose_no_trial(
        self, workers: TrialWorkers, store: Any, size: str
    ) -> None:
        """SIGKILL at any moment, SIGSTOP for longer than a lease: each trial is finished once."""
        if sys.platform == "win32":
            raise NotImplementedError("workers are forked, which Windows cannot")
        trials, faults = (24, 5) if size == "short" else (400, 40)
        sweep_id = self._make_sweep(store, trials)
        chance = random.Random(trials)
        names = iter(f"w{index}" for index in range(_WORKERS + faults))

        def start() -> None:
            name = next(names)
            workers.start(
                WorkerTask(
                    name=name,
                    what="trials",
                    sweep_id=sweep_id,
                    lease_s=_LEASE_S,
                    work_s=0.1,
                    repeats=len(workers.pids) % 3 == 0,
                    clock_shift_s=_SHIFTS_S[len(workers.pids) % 3],
                )
            )

        for _ in range(_WORKERS):
            start()
        stopped: dict[str, float] = {}
        killed: set[str] = set()
        for turn in range(faults):
            time.sleep(chance.uniform(0.0, 0.15))
            running = [n for n in workers.pids if not workers.is_over(n) and n not in stopped]
            if not running:
                break
            name = chance.choice(running)
            if turn % 3 == 2:
                workers.send(name, signal.SIGSTOP)
                stopped[name] = time.monotonic() + 1.5 * _LEASE_S
            else:
                workers.send(name, signal.SIGKILL)
                killed.add(name)
                start()
            _let_go(workers, stopped)
        while stopped:
            time.sleep(0.05)
            _let_go(workers, stopped)
        workers.wait(*killed, killed=True)
        workers.wait(*(name for name in workers.pids if name not in killed))
        notes = workers.read()
        self._check_trials(store, sweep_id, trials, notes)
        counted = _gather(notes, "counted")
        assert len({number for number, _ in counted}) == len(counted), "a trial counted twice"

    def _check_trials(
        self, store: Any, sweep_id: str, trials: int, notes: Mapping[str, list[Note]]
    ) -> None:
        """Each is completed with the value of its newest token, and no claim was given twice."""
        found = store.list_trials(sweep_id)
        assert [trial.number for trial in found] == list(range(trials))
        assert Counter(trial.state for trial in found) == {"completed": trials}
        claims = Counter(_gather(notes, "claimed"))
        assert [claim for claim, count in claims.items() if count > 1] == []
        # A repeated request had the answer that it had before, or another claim's by then.
        for told in notes.values():
            own = {(n.number, n.token) for n in told if n.what == "claimed"}
            assert {(n.number, n.token) for n in told if n.what == "again"} <= own
        newest = {trial.number: trial.token for trial in found}
        assert all(1 <= token <= newest[number] for number, token in claims)
        for trial in found:
            assert trial.values == (value_of(trial.number, trial.token),)
            assert trial.run_id == run_id_of(trial)
            assert (trial.losses, trial.failures) == (trial.token - 1, 0)
            if trial.token > 1:
                assert not store.load_run(trial.run_id).superseded

    @pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes cannot be stopped here")
    @pytest.mark.parametrize("when", ["while_it_runs", "after_its_result"])
    @needs(Capability.COORDINATION)
    def test_a_worker_that_was_stopped_comes_too_late(
        self, workers: TrialWorkers, store: Any, when: str
    ) -> None:
        """Beyond its lease somebody else has the trial, whose result is the one that counts."""
        if sys.platform == "win32":
            raise NotImplementedError("workers are forked, which Windows cannot")
        sweep_id = self._make_sweep(store, 1)
        task = WorkerTask(name="late", what="hold", sweep_id=sweep_id, lease_s=_LEASE_S / 4)
        workers.start(task)
        workers.wait_for("late", "claimed")
        workers.wait_for("late", "began")
        workers.send("late", signal.SIGSTOP)
        (late,) = store.list_trials(sweep_id)
        holder = self._hold_soon(store, sweep_id)
        assert (holder.number, holder.token) == (0, late.token + 1)
        assert holder.claimed_at is not None
        assert late.lease_until is not None
        assert parse_time(holder.claimed_at) >= parse_time(late.lease_until)
        maker = begin_run(store, holder)
        if when == "after_its_result":
            end_run(store, maker, holder)
        before = self._find(store, holder)
        (workers.folder / "finish").touch()
        workers.send("late", signal.SIGCONT)
        workers.wait("late")
        told = [note.what for note in workers.read()["late"]]
        assert "settled" in told
        assert "counted" not in told
        assert self._find(store, holder) == before
        stored = store.load_run(run_id_of(late))
        assert (stored.run.status, stored.superseded) == ("completed", True)
        if when == "while_it_runs":
            end_run(store, maker, holder)
        done = self._find(store, holder)
        assert (done.state, done.token, done.values) == ("completed", 2, (value_of(0, 2),))

    @pytest.mark.parametrize("size", _SIZES)
    @needs(Capability.COORDINATION)
    def test_nobody_sees_an_entry_before_one_of_a_lower_number(
        self, workers: TrialWorkers, store: Any, size: str
    ) -> None:
        """A dozen append, each call's entries together; readers look on all the while."""
        turns = 6 if size == "short" else 60
        log = f"{self._make_sweep(store, 0)}/reports"
        total = _WORKERS * sum(1 + turn % 3 for turn in range(turns))
        readers = [f"r{index}" for index in range(2)]
        for name in readers:
            workers.start(WorkerTask(name=name, what="read", where=log, count=total))
        for index in range(_WORKERS):
            workers.start(
                WorkerTask(
                    name=f"w{index}",
                    what="entries",
                    where=log,
                    count=turns,
                    repeats=index % 2 == 0,
                )
            )
        workers.wait()
        notes = workers.read()
        found = store.read_entries(log, 0)
        assert len(found) == len(set(found)) == total
        for told in notes.values():
            places: dict[tuple[str, ...], AppendedEntries] = {}
            for note in told:
                if note.what == "appended":
                    place = AppendedEntries(first=note.number, count=note.token)
                    assert places.setdefault(note.texts, place) == place
                    assert tuple(found[note.number : note.number + note.token]) == note.texts
        for name in readers:
            assert [note.texts for note in notes[name]] == [tuple(found)]

    @pytest.mark.parametrize("size", _SIZES)
    @needs(Capability.COORDINATION)
    def test_a_field_that_a_dozen_raise_loses_no_step(
        self, maker: BatchMaker, workers: TrialWorkers, store: Any, size: str
    ) -> None:
        """What was compared was still so when it was set."""
        turns = 2 if size == "short" else 12
        store.write(maker.start())
        for index in range(_WORKERS):
            workers.start(WorkerTask(name=f"w{index}", what="fields", where="n", count=turns))
        workers.wait()
        raised = sum(len(told) for told in workers.read().values())
        assert raised == _WORKERS * turns
        assert store.load_run(RUN_ID).fields["n"] == raised

    @pytest.mark.parametrize("size", _SIZES)
    @needs(Capability.COORDINATION)
    def test_trials_that_a_dozen_add_are_those_of_the_first(
        self, workers: TrialWorkers, store: Any, size: str
    ) -> None:
        """Under one key; and those of other keys are all there, each key's together."""
        turns = 2 if size == "short" else 20
        sweep_id = self._make_sweep(store, 0)
        for index in range(_WORKERS):
            workers.start(
                WorkerTask(
                    name=f"w{index}",
                    what="add",
                    where="shared",
                    sweep_id=sweep_id,
                    count=turns,
                    repeats=index % 2 == 0,
                )
            )
        workers.wait()
        keys: dict[str, set[tuple[int, str]]] = {}
        for told in workers.read().values():
            for note in told:
                key, by = note.texts
                keys.setdefault(key, set()).add((note.number, by))
        assert len(keys) == (_WORKERS + 1) * turns
        numbers: list[int] = []
        for key, added in keys.items():
            own = sorted(number for number, _ in added)
            assert own == list(range(own[0], own[0] + 3)), f"{key} has {own}"
            assert len({by for _, by in added}) == 1, f"{key} is of several"
            numbers += own
        assert sorted(numbers) == list(range(3 * len(keys)))
        assert [trial.number for trial in store.list_trials(sweep_id)] == sorted(numbers)


def _gather(notes: Mapping[str, Iterable[Note]], what: str) -> list[tuple[int, int]]:
    """Number and token of all notes of one kind."""
    return [(n.number, n.token) for told in notes.values() for n in told if n.what == what]


def _let_go(workers: TrialWorkers, stopped: dict[str, float]) -> None:
    """Let those go on whose time is over."""
    if sys.platform == "win32":
        raise NotImplementedError("workers are forked, which Windows cannot")
    for name, until in list(stopped.items()):
        if time.monotonic() >= until:
            workers.send(name, signal.SIGCONT)
            del stopped[name]
