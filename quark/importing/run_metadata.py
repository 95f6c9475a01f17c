"""Import progress of a run, and its metadata in the tool that it comes from.

Each group of batches that is stored ends with a lifecycle record `import`, which holds this:
whoever imports the run the next time begins behind it. Two who import one run at once write
as the same writer, so that the store takes the batches of one of them; the other one finds
another token than its own in the newest record, and goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from quark.importing.conversion import FIRST_US, LAST_US
from quark.importing.neutral_run import Losses, RunFacts
from quark_core.backends.contract import SupportsPrimary, SupportsRead
from quark_core.config import settings
from quark_core.config.arguments import (
    check_fields,
    check_group_path,
    check_label,
    check_notes,
    check_tag,
)
from quark_core.config.redaction import redact_text
from quark_core.config.snapshot import snapshot_config
from quark_core.errors import SchemaValidationError
from quark_core.records import EnvironmentSnapshot, LifecycleRecord, ProjectRecord
from quark_core.records.base import now_us
from quark_core.records.json_object import normalize_object
from quark_core.records.names import MAX_NAME_LENGTH
from quark_core.records.query import Query
from quark_core.records.schema import TERMINAL_STATUSES
from quark_core.system.process import current_process

ACTION = "import"
"""The lifecycle action of the record."""

_ID_DIGITS = 20
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_NEWEST = Query(equals={"action": ACTION}, all_attempts=True)


class Story(msgspec.Struct, kw_only=True):
    """State of one run's import.

    Attributes:
        tool: The tool.
        position: As `Portion.position`.
        attempt: Attempt that is being read.
        number: Number of the next batch of the attempt's writer.
        sequences: Kind -> sequence of its next record.
        said: What the tool has said of the run, as far as it was taken over.
        token: Of who has written it, drawn anew for each group.
    """

    tool: str
    position: dict[str, Any] = msgspec.field(default_factory=dict)
    attempt: int = 0
    number: int = 0
    sequences: dict[str, int] = msgspec.field(default_factory=dict)
    said: dict[str, Any] = msgspec.field(default_factory=dict)
    token: str = ""

    def copy(self) -> Story:
        """A copy to be changed, with a token of its own."""
        changed = msgspec.structs.replace(self, token=secrets.token_hex(8))
        changed.sequences, changed.said = dict(self.sequences), dict(self.said)
        return changed

    def begin_attempt(self) -> None:
        """The next attempt has a writer of its own."""
        self.attempt, self.number, self.sequences = self.attempt + 1, 0, {}

    def take(self, kind: str, count: int) -> tuple[int, int]:
        """Number of a batch of so many records, and the sequence of the first one."""
        number, first = self.number, self.sequences.get(kind, 0)
        self.number, self.sequences[kind] = number + 1, first + count
        return number, first

    def name_writer(self, run_id: str) -> str:
        """The writer of the attempt: the same for everybody who imports the run."""
        return f"import{self.attempt}-{run_id}"


def is_run_id(text: object) -> bool:
    """Whether it may be an id of ours: what somebody else has written may be a path."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def derive_run_id(tool: str, identity: str) -> str:
    """The id of a run of ours that stands for one of a tool."""
    text = f"{tool}\0{identity}".encode("utf-8", "replace")
    return hashlib.sha256(text).hexdigest()[:_ID_DIGITS]


def load_story(store: SupportsRead, run_id: str) -> Story | None:
    """What is known of a run's import; None where the run was not imported.

    Raises:
        RunNotFoundError: The store has no such run.
        SessionStoreError: It cannot be read.
    """
    columns = store.read(run_id, LifecycleRecord.KIND, _NEWEST)
    records = columns.to_records()
    if not records:
        return None
    newest: Any = records[-1]
    return msgspec.convert(dict(newest.data or {}), Story)


