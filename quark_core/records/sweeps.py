"""The state of a sweep, its trials, and the claim by which a run holds one of them.

A trial is a set of parameters that one worker at a time holds. Each claim of it has a token,
one higher than that before: whoever holds an older one no longer decides what becomes of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import msgspec

from quark_core.errors import SchemaValidationError
from quark_core.records.base import FieldRules, Record
from quark_core.records.json_object import JsonObject

TrialState = Literal[
    "waiting", "running", "suspended", "completed", "pruned", "failed", "broken", "cancelled"
]
"""States of a trial."""
TRIAL_STATES: tuple[TrialState, ...] = get_args(TrialState)
"""All states of a trial."""
FINAL_TRIAL_STATES: tuple[TrialState, ...] = (
    "completed",
    "pruned",
    "failed",
    "broken",
    "cancelled",
)
"""States that nothing changes any more."""

SweepState = Literal["running", "paused", "cancelled"]
"""States of a sweep."""

_TOKEN_PARTS = 3
_MOST_DIGITS = 18  # of numbers that a store can have
_MOST_SHOWN = 8
_MOST_VALUE = 40
_MOST_REASON = 100


def describe_parameters(parameters: Mapping[str, Any]) -> str:
    """Parameters for people, on one line: `lr=0.01274 layers=3 optimizer='adam'`."""
    pairs = [f"{_spell(name)}={_shorten(value)}" for name, value in parameters.items()]
    more = len(pairs) - _MOST_SHOWN
    return " ".join(pairs[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _shorten(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else ascii(value)
    return text if len(text) <= _MOST_VALUE else f"{text[: _MOST_VALUE - 1]}…"


def _spell(name: str) -> str:
    """A name as it is where it is printable: it may come from anybody."""
    return name if name.isprintable() else ascii(name)


def make_sweep_id() -> str:
    """An id for a new sweep, which no sweep of another store has.

    A run may be stored in several, and says by this id whose trial it has: it must settle none of
    a sweep that is only called the same.
    """
    return f"s{os.urandom(8).hex()}"


def derive_sweep_key(project: str, name: str) -> str:
    """By what a sweep is found whose id is not known: the same in every process and store."""
    both = f"{len(project)}:{project}{name}".encode("utf-8", "replace")
    return f"k{hashlib.sha256(both).hexdigest()[:32]}"


class TrialClaim(Record, frozen=True, gc=False):
    """By what a run has a trial.

    Attributes:
        sweep_id: The sweep.
        number: The trial, from 0 on.
        token: Which claim of it, from 1 on.
    """

    sweep_id: str
    number: int
    token: int

    def to_text(self) -> str:
        """As QUARK_TRIAL has it: `sweep/number/token`."""
        return f"{self.sweep_id}/{self.number}/{self.token}"

    @classmethod
    def from_text(cls, text: str, argument: str = "QUARK_TRIAL") -> TrialClaim:
        """The claim that a text names.

        Raises:
            SchemaValidationError: It names none; the message begins with `argument`.
        """
        parts = text.strip().split("/")
        if len(parts) == _TOKEN_PARTS and parts[0]:
            sweep_id, number, token = parts
            is_short = max(len(number), len(token)) <= _MOST_DIGITS and sweep_id.isprintable()
            if is_short and number.isdecimal() and token.isdecimal() and int(token) > 0:
                return cls(sweep_id, int(number), int(token))
        raise SchemaValidationError(
            f"{argument} must be sweep/number/token, as `quark sweep run` sets it, got "
            f"{text[:60]!r}"
        )


class TrialResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a trial, as whoever holds it says.

    Attributes:
        state: A final state, or `suspended` (somebody shall go on with it), or `waiting`
            (it has failed, and is to be tried again as long as `max_failures` allows).
        values: The figure of each of the sweep's metrics, in their order; None where it has none.
        constraints: How far each constraint is broken; at most 0 where it is kept.
        step: The last step that the values are of, or None.
        reason: Why, for people; or None.
    """

    state: TrialState
    values: tuple[float, ...] | None = None
    constraints: tuple[float, ...] | None = None
    step: int | None = None
    reason: str | None = None


