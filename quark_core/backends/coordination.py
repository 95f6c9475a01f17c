"""Trials that many workers share: the contract of stores that give each of them to one at a time.

A sweep is a list of trials. `claim_trial` gives each caller a trial of its own, with a token that
is one higher than that of the claim before. What comes of a trial travels with the records of its
run, and is applied in the transaction that stores them (`apply_trial_status`, `renew_lease`): so
nothing of a trial is lost that would not be lost of its run. An older token changes nothing; its
run is kept, and says that it was superseded.

Time is the store's, whatever the clocks of the workers say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from quark_core.config.arguments import check_fields, check_label
from quark_core.config.redaction import redact_text, redact_values
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.sweeps import (
    TRIAL_STATES,
    StoredSweep,
    StoredTrial,
    SweepState,
    TrialResult,
)
from quark_core.system.process import ProcessIdentity

MOST_LOSSES = 10
"""After how many workers that were gone without a word a trial is broken, as one may be that
takes all memory of any machine."""

MOST_TRIALS = 10_000
"""How many trials one call adds at most."""

MOST_ENTRIES = 10_000
"""How many entries one call appends, or reads, at most."""

MOST_READ_CHARACTERS = 16_000_000
"""How much text one call appends, or reads, at most; a single entry is always read."""

_MAX_PARAMETERS_BYTES = 65_536
_MAX_DEFINITION_BYTES = 1_048_576
_MAX_ENTRY_CHARACTERS = 1_000_000
_MAX_KEY = 250
_MAX_VALUES = 100
_MAX_REASON = 1_000
_MAX_READ_REASON = 10_000
_MAX_LEASE_S = 30 * 86_400.0

_Text = Annotated[str, Meta(max_length=250)]


class NewTrial(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A trial that is to be added.

    Attributes:
        parameters: What is to be tried, by name.
        origin: Where it comes from, for whoever searches: such as `rung`, `budget`, `parent`.
    """

    parameters: dict[str, Any]
    origin: dict[str, Any] = {}


