"""Fakes for tests: batches as a run's stream would make them, and a backend that fails on order."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from quark_core.backends.contract import (
    Backend,
    BackendConfig,
    BackendDefinition,
    Batch,
    Capability,
)
from quark_core.errors import (
    BackendOutcomeUnknown,
    BackendRejected,
    BackendUnauthorized,
    BackendUnavailable,
    BackendUnusable,
)
from quark_core.records import (
    RECORD_TYPES,
    EventRecord,
    LayerSummaryRecord,
    LifecycleRecord,
    MetricRecord,
    Record,
    StreamRecord,
)
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject
from quark_core.records.names import split_name
from quark_core.records.sweeps import TrialClaim
from quark_core.system.process import ProcessIdentity, current_process

FIRST_TIME_US = 1_767_225_600_000_000
"""Time of the first record: 2026-01-01, UTC."""

ODD_TEXT = 'Grüße, "两行"\n\t=1+1; \\ \x01 🦉 e\u0301 \u202eabc'
"""A text that has tripped somebody's format: quotes, line ends, formulas, other scripts."""

_WORDS = {
    "action": "heartbeat",
    "artifact_key": "val/best",
    "artifact_name": "best",
    "artifact_type": "checkpoint",
    "batch_size": 2,
    "boundary": "step",
    "category": "runtime",
    "class_counts": JsonObject({"cat": 3, "Hund": 0}),
    "distribution_type": "update",
    "event_type": "checkpoint.saved",
    "hook_direction": "backward",
    "metric_key": "val/mean_x40_1",
    "metric_name": "mean_x40_1",
    "module_name": "encoder.layers.0",
    "namespace": "val",
    "parameter_name": "weight",
    "parameter_role": "weight",
    "payload_format": "bytes",
    "relation": "used",
    "score_key": "overall",
    "severity": "error",
    "sha256": "0" * 64,
    "status": "watch",
    "summary_type": "gradient",
}
_JSON = JsonObject({"text": ODD_TEXT, "numbers": [1, -2.5, 0, 2**53], "none": None, "": {"a": []}})
_ALWAYS = ("step", "namespace")
_NO_PAYLOAD = ("payload_relative_path", "metadata_relative_path")


def make_samples(
    kind: str, run_id: str, *, writer_id: str = "writer0", attempt: int = 0, rank: int = 0
) -> list[StreamRecord]:
    """Two records of a kind: one with every field given, one with the least."""
    record_type = RECORD_TYPES[kind]
    samples = []
    for sequence, fill in enumerate((True, False)):
        head = {
            "run_id": run_id,
            "writer_id": writer_id,
            "attempt": attempt,
            "rank": rank,
            "sequence": sequence,
            "time_us": FIRST_TIME_US + sequence,
        }
        fields = {**_make_fields(record_type, fill=fill), **head}
        if record_type is LifecycleRecord:
            fields["data"] = JsonObject({})
        samples.append(record_type(**fields))
    return samples


def _make_fields(record_type: type[Record], *, fill: bool) -> dict[str, Any]:
    hints = get_type_hints(record_type)
    fields: dict[str, Any] = {}
    for name in record_type.__struct_fields__:
        options = get_args(hints[name])
        optional = get_origin(hints[name]) in (Union, UnionType) and type(None) in options
        # A record needs a step or an epoch; a payload that is named would have to be sent.
        if name in _NO_PAYLOAD or (optional and not fill and name not in _ALWAYS):
            fields[name] = None
        else:
            hint = next(h for h in options if h is not type(None)) if optional else hints[name]
            words = record_type.RULES.words.get(name, ())
            value = _make_value(name, hint, fill=fill)
            fields[name] = words[-1] if words and value not in words else value
    return fields


def _make_value(name: str, hint: Any, *, fill: bool) -> Any:
    if name in _WORDS:
        return _WORDS[name]
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return _make_items(name, item) if fill else ()
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint(**_make_fields(hint, fill=fill))
    if hint is JsonObject:
        return _JSON if fill else JsonObject({})
    if hint is bool:
        return fill
    values: dict[Any, Any] = {int: 2**40 + 1, float: 1 / 3, str: ODD_TEXT}
    least: dict[Any, Any] = {int: 0, float: 0.0, str: "x"}
    return (values if fill else least)[hint]


def _make_items(name: str, item: Any) -> tuple[Any, ...]:
    if name == "bin_edges":
        return (-1.0, 0.0, 0.1)
    if name == "counts":
        return (3, 4)
    if get_origin(item) in (Union, UnionType):
        return tuple(_make_value(name, option, fill=True) for option in get_args(item))
    return (_make_value("", item, fill=True), _make_value("", item, fill=False))


