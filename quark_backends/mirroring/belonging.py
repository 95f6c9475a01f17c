"""What mirrors say of where a run belongs: groups, fields and digests of its settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quark_core.api import (
    SOURCES_KEY,
    FingerprintRecord,
    LifecycleRecord,
    StreamRecord,
    change_fields,
    change_groups,
    make_digests,
)


def change_belonging(run: Mapping[str, Any], record: LifecycleRecord) -> dict[str, Any]:
    """What changes of a run, as its start has told of it, by a `group`, `fields` or `edit`.

    Args:
        run: The part `run` of its start, with what changed since.
        record: The record.
    """
    data: Mapping[str, Any] = record.data or {}
    if record.action == "group":
        return {"groups": change_groups(run.get("groups") or (), data)}
    if record.action == "fields":
        return {"fields": change_fields(run.get("fields") or {}, data)}
    return change_by_edit(run, data.get("changes") or {}) if record.action == "edit" else {}


def change_by_edit(run: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The same by what somebody has edited of a run.

    Args:
        run: As in `change_belonging`.
        changes: What the edit says.
    """
    changed: dict[str, Any] = {}
    groups, fields = changes.get("groups"), changes.get("fields")
    if groups:
        said = {"add": groups.get("added"), "remove": groups.get("removed")}
        changed["groups"] = change_groups(run.get("groups") or (), said)
    if fields:
        said = {"set": fields.get("set"), "remove": fields.get("removed")}
        changed["fields"] = change_fields(run.get("fields") or {}, said)
    return changed


def list_notes(run: Mapping[str, Any]) -> dict[str, str]:
    """Name and text of what is noted of a run: `groups`, and `field.NAME` of each field."""
    fields: Mapping[str, Any] = run.get("fields") or {}
    groups: Sequence[str] = run.get("groups") or ()
    notes = {f"field.{name}": _spell(value) for name, value in fields.items()}
    return {**({"groups": ", ".join(groups)} if groups else {}), **notes}


def list_digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Name and digest of a configuration and of its structure; none of an empty one."""
    made = make_digests(config, None)
    named = {"config_digest": made.config, "structure_digest": made.structure}
    return {name: digest for name, digest in named.items() if digest is not None}


def list_data_digests(records: Iterable[StreamRecord]) -> dict[str, str]:
    """Key -> level and digest of the newest fingerprint of data, such as `full 3fa1…`."""
    return {
        record.key: f"{record.level} {record.digest}"
        for record in records
        if isinstance(record, FingerprintRecord) and record.subject == "data"
    }


def find_code_digest(records: Iterable[StreamRecord]) -> str | None:
    """The newest digest of a run's sources among some records, or None."""
    found = None
    for record in records:
        if isinstance(record, FingerprintRecord) and record.subject == "code":
            found = record.digest if record.key == SOURCES_KEY else found
    return found


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
