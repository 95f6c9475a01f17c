"""What `quark show` says of a run's fingerprints: a line for the newest of each key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.query import Query
from quark_core.sessions.run_config import CONFIG_READS
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsRead

_MOST_READ = 1000
_MOST_SHOWN = 12
_DIGEST_CHARACTERS = 12
_STREAM = "stream"
_SUBJECTS = ("data", "output", "code", "environment")
_COUNTS = {"files": "files", "rows": "rows", "length": "items", "samples": "samples"}
_TROUBLES = ("unreadable", "changed", "failed", "not_the_same_twice", "unseen")
_MOST_KEYS = 8


def read_fingerprints(reader: SupportsRead, run_id: str) -> list[FingerprintRecord]:
    """The newest fingerprint of each subject and key, those of data first.

    Data that came may have the key of the data that were given: they are two.
    """
    found: Iterable[object] = reader.read(
        run_id, FingerprintRecord.KIND, Query(limit=_MOST_READ)
    ).to_records()
    newest = {
        (one.subject, one.key, one.level.startswith(_STREAM)): one
        for one in found
        if isinstance(one, FingerprintRecord)
    }
    return sorted(newest.values(), key=lambda one: (_SUBJECTS.index(one.subject), one.key))


def describe_fingerprints(reader: SupportsRead, run_id: str) -> list[str]:
    """Such as `data train  7e281994496c  stream:contents, 60000 samples, pass 3`."""
    records = read_fingerprints(reader, run_id)
    lines = [_describe(record) for record in records[:_MOST_SHOWN]]
    if len(records) > _MOST_SHOWN:
        lines.append(f"and {len(records) - _MOST_SHOWN} more; `quark show --json` has all")
    return lines


def _describe(record: FingerprintRecord) -> str:
    metadata: Mapping[str, Any] = record.metadata or {}
    if (record.subject, record.key) == ("environment", CONFIG_READS):
        return clean_line(_describe_reads(metadata))
    parts = [record.level]
    if record.step is not None:
        parts.append(f"step {record.step}")
    for name, word in _COUNTS.items():
        count = metadata.get(name)
        if isinstance(count, int):
            parts.append(f"{count} {word.removesuffix('s') if count == 1 else word}")
    if isinstance(metadata.get("pass"), int):
        parts.append(f"pass {metadata['pass']}")
    parts.extend(name.replace("_", " ") for name in _TROUBLES if metadata.get(name))
    digest = record.digest[:_DIGEST_CHARACTERS]
    return clean_line(f"{record.subject} {record.key}  {digest}  {', '.join(parts)}")


def _describe_reads(metadata: Mapping[str, Any]) -> str:
    """Such as `configuration  2 of 3 keys were read, never: log_every`."""
    read, known = (
        [str(key) for key in found] if isinstance(found, list) else []
        for found in (metadata.get("read"), metadata.get("known"))
    )
    unread = sorted({*known} - {*read})
    never = ", ".join(unread[:_MOST_KEYS])
    if len(unread) > _MOST_KEYS:
        never += f" and {len(unread) - _MOST_KEYS} more"
    return f"configuration  {len(read)} of {len(known)} keys were read" + (
        f", never: {never}" if never else ""
    )