_COMMIT = re.compile(r"[\w.+:/-]{0,200}", re.ASCII)
_MAX_NOTES = 100_000
_MAX_TAGS = 1000
_MAX_GROUPS = 100
_MAX_FIELDS = 500
_STOPPED = "interrupted"
"""Status of what says that it goes on, when nobody watches it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Facts that a store takes: checked, without secrets; see `RunFacts`."""

    project: str
    name: str | None
    notes: str | None
    tags: tuple[str, ...]
    config: Mapping[str, Any] | None
    config_digest: str
    environment: Mapping[str, Any]
    environment_digest: str
    status: str
    is_told: bool
    started_us: int | None
    ended_us: int | None
    parent_run_id: str | None
    git_commit: str | None
    groups: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


def take_facts(facts: RunFacts, tool: str, losses: Losses) -> Taken:
    """The facts as a store takes them; what it cannot take is told."""
    config = None
    if facts.config:
        snapshot = snapshot_config(dict(facts.config))
        config = {"values": dict(snapshot.values), "notes": list(snapshot.notes)}
    environment = {
        "imported": {"from": tool, "run": redact_text(facts.identity)},
        **facts.environment,
    }
    known = _take_environment(environment, losses)
    return Taken(
        project=_cut_label(facts.project, "project", losses) or tool,
        name=_cut_label(facts.name, "name", losses),
        notes=_cut_notes(facts.notes, losses),
        tags=_take_words(facts.tags, lambda tag: check_tag(tag, "tag"), "tag", _MAX_TAGS, losses),
        config=config,
        config_digest="" if config is None else _digest(config),
        environment=known,
        environment_digest=_digest(known),
        status=facts.status if facts.status in TERMINAL_STATUSES else "running",
        is_told=facts.is_told,
        started_us=_take_time(facts.started_us),
        ended_us=_take_time(facts.ended_us),
        parent_run_id=None if facts.parent is None else derive_run_id(tool, facts.parent),
        git_commit=_take_commit(facts.git_commit, losses),
        groups=_take_words(facts.groups, check_group_path, "group", _MAX_GROUPS, losses),
        fields=_take_fields(facts.fields, losses),
    )


def describe_start(
    taken: Taken, run_id: str, run_path: str, storage_dir: Path, primary: SupportsPrimary
) -> dict[str, Any]:
    """What the start of a run says, as a store makes the run of it."""
    root = str(storage_dir)
    return {
        "project": {
            "id": ProjectRecord.derive_id(taken.project),
            "name": taken.project,
            "root_path": root,
        },
        "run": {
            "name": taken.name,
            "notes": taken.notes,
            "parent_run_id": taken.parent_run_id,
            "lineage_root_run_id": taken.parent_run_id or run_id,
            "run_path": run_path,
            "git_commit": taken.git_commit,
            "strict_mode": False,
            "tags": list(taken.tags),
        },
        "store": {
            "name": getattr(primary, "store_name", None) or settings.store_name(storage_dir),
            "path": root,
        },
        "process": describe_process(),
    }


def describe_process() -> dict[str, Any]:
    """This process: as long as it imports the run, the run is alive."""
    found: dict[str, Any] = msgspec.to_builtins(current_process())
    return found


@dataclass(slots=True)
class Changes:
    """What is to be said of a run that its store does not know yet.

    Attributes:
        records: Lifecycle actions, with their data and times.
        said: What has been said then, to be noted.
    """

    records: list[tuple[str, Mapping[str, Any], int]] = field(default_factory=list)
    said: dict[str, Any] = field(default_factory=dict)

    def add_belonging(self, said: Mapping[str, Any], taken: Taken, time_us: int) -> None:
        """Groups that are new, and fields that are or have another value."""
        groups, known = said.get("groups", ()), said.get("fields", {})
        if added := sorted({*taken.groups} - {*groups}):
            self.records.append(("group", {"add": added}, time_us))
            self.said["groups"] = sorted({*groups, *added})
        changed = {
            name: value
            for name, value in taken.fields.items()
            if name not in known or known[name] != value
        }
        if changed:
            self.records.append(("fields", {"set": changed}, time_us))
            self.said["fields"] = {**known, **changed}


