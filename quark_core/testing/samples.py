"""One or two records of every kind, with every field filled and with none that may be empty."""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from quark_core.json_object import JsonObject
from quark_core.records import RECORD_TYPES, LifecycleRecord, Record, StreamRecord

__all__ = ["FIRST_TIME_US", "ODD_TEXT", "make_samples"]

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
            fields[name] = _make_value(name, hint, fill=fill)
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
