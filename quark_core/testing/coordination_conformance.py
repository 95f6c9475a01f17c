"""Conformance of backends that give trials to many workers: the contract, in one process.

What several processes do at once, and to each other, is in `workers_conformance`.
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from quark_core.backends.contract import BackendDefinition, Capability
from quark_core.backends.coordination import (
    MOST_LOSSES,
    AppendedEntries,
    NewTrial,
    TrialWish,
)
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records import parse_time
from quark_core.records.sweeps import (
    StoredTrial,
    TrialResult,
    derive_sweep_key,
    make_sweep_id,
)
from quark_core.system.process import ProcessIdentity, current_process
from quark_core.testing.fakes import ODD_TEXT, BatchMaker
from quark_core.testing.kit import RUN_ID, BackendKit, Opener, needs
from quark_core.testing.trial_workers import begin_run, end_run, run_id_of, value_of, when_reached

_NAME = "Suche 'nach' 学習率; 1"
_HOUR_S = 3600.0
_BRIEF_S = 0.05
_LONG_S = 600.0
_ELSEWHERE = ProcessIdentity("elsewhere", 1, "1")


class SweepKit(BackendKit):
    """What tests of trials share."""

    MAX_FAILURES = 3

    @pytest.fixture
    def store(self, opened: Any) -> Any:
        """The backend opened."""
        return opened

    def _make_sweep(self, store: Any, trials: int, **definition: Any) -> str:
        """A new sweep with so many trials; returns its id."""
        sweep = store.open_sweep(
            "conformance", "search", definition, max_failures=self.MAX_FAILURES
        )
        if trials:
            store.add_trials(
                sweep.id, [NewTrial(parameters={"lr": i / 8}) for i in range(trials)], key="kit"
            )
        return str(sweep.id)

    def _claim(self, store: Any, sweep_id: str, **changes: Any) -> StoredTrial | None:
        """One claim of this process, by a request of its own."""
        wanted = {
            "request_id": uuid.uuid4().hex,
            "worker": current_process(),
            "lease_s": _LONG_S,
            **changes,
        }
        found: StoredTrial | None = when_reached(lambda: store.claim_trial(sweep_id, **wanted))
        return found

    def _hold(self, store: Any, sweep_id: str, **changes: Any) -> StoredTrial:
        """A claim that gets a trial."""
        trial = self._claim(store, sweep_id, **changes)
        assert trial is not None, "there was a trial to give, and it was not given"
        return trial

    def _hold_soon(self, store: Any, sweep_id: str, **changes: Any) -> StoredTrial:
        """A claim that gets a trial as soon as its lease is over."""
        deadline = time.monotonic() + self.TIME_LIMIT_S / 2
        while True:
            trial = self._claim(store, sweep_id, **changes)
            if trial is not None:
                return trial
            assert time.monotonic() < deadline, "a lease that was over freed no trial"
            time.sleep(_BRIEF_S / 2)

    def _find(self, store: Any, trial: StoredTrial) -> StoredTrial:
        """A trial as it is now."""
        (found,) = store.list_trials(trial.sweep_id, start=trial.number, limit=1)
        assert isinstance(found, StoredTrial)
        return found


class CoordinationConformance(SweepKit):
    """Standard tests of backends that declare COORDINATION."""

    @needs(Capability.COORDINATION)
    def test_a_sweep_is_the_same_for_all_who_open_it(
        self, store: Any, open_backend: Opener
    ) -> None:
        """By project and name, with one definition; a sweep that is not there is an error."""
        space = {"lr": [0.5, 1, None, True], "text": ODD_TEXT, "": {"deep": [[]]}}
        made = store.open_sweep("vision", _NAME, space, max_failures=2)
        assert (made.project, made.name, made.state) == ("vision", _NAME, "running")
        assert (dict(made.definition), dict(made.counts)) == (space, {})
        other: Any = open_backend()
        turned = dict(reversed(list(space.items())))
        assert other.open_sweep("vision", _NAME, turned, max_failures=2) == made
        with pytest.raises(SchemaValidationError):
            other.open_sweep("vision", _NAME, {**space, "more": 1}, max_failures=2)
        second = other.open_sweep("speech", _NAME, {}, max_failures=2)
        assert store.load_sweep(made.id) == made
        assert other.load_sweep(derive_sweep_key("vision", _NAME)) == made
        # A run that is stored elsewhere, too, must not settle what is only called the same there.
        assert made.id != derive_sweep_key("vision", _NAME)
        assert store.list_sweeps("vision") == [made]
        assert {sweep.id for sweep in store.list_sweeps()} == {made.id, second.id}
        assert store.list_sweeps("absent") == []
        absent = make_sweep_id()
        for call in (
            lambda: store.load_sweep(absent),
            lambda: store.list_trials(absent),
            lambda: store.update_sweep(absent, "paused", by="kit@test"),
            lambda: store.add_trials(absent, [NewTrial(parameters={})], key="k"),
            lambda: self._claim(store, absent),
            lambda: store.settle_trial(absent, 0, 1, None, lease_s=1.0),
        ):
            with pytest.raises(SchemaValidationError):
                call()

    @needs(Capability.COORDINATION)
    def test_trials_are_added_once_for_each_key(self, store: Any, open_backend: Opener) -> None:
        """All of a call or none, in their order, with numbers that have no gaps."""
        sweep_id = self._make_sweep(store, 0)
        values = {"lr": 1e-300, "n": 2**53, "on": False, "none": None, "name": ODD_TEXT, "l": [1.0]}
        new = [NewTrial(parameters=values, origin={"rung": 0}), NewTrial(parameters={})]
        added = store.add_trials(sweep_id, new, key="a")
        assert [trial.number for trial in added] == [0, 1]
        assert [(dict(t.parameters), dict(t.origin)) for t in added] == [
            (values, {"rung": 0}),
            ({}, {}),
        ]
        assert {(t.state, t.token, t.failures, t.losses, t.run_id) for t in added} == {
            ("waiting", 0, 0, 0, None)
        }
        other: Any = open_backend()
        assert other.add_trials(sweep_id, [NewTrial(parameters={"x": 1})], key="a") == added
        good = NewTrial(parameters={"x": 1})
        bad = [NewTrial(parameters={"x": [float("nan")]}), NewTrial(parameters={"": 1})]
        for trials in ([good, bad[0]], [good, bad[1]], []):
            with pytest.raises(SchemaValidationError):
                other.add_trials(sweep_id, trials, key="b")
        more = other.add_trials(sweep_id, [good], key="c")
        assert [trial.number for trial in more] == [2]
        assert store.list_trials(sweep_id) == added + more
        assert store.list_trials(sweep_id, start=1, limit=1) == added[1:]
        assert store.list_trials(sweep_id, start=9) == []
        assert dict(store.load_sweep(sweep_id).counts) == {"waiting": 3}

    @needs(Capability.COORDINATION)
    def test_each_claim_gets_another_trial(self, store: Any, open_backend: Opener) -> None:
        """By their number, each with the token 1 and a lease; then there is none to have."""
        sweep_id = self._make_sweep(store, 3)
        stores = [store, open_backend(), store]
        held = [self._hold(each, sweep_id, worker=_ELSEWHERE) for each in stores]
        assert [(t.number, t.token, t.state) for t in held] == [(n, 1, "running") for n in range(3)]
        for trial in held:
            assert trial.worker is not None
            assert trial.worker["host"] == "elsewhere"
            assert _lease_of(trial) == pytest.approx(_LONG_S, abs=1.0)
        assert self._claim(store, sweep_id) is None
        assert store.list_trials(sweep_id) == held
        assert dict(store.load_sweep(sweep_id).counts) == {"running": 3}

    @needs(Capability.COORDINATION)
    def test_a_claim_that_is_asked_for_again_is_the_same(
        self, store: Any, open_backend: Opener
    ) -> None:
        """As after a lost reply; but never once somebody else has the trial."""
        sweep_id = self._make_sweep(store, 2)
        request = {"request_id": "first", "worker": _ELSEWHERE}
        first = self._hold(store, sweep_id, **request)
        for again in (store, open_backend()):
            repeated = self._hold(again, sweep_id, **request)
            assert (repeated.number, repeated.token) == (first.number, first.token)
        brief = {"request_id": "brief", "worker": _ELSEWHERE, "lease_s": _BRIEF_S}
        lost = self._hold(store, sweep_id, **brief)
        taken = self._hold_soon(store, sweep_id)
        assert (taken.number, taken.token) == (lost.number, lost.token + 1)
        assert self._claim(store, sweep_id, **brief) is None
        assert self._find(store, taken) == taken

    @needs(Capability.COORDINATION)
    def test_a_wish_is_heeded(self, store: Any) -> None:
        """A trial of that number or that the search finds, or none, also where others wait."""
        sweep_id = self._make_sweep(store, 4)
        small = TrialWish(where="param.lr > 0.3 and failures == 0")
        assert self._hold(store, sweep_id, wish=small).number == 3
        assert self._claim(store, sweep_id, wish=small) is None
        wish = TrialWish(number=2)
        assert self._hold(store, sweep_id, wish=wish).number == 2
        assert self._claim(store, sweep_id, wish=wish) is None
        assert self._claim(store, sweep_id, wish=TrialWish(number=9)) is None
        assert self._hold(store, sweep_id).number == 0

    @needs(Capability.COORDINATION)
    def test_a_lease_that_is_over_frees_its_trial(self, store: Any) -> None:
        """After those that wait; whoever held it decides nothing any more."""
        sweep_id = self._make_sweep(store, 2)
        late = self._hold(store, sweep_id, worker=_ELSEWHERE, lease_s=_BRIEF_S)
        time.sleep(2 * _BRIEF_S)
        assert self._hold(store, sweep_id).number == 1
        holder = self._hold_soon(store, sweep_id)
        assert (holder.number, holder.token, holder.losses) == (0, 2, 1)
        told = TrialResult(state="completed", values=(1.0,))
        for result in (told, None, TrialResult(state="waiting")):
            left = store.settle_trial(sweep_id, 0, late.token, result, lease_s=_LONG_S)
            assert left == self._find(store, holder) == holder
        mine = TrialResult(
            state="pruned", values=(2.0, -0.5), constraints=(-1.0,), step=7, reason=ODD_TEXT
        )
        done = store.settle_trial(sweep_id, 0, holder.token, mine, lease_s=_LONG_S)
        said = {name: getattr(done, name) for name in mine.__struct_fields__}
        assert said == {name: getattr(mine, name) for name in mine.__struct_fields__}
        assert done.settled_at is not None
        for token in (late.token, holder.token):
            assert store.settle_trial(sweep_id, 0, token, told, lease_s=_LONG_S) == done
        assert self._find(store, holder) == done

    @needs(Capability.COORDINATION)
    def test_a_late_result_counts_while_nobody_else_has_the_trial(self, store: Any) -> None:
        """By its run, or without one: a lease that is over is no reason to lose work."""
        sweep_id = self._make_sweep(store, 2)
        for number in range(2):
            trial = self._hold(store, sweep_id, worker=_ELSEWHERE, lease_s=_BRIEF_S,
                               wish=TrialWish(number=number))  # fmt: skip
            maker = begin_run(store, trial) if number else None
            time.sleep(2 * _BRIEF_S)
            if maker is None:
                told = TrialResult(state="completed", values=(value_of(0, 1),))
                store.settle_trial(sweep_id, number, trial.token, told, lease_s=_LONG_S)
            else:
                end_run(store, maker, trial)
            now = self._find(store, trial)
            assert (now.state, now.token, now.values) == ("completed", 1, (value_of(number, 1),))
        assert self._claim(store, sweep_id) is None

    @needs(Capability.COORDINATION)
    def test_a_lease_is_renewed_by_its_holder(self, store: Any) -> None:
        """Without a run by `settle_trial`, with one by its heartbeats."""
        sweep_id = self._make_sweep(store, 1)
        trial = self._hold(store, sweep_id, worker=_ELSEWHERE, lease_s=60.0)
        renewed = store.settle_trial(sweep_id, 0, 1, None, lease_s=_LONG_S)
        assert _lease_of(renewed) > _LONG_S - 1
        maker = begin_run(store, trial)
        before = self._find(store, trial)
        time.sleep(2 * _BRIEF_S)
        store.write(maker.lifecycle(("heartbeat", {})))
        after = self._find(store, trial)
        assert after.lease_until is not None
        assert after.lease_until != before.lease_until
        assert (after.state, after.token) == ("running", 1)

    @pytest.mark.parametrize("shift_s", [-_HOUR_S, _HOUR_S], ids=["behind", "ahead"])
    @needs(Capability.COORDINATION)
    def test_the_clock_of_a_worker_decides_nothing(self, store: Any, shift_s: float) -> None:
        """Whose heartbeats are an hour off holds its trial, and no longer than others."""
        sweep_id = self._make_sweep(store, 2)
        trial = self._hold(store, sweep_id, worker=_ELSEWHERE, lease_s=_LONG_S)
        maker = begin_run(store, trial, shift_s)
        store.write(maker.lifecycle(("heartbeat", {})))
        now = self._hold(store, sweep_id).claimed_at
        assert self._claim(store, sweep_id) is None, "it holds its trial, and it was given away"
        renewed = self._find(store, trial)
        assert now is not None
        assert renewed.lease_until is not None
        left_s = (parse_time(renewed.lease_until) - parse_time(now)) / 1e6
        assert left_s == pytest.approx(_LONG_S, abs=60.0)
        brief = self._make_brief(store, shift_s)
        taken = self._hold_soon(store, brief.sweep_id)
        assert (taken.token, taken.losses) == (2, 1)

    def _make_brief(self, store: Any, shift_s: float) -> StoredTrial:
        """A trial whose holder has a wrong clock and a brief lease, renewed once."""
        sweep = store.open_sweep("conformance", "brief", {}, max_failures=3)
        store.add_trials(sweep.id, [NewTrial(parameters={})], key="kit")
        trial = self._hold(store, sweep.id, worker=_ELSEWHERE, lease_s=_BRIEF_S)
        maker = begin_run(store, trial, shift_s)
        store.write(maker.lifecycle(("heartbeat", {})))
        return trial

    @needs(Capability.COORDINATION)
    def test_a_process_that_has_ended_frees_its_trial_at_once(
        self, store: Any, definition: BackendDefinition
    ) -> None:
        """One of the store's host; a pid of another host says nothing, however it reads."""
        sweep_id = self._make_sweep(store, 1)
        gone = _find_ended()
        elsewhere = msgspec.structs.replace(gone, host="elsewhere")
        trial = self._hold(store, sweep_id, worker=elsewhere)
        assert self._claim(store, sweep_id) is None
        again = TrialResult(state="suspended")
        store.settle_trial(sweep_id, 0, trial.token, again, lease_s=_LONG_S)
        # A store on another machine waits for the lease.
        lease_s = 1.0 if definition.remote else _LONG_S
        assert self._hold(store, sweep_id, worker=gone, lease_s=lease_s).token == 2
        taken = (self._hold_soon if definition.remote else self._hold)(store, sweep_id)
        assert (taken.token, taken.losses) == (3, 1)

    @needs(Capability.COORDINATION)
    def test_a_trial_that_is_lost_again_and_again_is_broken(self, store: Any) -> None:
        """Whatever it does to its workers, it does it to no more than so many."""
        sweep_id = self._make_sweep(store, 1)
        trial = self._hold(store, sweep_id, worker=_ELSEWHERE, lease_s=_BRIEF_S)
        for loss in range(1, MOST_LOSSES):
            trial = self._hold_soon(store, sweep_id, worker=_ELSEWHERE, lease_s=_BRIEF_S)
            assert (trial.token, trial.losses) == (loss + 1, loss)
        deadline = time.monotonic() + self.TIME_LIMIT_S / 2
        while self._find(store, trial).state != "broken":
            assert self._claim(store, sweep_id) is None
            assert time.monotonic() < deadline, "it is not broken"
            time.sleep(_BRIEF_S / 2)
        broken = self._find(store, trial)
        assert (broken.losses, broken.is_final) == (MOST_LOSSES, True)
        assert self._claim(store, sweep_id) is None

    @needs(Capability.COORDINATION)
    def test_a_run_has_its_trial(self, store: Any) -> None:
        """By the claim in its start; it is superseded once somebody has claimed the trial since."""
        sweep_id = self._make_sweep(store, 1)
        store.write(BatchMaker(RUN_ID).start())
        assert (store.load_run(RUN_ID).trial, store.load_run(RUN_ID).superseded) == (None, False)
        first = self._hold(store, sweep_id, worker=_ELSEWHERE, lease_s=_BRIEF_S)
        begin_run(store, first)
        stored = store.load_run(run_id_of(first))
        assert (stored.trial, stored.superseded) == (first.claim, False)
        assert self._find(store, first).run_id == run_id_of(first)
        second = self._hold_soon(store, sweep_id)
        assert second.run_id == run_id_of(first), "a checkpoint is found by the earlier run"
        assert store.load_run(run_id_of(first)).superseded
        begin_run(store, second)
        assert self._find(store, first).run_id == run_id_of(second)
        stored = store.load_run(run_id_of(second))
        assert (stored.trial, stored.superseded) == (second.claim, False)

    @pytest.mark.parametrize("case", ["plain", "failed", "interrupted", "pruned", "told_failed",
                                      "nonsense"])  # fmt: skip
    @needs(Capability.COORDINATION)
    def test_the_end_of_a_run_settles_its_trial(
        self, store: Any, open_backend: Opener, case: str
    ) -> None:
        """In the batch that tells it, once however often that comes."""
        status, told, state, failures = _ENDS[case]
        sweep_id = self._make_sweep(store, 1)
        trial = self._hold(store, sweep_id)
        maker = begin_run(store, trial)
        data = {"status": status, **({} if told is None else {"trial": told})}
        batch = maker.lifecycle(("status", data))
        for again in (store, store, open_backend()):
            again.write(batch)
        now = self._find(store, trial)
        assert (now.state, now.failures, now.token) == (state, failures, 1)
        assert now.is_final == (now.settled_at is not None)
        said = told if isinstance(told, Mapping) and state == told.get("state") else {}
        assert now.values == (tuple(said["values"]) if "values" in said else None)
        assert now.step == said.get("step")
        again_to_have = self._claim(store, sweep_id)
        assert (again_to_have is None) == now.is_final
        if again_to_have is not None:
            assert (again_to_have.token, again_to_have.losses) == (2, 0)

    @needs(Capability.COORDINATION)
    def test_a_failure_that_is_told_again_is_counted_once(self, store: Any) -> None:
        """Without a run, after a lost reply; and by its run besides."""
        sweep_id = self._make_sweep(store, 1)
        trial = self._hold(store, sweep_id)
        maker = begin_run(store, trial)
        failed = TrialResult(state="waiting", reason="out of memory")
        for _ in range(2):
            now = store.settle_trial(sweep_id, 0, 1, failed, lease_s=_LONG_S)
            assert (now.state, now.failures, now.token) == ("waiting", 1, 1)
        store.write(maker.lifecycle(("status", {"status": "failed"})))
        assert self._find(store, trial).failures == 1

    @needs(Capability.COORDINATION)
    def test_a_score_that_comes_after_the_end_of_the_run_is_taken(self, store: Any) -> None:
        """Once, by the newest token, of a trial that has completed without one."""
        sweep_id = self._make_sweep(store, 1)
        trial = self._hold(store, sweep_id)
        maker = begin_run(store, trial)
        store.write(maker.lifecycle(("status", {"status": "completed"})))
        assert self._find(store, trial).values is None
        for token, value in ((2, 3.0), (1, 1.0), (1, 2.0)):
            told = TrialResult(state="completed", values=(value,))
            store.settle_trial(sweep_id, 0, token, told, lease_s=_LONG_S)
        now = self._find(store, trial)
        assert (now.state, now.token, now.values) == ("completed", 1, (1.0,))

    @needs(Capability.COORDINATION)
    def test_a_trial_whose_runs_fail_is_broken(self, store: Any) -> None:
        """After `max_failures` runs of it, and tokens rise through all of that."""
        sweep_id = self._make_sweep(store, 1)
        for failures in range(1, self.MAX_FAILURES + 1):
            trial = self._hold(store, sweep_id)
            assert trial.token == failures
            maker = begin_run(store, trial)
            store.write(maker.lifecycle(("status", {"status": "failed"})))
            now = self._find(store, trial)
            assert now.failures == failures
        assert (now.state, now.is_final) == ("broken", True)
        assert self._claim(store, sweep_id) is None

    @needs(Capability.COORDINATION)
    def test_a_superseded_run_is_kept_and_decides_nothing(self, store: Any) -> None:
        """Its records are there to its end; the trial is that of the newest claim."""
        sweep_id = self._make_sweep(store, 1)
        late = self._hold(store, sweep_id, worker=_ELSEWHERE, lease_s=_BRIEF_S)
        late_maker = begin_run(store, late)
        holder = self._hold_soon(store, sweep_id)
        maker = begin_run(store, holder)
        held = self._find(store, holder)
        store.write(late_maker.lifecycle(("heartbeat", {})))
        end_run(store, late_maker, late)
        assert self._find(store, holder) == held
        stored = store.load_run(run_id_of(late))
        assert (stored.run.status, stored.superseded) == ("completed", True)
        end_run(store, maker, holder)
        done = self._find(store, holder)
        assert (done.state, done.values) == ("completed", (value_of(0, 2),))
        # A resumed attempt of the late run with its old claim changes nothing either.
        resumed = BatchMaker(run_id_of(late), attempt=1, writer_id="resumed", started_us=2**51)
        store.write(resumed.start(trial=late.claim))
        store.write(resumed.lifecycle(("status", {"status": "failed"})))
        assert self._find(store, holder) == done
        assert not store.load_run(run_id_of(holder)).superseded

    @needs(Capability.COORDINATION)
    def test_paused_and_cancelled_sweeps_give_nothing(self, store: Any) -> None:
        """What runs is finished; what waits is cancelled, for good."""
        sweep_id = self._make_sweep(store, 4)
        running = self._hold(store, sweep_id)
        suspended = self._hold(store, sweep_id)
        told = TrialResult(state="suspended")
        store.settle_trial(sweep_id, suspended.number, 1, told, lease_s=_LONG_S)
        paused = store.update_sweep(sweep_id, "paused", by="kit@test")
        assert (paused.state, store.load_sweep(sweep_id)) == ("paused", paused)
        assert self._claim(store, sweep_id) is None
        assert store.update_sweep(sweep_id, "running", by="kit@test").state == "running"
        held = self._hold(store, sweep_id)
        assert (held.number, held.token) == (suspended.number, 2)
        store.settle_trial(sweep_id, held.number, 2, told, lease_s=_LONG_S)
        cancelled = store.update_sweep(sweep_id, "cancelled", by="kit@test")
        assert cancelled.state == "cancelled"
        assert dict(cancelled.counts) == {"running": 1, "cancelled": 3}
        assert self._claim(store, sweep_id) is None
        with pytest.raises(SchemaValidationError):
            store.update_sweep(sweep_id, "running", by="kit@test")
        with pytest.raises(SchemaValidationError):
            store.add_trials(sweep_id, [NewTrial(parameters={})], key="more")
        end_run(store, begin_run(store, running), running)
        assert self._find(store, running).state == "completed"
        assert self._find(store, held).state == "cancelled"

    @needs(Capability.COORDINATION)
    def test_entries_are_numbered_without_gaps(self, store: Any, open_backend: Opener) -> None:
        """Each log for itself; a call that comes again appends nothing."""
        other: Any = open_backend()
        log, beside = f"{self._make_sweep(store, 0)}/optuna", "another log"
        assert store.read_entries(log, 0) == []
        texts = [ODD_TEXT.replace("\x01", ""), "", "{}", "x" * 100_000]
        one = store.append_entries(log, texts, request_id="one")
        assert one == AppendedEntries(first=0, count=4)
        for again in (store, other):
            assert again.append_entries(log, texts, request_id="one") == one
        assert other.append_entries(beside, ["b"], request_id="two").first == 0
        assert other.append_entries(log, ["last"], request_id="three").first == 4
        for bad in ([], "text", [1]):
            with pytest.raises(SchemaValidationError):
                store.append_entries(log, bad, request_id="four")
        assert store.read_entries(log, 0) == [*texts, "last"]
        assert store.read_entries(log, 2, limit=2) == texts[2:]
        assert store.read_entries(log, 5) == []
        assert store.read_entries(beside, 0) == ["b"]

    @needs(Capability.COORDINATION)
    def test_fields_are_compared_and_set(self, backend: Any) -> None:
        """Of runs, groups and projects; None is a field that is not there."""
        project = backend.load_run(RUN_ID).project.name

        def of_run(*values: Any) -> bool:
            return bool(backend.compare_and_set(RUN_ID, *values, by="kit@test"))

        def of_group(path: str, *values: Any) -> bool:
            return bool(backend.compare_and_set_group(project, path, *values, by="kit@test"))

        for compare in (
            of_run,
            lambda *values: of_group("paper/fig3", *values),
            lambda *values: of_group("", *values),
        ):
            assert not compare("owner", "ben", "anna")
            assert compare("owner", None, "anna")
            assert not compare("owner", None, "ben")
            assert compare("owner", "anna", {"a": [1, None]})
            assert compare("owner", {"a": [1, None]}, None)
            assert compare("owner", None, 1.5)
        assert dict(backend.load_run(RUN_ID).fields) == {"owner": 1.5}
        with pytest.raises(RunNotFoundError):
            backend.compare_and_set("absent", "owner", None, 1, by="kit@test")


_ENDS: dict[str, tuple[str, Any, str, int]] = {
    "plain": ("completed", None, "completed", 0),
    "failed": ("failed", None, "waiting", 1),
    "interrupted": ("interrupted", None, "suspended", 0),
    "pruned": (
        "completed",
        {"state": "pruned", "values": [0.5, -0.0], "step": 3, "reason": ODD_TEXT},
        "pruned",
        0,
    ),
    "told_failed": ("failed", {"state": "failed", "reason": "it exploded"}, "failed", 1),
    "nonsense": ("completed", {"state": "won", "values": "many"}, "completed", 0),
}
"""How a run ends, what it tells of its trial, what that becomes, and how often it has failed."""


def _lease_of(trial: StoredTrial) -> float:
    """For how long a trial was held when it was claimed, in seconds."""
    assert trial.claimed_at is not None
    assert trial.lease_until is not None
    return (parse_time(trial.lease_until) - parse_time(trial.claimed_at)) / 1e6


def _find_ended() -> ProcessIdentity:
    """A process of this machine that has ended."""
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        pass
    mine = current_process()
    return ProcessIdentity(mine.host, process.pid, "1", mine.image)