def find_changes(said: Mapping[str, Any], taken: Taken, *, is_watched: bool) -> Changes:
    """What the tool says now and did not say before: what people have edited with us stays.

    Args:
        said: What it had said, as `Changes.said`.
        taken: What it says now.
        is_watched: More may come, so that the end is not told, unless the tool tells it.
    """
    changes, now = Changes(), now_us()
    edits: dict[str, Any] = {}
    for name, value in (("name", taken.name), ("notes", taken.notes)):
        if value is not None and value != said.get(name):
            edits[name] = {"before": said.get(name), "after": value}
            changes.said[name] = value
    added = sorted({*taken.tags} - {*said.get("tags", ())})
    if added:
        edits["tags"] = {
            "before": list(said.get("tags", ())),
            "after": sorted({*taken.tags, *said.get("tags", ())}),
            "added": added,
            "removed": [],
        }
        changes.said["tags"] = edits["tags"]["after"]
    if edits:
        changes.records.append(("edit", {"by": "import", "changes": edits}, now))
    changes.add_belonging(said, taken, now)
    if taken.config is not None and taken.config_digest != said.get("config"):
        changes.records.append(("config", taken.config, now))
        changes.said["config"] = taken.config_digest
    if taken.environment_digest != said.get("environment"):
        changes.records.append(("environment", taken.environment, now))
        changes.said["environment"] = taken.environment_digest
    if is_watched and (taken.status == "running" or not taken.is_told):
        return changes
    status = _STOPPED if taken.status == "running" else taken.status
    ended_us = taken.ended_us or now
    ending = [status, taken.ended_us]
    if ending != said.get("ending"):
        changes.records.append(("status", {"status": status}, ended_us))
        changes.said["ending"] = ending
    return changes


def _cut_label(text: str | None, what: str, losses: Losses) -> str | None:
    if text is None or not text.strip("/ \t\r\n"):
        return None
    cut = text.encode("utf-8", "replace").decode()[:MAX_NAME_LENGTH]
    if len(cut) < len(text):
        losses.add(what, text, f"characters beyond {MAX_NAME_LENGTH} are omitted")
    return check_label(cut, what)[:MAX_NAME_LENGTH]


def _cut_notes(text: str | None, losses: Losses) -> str | None:
    if not text:
        return None
    if len(text) > _MAX_NOTES:
        losses.add("notes", "notes", f"characters beyond {_MAX_NOTES} are omitted")
    return check_notes(text[:_MAX_NOTES])


def _take_words(
    words: Sequence[str], check: Callable[[str], str], what: str, most: int, losses: Losses
) -> tuple[str, ...]:
    """Those tags or groups that are such, and no more than a run may have."""
    kept = set()
    for word in words:
        try:
            kept.add(check(word))
        except SchemaValidationError as error:
            losses.add(what, str(word), str(error))
    if len(kept) > most:
        end = "here" if what == "group" else "at most"
        losses.add(what, f"{what}s", f"a run has {most} {end}", len(kept) - most)
    return tuple(sorted(kept)[:most])


def _take_fields(fields: Mapping[str, Any], losses: Losses) -> Mapping[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if len(kept) >= _MAX_FIELDS:
            losses.add("field", "fields", f"a run can have at most {_MAX_FIELDS}")
            continue
        try:
            kept.update(check_fields({name: value}))
        except SchemaValidationError as error:
            losses.add("field", str(name), str(error))
    return kept


def _take_environment(known: Mapping[str, Any], losses: Losses) -> Mapping[str, Any]:
    try:
        # A part that is none would be refused by a service, and the run with it.
        return EnvironmentSnapshot.from_data(snapshot_config(dict(known)).values).values
    except SchemaValidationError as error:
        losses.add("environment", "environment", str(error))
        return normalize_object({}, "environment") or {}


def _take_time(time_us: int | None) -> int | None:
    return time_us if time_us is not None and FIRST_US <= time_us <= LAST_US else None


def _take_commit(commit: object, losses: Losses) -> str | None:
    if commit is None or (isinstance(commit, str) and _COMMIT.fullmatch(commit)):
        return commit or None
    losses.add("commit", redact_text(str(commit)), "it is not a commit hash")
    return None


def _digest(config: Mapping[str, Any]) -> str:
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