class TrialWish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which trials a claim may be given; each thing that is said must hold.

    Attributes:
        where: A search over trials, such as `param.lr < 0.1 and failures == 0`; see
            `quark_core.search.parser`. None for any.
        number: This trial alone, or None.
    """

    where: Annotated[str, Meta(max_length=10_000)] | None = None
    number: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


class AppendedEntries(msgspec.Struct, frozen=True, kw_only=True):
    """Where entries stand that were appended.

    Attributes:
        first: Number of the first of them.
        count: How many they are.
    """

    first: int
    count: int


@runtime_checkable
class SupportsCoordination(Protocol):
    """What a backend has that declares `Capability.COORDINATION`.

    Each method may be called from any thread and any process, and is one transaction: when it
    returns, what it did holds even if the power fails, and when its reply is lost, the same call
    with the same `request_id` or `key` has the same answer and does nothing twice.

    Every method raises `SessionStoreError` where the store is busy, full or out of reach, and
    `SchemaValidationError` where there is no such sweep.
    """

    def open_sweep(
        self, project: str, name: str, definition: Mapping[str, Any], *, max_failures: int
    ) -> StoredSweep:
        """The sweep of this name, which is made where there is none, with `make_sweep_id`.

        Args:
            project: Of which project; it need not be there yet.
            name: What it is called there.
            definition: What it is, as JSON values: the same for all who come.
            max_failures: How many failed runs of a trial make it broken.

        Raises:
            SchemaValidationError: It is there with another definition.
        """

    def update_sweep(self, sweep_id: str, state: SweepState, *, by: str) -> StoredSweep:
        """Pause, go on with or cancel a sweep; returns it as it is then.

        Cancelling makes `cancelled` of all trials that wait or are suspended; those that run
        go on, and can still be settled. A cancelled sweep stays so.

        Raises:
            SchemaValidationError: It is cancelled, and shall go on.
        """

    def add_trials(
        self, sweep_id: str, trials: Sequence[NewTrial], *, key: str
    ) -> list[StoredTrial]:
        """Add trials, all of them or none; returns those of `key`, in their order.

        Where trials of this key are there already, they are returned and nothing is added,
        whatever `trials` says: of several who add the same thing, the first does. Numbers have
        no gaps.

        Raises:
            SchemaValidationError: The sweep is cancelled, or there are none to add.
        """

    def claim_trial(
        self,
        sweep_id: str,
        *,
        request_id: str,
        worker: ProcessIdentity,
        lease_s: float,
        wish: TrialWish | None = None,
    ) -> StoredTrial | None:
        """A trial that nobody else holds, or None where there is none to have now.

        First those that wait or are suspended, by their number, then those whose holder is gone:
        its lease is over, its run is lost, or its process has ended on the host of the store.
        A trial whose holder was gone `MOST_LOSSES` times is broken, and given to nobody.
        A sweep that is paused or cancelled has none to give.

        Args:
            sweep_id: The sweep.
            request_id: Of this claim: the same one gets the same trial again, with the same
                token, as long as nobody has claimed it since.
            worker: Who claims.
            lease_s: For how long it is held without a word of its run; each heartbeat of its
                run renews it.
            wish: Which trials it may be.
        """

    def settle_trial(
        self, sweep_id: str, number: int, token: int, result: TrialResult | None, *, lease_s: float
    ) -> StoredTrial:
        """Say what became of a trial, or renew its lease; returns it as it is then.

        For those whose trial has no run that says so. A token that is no longer the newest, or a
        trial that is final, is left as it is: see whether the returned one has your token. Only
        a trial that is completed without values takes those of another `completed`.

        Args:
            sweep_id, number, token: The claim.
            result: What became of it; None only renews the lease.
            lease_s: For how long it is held from now on, where it is held.
        """

    def append_entries(
        self, log: str, entries: Sequence[str], *, request_id: str
    ) -> AppendedEntries:
        """Append texts to a log, all of them or none, one after the other.

        Numbers begin at 0 and have no gaps; nobody sees an entry before one of a lower number.
        A log begins with its first entry.
        """

    def read_entries(self, log: str, start: int, *, limit: int = MOST_ENTRIES) -> list[str]:
        """The entries of a log from a number on, in their order.

        At most `limit`, and fewer where that would be more than `MOST_READ_CHARACTERS` of text:
        read on from the number after the last one until there are none.
        """

    def compare_and_set(self, run_id: str, field: str, expect: Any, value: Any, *, by: str) -> bool:
        """Set a field of a run if its value is `expect`; returns whether it was.

        None stands for a field that is not there, as the one or the other.

        Raises:
            RunNotFoundError: There is no such run, or it is in the trash.
        """

    def compare_and_set_group(
        self, project: str, path: str, field: str, expect: Any, value: Any, *, by: str
    ) -> bool:
        """As `compare_and_set`, of a field of a group, or of the project where `path` is ""."""

    def list_sweeps(self, project: str | None = None) -> list[StoredSweep]:
        """The sweeps there are, newest first; of very large ones the newest that memory takes."""

    def load_sweep(self, sweep_id: str) -> StoredSweep:
        """One sweep, by its id or by `derive_sweep_key` of its project and name."""

    def list_trials(
        self, sweep_id: str, *, start: int = 0, limit: int | None = None
    ) -> list[StoredTrial]:
        """Trials of a sweep from a number on, in their order."""


def check_new_trials(trials: Sequence[NewTrial]) -> list[NewTrial]:
    """Trials as they are kept: plain JSON values, their origins without secrets.

    Raises:
        SchemaValidationError: None, too many, or one that cannot be kept: a parameter without a
            name, of no JSON value, not finite, too large, or one that looks like a secret, since
            parameters are kept as they are.
    """
    if not trials:
        raise SchemaValidationError("trials must contain at least one trial")
    if len(trials) > MOST_TRIALS:
        raise SchemaValidationError(f"trials has {len(trials)} trials; at most {MOST_TRIALS}")
    return [_check_new_trial(trial, f"trials[{place}]") for place, trial in enumerate(trials)]


def _check_new_trial(trial: NewTrial, where: str) -> NewTrial:
    parameters = normalize_object(trial.parameters, f"{where}.parameters") or JsonObject()
    for name in parameters:
        check_label(name, f"{where}.parameters name")
    # As it was given: what is kept has a text for what no JSON can say.
    for name, value in trial.parameters.items():
        if not _is_finite(value):
            raise SchemaValidationError(f"{where}.parameters[{name!r}] must be finite, got {value}")
    for what, kept in (("parameters", parameters), ("origin", trial.origin)):
        if len(msgspec.json.encode(kept)) > _MAX_PARAMETERS_BYTES:
            raise SchemaValidationError(
                f"{where}.{what} has more than {_MAX_PARAMETERS_BYTES:,} bytes of JSON"
            )
    redacted = redact_values(parameters)
    if redacted != parameters:
        name = next((n for n in parameters if redacted.get(n) != parameters[n]), "")
        raise SchemaValidationError(
            f"{where}.parameters[{redact_text(name)!r}] looks like a secret. Sweep parameters "
            "are stored without redaction, so pass secrets in environment variables"
        )
    origin = normalize_object(trial.origin, f"{where}.origin") or JsonObject()
    return NewTrial(parameters=parameters, origin=redact_values(origin))


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_is_finite, value))


def check_entries(entries: Sequence[str]) -> list[str]:
    """Entries as they are kept.

    Raises:
        SchemaValidationError: None, too many, no text, or too long.
    """
    if isinstance(entries, str) or not entries or len(entries) > MOST_ENTRIES:
        raise SchemaValidationError(f"entries must be a list of 1 to {MOST_ENTRIES:,} strings")
    for place, entry in enumerate(entries):
        if not isinstance(entry, str):
            raise SchemaValidationError(
                f"entries[{place}] must be a str, not {type(entry).__name__}"
            )
        if len(entry) > _MAX_ENTRY_CHARACTERS:
            raise SchemaValidationError(
                f"entries[{place}] has {len(entry):,} characters; at most {_MAX_ENTRY_CHARACTERS:,}"
            )
        _check_encoding(entry, f"entries[{place}]")
    size = sum(map(len, entries))
    if size > MOST_READ_CHARACTERS:
        raise SchemaValidationError(
            f"entries have {size:,} characters in all; at most {MOST_READ_CHARACTERS:,} at once"
        )
    return list(entries)


def check_sweep(
    project: str, name: str, definition: Mapping[str, Any], max_failures: int
) -> tuple[str, str, JsonObject]:
    """Project, name and definition of a sweep as they are kept.

    Raises:
        SchemaValidationError: One of them cannot be kept; the message names it.
    """
    kept = normalize_object(definition, "definition") or JsonObject()
    if len(kept.encoded) > _MAX_DEFINITION_BYTES:
        raise SchemaValidationError(
            f"definition has more than {_MAX_DEFINITION_BYTES:,} bytes of JSON"
        )
    if isinstance(max_failures, bool) or not isinstance(max_failures, int) or max_failures < 1:
        raise SchemaValidationError(
            f"max_failures must be a positive int, got {max_failures!r:.60}"
        )
    redacted = JsonObject(redact_values(kept))
    return check_label(project, "project"), check_label(name, "name"), redacted


def check_key(text: str, argument: str) -> str:
    """Return what names a call, a log or a sweep, or refuse it.

    Raises:
        SchemaValidationError: Not a str of 1 to 250 characters.
    """
    if not isinstance(text, str) or not 0 < len(text) <= _MAX_KEY:
        raise SchemaValidationError(f"{argument} must be a str of 1 to {_MAX_KEY} characters")
    _check_encoding(text, argument)
    return text


def _check_encoding(text: str, argument: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SchemaValidationError(f"{argument} contains half of a surrogate pair") from None


def check_lease(lease_s: float) -> float:
    """Return a lease, or refuse it.

    Raises:
        SchemaValidationError: Not a number of seconds above 0, or more than 30 days.
    """
    is_number = isinstance(lease_s, (int, float)) and not isinstance(lease_s, bool)
    if not is_number or not 0 < lease_s <= _MAX_LEASE_S:
        raise SchemaValidationError(
            f"lease_s must be a number of seconds above 0, at most {_MAX_LEASE_S:.0f}, "
            f"got {lease_s!r:.60}"
        )
    return float(lease_s)


def check_result(result: TrialResult) -> TrialResult:
    """Return a result as it is kept, or refuse it.

    Raises:
        SchemaValidationError: No state that a holder can say, or a value that is not finite.
    """
    if result.state not in TRIAL_STATES or result.state == "running":
        states = ", ".join(repr(state) for state in TRIAL_STATES if state != "running")
        raise SchemaValidationError(
            f"result.state must be one of {states}, got {result.state!r:.60}"
        )
    for what in ("values", "constraints"):
        numbers = getattr(result, what)
        if numbers is not None and not all(map(math.isfinite, numbers)):
            raise SchemaValidationError(f"result.{what} must be finite, got {numbers!r:.100}")
    if result.step is not None and not 0 <= result.step < 2**63:
        raise SchemaValidationError(f"result.step must not be negative, got {result.step}")
    return clean_result(result)


def clean_result(result: TrialResult) -> TrialResult:
    """What can be kept of a result, whoever says it."""
    reason = result.reason
    if reason is not None:
        # Of a secret that was cut in two, nobody sees any more that it is one.
        whole = reason[:_MAX_READ_REASON].encode("utf-8", "replace").decode()
        reason = redact_text(whole)[:_MAX_REASON] or None
    step = result.step
    return msgspec.structs.replace(
        result,
        values=_clean_numbers(result.values),
        constraints=_clean_numbers(result.constraints),
        step=step if step is not None and 0 <= step < 2**63 else None,
        reason=reason,
    )


def _clean_numbers(numbers: tuple[float, ...] | None) -> tuple[float, ...] | None:
    if numbers is None or len(numbers) > _MAX_VALUES or not all(map(math.isfinite, numbers)):
        return None
    return numbers


class FieldExchange(msgspec.Struct, frozen=True, kw_only=True):
    """A field that is to be set if it has a certain value; None stands for none there.

    Attributes:
        field: Its name.
        expect: The value that it must have.
        value: The value that it is to have.
    """

    field: str
    expect: Any
    value: Any

    def fits(self, known: Mapping[str, Any]) -> bool:
        """Whether the field has the value that is expected, among those that are known.

        Numbers are equal where their values are; True is no number.
        """
        return _is_same(known.get(self.field), self.expect)


def check_exchange(field: str, expect: Any, value: Any) -> FieldExchange:
    """An exchange as it is done: values as fields keep them, secrets taken out.

    Raises:
        SchemaValidationError: A name or a value that no field can have.
    """
    kept = [check_fields({field: each}, "field") for each in (expect, value)]
    (name,) = kept[0]
    return FieldExchange(field=name, expect=kept[0][name], value=kept[1][name])


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def settle_state(trial: StoredTrial, result: TrialResult, max_failures: int) -> TrialResult:
    """What becomes of a trial by a result, with the count of its failures.

    `waiting` asks that it be tried again; it is broken instead where that was its last failure.

    Args:
        trial: As it is known, with the failures before.
        result: What its holder says.
        max_failures: Of its sweep.
    """
    if trial.is_final or result.state == "running":
        raise ValueError(f"trial {trial.number} cannot become {result.state} from {trial.state}")
    if result.state == "waiting" and trial.failures + 1 >= max_failures:
        said = result.reason or "its run failed"
        times = "once" if max_failures == 1 else f"{max_failures} times"
        return msgspec.structs.replace(result, state="broken", reason=f"failed {times}: {said}")
    return result


def lacks_values(trial: StoredTrial, result: TrialResult) -> bool:
    """Whether a trial has completed without the values that its holder tells now."""
    has_completed = trial.state == result.state == "completed"
    return has_completed and trial.values is None and result.values is not None


def unknown_sweep(sweep: str) -> SchemaValidationError:
    """The error for a sweep that the store does not have."""
    return SchemaValidationError(
        f"sweep {sweep!r} does not exist in this store. `quark sweep show` lists the sweeps, "
        "and `quark sweep new` creates one"
    )


def unknown_trial(sweep_id: str, number: int) -> SchemaValidationError:
    """The error for a trial that a sweep does not have."""
    return SchemaValidationError(f"sweep {sweep_id} has no trial {number}")


def refuse_coordination(store: str) -> SessionStoreError:
    """The error of a store that cannot give trials to workers."""
    return SessionStoreError(
        f"{store} cannot assign each trial to only one worker. Use a store on a local disk "
        "(SQLite), or a Quark server (`quark serve`), which many machines can share"
    )
