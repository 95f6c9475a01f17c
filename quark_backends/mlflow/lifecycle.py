"""Applies lifecycle records, findings and errors to the MLflow run: status, params and tags.

Params and tags are flat, and text.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from quark_backends.mirror_records import (
    change_belonging,
    change_by_edit,
    find_code_digest,
    find_raised_rule,
    list_data_digests,
    list_digests,
    list_notes,
    split_tag,
)
from quark_backends.mlflow.artifacts import MirrorFiles, Shown, describe_models, extend_tables
from quark_backends.mlflow.client import Missing, Refused, RefusedRecords, Server
from quark_backends.mlflow.points import NameMap, chunk
from quark_backends.mlflow.run import PARENT_TAG, MirroredRun
from quark_core.api import (
    AlertRecord,
    EventRecord,
    HealthScoreRecord,
    LifecycleRecord,
    PhaseRecord,
    StreamRecord,
    encode_json,
    split_generation,
)

PARAM_LIMITS = (6000, 500, 250)
"""Longest value of a param: today's servers, and what older ones still ask for."""
TAG_LIMITS = (8000, 5000, 500)
"""Longest value of a tag, likewise."""


def flatten(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path and text of each leaf: scalars by `str()`, lists and empty objects as JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            for path, text in flatten(value):
                yield (key, *path), text
        elif isinstance(value, (Mapping, list, tuple)):
            yield (key,), encode_json(value).decode()
        else:
            yield (key,), str(value)


def fit(text: str, limit: int) -> str:
    """The text, or its beginning with the SHA-256 of the whole where it is too long.

    Servers cut long values without a word; this way two that differ stay different.
    """
    # PostgreSQL takes no NUL and would fail at this value for ever.
    text = text.replace("\0", "\ufffd")
    if len(text) <= limit:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    ending = f"… [{len(text)} characters, sha256 {digest}]"
    return text[: limit - len(ending)] + ending


def is_same(stored: str, text: str) -> bool:
    """Whether a stored value is this text, whole or as `fit` has cut it."""
    return any(stored == fit(text, limit) for limit in PARAM_LIMITS)


def make_user_tags(tags: Iterable[str]) -> dict[str, str]:
    """A run's tags as MLflow's, which have values: those who search for them know the key.

    `key=value` and `key:value` are what they say, and anything else is `true`; values of
    one key stand beside each other. What would pass for MLflow's own or Quark's, which
    readers believe, stands behind `quark.tag.`.
    """
    found: dict[str, list[str]] = {}
    for tag in tags:
        key, text = split_tag(tag)
        if key.lower().startswith(_OWN):
            key, text = f"{USER_TAG}{tag}", "1"
        values = found.setdefault(key, [])
        if text:
            values.append(text)
    return {key: ", ".join(values) or "true" for key, values in found.items()}


_log = logging.getLogger("quark")
USER_TAG = "quark.tag."
"""What begins the name of a run's tag that would pass for MLflow's own or Quark's."""
_OWN = ("mlflow.", "quark.")
_FIELDS, _GROUPS = "quark.field.", "quark.groups"
_NOTES = "mlflow.note.content"
_TABLES = "mlflow.loggedArtifacts"
_MODELS = "mlflow.log-model.history"
_MAX_TEXTS = 100
_NON_FINITE = "quark.nonfinite."
# Readers of other hosts take a run for lost after a minute without one.
_HEARTBEAT_EVERY_US = 20_000_000


class Lifecycle:
    """What of a run is not a stream: its start, configuration, tags and end.

    Applying a record twice changes nothing more. A param or tag that MLflow
    refuses is put aside, and the others are sent.

    Args:
        server: Where the run is.
        run: The run.
        names: Names of params and tags.
        refused: Takes what MLflow refuses.
        files: Takes the configuration and the environment as they are.
        max_params: How many params the server takes, or None for any number.
    """

    def __init__(
        self,
        server: Server,
        run: MirroredRun,
        names: NameMap,
        refused: RefusedRecords,
        files: MirrorFiles,
        *,
        max_params: int | None,
    ) -> None:
        self._server = server
        self._run = run
        self._names = names
        self._refused = refused
        self._files = files
        self._max_params = max_params
        self._beat_us = 0
        self._tags: dict[str, str] = {}
        self._infinite: set[tuple[str, str]] = set()

    def apply(self, record: LifecycleRecord) -> None:
        """Apply one record; what an older attempt says of itself is left out."""
        data: Mapping[str, Any] = record.data or {}
        if record.action == "start":
            self._run.start(record)
        known = self._run.known
        if record.action == "start":
            if record.attempt == known.attempt and not self.catch_up():
                self._describe()
        elif record.action == "tag":
            self._edit_tags([data["tag"]], [])
        elif record.action == "edit":
            self._apply_edit(data.get("changes") or {})
        elif record.action in ("group", "fields"):
            self._run.keep_description(change_belonging((known.start or {}).get("run", {}), record))
            self._tell_belonging(removes=bool(data.get("remove")))
        elif record.attempt != known.attempt:
            if record.action == "config" and known.config is None:
                self._send_params(data.get("values", {}))
        elif record.action == "config":
            self._take_config(data)
        elif record.action == "heartbeat":
            if record.time_us - self._beat_us >= _HEARTBEAT_EVERY_US:
                beat = {"quark.heartbeat_at": record.timestamp} if self._run.keeps_all else {}
                self.set_tags({**beat, **self._find_parent_tag()})
                self._beat_us = record.time_us
        elif record.action == "environment":
            if self._run.keeps_all:
                self._files.put_text("environment.json", dict(data))
            arguments = data.get("process", {}).get("argv") or [""]
            self.set_tags({"mlflow.source.name": arguments[0]})
        elif record.action == "status":
            self._apply_end(record)

    def _take_config(self, data: Mapping[str, Any]) -> None:
        values = data.get("values", {})
        if self._run.keeps_all:
            self._files.put_text("config.json", dict(data))
        self._run.keep_config(values)
        self._send_params(values)
        self._tell_digests(values)

    def _apply_end(self, record: LifecycleRecord) -> None:
        data: Mapping[str, Any] = record.data or {}
        # Tags keep what MLflow's statuses cannot say.
        code, ending = data.get("exit_code"), data.get("ending")
        status = {
            "quark.status": str(data["status"]),
            "quark.exit_code": None if code is None else str(code),
            "quark.ending": None if not ending else json.dumps(dict(ending), ensure_ascii=False),
        }
        status = status if self._run.keeps_all else {}
        self.set_tags({**status, **self._find_parent_tag()})
        if self.catch_up():
            self.set_tags(status)
        self._run.end(data["status"], record.time_us // 1000)

    def _tell_digests(self, config: Mapping[str, Any]) -> None:
        if not self._run.keeps_all:
            return  # they say something to who looks for runs with Quark, and to nobody else
        self.set_tags({f"quark.{name}": text for name, text in list_digests(config).items()})

    def tell_code(self, records: Sequence[StreamRecord]) -> None:
        """Say in tags which sources and data the run has, where fingerprints tell it."""
        if not self._run.keeps_all:
            return
        self.set_tags({"quark.code_digest": find_code_digest(records)})
        self.set_named_tags(
            {f"quark.data.{key}": said for key, said in list_data_digests(records).items()}
        )

    def note_infinities(self, found: Mapping[str, Mapping[str, int]]) -> None:
        """Say in a tag at which step a metric first became infinite, which MLflow shows as NaN.

        Args:
            found: Name of a metric -> `inf` or `-inf` -> first step.
        """
        pairs = {(name, spelled) for name, steps in found.items() for spelled in steps}
        if pairs <= self._infinite:
            return
        known = self._run.load().tags
        wanted = [(name, f"{_NON_FINITE}{name}") for name in found]
        keys = self._names.find("nonfinite", wanted)
        tags = {}
        for name, steps in found.items():
            notes = [note for note in known.get(keys[name], "").split(",") if note]
            seen = {note.partition("@")[0] for note in notes}
            notes += [f"{spelled}@{step}" for spelled, step in steps.items() if spelled not in seen]
            tags[keys[name]] = ",".join(notes)
        self.set_tags({key: value for key, value in tags.items() if known.get(key) != value})
        self._infinite |= pairs

    def catch_up(self) -> bool:
        """Give an MLflow run that was made since the last call what is known; whether there is one.

        That is the run's first one, or one in place of one that was deleted.
        """
        if not self._run.is_new:
            return False
        self._files.forget()
        self._describe()
        self._run.tell_children()
        if self._run.known.config is not None:
            self._send_params(self._run.known.config)
            self._tell_digests(self._run.known.config)
        ended = self._run.known.ended
        if ended is not None:
            # What comes after a run's end must not leave another one that runs for ever.
            if self._run.keeps_all:
                self.set_tags({"quark.status": ended[0]})
            self._run.end(*ended)
        self._run.is_new = False
        return True

    def set_tags(self, tags: Mapping[str, str | None]) -> None:
        """Set those tags of this process that are not set yet; None and "" are left out."""
        new = {k: v for k, v in tags.items() if v and self._tags.get(k) != v}
        self._send("tag", list(new.items()), self._server.set_tags, TAG_LIMITS)
        self._tags.update(new)

    def show(self, shown: Shown) -> None:
        """Tell MLflow's page of images, tables and models among the artifacts."""
        if shown.has_images:
            self.set_tags({"mlflow.loggedImages": "True"})
        if not shown.tables and not shown.models:
            return
        found = self._run.load()
        if shown.tables:
            told = extend_tables(found.tags.get(_TABLES, ""), shown.tables)
            if told is not None:
                self.set_tags({_TABLES: told})
        if shown.models:
            told = describe_models(found.tags.get(_MODELS, ""), shown.models, found.id)
            if len(told) <= TAG_LIMITS[0]:
                self.set_tags({_MODELS: told})

    def set_named_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags whose names may hold what MLflow does not take."""
        names = self._names.find("tags", [(f"tag:{key}", key) for key in tags])
        self.set_tags({names[f"tag:{key}"]: text for key, text in tags.items()})

    def drop_tags(self, keys: Iterable[str]) -> None:
        """Delete tags of the MLflow run, by their names there; one that is gone is no matter."""
        for key in keys:
            with suppress(Missing, Refused):
                self._run.call(lambda run_id, key=key: self._server.delete_tag(run_id, key))  # type: ignore[misc]
            self._tags.pop(key, None)

    def _describe(self) -> None:
        known = self._run.known
        run: Mapping[str, Any] = (known.start or {}).get("run", {})
        # After an end and a new start, and in a new MLflow run, these are to be set again.
        self._tags.clear()
        self._infinite.clear()
        self.set_tags(
            {
                "mlflow.source.git.commit": run.get("git_commit"),
                _NOTES: run.get("notes"),
            }
        )
        if self._run.keeps_all:
            self.set_tags(
                {
                    "quark.attempt": str(max(0, known.attempt)),
                    "quark.status": "running",
                    "quark.from_steps": json.dumps(known.from_steps) if known.from_steps else None,
                }
            )
        self._tell_name(run)
        self._tell_tags(run)
        self._tell_belonging()

    def _tell_name(self, run: Mapping[str, Any]) -> None:
        name = run.get("name")
        if name and self._run.load().name != name:
            self._run.call(lambda run_id: self._server.rename_run(run_id, name))

    def _tell_belonging(self, *, removes: bool = False) -> None:
        """Bring the tags that say groups and fields to what these are."""
        run: Mapping[str, Any] = (self._run.known.start or {}).get("run", {})
        wanted = {f"quark.{name}": text for name, text in list_notes(run).items()}
        names = self._names.find("tags", [(f"tag:{key}", key) for key in wanted])
        shown = {names[f"tag:{key}"]: text for key, text in wanted.items()}
        self.set_tags(shown)
        if removes:
            stored = self._run.load().tags
            old = {key for key in stored if key.startswith(_FIELDS) or key == _GROUPS}
            self.drop_tags(old - {name for name, text in shown.items() if text})

    def _tell_tags(self, run: Mapping[str, Any]) -> None:
        """Bring the tags in MLflow that stand for the run's to what these are."""
        wanted = make_user_tags(run.get("tags", ()))
        names = self._names.find("user_tags", [(key, key) for key in wanted])
        self.set_tags({names[key]: text for key, text in wanted.items()})
        shown = [names[key] for key in wanted]
        self.drop_tags(set(self._run.known.shown_tags) - set(shown))
        self._run.keep_shown_tags(shown)

    def _edit_tags(self, added: Sequence[str], removed: Sequence[str]) -> None:
        run: Mapping[str, Any] = (self._run.known.start or {}).get("run", {})
        tags = [tag for tag in dict.fromkeys([*run.get("tags", ()), *added]) if tag not in removed]
        self._run.keep_description({"tags": tags})
        self._tell_tags({"tags": tags})

    def _apply_edit(self, changes: Mapping[str, Any]) -> None:
        """Change what somebody has changed of the run meanwhile, or after its end."""
        if changes.get("tags"):
            self._edit_tags(changes["tags"].get("added", ()), changes["tags"].get("removed", ()))
        if changes.get("name"):
            name = changes["name"]["after"]
            self._run.keep_description({"name": name})
            self._tell_name({"name": name or self._run.run_id})
        if changes.get("notes"):
            notes = changes["notes"]["after"]
            self._run.keep_description({"notes": notes})
            self.set_tags({_NOTES: notes})
            if not notes:
                self.drop_tags([_NOTES])
        belongs = change_by_edit((self._run.known.start or {}).get("run", {}), changes)
        if belongs:
            self._run.keep_description(belongs)
            self._tell_belonging(removes=True)

    def _find_parent_tag(self) -> dict[str, str | None]:
        """The parent, which may have been mirrored after this run was."""
        return {} if self._tags.get(PARENT_TAG) else {PARENT_TAG: self._run.find_parent()}

    def note_missing(self, writer_id: str, counts: Mapping[str, int]) -> None:
        """Say how many records of each kind a writer could not keep."""
        self.set_named_tags({f"quark.gap.{writer_id}": json.dumps(counts)})

    def _send_params(self, values: Mapping[str, Any]) -> None:
        # Paths as JSON are the keys: {"a.b": 1} and {"a": {"b": 1}} read the same with dots.
        leaves = [(json.dumps(path), ".".join(path), text) for path, text in flatten(values)]
        if not leaves:
            return
        names = self._names.find("params", [(key, dotted) for key, dotted, _ in leaves])
        wanted = {names[key]: text for key, _, text in leaves}
        stored = self._run.load().params
        missing = [(name, text) for name, text in wanted.items() if name not in stored]
        if self._max_params is not None and len(stored) + len(missing) > self._max_params:
            kept = max(0, self._max_params - len(stored))
            _log.warning(
                "backend mlflow: max_params=%d omits %d params",
                self._max_params,
                len(missing) - kept,
            )
            missing = missing[:kept]
        self._send("param", missing, self._server.log_params, PARAM_LIMITS)
        drift = sorted(
            name
            for name, text in wanted.items()
            if name in stored and not is_same(stored[name], text)
        )
        if drift:
            _log.warning(
                "backend mlflow: MLflow keeps the first value of %d changed params (%s)",
                len(drift),
                ", ".join(drift[:5]),
            )
            self.set_tags({"quark.param_drift": json.dumps(drift, ensure_ascii=False)})

    def _send(
        self,
        kind: str,
        pairs: Sequence[tuple[str, str]],
        push: Callable[[str, Sequence[tuple[str, str]]], None],
        limits: Sequence[int],
    ) -> None:
        fitted = [(name, fit(text, limits[0])) for name, text in pairs]
        sizes = (len(json.dumps(pair)) for pair in fitted)
        for part in chunk(fitted, sizes, _MAX_TEXTS):
            self._push(kind, part, push, limits)

    def _push(
        self,
        kind: str,
        pairs: Sequence[tuple[str, str]],
        push: Callable[[str, Sequence[tuple[str, str]]], None],
        limits: Sequence[int],
    ) -> None:
        try:
            self._run.call(lambda run_id: push(run_id, pairs))
        except Refused as error:
            middle = len(pairs) // 2
            if middle:
                self._push(kind, pairs[:middle], push, limits)
                self._push(kind, pairs[middle:], push, limits)
                return
            name, text = pairs[0]
            shorter = [limit for limit in limits if limit < len(text)]
            if shorter:
                # An older server takes less than today's.
                self._push(kind, [(name, fit(text, shorter[0]))], push, limits)
            else:
                self._refused.add(kind, {"name": name, "value": text}, str(error))


# What analyzers have found, and the newest error, as tags of the MLflow run.
#
# Of each analyzer's outputs the tags show the newest generation.

_ERRORS = ("error", "critical")
_PHASE_FIELDS = ("phase_name", "step_start", "step_end", "epoch_start", "epoch_end", "summary")


def list_finding_tags(kind: str, records: Sequence[Any]) -> dict[str, str]:
    """Tag -> value for the alerts, scores or phases of one batch; {} for other kinds."""
    tags = {}
    if kind == AlertRecord.KIND:
        for record in records:
            tags[f"quark.alert.{record.rule_id}"] = _encode(record.to_dict())
    elif kind == HealthScoreRecord.KIND:
        for record in records:
            tags[f"quark.health.{record.score_key}"] = record.word
    elif kind == PhaseRecord.KIND:
        phases = [{name: getattr(one, name) for name in _PHASE_FIELDS} for one in records]
        tags["quark.phases"] = json.dumps(phases, ensure_ascii=False)
    return tags


def list_raised_tags(records: Sequence[EventRecord]) -> dict[str, str]:
    """Tag -> value for the alerts that a monitor has raised among events."""
    tags = {}
    for record in records:
        rule_id = find_raised_rule(record)
        if rule_id is not None:
            raised = {**dict(record.payload or {}), "timestamp": record.timestamp}
            tags[f"quark.alert.{rule_id}"] = _encode(raised)
    return tags


def tag_last_error(records: Sequence[EventRecord]) -> dict[str, str]:
    """The tag that tells of the last error of a batch of events; {} where there is none."""
    for record in reversed(records):
        if record.severity in _ERRORS:
            payload: Mapping[str, Any] = record.payload or {}
            said = {
                "event_type": record.event_type,
                "severity": record.severity,
                "step": record.step,
                "timestamp": record.timestamp,
                "message": payload.get("message", payload.get("error")),
            }
            return {"quark.last_error": json.dumps(said, ensure_ascii=False)}
    return {}


def _encode(described: dict[str, Any]) -> str:
    """A tag's value that stays JSON: evidence that does not fit is in the records only."""
    text = json.dumps(described, ensure_ascii=False)
    if len(text) > TAG_LIMITS[0]:
        text = json.dumps({**described, "evidence": [], "metadata": None}, ensure_ascii=False)
    return text


_ALERT_TAG = "quark.alert."
# Early in the tag's JSON, whose end may have been cut off.
_WRITER = re.compile(r'"writer_id": "([^"\\]*)"')


class ShownGenerations:
    """Keeps the tag `quark.generation.<analyzer>`, and no tags of older generations.

    Journals of one run may be delivered in any order, and by several machines.

    Args:
        run: The MLflow run.
        lifecycle: Sets its tags.
    """

    def __init__(self, run: MirroredRun, lifecycle: Lifecycle) -> None:
        self._run = run
        self._lifecycle = lifecycle

    def take_up(self, writer_id: str) -> bool:
        """Whether tags are to show what this writer found: none that is newer was here.

        Alerts that only older generations of the analyzer have lose their tags.
        A writer that is no generation is always shown.
        """
        found = split_generation(writer_id)
        if found is None:
            return True
        analyzer, number = found
        tags = self._run.load().tags
        name = f"quark.generation.{analyzer}"
        known = tags.get(name, "")
        shown = int(known) if known.isascii() and known.isdigit() else 0
        if number < shown:
            return False
        if number > shown:
            self._lifecycle.drop_tags(
                key
                for key, text in tags.items()
                if key.startswith(_ALERT_TAG) and _is_older(text, analyzer, number)
            )
            self._lifecycle.set_named_tags({name: str(number)})
        return True


def _is_older(text: str, analyzer: str, number: int) -> bool:
    match = _WRITER.search(text)
    found = None if match is None else split_generation(match[1])
    return found is not None and found[0] == analyzer and found[1] < number
