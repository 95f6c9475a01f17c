"""What lifecycle records say of a run's groups, fields and progress, applied to what is known.

Every store and reader applies them by these functions. What a record says wrongly is let go:
it may come from anybody, and costs no other record of its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from quark_core.records.runs import RunProgress


def change_groups(known: Iterable[str], data: Mapping[str, Any]) -> list[str]:
    """The groups of a run after a record `group`, sorted.

    Args:
        known: Those before.
        data: Of the record: paths to `add` and to `remove`.
    """
    return sorted({*known, *_texts(data.get("add"))} - {*_texts(data.get("remove"))})


def change_fields(known: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a run after a record `fields`, by name.

    Args:
        known: Those before.
        data: Of the record: what to `set`, by name, and names to `remove`.
    """
    found = data.get("set")
    changed = {**known, **(found if isinstance(found, Mapping) else {})}
    for name in _texts(data.get("remove")):
        changed.pop(name, None)
    return dict(sorted(changed.items()))


def read_progress(data: Mapping[str, Any]) -> RunProgress | None:
    """How far the run has come by what a heartbeat says; None where it says nothing of it."""
    told = data.get("progress")
    if told is None:
        return None
    try:
        return msgspec.convert(told, RunProgress)
    except msgspec.ValidationError:
        return None


def _texts(value: object) -> list[str]:
    found = value if isinstance(value, list | tuple) else ()
    return [text for text in found if isinstance(text, str)]