def read_trial_result(data: Mapping[str, Any]) -> TrialResult | None:
    """What the data of a lifecycle record `status` say of the run's trial, or None.

    What is said wrongly is let go: it may come from anybody.
    """
    told = data.get("trial")
    if told is None:
        return None
    try:
        return msgspec.convert(told, TrialResult)
    except msgspec.ValidationError:
        return None


class StoredSweep(Record, frozen=True, gc=False):
    """A sweep as its store knows it. Times are ISO 8601 text in UTC.

    Attributes:
        id: Its id.
        project, name: Of which project, and what it is called there.
        definition: What it was opened with.
        state: running; paused, which gives no trial away; or cancelled, for good.
        counts: How many trials it has in each state; states without any are left out.
        created_at, updated_at: When it was opened, and when its state changed last.
    """

    id: str
    project: str
    name: str
    definition: JsonObject
    state: str
    counts: JsonObject
    created_at: str
    updated_at: str

    RULES: ClassVar[FieldRules] = FieldRules(words={"state": get_args(SweepState)})

    @property
    def is_done(self) -> bool:
        """Whether all the trials that it was opened for have ended; more may be asked for."""
        total = self.definition.get("trials")
        counts = {state: n for state, n in self.counts.items() if isinstance(n, int)}
        if self.state != "running" or not isinstance(total, int):
            return False
        is_open = any(
            counts.get(state) for state in TRIAL_STATES if state not in FINAL_TRIAL_STATES
        )
        return not is_open and sum(counts.values()) >= total


class StoredTrial(Record, frozen=True, gc=False):
    """Stored state of a trial; times are ISO 8601 text in UTC, by the store's clock.

    Attributes:
        sweep_id, number: ID of the sweep, and number of the trial without gaps.
        parameters: Parameters to try.
        origin: Origin as recorded by the search, such as `rung`, `budget` and `parent`.
        state: `waiting`, `running`, `suspended`, `completed`, `pruned`, `failed`, `broken` or
            `cancelled`.
        token: Number of times it was claimed.
        failures: Number of failed runs.
        losses: Number of times its worker was lost.
        worker: Current or last worker, or None.
        claimed_at, lease_until: Start and end of the newest claim.
        run_id: ID of the newest run, or None.
        values, constraints, step, reason: Result: values of the metrics and constraints, last step,
            and reason of the end.
        settled_at: Time of its final state, or None.
    """

    sweep_id: str
    number: int
    parameters: JsonObject
    origin: JsonObject
    state: str
    token: int = 0
    failures: int = 0
    losses: int = 0
    worker: JsonObject | None = None
    claimed_at: str | None = None
    lease_until: str | None = None
    run_id: str | None = None
    values: tuple[float, ...] | None = None
    constraints: tuple[float, ...] | None = None
    step: int | None = None
    reason: str | None = None
    settled_at: str | None = None

    RULES: ClassVar[FieldRules] = FieldRules(words={"state": TRIAL_STATES})

    def __repr__(self) -> str:
        values = self.values or ()
        figures = "" if not values else f", {' '.join(f'{value:.4g}' for value in values)}"
        run = "" if self.run_id is None else f", run {_spell(self.run_id)}"
        reason = "" if self.reason is None else f", {self.reason[:_MOST_REASON]!r}"
        told = describe_parameters(self.parameters)
        return f"StoredTrial({self.number}, {_spell(self.state)}{figures}, {told}{run}{reason})"

    @property
    def is_final(self) -> bool:
        """Whether its state is final."""
        return self.state in FINAL_TRIAL_STATES

    @property
    def claim(self) -> TrialClaim:
        """Newest claim of the trial."""
        return TrialClaim(self.sweep_id, self.number, self.token)
