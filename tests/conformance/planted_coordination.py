"""A small sound store of trials, and weak ones that differ from it in one thing each.

Which one is opened is said by the option `weakness`, so that other processes can open the same
one. It keeps batches, sweeps, trials and entries in one SQLite file, each call in a transaction.
"""

import dataclasses
import json
import sqlite3
import time
from contextlib import closing, contextmanager

import msgspec
import xxhash

from quark_core.backends.contract import BackendDefinition, Capability
from quark_core.backends.coordination import (
    MOST_LOSSES,
    AppendedEntries,
    check_entries,
    check_new_trials,
    lacks_values,
    settle_state,
    unknown_sweep,
    unknown_trial,
)
from quark_core.backends.edits import RunEdit, make_edit
from quark_core.backends.stored_batches import describe_run, dump_batch, restore_batch, select_rows
from quark_core.errors import (
    BackendRejected,
    BackendUnavailable,
    RunNotFoundError,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.records import format_time, parse_time
from quark_core.records.json_object import JsonObject
from quark_core.records.sweeps import (
    TRIAL_STATES,
    StoredSweep,
    StoredTrial,
    TrialClaim,
    TrialResult,
    derive_sweep_key,
    make_sweep_id,
    read_trial_result,
)
from quark_core.search.parser import compile_trial_where
from quark_core.system.process import ProcessIdentity, current_process, is_alive

WEAK = {}
TABLES = """
CREATE TABLE IF NOT EXISTS batch (run_id, writer_id, number, line, digest,
    PRIMARY KEY (run_id, writer_id, number));
CREATE TABLE IF NOT EXISTS sweep (id PRIMARY KEY, body);
CREATE TABLE IF NOT EXISTS trial (sweep_id, number, key, body, PRIMARY KEY (sweep_id, number));
CREATE TABLE IF NOT EXISTS entry (log, number, text, PRIMARY KEY (log, number));
CREATE TABLE IF NOT EXISTS counter (log PRIMARY KEY, next);
CREATE TABLE IF NOT EXISTS request (id PRIMARY KEY, answer);
CREATE TABLE IF NOT EXISTS field (project, path, name, value, PRIMARY KEY (project, path, name));
"""
STATES = {"completed": "completed", "failed": "waiting", "interrupted": "suspended"}
"""What becomes of a trial whose run says only how it has ended."""


class Trial(dict):
    """A trial's row: what a StoredTrial says, and three things more."""

    def to_record(self):
        kept = {k: v for k, v in self.items() if k not in ("lease_us", "lease_s")}
        return msgspec.convert(kept, StoredTrial, dec_hook=lambda _, value: JsonObject(value))


class SoundStore:
    def __init__(self, config):
        self._path = config.storage_dir / "coordinated.db"
        with closing(self._connect()) as db:
            db.executescript(f"PRAGMA journal_mode = WAL; {TABLES}")

    def close(self):
        pass

    # Batches, and what they say of trials.

    def write(self, batch):
        digest = xxhash.xxh3_64_hexdigest(batch.body)
        try:
            line = json.dumps(dump_batch(batch))
            with self.transaction() as db:
                known = db.execute(
                    "SELECT digest FROM batch WHERE (run_id, writer_id, number) = (?, ?, ?)",
                    (batch.run_id, batch.writer_id, batch.number),
                ).fetchone()
                if known not in (None, (digest,)):
                    raise BackendRejected("other content under a known number")
                if known is None or self.applies_again():
                    if batch.kind == "lifecycle":
                        for record in batch.to_records():
                            self.apply(db, record)
                    self._keep(db, batch, line, digest)
        except SchemaValidationError as error:
            raise BackendRejected(str(error)) from error
        except SessionStoreError as error:
            raise BackendUnavailable(str(error)) from error

    def applies_again(self):
        return False

    def _keep(self, db, batch, line, digest):
        row = (batch.run_id, batch.writer_id, batch.number, line, digest)
        db.execute("INSERT OR IGNORE INTO batch VALUES (?, ?, ?, ?, ?)", row)

    def apply(self, db, record):
        data = record.data or {}
        if record.action == "start" and "trial" in data:
            claim = msgspec.convert(data["trial"], TrialClaim)
            trial = self._find(db, claim.sweep_id, claim.number)
            if trial is not None and trial["token"] == claim.token:
                trial["run_id"] = record.run_id
                self._store(db, trial)
            return
        if record.action not in ("heartbeat", "status"):
            return
        claim = find_claim(self._load_batches(db, record.run_id))
        trial = claim and self._find(db, claim.sweep_id, claim.number)
        if not trial or not self.may_tell(trial, claim.token):
            return
        if record.action == "heartbeat":
            if trial["state"] == "running":
                self.renew(db, trial, trial["lease_s"], record.time_us)
            return
        status = str(data.get("status"))
        told = read_trial_result(data)
        if told is None and status in STATES:
            reason = "its run failed" if status == "failed" else None
            told = TrialResult(state=STATES[status], reason=reason)
        if told is not None:
            self.settle(db, trial, told)

    def may_tell(self, trial, token):
        return trial["token"] == token and trial["state"] == "running"

    def renew(self, db, trial, lease_s, _told_us):
        trial["lease_us"] = now_us() + int(lease_s * 1e6)
        trial["lease_until"] = format_time(trial["lease_us"])
        self._store(db, trial)

    def settle(self, db, trial, result):
        sweep = self._load_sweep(db, trial["sweep_id"])
        result = self.decide(trial.to_record(), result, sweep["max_failures"])
        if result.state in ("waiting", "broken", "failed"):
            trial["failures"] += 1
        named = {name: getattr(result, name) for name in result.__struct_fields__}
        trial.update(named, settled_at=None)
        if trial.to_record().is_final:
            trial["settled_at"] = format_time(now_us())
        trial["lease_us"] = trial["lease_until"] = None
        self._store(db, trial)

    def decide(self, trial, result, max_failures):
        return settle_state(trial, result, max_failures)

    # Reading.

    def read(self, run_id, kind, query):
        with self.transaction() as db:
            batches = self._load_batches(db, run_id)
        if not batches:
            raise RunNotFoundError(f"no run {run_id}")
        return select_rows(batches, kind, query)

    def load_run(self, run_id):
        with self.transaction() as db:
            return self._describe(db, run_id)

    def list_runs(self, *, project=None, limit=None):
        with self.transaction() as db:
            ids = [row[0] for row in db.execute("SELECT DISTINCT run_id FROM batch")]
            runs = [self._describe(db, run_id) for run_id in ids]
        runs = [run for run in runs if project in (None, run.project.name)]
        return sorted(runs, key=lambda run: run.run.created_at, reverse=True)[:limit]

    def _describe(self, db, run_id):
        batches = self._load_batches(db, run_id)
        run = describe_run(batches)
        claim = find_claim(batches)
        if claim is None:
            return run
        trial = self._find(db, claim.sweep_id, claim.number)
        superseded = trial is not None and claim.token < trial["token"]
        return dataclasses.replace(run, trial=claim, superseded=superseded)

    # Sweeps and their trials.

    def open_sweep(self, project, name, definition, *, max_failures):
        with self.transaction() as db:
            known = (json.loads(body) for (body,) in db.execute("SELECT body FROM sweep"))
            key = derive_sweep_key(project, name)
            found = next((each for each in known if self._has_key(each, key)), None)
            sweep_id = make_sweep_id() if found is None else found["id"]
            if found is None:
                now = format_time(now_us())
                self._store_sweep(
                    db,
                    {
                        "id": sweep_id,
                        "project": project,
                        "name": name,
                        "definition": dict(definition),
                        "max_failures": max_failures,
                        "state": "running",
                        "created_at": now,
                        "updated_at": now,
                    },
                )
            elif found["definition"] != definition and not self.takes_any():
                raise SchemaValidationError(
                    f"sweep {name!r} already exists with a different definition"
                )
            return self._describe_sweep(db, self._load_sweep(db, sweep_id))

    def takes_any(self):
        return False

    def update_sweep(self, sweep_id, state, *, by):
        with self.transaction() as db:
            sweep = self._load_sweep(db, sweep_id)
            if sweep["state"] == "cancelled" != state:
                raise SchemaValidationError(f"sweep {sweep['name']!r} is cancelled")
            sweep.update(state=state, updated_at=format_time(now_us()))
            self._store_sweep(db, sweep)
            for trial in self._list(db, sweep_id) if state == "cancelled" else ():
                if trial["state"] in ("waiting", "suspended"):
                    trial.update(state="cancelled", settled_at=format_time(now_us()))
                    self._store(db, trial)
            return self._describe_sweep(db, sweep)

    def add_trials(self, sweep_id, trials, *, key):
        with self.transaction() as db:
            sweep = self._load_sweep(db, sweep_id)
            known = self.find_added(db, sweep_id, key)
            if known:
                return [trial.to_record() for trial in known]
            if sweep["state"] == "cancelled":
                raise SchemaValidationError(f"sweep {sweep['name']!r} is cancelled")
            made = self.make_trials(db, sweep_id, trials)
            for trial in made:
                self._store(db, trial, key)
            return [trial.to_record() for trial in made]

    def find_added(self, db, sweep_id, key):
        return self._list(db, sweep_id, "AND key = ?", key)

    def make_trials(self, db, sweep_id, trials):
        first = len(self._list(db, sweep_id))
        return [
            make_trial(sweep_id, first + place, new)
            for place, new in enumerate(check_new_trials(trials))
        ]

    def claim_trial(self, sweep_id, *, request_id, worker, lease_s, wish=None):
        with self.claiming() as db:
            sweep = self._load_sweep(db, sweep_id)
            known = self.find_request(db, f"claim {request_id}")
            if known is not None:
                trial = self._find(db, sweep_id, known["number"])
                if trial["token"] == known["token"]:
                    return trial.to_record()
            if not self.gives(sweep):
                return None
            trial = self.choose(db, sweep_id, wish)
            if trial is None:
                return None
            trial.update(
                state="running",
                token=self.next_token(trial),
                worker=msgspec.to_builtins(worker),
                claimed_at=format_time(now_us()),
                lease_s=lease_s,
                values=None,
                constraints=None,
                step=None,
                reason=None,
            )
            self.renew(db, trial, lease_s, now_us())
            self._note(db, f"claim {request_id}", {k: trial[k] for k in ("number", "token")})
            return trial.to_record()

    def claiming(self):
        return self.transaction()

    def gives(self, sweep):
        return sweep["state"] == "running"

    def next_token(self, trial):
        return trial["token"] + 1

    def choose(self, db, sweep_id, wish):
        trials = self._list(db, sweep_id)
        if wish is not None and wish.number is not None:
            trials = [trial for trial in trials if trial["number"] == wish.number]
        if wish is not None and wish.where is not None:
            fits = compile_trial_where(wish.where)
            trials = [trial for trial in trials if fits(trial.to_record())]
        for trial in trials:
            if trial["state"] in ("waiting", "suspended"):
                return trial
        for trial in trials:
            if trial["state"] == "running" and self.is_lost(trial):
                trial["losses"] += 1
                if trial["losses"] < self.most_losses():
                    return trial
                trial.update(state="broken", reason="lost", settled_at=format_time(now_us()))
                self._store(db, trial)
        return None

    def most_losses(self):
        return MOST_LOSSES

    def is_lost(self, trial):
        worker = msgspec.convert(trial["worker"], ProcessIdentity)
        return trial["lease_us"] <= now_us() or is_alive(worker) is False

    def settle_trial(self, sweep_id, number, token, result, *, lease_s):
        with self.transaction() as db:
            self._load_sweep(db, sweep_id)
            trial = self._find(db, sweep_id, number)
            if trial is None:
                raise unknown_trial(sweep_id, number)
            if self.may_tell(trial, token):
                if result is not None:
                    self.settle(db, trial, result)
                elif trial["state"] == "running":
                    self.renew(db, trial, lease_s, now_us())
            elif result is not None and trial["token"] == token:
                self.fill_in(db, trial, result)
            return trial.to_record()

    def fill_in(self, db, trial, result):
        if lacks_values(trial.to_record(), result):
            trial["values"] = result.values
            self._store(db, trial)

    def list_sweeps(self, project=None):
        with self.transaction() as db:
            found = [json.loads(row[0]) for row in db.execute("SELECT body FROM sweep")]
            found = [one for one in found if project in (None, one["project"])]
            found.sort(key=lambda one: one["created_at"], reverse=True)
            return [self._describe_sweep(db, one) for one in found]

    @staticmethod
    def _has_key(sweep, key):
        return derive_sweep_key(sweep["project"], sweep["name"]) == key

    def load_sweep(self, sweep_id):
        with self.transaction() as db:
            for (body,) in db.execute("SELECT body FROM sweep").fetchall():
                if self._has_key(json.loads(body), sweep_id):
                    return self._describe_sweep(db, json.loads(body))
            return self._describe_sweep(db, self._load_sweep(db, sweep_id))

    def list_trials(self, sweep_id, *, start=0, limit=None):
        with self.transaction() as db:
            self._load_sweep(db, sweep_id)
            found = self._list(db, sweep_id, "AND number >= ?", start)
            return [trial.to_record() for trial in found[:limit]]

    # Entries and fields.

    def append_entries(self, log, entries, *, request_id):
        checked = check_entries(entries)
        with self.transaction() as db:
            known = self.find_request(db, f"append {request_id}")
            if known is None:
                first = self.take_numbers(db, log, len(checked))
                self.insert_entries(db, log, first, checked)
                known = {"first": first, "count": len(checked)}
                self._note(db, f"append {request_id}", known)
            return AppendedEntries(**known)

    def take_numbers(self, db, log, count):
        db.execute("INSERT OR IGNORE INTO counter VALUES (?, 0)", (log,))
        db.execute("UPDATE counter SET next = next + ? WHERE log = ?", (count, log))
        return db.execute("SELECT next FROM counter WHERE log = ?", (log,)).fetchone()[0] - count

    def insert_entries(self, db, log, first, entries):
        rows = [(log, first + place, text) for place, text in enumerate(entries)]
        db.executemany("INSERT INTO entry VALUES (?, ?, ?)", rows)

    def read_entries(self, log, start, *, limit=10_000):
        with self.transaction() as db:
            rows = db.execute(
                "SELECT text FROM entry WHERE log = ? AND number >= ? ORDER BY number LIMIT ?",
                (log, start, limit),
            )
            return [row[0] for row in rows]

    def compare_and_set(self, run_id, field, expect, value, *, by):
        with self.comparing() as db:
            stored = self._describe(db, run_id)
            if not self.is_equal(stored.fields.get(field), expect):
                return False
            edit = (
                RunEdit(remove_fields=(field,))
                if value is None
                else RunEdit(set_fields={field: value})
            )
            for batch in make_edit(stored, edit, by=by):
                self._keep(db, batch, json.dumps(dump_batch(batch)), "")
            return True

    def compare_and_set_group(self, project, path, field, expect, value, *, by):
        with self.comparing() as db:
            where = (project, path, field)
            row = db.execute(
                "SELECT value FROM field WHERE (project, path, name) = (?, ?, ?)", where
            ).fetchone()
            if not self.is_equal(None if row is None else json.loads(row[0]), expect):
                return False
            db.execute("REPLACE INTO field VALUES (?, ?, ?, ?)", (*where, json.dumps(value)))
            return True

    def comparing(self):
        return self.transaction()

    def is_equal(self, known, expect):
        return known == expect

    # The file.

    def _connect(self):
        return sqlite3.connect(self._path, timeout=30, isolation_level=None)

    @contextmanager
    def transaction(self):
        with closing(self._connect()) as db:
            try:
                db.execute("BEGIN IMMEDIATE")
                yield db
                db.execute("COMMIT")
            except sqlite3.Error as error:
                raise SessionStoreError(f"coordinated.db: {error}") from error

    def _load_batches(self, db, run_id):
        rows = db.execute("SELECT line FROM batch WHERE run_id = ? ORDER BY rowid", (run_id,))
        return [restore_batch(json.loads(row[0])) for row in rows]

    def _load_sweep(self, db, sweep_id):
        row = db.execute("SELECT body FROM sweep WHERE id = ?", (sweep_id,)).fetchone()
        if row is None:
            raise unknown_sweep(sweep_id)
        return json.loads(row[0])

    def _store_sweep(self, db, sweep):
        db.execute("REPLACE INTO sweep VALUES (?, ?)", (sweep["id"], json.dumps(sweep)))

    def _describe_sweep(self, db, sweep):
        states = [trial["state"] for trial in self._list(db, sweep["id"])]
        counts = JsonObject({s: states.count(s) for s in TRIAL_STATES if s in states})
        named = {k: v for k, v in sweep.items() if k not in ("max_failures", "definition")}
        return StoredSweep(definition=JsonObject(sweep["definition"]), counts=counts, **named)

    def _list(self, db, sweep_id, clause="", *more):
        rows = db.execute(
            f"SELECT body FROM trial WHERE sweep_id = ? {clause} ORDER BY number",
            (sweep_id, *more),
        )
        return [Trial(json.loads(row[0])) for row in rows]

    def _find(self, db, sweep_id, number):
        return next(iter(self._list(db, sweep_id, "AND number = ?", number)), None)

    def _store(self, db, trial, key=None):
        body = json.dumps(trial)
        if key is None:
            where = (body, trial["sweep_id"], trial["number"])
            db.execute("UPDATE trial SET body = ? WHERE (sweep_id, number) = (?, ?)", where)
        else:
            row = (trial["sweep_id"], trial["number"], key, body)
            db.execute("INSERT INTO trial VALUES (?, ?, ?, ?)", row)

    def find_request(self, db, request):
        row = db.execute("SELECT answer FROM request WHERE id = ?", (request,)).fetchone()
        return None if row is None else json.loads(row[0])

    def _note(self, db, request, answer):
        db.execute("REPLACE INTO request VALUES (?, ?)", (request, json.dumps(answer)))


def now_us():
    return time.time_ns() // 1000


def find_claim(batches):
    """The newest claim that a run's starts carry, or None."""
    starts = [
        record
        for batch in batches
        if batch.kind == "lifecycle"
        for record in batch.to_records()
        if record.action == "start" and "trial" in (record.data or {})
    ]
    newest = max(starts, key=lambda record: record.attempt, default=None)
    return newest and msgspec.convert(newest.data["trial"], TrialClaim)


def make_trial(sweep_id, number, new):
    return Trial(
        sweep_id=sweep_id,
        number=number,
        parameters=new.parameters,
        origin=new.origin,
        state="waiting",
        token=0,
        failures=0,
        losses=0,
        run_id=None,
    )


def weakness(store):
    WEAK[store.__name__] = store
    return store


@weakness
class ClaimsWithoutALock(SoundStore):
    """It looks for a free trial, and takes it later."""

    @contextmanager
    def claiming(self):
        with closing(self._connect()) as db:
            yield db

    def choose(self, db, sweep_id, wish):
        trial = super().choose(db, sweep_id, wish)
        time.sleep(0.002)
        return trial


@weakness
class TakesResultsOfAnyToken(SoundStore):
    def may_tell(self, trial, token):
        return trial["state"] == "running"


@weakness
class ChangesFinalResults(SoundStore):
    def may_tell(self, trial, token):
        return trial["token"] == token and trial["state"] != "cancelled"

    def decide(self, trial, result, max_failures):
        return result


@weakness
class DropsAResultOnceTheLeaseIsOver(SoundStore):
    """Although nobody has taken the trial."""

    def may_tell(self, trial, token):
        is_held = trial["lease_us"] is None or trial["lease_us"] > now_us()
        return is_held and super().may_tell(trial, token)


@weakness
class BeginsTokensAnewAfterAFailure(SoundStore):
    def settle(self, db, trial, result):
        super().settle(db, trial, result)
        if trial["state"] == "waiting":
            trial["token"] = 0
            self._store(db, trial)


@weakness
class KeepsTheTokenOfALostTrial(SoundStore):
    def next_token(self, trial):
        return max(1, trial["token"])


@weakness
class KnowsNoRequests(SoundStore):
    """The same request again is another one."""

    def find_request(self, db, request):
        return None


@weakness
class AnswersARequestWithWhatSomebodyElseHolds(SoundStore):
    def claim_trial(self, sweep_id, *, request_id, **wanted):
        with self.transaction() as db:
            known = self.find_request(db, f"claim {request_id}")
            if known is not None:
                return self._find(db, sweep_id, known["number"]).to_record()
        return super().claim_trial(sweep_id, request_id=request_id, **wanted)


@weakness
class KnowsNoKeys(SoundStore):
    """Trials of the same key are added again."""

    def find_added(self, db, sweep_id, key):
        return []


@weakness
class AddsTrialsOneByOne(SoundStore):
    """Those before a bad one stay."""

    def add_trials(self, sweep_id, trials, *, key):
        for place, trial in enumerate(trials):
            super().add_trials(sweep_id, [trial], key=f"{key}-{place}")
        with self.transaction() as db:
            found = self._list(db, sweep_id, "AND key LIKE ?", f"{key}-%")
            return [trial.to_record() for trial in found]


@weakness
class NumbersEntriesBySequence(SoundStore):
    """Numbers are drawn in a transaction of their own, and entries come later."""

    def append_entries(self, log, entries, *, request_id):
        with self.transaction() as db:
            known = self.find_request(db, f"append {request_id}")
            if known is not None:
                return AppendedEntries(**known)
            first = self.take_numbers(db, log, len(entries))
        time.sleep(0.001)
        with self.transaction() as db:
            self.insert_entries(db, log, first, check_entries(entries))
            known = {"first": first, "count": len(entries)}
            self._note(db, f"append {request_id}", known)
        return AppendedEntries(**known)


@weakness
class LeavesGapsBetweenEntries(SoundStore):
    """A call that is made again draws numbers again."""

    def append_entries(self, log, entries, *, request_id):
        with self.transaction() as db:
            self.take_numbers(db, log, 1)
        return super().append_entries(log, entries, request_id=request_id)


@weakness
class LetsEntriesOfOthersBetween(SoundStore):
    def append_entries(self, log, entries, *, request_id):
        parts = []
        for place, entry in enumerate(entries):
            parts.append(super().append_entries(log, [entry], request_id=f"{request_id}-{place}"))
            time.sleep(0.005)  # others come between on a busy machine too
        return AppendedEntries(first=parts[0].first, count=len(parts))


@weakness
class RenewsNoLease(SoundStore):
    """Heartbeats are kept, and nothing else."""

    def apply(self, db, record):
        if record.action != "heartbeat":
            super().apply(db, record)


@weakness
class BelievesTheClocksOfWorkers(SoundStore):
    """A lease is renewed from the time on that the heartbeat tells."""

    def renew(self, db, trial, lease_s, told_us):
        trial["lease_us"] = told_us + int(lease_s * 1e6)
        trial["lease_until"] = format_time(trial["lease_us"])
        self._store(db, trial)


@weakness
class JudgesWorkersByTheirHeartbeats(SoundStore):
    """Who has said nothing for a minute, by its own clock, is gone."""

    def is_lost(self, trial):
        if super().is_lost(trial):
            return True
        try:
            heartbeat_at = trial["run_id"] and self.load_run(trial["run_id"]).heartbeat_at
        except SessionStoreError:
            return False
        return bool(heartbeat_at) and now_us() - parse_time(heartbeat_at) > 60_000_000

    @contextmanager
    def claiming(self):
        with closing(self._connect()) as db:
            yield db


@weakness
class ForgetsLostTrials(SoundStore):
    """What somebody has held is given to nobody else."""

    def is_lost(self, trial):
        return False


@weakness
class WaitsForEveryLease(SoundStore):
    """Also of processes of this machine that have ended."""

    def is_lost(self, trial):
        return trial["lease_us"] <= now_us()


@weakness
class LooksAtProcessesOfOtherMachines(SoundStore):
    def is_lost(self, trial):
        worker = msgspec.convert(trial["worker"], ProcessIdentity)
        here = msgspec.structs.replace(worker, host=current_process().host)
        return trial["lease_us"] <= now_us() or not is_alive(here)


@weakness
class NeverGivesUpATrial(SoundStore):
    def most_losses(self):
        return 1 << 30


@weakness
class TriesFailedTrialsForEver(SoundStore):
    def decide(self, trial, result, max_failures):
        return settle_state(trial, result, 1 << 30)


@weakness
class AppliesAStatusAgain(SoundStore):
    """A batch that comes twice fails its trial twice."""

    def applies_again(self):
        return True

    def may_tell(self, trial, token):
        return trial["token"] == token and not trial.to_record().is_final


@weakness
class DropsLateScores(SoundStore):
    def fill_in(self, db, trial, result):
        pass


@weakness
class CountsAFailureAsOftenAsItIsTold(SoundStore):
    def may_tell(self, trial, token):
        return trial["token"] == token and not trial.to_record().is_final


@weakness
class GivesTrialsOfPausedSweeps(SoundStore):
    def gives(self, sweep):
        return sweep["state"] != "cancelled"


@weakness
class CancelsRunningTrials(SoundStore):
    def update_sweep(self, sweep_id, state, *, by):
        sweep = super().update_sweep(sweep_id, state, by=by)
        with self.transaction() as db:
            for trial in self._list(db, sweep_id) if state == "cancelled" else ():
                trial["state"] = "cancelled"
                self._store(db, trial)
        return sweep


@weakness
class TakesAnyDefinition(SoundStore):
    def takes_any(self):
        return True


@weakness
class IgnoresTheNumberOfAWish(SoundStore):
    def choose(self, db, sweep_id, wish):
        return super().choose(db, sweep_id, None)


@weakness
class IgnoresTheSearchOfAWish(SoundStore):
    def choose(self, db, sweep_id, wish):
        wish = wish and msgspec.structs.replace(wish, where=None)
        return super().choose(db, sweep_id, wish)


@weakness
class GivesTheNewestFirst(SoundStore):
    def _list(self, db, sweep_id, clause="", *more):
        found = super()._list(db, sweep_id, clause, *more)
        return found[::-1] if not clause else found


@weakness
class ComparesAndSetsInTwoSteps(SoundStore):
    @contextmanager
    def comparing(self):
        with closing(self._connect()) as db:
            yield db

    def is_equal(self, known, expect):
        time.sleep(0.002)
        return super().is_equal(known, expect)


@weakness
class SetsWithoutComparing(SoundStore):
    def is_equal(self, known, expect):
        return True


@weakness
class RefusesLateRuns(SoundStore):
    """The run of an older token is not kept."""

    def apply(self, db, record):
        if record.action == "status":
            claim = find_claim(self._load_batches(db, record.run_id))
            trial = claim and self._find(db, claim.sweep_id, claim.number)
            if trial and trial["token"] != claim.token:
                raise BackendRejected("superseded")
        super().apply(db, record)


def open_planted(config):
    return WEAK.get(config.options.get("weakness"), SoundStore)(config)


def define():
    return BackendDefinition(
        name="planted",
        summary="a store of trials with a planted weakness",
        open=open_planted,
        capabilities=frozenset({Capability.READ, Capability.IDEMPOTENT, Capability.COORDINATION}),
    )
