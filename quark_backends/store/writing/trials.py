"""Assigns trials to workers, stores their results, and appends to logs that workers share.

Each public function is one transaction, or, where it says so, a part of one. A token counts the
claims of a trial: whatever comes with an older one changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from quark_backends.store.databases.connection import StoreConnection, writing
from quark_backends.store.reading.table_rows import (
    TRIAL_COLUMNS,
    load_sweep,
    load_trial,
    to_stored_trial,
)
from quark_core.backends.coordination import (
    MOST_LOSSES,
    AppendedEntries,
    NewTrial,
    TrialWish,
    clean_result,
    lacks_values,
    settle_state,
    unknown_sweep,
    unknown_trial,
)
from quark_core.errors import SchemaValidationError
from quark_core.records import format_time
from quark_core.records.sweeps import (
    FINAL_TRIAL_STATES,
    StoredSweep,
    StoredTrial,
    SweepState,
    TrialClaim,
    TrialResult,
    derive_sweep_key,
    make_sweep_id,
    read_trial_result,
)
from quark_core.system.process import ProcessIdentity, find_lost_reason, is_alive


def append_entries(
    connection: StoreConnection, log: str, entries: Sequence[str], request_id: str
) -> AppendedEntries:
    """See `SupportsCoordination.append_entries`; of entries that were checked.

    Who appends to the same log at the same moment waits for the row that counts them: so the
    numbers are in the order in which what was written becomes visible.
    """
    with writing(connection):
        connection.execute(
            "INSERT INTO log (pk, name, count) VALUES (?, ?, 0) ON CONFLICT (name) DO NOTHING",
            (connection.new_key(), log),
        )
        log_pk, count = connection.execute(
            f"SELECT pk, count FROM log WHERE name = ?{connection.for_update}", (log,)
        ).fetchone()
        known = connection.execute(
            "SELECT number, appended FROM entry WHERE log_pk = ? AND request_id = ?",
            (log_pk, request_id),
        ).fetchone()
        if known is not None:
            return AppendedEntries(first=known[0], count=known[1])
        connection.executemany(
            "INSERT INTO entry (log_pk, number, text, request_id, appended) VALUES (?, ?, ?, ?, ?)",
            [
                (log_pk, number, text, *((request_id, len(entries)) if first else (None, None)))
                for number, text, first in (
                    (count + place, text, place == 0) for place, text in enumerate(entries)
                )
            ],
        )
        connection.execute("UPDATE log SET count = ? WHERE pk = ?", (count + len(entries), log_pk))
    return AppendedEntries(first=count, count=len(entries))


_OPEN = ("waiting", "suspended")
# What a run that has ended says of its trial, where it says nothing else.
_RESULTS = {
    "completed": TrialResult(state="completed"),
    "failed": TrialResult(state="waiting", reason="its run failed"),
    "interrupted": TrialResult(state="suspended", reason="its run was interrupted"),
}


def open_sweep(
    connection: StoreConnection,
    project: str,
    name: str,
    definition: Mapping[str, Any],
    max_failures: int,
) -> StoredSweep:
    """See `SupportsCoordination.open_sweep`."""
    key = derive_sweep_key(project, name)
    with writing(connection):
        now_us = connection.read_clock_us()
        connection.execute(
            "INSERT INTO sweep (id, name_key, project, name, definition, max_failures, state,"
            " created_us, updated_us) VALUES (?, ?, ?, ?, ?, ?, 'running', ?, ?)"
            " ON CONFLICT (name_key) DO NOTHING",
            (
                make_sweep_id(), key, project, name, json.dumps(definition), max_failures, now_us,
                now_us,
            ),
        )  # fmt: skip
        found = load_sweep(connection, key)
    if found.definition != definition:
        parts = sorted({*found.definition, *definition})
        other = [p for p in parts if found.definition.get(p) != definition.get(p)]
        raise SchemaValidationError(
            f"sweep {name!r} of project {project!r} already exists with a different definition "
            f"({', '.join(other)[:200]}). Use the same definition, or choose another name"
        )
    return found


def update_sweep(connection: StoreConnection, sweep_id: str, state: SweepState) -> StoredSweep:
    """See `SupportsCoordination.update_sweep`."""
    with writing(connection):
        known, _ = _find_sweep(connection, sweep_id, lock=connection.for_update)
        if known == "cancelled" and state != "cancelled":
            raise SchemaValidationError(
                f"sweep {sweep_id} is cancelled, so it cannot become {state}. Create a sweep "
                "with another name"
            )
        now_us = connection.read_clock_us()
        if known != state:
            connection.execute(
                "UPDATE sweep SET state = ?, updated_us = ? WHERE id = ?", (state, now_us, sweep_id)
            )
        if state == "cancelled":
            connection.execute(
                "UPDATE trial SET state = 'cancelled', settled_us = ?"
                " WHERE sweep_id = ? AND state IN ('waiting', 'suspended')",
                (now_us, sweep_id),
            )
            _cancel_gone(connection, sweep_id, now_us)
        return load_sweep(connection, sweep_id)


def add_trials(
    connection: StoreConnection, sweep_id: str, trials: Sequence[NewTrial], key: str
) -> list[StoredTrial]:
    """See `SupportsCoordination.add_trials`; of trials that were checked."""
    with writing(connection):
        # Who adds at the same moment waits, and finds what is there then.
        state, _ = _find_sweep(connection, sweep_id, lock=connection.for_update)
        if found := _list_added(connection, sweep_id, key):
            return found
        if state == "cancelled":
            raise SchemaValidationError(f"sweep {sweep_id} is cancelled and accepts no more trials")
        (newest,) = connection.execute(
            "SELECT max(number) FROM trial WHERE sweep_id = ?", (sweep_id,)
        ).fetchone()
        first = 0 if newest is None else newest + 1
        connection.executemany(
            "INSERT INTO trial (sweep_id, number, added_key, parameters, origin, state, token,"
            " failures, losses) VALUES (?, ?, ?, ?, ?, 'waiting', 0, 0, 0)",
            [
                (sweep_id, number, key, json.dumps(trial.parameters), json.dumps(trial.origin))
                for number, trial in enumerate(trials, first)
            ],
        )
        return _list_added(connection, sweep_id, key)


def _list_added(connection: StoreConnection, sweep_id: str, key: str) -> list[StoredTrial]:
    rows = connection.execute(
        f"SELECT {TRIAL_COLUMNS} FROM trial WHERE sweep_id = ? AND added_key = ? ORDER BY number",
        (sweep_id, key),
    ).fetchall()
    return [to_stored_trial(row) for row in rows]


def claim_trial(
    connection: StoreConnection,
    sweep_id: str,
    request_id: str,
    worker: ProcessIdentity,
    lease_s: float,
    wish: TrialWish | None,
) -> StoredTrial | None:
    """See `SupportsCoordination.claim_trial`."""
    accepts = _make_filter(wish)
    number = None if wish is None else wish.number
    asked = _Asked(sweep_id, request_id, worker, lease_s, number, accepts)
    # Whoever asks again and again for what is not there must not keep others from writing.
    if not connection.is_shared and not _may_claim(connection, asked):
        return None
    try:
        with writing(connection):
            return _claim(connection, asked)
    except connection.IntegrityError:
        # The same request, at the same moment, from two connections.
        with writing(connection):
            return _claim(connection, asked)


class _Asked(msgspec.Struct, frozen=True):
    """A claim that is asked for.

    Attributes:
        number: The trial that it is to be, or None.
        accepts: Tells whether a trial may be given; None where any may.
    """

    sweep_id: str
    request_id: str
    worker: ProcessIdentity
    lease_s: float
    number: int | None
    accepts: Callable[[StoredTrial], bool] | None

    @property
    def is_any(self) -> bool:
        """Whether any trial will do."""
        return self.number is None and self.accepts is None


def _make_filter(wish: TrialWish | None) -> Callable[[StoredTrial], bool] | None:
    if wish is None or wish.where is None:
        return None
    from quark_core.search.parser import compile_trial_where

    return compile_trial_where(wish.where)


def _may_claim(connection: StoreConnection, asked: _Asked) -> bool:
    """Whether a claim may find something; reads only, of SQLite."""
    if asked.is_any:
        # What most claims find, in one statement.
        row = connection.execute(
            "SELECT 1 FROM sweep WHERE id = ? AND state = 'running' AND EXISTS (SELECT 1 FROM trial"
            " INDEXED BY trial_by_state WHERE sweep_id = ? AND state IN ('waiting', 'suspended'))",
            (asked.sweep_id, asked.sweep_id),
        ).fetchone()
        if row is not None:
            return True
    state, _ = _find_sweep(connection, asked.sweep_id)
    if _find_request(connection, asked) is not None or state == "cancelled":
        return True
    if state != "running":
        return False
    if next(_list_open(connection, asked, lock=""), None) is not None:
        return True
    return bool(_list_gone(connection, asked, connection.read_clock_us()))


def _claim(connection: StoreConnection, asked: _Asked) -> StoredTrial | None:
    state, _ = _find_sweep(connection, asked.sweep_id)
    now_us = connection.read_clock_us()
    known = _find_request(connection, asked)
    if known is not None:
        _renew(connection, known.claim, asked.lease_s, now_us)
        return load_trial(connection, asked.sweep_id, known.number)
    if state == "cancelled":
        _cancel_gone(connection, asked.sweep_id, now_us)
    if state != "running":
        return None
    trial = next(_list_open(connection, asked, lock=connection.skip_locked), None)
    if trial is not None:
        return _give(connection, trial, asked, now_us)
    for trial in _list_gone(connection, asked, now_us):
        if not _lock(connection, trial, connection.skip_locked):
            continue
        losses = trial.losses + 1
        if losses < MOST_LOSSES:
            return _give(connection, trial, asked, now_us, losses=losses)
        _put(
            connection,
            trial,
            TrialResult(state="broken", reason=f"{losses} of its workers were lost"),
            now_us,
            losses=losses,
        )
    return None


def _find_sweep(connection: StoreConnection, sweep_id: str, lock: str = "") -> tuple[str, int]:
    """State of a sweep, and how many failures make a trial of it broken."""
    row = connection.execute(
        f"SELECT state, max_failures FROM sweep WHERE id = ?{lock}", (sweep_id,)
    ).fetchone()
    if row is None:
        raise unknown_sweep(sweep_id)
    return row[0], row[1]


def _find_request(connection: StoreConnection, asked: _Asked) -> StoredTrial | None:
    """The trial that a request was given, unless somebody has claimed it since."""
    row = connection.execute(
        f"SELECT {TRIAL_COLUMNS} FROM trial WHERE sweep_id = ? AND request_id = ?",
        (asked.sweep_id, asked.request_id),
    ).fetchone()
    return None if row is None else to_stored_trial(row)


def _list_open(connection: StoreConnection, asked: _Asked, lock: str) -> Iterator[StoredTrial]:
    """Trials that nobody holds and that may be given, in their order; those given are locked.

    Args:
        connection: The store.
        asked: What they must be.
        lock: Ends a SELECT whose rows nobody else may have.
    """
    # By itself SQLite goes through all trials of the sweep, in their order.
    index = "" if connection.is_shared else " INDEXED BY trial_by_state"
    sql = f"SELECT {TRIAL_COLUMNS} FROM trial{index} WHERE sweep_id = ? AND state = ?"
    found: list[StoredTrial] = []
    if asked.is_any:
        # Each of the two is the first of an index; together they would have to be sorted.
        for state in _OPEN:
            rows = connection.execute(
                f"{sql} ORDER BY number LIMIT 1{lock}", (asked.sweep_id, state)
            ).fetchall()
            found += [to_stored_trial(row) for row in rows]
        yield from sorted(found, key=lambda trial: trial.number)
        return
    for state in _OPEN:
        arguments: tuple[Any, ...] = (asked.sweep_id, state)
        if asked.number is not None:
            arguments = (*arguments, asked.number)
        numbered = "" if asked.number is None else " AND number = ?"
        rows = connection.execute(f"{sql}{numbered}", arguments).fetchall()
        found += [to_stored_trial(row) for row in rows]
    for trial in sorted(found, key=lambda trial: trial.number):
        accepted = asked.accepts is None or asked.accepts(trial)
        if accepted and (not lock or _lock(connection, trial, lock)):
            yield trial


def _lock(connection: StoreConnection, trial: StoredTrial, lock: str) -> bool:
    """See that nobody else gets a trial; whether it is still as it was."""
    row = connection.execute(
        f"SELECT 1 FROM trial WHERE sweep_id = ? AND number = ? AND state = ? AND token = ?{lock}",
        (trial.sweep_id, trial.number, trial.state, trial.token),
    ).fetchone()
    return row is not None


def _list_gone(connection: StoreConnection, asked: _Asked, now_us: int) -> list[StoredTrial]:
    """Trials whose holder is gone and that may be given, in their order."""
    found = [
        trial
        for trial, is_gone in _list_running(connection, asked.sweep_id, asked.number, now_us)
        if is_gone and (asked.accepts is None or asked.accepts(trial))
    ]
    return sorted(found, key=lambda trial: trial.number)


def _list_running(
    connection: StoreConnection, sweep_id: str, number: int | None, now_us: int
) -> Iterator[tuple[StoredTrial, bool]]:
    """Trials that are held, and whether their holder is gone."""
    columns = ", ".join(f"trial.{name.strip()}" for name in TRIAL_COLUMNS.split(","))
    sql = (
        f"SELECT {columns}, trial.lease_us, run.status, run.process, run.heartbeat_us FROM trial"
        " LEFT JOIN run ON run.id = trial.run_id AND run.sweep_id = trial.sweep_id"
        " AND run.trial_number = trial.number AND run.trial_token = trial.token"
        " WHERE trial.sweep_id = ? AND trial.state = 'running'"
    )
    arguments: tuple[Any, ...] = (sweep_id,)
    if number is not None:
        sql, arguments = f"{sql} AND trial.number = ?", (sweep_id, number)
    ended: dict[ProcessIdentity | None, bool] = {}
    for *row, lease_us, status, process, heartbeat_us in connection.execute(
        sql, arguments
    ).fetchall():
        trial = to_stored_trial(row)
        if lease_us is None or lease_us <= now_us:
            yield trial, True
        elif status is not None:
            holder = _read_identity(json.loads(process))
            yield trial, find_lost_reason(status, holder, heartbeat_us) is not None
        else:
            worker = _read_identity(trial.worker)
            if worker not in ended:
                # One worker may hold many, and is asked for once.
                ended[worker] = worker is not None and is_alive(worker) is False
            yield trial, ended[worker]


def _read_identity(value: Any) -> ProcessIdentity | None:
    try:
        return msgspec.convert(value, ProcessIdentity)
    except msgspec.ValidationError:
        return None


def _cancel_gone(connection: StoreConnection, sweep_id: str, now_us: int) -> None:
    """What nobody goes on with in a cancelled sweep is cancelled, too."""
    for trial, is_gone in list(_list_running(connection, sweep_id, None, now_us)):
        if is_gone and _lock(connection, trial, connection.skip_locked):
            reason = "its worker was lost, and the sweep is cancelled"
            _put(connection, trial, TrialResult(state="cancelled", reason=reason), now_us)


def _give(
    connection: StoreConnection,
    trial: StoredTrial,
    asked: _Asked,
    now_us: int,
    losses: int | None = None,
) -> StoredTrial:
    """Give a trial that is locked to a worker."""
    worker = msgspec.to_builtins(asked.worker)
    lease_us = now_us + round(asked.lease_s * 1e6)
    given = msgspec.structs.replace(
        trial,
        state="running",
        token=trial.token + 1,
        losses=trial.losses if losses is None else losses,
        worker=worker,
        claimed_at=format_time(now_us),
        lease_until=format_time(lease_us),
    )
    connection.execute(
        "UPDATE trial SET state = 'running', token = ?, losses = ?, request_id = ?, worker = ?,"
        " claimed_us = ?, lease_s = ?, lease_us = ? WHERE sweep_id = ? AND number = ?",
        (
            given.token,
            given.losses,
            asked.request_id,
            json.dumps(worker),
            now_us,
            asked.lease_s,
            lease_us,
            trial.sweep_id,
            trial.number,
        ),
    )
    return given


def settle_trial(
    connection: StoreConnection,
    claim: TrialClaim,
    result: TrialResult | None,
    lease_s: float,
) -> StoredTrial:
    """See `SupportsCoordination.settle_trial`."""
    with writing(connection):
        if result is None:
            _find_sweep(connection, claim.sweep_id)
            _renew(connection, claim, lease_s, connection.read_clock_us())
            found = load_trial(connection, claim.sweep_id, claim.number)
        else:
            found = _settle(connection, claim, result)
    if found is None:
        raise unknown_trial(claim.sweep_id, claim.number)
    return found


def _renew(connection: StoreConnection, claim: TrialClaim, lease_s: float, now_us: int) -> None:
    connection.execute(
        "UPDATE trial SET lease_s = ?, lease_us = ?"
        " WHERE sweep_id = ? AND number = ? AND token = ? AND state = 'running'",
        (lease_s, now_us + round(lease_s * 1e6), claim.sweep_id, claim.number, claim.token),
    )


def _settle(
    connection: StoreConnection, claim: TrialClaim, result: TrialResult
) -> StoredTrial | None:
    """Take what the holder of a trial says of it, where it still is the newest one.

    Returns:
        The trial as it is then, or None where there is none.
    """
    row = connection.execute(
        f"SELECT {TRIAL_COLUMNS} FROM trial WHERE sweep_id = ? AND number = ?"
        f"{connection.for_update}",
        (claim.sweep_id, claim.number),
    ).fetchone()
    if row is None:
        return None
    trial = to_stored_trial(row)
    if trial.token == claim.token and lacks_values(trial, result):
        # What a training returns is known after its run has ended.
        return _put(connection, trial, clean_result(result), connection.read_clock_us())
    if trial.token != claim.token or trial.is_final or result.state == "running":
        return trial
    if trial.state in _OPEN and result.state in _OPEN:
        return trial  # told before, by the same holder in another way, or with a lost reply
    state, max_failures = _find_sweep(connection, claim.sweep_id)
    told = settle_state(trial, clean_result(result), max_failures)
    if state == "cancelled" and told.state in _OPEN:
        told = msgspec.structs.replace(told, state="cancelled")
    failed = result.state in ("waiting", "failed", "broken")
    return _put(
        connection,
        trial,
        told,
        connection.read_clock_us(),
        failures=trial.failures + (1 if failed else 0),
    )


def _put(
    connection: StoreConnection,
    trial: StoredTrial,
    result: TrialResult,
    now_us: int,
    *,
    failures: int | None = None,
    losses: int | None = None,
) -> StoredTrial:
    """Write what became of a trial; returns it as it is then."""
    is_final = result.state in FINAL_TRIAL_STATES
    then = msgspec.structs.replace(
        trial,
        state=result.state,
        failures=trial.failures if failures is None else failures,
        losses=trial.losses if losses is None else losses,
        values=None if result.values is None else tuple(map(float, result.values)),
        constraints=None if result.constraints is None else tuple(map(float, result.constraints)),
        step=result.step,
        reason=result.reason,
        settled_at=format_time(now_us) if is_final else None,
    )
    connection.execute(
        "UPDATE trial SET state = ?, failures = ?, losses = ?, objective_values = ?,"
        " constraint_values = ?, step = ?, reason = ?, settled_us = ?"
        " WHERE sweep_id = ? AND number = ?",
        (
            then.state,
            then.failures,
            then.losses,
            None if result.values is None else json.dumps(result.values),
            None if result.constraints is None else json.dumps(result.constraints),
            then.step,
            then.reason,
            now_us if is_final else None,
            trial.sweep_id,
            trial.number,
        ),
    )
    return then


def read_claim(data: Mapping[str, Any]) -> TrialClaim | None:
    """The claim that the data of a record `start` carry, or None.

    What is said wrongly is let go: it may come from anybody.
    """
    told = data.get("trial")
    if told is None:
        return None
    try:
        claim = msgspec.convert(told, TrialClaim)
    except msgspec.ValidationError:
        return None
    return claim if 0 <= claim.number < 2**63 and 0 < claim.token < 2**63 else None


def begin_trial(connection: StoreConnection, run_id: str, claim: TrialClaim) -> None:
    """A run has begun with a trial; inside the transaction of its record `start`.

    A trial that waits or is suspended since then is taken up again by it, as long as nobody has
    claimed it.
    """
    connection.execute(
        "UPDATE trial SET run_id = ?, state = 'running', lease_us = ? + round(lease_s * 1000000)"
        " WHERE sweep_id = ? AND number = ? AND token = ?"
        " AND state IN ('running', 'waiting', 'suspended')",
        (run_id, connection.read_clock_us(), claim.sweep_id, claim.number, claim.token),
    )


def renew_trial(connection: StoreConnection, claim: TrialClaim) -> None:
    """The run of a trial is alive; inside the transaction of its record `heartbeat`."""
    connection.execute(
        "UPDATE trial SET lease_us = ? + round(lease_s * 1000000)"
        " WHERE sweep_id = ? AND number = ? AND token = ? AND state = 'running'",
        (connection.read_clock_us(), claim.sweep_id, claim.number, claim.token),
    )


def end_trial(connection: StoreConnection, claim: TrialClaim, data: Mapping[str, Any]) -> None:
    """The run of a trial has ended; inside the transaction of its record `status`."""
    told = read_trial_result(data) or _RESULTS.get(data["status"])
    if told is not None:
        _settle(connection, claim, told)