class BatchMaker:
    """One writer's stream into a run, batch by batch, with numbers and sequences kept.

    Args:
        run_id: The run.
        attempt: Attempt of the writer.
        rank: Its rank.
        writer_id: Its id; each writer of a run needs one of its own.
        started_us: Time of its first record; each further one is a microsecond later.
    """

    def __init__(
        self,
        run_id: str,
        *,
        attempt: int = 0,
        rank: int = 0,
        writer_id: str = "writer0",
        started_us: int = FIRST_TIME_US,
    ) -> None:
        self.run_id = run_id
        self.attempt = attempt
        self.rank = rank
        self.writer_id = writer_id
        self._times = itertools.count(started_us)
        self._numbers = itertools.count()
        self._sequences: dict[str, Iterator[int]] = defaultdict(itertools.count)

    def start(
        self,
        *,
        project: str = "conformance",
        tags: Sequence[str] = (),
        from_step: int | None = None,
        trial: TrialClaim | None = None,
        process: ProcessIdentity | None = None,
    ) -> Batch:
        """The start of an attempt, with a configuration; of the run of a trial, with its claim."""
        data = {
            "project": {"id": f"p-{project}", "name": project, "root_path": "/nowhere"},
            "run": {
                "name": None,
                "notes": None,
                "parent_run_id": None,
                "lineage_root_run_id": self.run_id,
                "run_path": f"/nowhere/{self.run_id}",
                "git_commit": None,
                "strict_mode": False,
                "tags": list(tags),
            },
            "process": msgspec.to_builtins(process or current_process()),
            **({} if from_step is None else {"from_step": from_step}),
            **({} if trial is None else {"trial": trial.to_dict()}),
        }
        config = {
            "values": {"lr": 0.1},
            "notes": [],
            "origins": [{"key": "lr", "source": "defaults", "place": "train.py:4", "value": 0.1}],
        }
        return self.lifecycle(("start", data), ("config", config))

    def lifecycle(self, *actions: tuple[str, Mapping[str, Any]]) -> Batch:
        """One batch of lifecycle records."""
        return self.batch(
            [
                LifecycleRecord(*self._head("lifecycle"), action, JsonObject(data))
                for action, data in actions
            ]
        )

    def metrics(self, *values: tuple[str, int | None, float], **fields: Any) -> Batch:
        """One batch of metrics, each given as (key, step, value); other fields for all of them."""
        records = []
        for key, step, value in values:
            named = {"step": step, "epoch": 0 if step is None else None, **fields}
            records.append(
                MetricRecord(*self._head("metric"), key, *split_name(key), value, **named)
            )
        return self.batch(records)

    def events(self, *types: str, severity: str = "info", **fields: Any) -> Batch:
        """One batch of events of these types."""
        return self.batch(
            [EventRecord(*self._head("event"), name, severity, **fields) for name in types]
        )

    def layers(self, step: int, norms: Mapping[str, float | None], **fields: Any) -> Batch:
        """One batch of a step: the activation of each module with its norm, then the gradients."""
        return self.batch(
            [
                LayerSummaryRecord(
                    *self._head("layer"), name, "Linear", summary, direction, 0, 8, step,
                    norm=norms[name], **{"nan_count": 0, "inf_count": 0, **fields},
                )
                for summary, direction, names in (
                    ("activation", "forward", list(norms)),
                    ("gradient", "backward", list(norms)[::-1]),
                )
                for name in names
            ]
        )  # fmt: skip

    def samples(self, kind: str) -> Batch:
        """One batch of sample records of any kind; a second one of a kind would repeat them."""
        return self.batch(
            make_samples(
                kind, self.run_id, writer_id=self.writer_id, attempt=self.attempt, rank=self.rank
            )
        )

    def batch(self, records: Sequence[StreamRecord]) -> Batch:
        """One batch of any records of one kind, under the next number."""
        return Batch(
            self.run_id,
            self.writer_id,
            self.attempt,
            self.rank,
            next(self._numbers),
            records[0].KIND,
            len(records),
            encode_records(records),
        )

    def _head(self, kind: str) -> tuple[str, str, int, int, int, int]:
        sequence = next(self._sequences[kind])
        return (
            self.run_id,
            self.writer_id,
            self.attempt,
            self.rank,
            sequence,
            next(self._times),
        )


Fault = Literal[
    "ok",
    "unavailable",
    "unauthorized",
    "unusable",
    "unknown",
    "lost_reply",
    "rejected",
    "bug",
    "exit",
    "hang",
]


class ScriptedBackend:
    """Keeps batches in memory and follows a script, one entry per call of `write`.

    Where the script is at its end every write succeeds. "lost_reply" stores
    the batch and then raises; "hang" waits until `release` is set.

    Attributes:
        stored: The batches it has, in order; one that comes twice is there once.
        calls: How often `write` was called.
        closed: Whether `close` was called.
        release: Ends every hang.
    """

    def __init__(self, script: Iterable[Fault] = (), *, always: Fault = "ok") -> None:
        self._script = iter(script)
        self._always = always
        self.stored: list[Batch] = []
        self.calls = 0
        self.closed = False
        self.release = threading.Event()

    def write(self, batch: Batch) -> None:
        """Do what the script says next."""
        self.calls += 1
        fault = next(self._script, self._always)
        if fault == "unavailable":
            raise BackendUnavailable("planted outage")
        if fault == "unauthorized":
            raise BackendUnauthorized("planted refusal of the credentials")
        if fault == "unusable":
            raise BackendUnusable("planted lack of a package")
        if fault == "unknown":
            raise BackendOutcomeUnknown("planted end of its process")
        if fault == "rejected":
            raise BackendRejected("planted refusal")
        if fault == "bug":
            raise ZeroDivisionError("planted bug")
        if fault == "exit":
            sys.exit(3)
        if fault == "hang":
            self.release.wait()
        known = {(one.writer_id, one.number) for one in self.stored}
        if (batch.writer_id, batch.number) not in known:
            self.stored.append(batch)
        if fault == "lost_reply":
            raise BackendUnavailable("planted loss of the reply")

    def close(self) -> None:
        """Note that it was called."""
        self.closed = True

    @property
    def count_records(self) -> int:
        """How many records are stored."""
        return sum(batch.count for batch in self.stored)


def define_scripted(name: str, backend: Backend, *, idempotent: bool = True) -> BackendDefinition:
    """A definition that opens this one backend, whatever it is opened with."""

    def open_it(_config: BackendConfig) -> Backend:
        return backend

    return BackendDefinition(
        name=name,
        summary="does what a script says",
        open=open_it,
        capabilities=frozenset({Capability.IDEMPOTENT} if idempotent else ()),
        own_process=False,
    )
