"""Optuna's journal over a log of the store: what samplers and pruners know is kept beside the runs.

Optuna replays the journal in every process, so all of them see the same trials in the same order.
A store may be shared with strangers. Nothing of the journal is ever unpickled, and an entry that
Optuna could not replay is passed over: in every process alike, so that all go on seeing the same.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta
from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.storages.journal import BaseJournalBackend

from quark_core.backends.coordination import MOST_ENTRIES, AppendedEntries
from quark_core.errors import SessionStoreError

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
                "this journal holds a store that is open, and was not told how to open it anew: "
                "give reopen= where it is to be pickled"
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
        _log.debug("an entry of a sweep's journal is passed over: %.200r", text)
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
        raise ValueError("a pickle of a stranger may be anything")
