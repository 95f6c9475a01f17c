"""Mirrors batches into a W&B run. For the process of the mirror only."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from quark_backends.mirror_records import (
    ALERT_LEVELS,
    change_belonging,
    change_by_edit,
    find_raised_rule,
    list_data_digests,
    list_digests,
)
from quark_backends.mirror_state import digest_batch, is_new, load_state, save_state
from quark_backends.wandb.backend import OpenRun
from quark_backends.wandb.history import (
    AXES,
    Histogram,
    Part,
    RowMaker,
    StepRows,
    join_parts,
    showing,
)
from quark_backends.wandb.local_files import (
    STATE_NAME,
    LogFile,
    WandbFile,
    WandbState,
    WriterHead,
    join_folders,
)
from quark_backends.wandb.run import (
    Attachments,
    define_steps,
    describe_start,
    find_exit_code,
    init_run,
    note_page,
)
from quark_core.api import (
    HELD_FILE,
    HIDDEN_TYPES,
    AlertRecord,
    ArtifactLinkRecord,
    ArtifactRecord,
    BackendRejected,
    BackendUnavailable,
    Batch,
    EventRecord,
    LifecycleRecord,
    MetricRecord,
    Objective,
    PayloadFolder,
    RunEnding,
    SchemaValidationError,
    StreamRecord,
    decode_name,
    encode_name,
    find_mode,
    is_user_alert,
    read_objective,
)

_MOST_KEPT = 100


def note_best(state: WandbState, records: Sequence[StreamRecord]) -> None:
    """Note points of the objective that are better than all before them."""
    objective = read_objective(state.config)
    if objective is None or not records or not isinstance(records[0], MetricRecord):
        return
    if state.best_of != _name(objective):
        state.best_of, state.best = _name(objective), []
    key, sign = encode_name(objective.metric), _sign(objective)
    for record in records:
        if not isinstance(record, MetricRecord) or record.metric_key != key or record.rank:
            continue
        if record.attempt > state.best_attempt and record.step is not None:
            state.best_attempt = record.attempt
            forget_from(state, record.step)  # what is done again
        if not isfinite(record.value):
            continue
        if not state.best or sign * record.value > sign * state.best[-1][0]:
            state.best.append((record.value, record.step))
    del state.best[:-_MOST_KEPT]


def forget_from(state: WandbState, step: int) -> None:
    """The run goes on from a step: what it had there and beyond no longer counts."""
    while state.best and (state.best[-1][1] is None or state.best[-1][1] >= step):
        state.best.pop()


def describe_best(state: WandbState) -> dict[str, Any]:
    """What the summary says: the best value, and its step."""
    objective = read_objective(state.config)
    if objective is None or not state.best or state.best_of != _name(objective):
        return {}
    value, step = state.best[-1]
    name = decode_name(encode_name(objective.metric))
    said = {f"quark/best/{name}": value}
    return said if step is None else {**said, f"quark/best_step/{name}": step}


def _name(objective: Objective) -> str:
    return f"{objective.metric}:{_sign(objective)}"


def _sign(objective: Objective) -> int:
    return 1 if find_mode(objective.metric, objective) == "max" else -1


_POLL_S = 0.002
_FILE_TIMEOUT_S = 30.0
_MAX_TITLE_LENGTH = 60
_EVENT_ALERT_EVERY_S = 60.0
_KNOWN_ARTIFACTS = 1000


class WandbMirror:
    """One run, as a run of W&B; see `quark_backends.wandb.backend` for what is promised.

    After an error other than `BackendRejected` it must not be used again:
    another one, opened later, finds out how far this one was.

    Args:
        wandb: The imported library.
        opening: The run and what the user chose.
    """

    def __init__(self, wandb: Any, opening: OpenRun) -> None:
        self._wandb = wandb
        self._opening = opening
        self._folder = Path(opening.folder)
        self._state = load_state(self._folder / STATE_NAME, WandbState)
        self._attachments = Attachments(wandb, self._folder)
        self._payloads = PayloadFolder(self._folder)
        options = opening.options
        self._rows = RowMaker(self._state, strict_names=options.strict_names, layers=options.layers)
        self._run: Any = None
        self._log: LogFile | None = None
        self._steps = StepRows(self._state)
        self._found: set[str] = set()
        self._sent: dict[str, WriterHead] = {}
        self._newest_mark: str | None = None
        self._newest_s = 0.0
        self._summary: dict[str, Any] = {}
        self._metrics: set[str] = set()
        self._defined: set[str] = set()
        self._last_event_alert_s = -_EVENT_ALERT_EVERY_S
        self._notes: list[str] = []
        self._artifacts: dict[str, ArtifactRecord] = {}
        self._awaited: dict[str, list[str]] = {}

    @property
    def has_run(self) -> bool:
        """Whether a W&B run is open."""
        return self._run is not None

    @property
    def page(self) -> str:
        """Address of the W&B run's page, or "" where it has none."""
        return self._state.url if self._run is not None and not self._run.offline else ""

    def apply(self, batches: Sequence[Batch]) -> str:
        """Mirror batches; returns what the user should know, mostly nothing.

        Raises:
            BackendRejected: One of them has other content than it had, or a
                body that cannot be read; none is mirrored.
            BackendUnavailable: W&B cannot take them now.
        """
        decoded = [(batch, self._decode(batch)) for batch in batches if self._is_new(batch)]
        if not batches:
            self._open()  # for what is held, which goes out at the end
        for batch, records in decoded:
            if batch.kind == LifecycleRecord.KIND:
                self._note_lifecycle(records)
            self._open()
            parts = self._rows.make(batch, records)
            for part in parts:
                self._metrics.update(part.values if part.is_metric else ())
            self._take(parts)
            self._send_rest(batch, records)
            note_best(self._state, records)
            head = WriterHead(batch.number, digest_batch(batch))
            self._sent[batch.writer_id] = head
        if self._run is not None:
            for row in self._steps.release():
                self._send_row(row.parts, row.step)
            self._tell_summary()
        self._acknowledge()
        notes, self._notes = self._notes, []
        return "; ".join(notes)

    def _is_new(self, batch: Batch) -> bool:
        head = self._state.writers.get(batch.writer_id, WriterHead())
        return is_new(batch, head.number, head.digest, backend="wandb")

    def _decode(self, batch: Batch) -> Sequence[StreamRecord]:
        try:
            return batch.to_records()
        except SchemaValidationError as error:
            raise BackendRejected(str(error), backend="wandb") from error

    def _acknowledge(self) -> None:
        """Wait until all that was sent is in W&B's file, and note that it is."""
        if self._newest_mark is not None:
            self._wait_for(self._newest_mark)
            self._newest_mark = None
        if self._sent:
            self._state.writers.update(self._sent)
            self._sent = {}
            self._save()

    def _save(self) -> None:
        """Note what is in W&B's file and what is held, which together is all that was taken."""
        self._steps.save()
        if self._state.file is not None and self._log is not None:
            self._state.file.offset = self._log.offset
        held = self._folder / HELD_FILE
        if self._state.held:
            held.touch()
        save_state(self._folder / STATE_NAME, self._state)
        if not self._state.held:
            held.unlink(missing_ok=True)

    def finish(self, *, is_last: bool = True) -> str:
        """End the W&B run as the run ended; returns where what is left can be sent from.

        Args:
            is_last: Whether all that the run's process had has come. Else what is held
                waits for the next process, which may have more for the same steps.
        """
        if self._run is None:
            return ""
        if is_last:
            for row in self._steps.flush():
                self._send_row(row.parts, row.step)
            if self._newest_mark is not None:
                self._wait_for(self._newest_mark)
        run, self._run = self._run, None
        now_s = self._newest_s or time.time()
        for key, table in self._attachments.make_tables().items():
            run.log({key: table, "quark/time": now_s, "_timestamp": now_s})
        run.summary["quark/status"] = self._state.status
        if self._state.ending or self._state.attempt > 0:  # W&B keeps that of an earlier attempt
            run.summary["quark/ending"] = self._state.ending
        for kind, count in self._state.left_out.items():
            run.summary[f"quark/left_out/{kind}"] = count
        code = find_exit_code(self._state)
        if code == 143:
            run.mark_preempting()
        offline = bool(run.offline)
        directory = Path(run.settings.sync_file).parent if run.settings.sync_file else None
        run.finish(exit_code=code)
        if self._state.file is not None:
            self._state.file.synced = not offline
        if offline and directory is not None:
            directory = self._join_folders(directory)
        self._save()
        if offline and directory is not None:
            return f"W&B is offline. To send the run, run: wandb sync {directory}"
        return ""

    def _join_folders(self, directory: Path) -> Path:
        """Join what processes before this one have left; the folder that has all of it."""
        state = self._state
        record_type = _find_record_type(self._wandb)
        try:
            joined = join_folders(directory.parent, state.wandb_id, record_type)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"folders of the run stay apart: {error}\n")
            return directory
        if joined is None or joined.parent == directory or directory.exists():
            return directory
        state.file = WandbFile(str(joined), joined.stat().st_size)
        self._log = None
        return joined.parent

    def _open(self) -> None:
        if self._run is not None:
            return
        state = self._state
        last = state.file
        if last is not None and self._folder not in Path(os.path.realpath(last.path)).parents:
            last = None  # W&B writes nowhere else for this run
        if last is not None and not last.synced:
            self._find_rows(last)
        self._run = init_run(self._wandb, self._opening, state)
        if self._run.disabled:
            self._notes.append("WANDB_MODE is 'disabled', so W&B stores no records")
            return
        note_page(state, self._run)
        path = Path(self._run.settings.sync_file)
        if last is not None and not last.synced and not self._run.offline:
            self._notes.append(
                "an earlier process of this run did not finish in W&B, which may lack its "
                f"newest rows. To send them from {last.path}, run: wandb sync --include-online"
            )
        if "x_transaction_log_flush_interval" in self._wandb.Settings.model_fields:
            self._log = LogFile(path, _find_record_type(self._wandb))
        else:
            self._notes.append(
                f"wandb {self._wandb.__version__} writes its file only every 15 s, so delivered "
                "rows may be lost if its process is killed. Newer versions keep them"
            )
        state.file = WandbFile(str(path))
        # Noted before the first row: whoever comes later must know where to look.
        save_state(self._folder / STATE_NAME, state)
        self._tell_run()
        if state.steps == "own":
            # Of a run that is taken up, W&B's server says how far it is.
            state.sent_step = max(state.sent_step, int(self._run.step) - 1)
        elif not self._steps.is_empty:
            for part in self._steps.give_up():
                self._send_row([part])

    def _find_rows(self, file: WandbFile) -> None:
        """Look up which rows beyond the acknowledged ones are in an earlier process's file."""
        path, offset = Path(file.path), file.offset
        paths = [path]
        if not path.exists():  # it was joined to another one, and nobody has noted that
            paths, offset = [*path.parent.parent.glob("offline-run-*/*.wandb")], 0
        for each in paths:
            log = LogFile(each, _find_record_type(self._wandb), offset)
            self._found.update(log.read_marks())
        self._steps.drop_found(self._found)

    def _take(self, parts: Sequence[Part]) -> None:
        """Send parts, or hold them for the rows of their steps."""
        if self._state.steps != "own":
            for part in parts:
                if part.mark not in self._found:
                    self._send_row([part])
            return
        for part in parts:
            if part.mark in self._found:
                self._steps.note_found(part)
        reason = self._steps.add([part for part in parts if part.mark not in self._found])
        if reason is not None:
            self._fall_back(reason)

    def _fall_back(self, reason: str) -> None:
        """From here on rows have numbers of their own, and metrics an axis beside them."""
        state = self._state
        state.steps = "kept"
        # Before any row: who finds those in W&B's file must not go on by steps.
        save_state(self._folder / STATE_NAME, state)
        for row in self._steps.release():
            self._send_row(row.parts, row.step)
        define_steps(self._run, state)
        for part in self._steps.give_up():
            self._send_row([part])
        self._notes.append(
            f"its steps do not ascend ({reason}), so the step of W&B differs from the step of "
            "the run. The charts use the axis quark/step, and all points are stored"
        )

    def _send_row(self, parts: Sequence[Part], step: int | None = None) -> None:
        """Hand a row to W&B, at once: one that W&B would hold open might be lost."""
        for part in parts:
            self._define(part)
        with showing(self._wandb, self._payloads, join_parts(parts)) as values:
            made = {
                key: self._make_histogram(value) if isinstance(value, Histogram) else value
                for key, value in values.items()
            }
            # When it was logged, not when it is sent.
            self._newest_s = made["_timestamp"] = made["quark/time"]
            if step is None:
                self._run.log(made)
            else:
                self._run.log(made, step=step, commit=True)
        self._newest_mark = parts[-1].mark

    def _wait_for(self, mark: str) -> None:
        """Wait until W&B's file has it: whatever is killed from then on, it is there."""
        if self._log is None:
            return
        progressed_s = time.monotonic()
        while True:
            offset = self._log.offset
            if mark in self._log.read_marks():
                return
            if self._log.offset > offset:
                progressed_s = time.monotonic()
            elif time.monotonic() - progressed_s > _FILE_TIMEOUT_S:
                raise BackendUnavailable(
                    f"W&B did not write its file {self._log.path} in {_FILE_TIMEOUT_S:g} s",
                    backend="wandb",
                )
            time.sleep(_POLL_S)

    def _define(self, part: Part) -> None:
        """Give keys whose axis is not W&B's own one of their own, at first sight."""
        state = self._state
        if not part.axis:
            new = [key for key in part.values if key not in self._defined and key not in AXES]
            self._defined.update(new)
            state.metric_keys += [key for key in new if key not in state.metric_keys]
            return
        for key in part.values:
            if key in self._defined or key in ("quark/time", "quark/attempt"):
                continue
            self._defined.add(key)
            hidden = ("layers/", "params_stats/")
            if key.startswith(hidden) and part.axis.endswith("_step"):
                continue  # see `init_run`
            # W&B takes a star for a pattern, and refuses it in the middle.
            with contextlib.suppress(self._wandb.Error):
                if key != part.axis:
                    self._run.define_metric(key, step_metric=part.axis, step_sync=False)
                elif key not in AXES:
                    self._run.define_metric(key, hidden=True, summary="none")

    def _make_histogram(self, histogram: Histogram) -> Any:
        return self._wandb.Histogram(np_histogram=(list(histogram.counts), list(histogram.edges)))

    def _send_rest(self, batch: Batch, records: Sequence[StreamRecord]) -> None:
        self._attachments.collect(records)
        if data := list_data_digests(records):
            told = {f"quark_data/{key}": said for key, said in data.items()}
            self._run.config.update(told, allow_val_change=True)
        if batch.kind == EventRecord.KIND:
            events = [record for record in records if isinstance(record, EventRecord)]
            counts = self._state.counts
            counts["events_bytes"] = self._attachments.append_events(
                self._run, events, counts.get("events_bytes", 0)
            )
        for record in records:
            if isinstance(record, LifecycleRecord):
                self._apply_lifecycle(record)
            elif isinstance(record, ArtifactRecord):
                self._log_artifact(record)
            elif isinstance(record, ArtifactLinkRecord):
                self._apply_link(record)
            elif isinstance(record, AlertRecord):
                said = (record.title, record.summary, record.fact, record.inference)
                self._raise_alert(record.rule_id, record.severity, *said)
            elif isinstance(record, EventRecord):
                self._note_event(record)

    def _log_artifact(self, record: ArtifactRecord, alias: str | None = None) -> None:
        mark = self._attachments.log_artifact(self._run, record, alias)
        self._newest_mark = mark or self._newest_mark
        if record.id is not None and record.artifact_type not in HIDDEN_TYPES:
            self._artifacts[record.id] = record
            if len(self._artifacts) > _KNOWN_ARTIFACTS:
                del self._artifacts[next(iter(self._artifacts))]
            for awaited in self._awaited.pop(record.id, ()):
                self._log_artifact(record, awaited)

    def _apply_link(self, record: ArtifactLinkRecord) -> None:
        """Give an artifact an alias, or note which one the run has used."""
        if record.relation == "used":
            version = "" if record.version is None else f":v{record.version}"
            used = f"{decode_name(record.artifact_key)}{version} of run {record.artifact_run_id}"
            if used not in self._state.used:
                self._state.used.append(used)
            self._run.config.update({"quark_used": self._state.used}, allow_val_change=True)
        elif record.relation == "alias":
            known = self._artifacts.get(record.artifact_id)
            if known is not None:
                # The same content is the same version to W&B, with one more name.
                self._log_artifact(known, record.alias)
            elif record.artifact_run_id == self._opening.run_id and record.alias is not None:
                # Kinds come one after the other: its artifact may be about to come.
                self._awaited.setdefault(record.artifact_id, []).append(record.alias)

    def _raise_alert(self, rule_id: str, severity: str, title: str, *text: str) -> None:
        """Tell W&B of an alert: once per rule, and again when it gets worse.

        What somebody has raised is told as it is; a finding that is for information is none.
        """
        level = ALERT_LEVELS.get(severity, 0)
        if not is_user_alert(rule_id):
            if level <= max(ALERT_LEVELS["info"], self._state.levels.get(rule_id, 0)):
                return
            self._state.levels[rule_id] = level
        if level:
            names = {1: "INFO", 2: "WARN"}
            self._run.alert(
                title=title[:_MAX_TITLE_LENGTH] or "alert",
                text="\n".join(line for line in text if line)[:2000],
                level=names.get(level, "ERROR"),
            )

    def _note_event(self, record: EventRecord) -> None:
        payload: Mapping[str, Any] = record.payload or {}
        if payload.get("signal") and record.attempt >= self._state.attempt:
            self._state.signal = str(payload["signal"])
        rule_id = find_raised_rule(record)
        if rule_id is not None:
            names = ("title", "message", "fact", "inference")
            said = [str(payload.get(name) or "") for name in names]
            self._raise_alert(rule_id, record.severity, *said)
            return
        if record.severity not in ("error", "critical"):
            return
        now_s = time.monotonic()
        if now_s - self._last_event_alert_s >= _EVENT_ALERT_EVERY_S:
            self._last_event_alert_s = now_s
            text = str(payload.get("message") or record.status or record.event_type)
            title = record.event_type[:_MAX_TITLE_LENGTH]
            self._run.alert(title=title, text=text[:2000], level="ERROR")

    def _note_lifecycle(self, records: Sequence[StreamRecord]) -> None:
        """Note what W&B must be told when the run is opened there."""
        state = self._state
        for record in records:
            assert isinstance(record, LifecycleRecord)
            if record.action == "start" and record.attempt > state.attempt:
                state.attempt, state.start = record.attempt, dict(record.data or {})
                state.status, state.signal, state.exit_code = "running", "", None
                state.ending = ""
                state.started_us = state.started_us or record.time_us
                from_step = state.start.get("from_step")
                if isinstance(from_step, int):
                    forget_from(state, from_step)
            elif record.action in ("group", "fields"):
                self._keep_belonging(record)

    def _apply_lifecycle(self, record: LifecycleRecord) -> None:
        data: Mapping[str, Any] = record.data or {}
        state = self._state
        if record.action == "start":
            self._tell_run()
        elif record.action == "tag":
            tag = str(data.get("tag", ""))
            if tag and tag not in state.tags:
                state.tags.append(tag)
            self._run.tags = tuple(describe_start(self._opening, state)["tags"])
        elif record.action == "edit":
            self._apply_edit(data.get("changes") or {})
        elif record.action in ("group", "fields"):
            self._keep_belonging(record)
            self._tell_run()
        elif record.action == "config":
            state.config = dict(data.get("values", {}))
            self._tell_config()
        elif record.action == "environment":
            self._attachments.save_environment(self._run, dict(data))
        elif record.action == "status" and record.attempt >= state.attempt:
            state.status = str(data.get("status", "running"))
            state.exit_code = data.get("exit_code")
            ending = RunEnding.from_data(data.get("ending"))
            state.ending = "" if ending is None else ending.describe()

    def _keep_belonging(self, record: LifecycleRecord) -> None:
        """Note the groups and fields of the run; the same record twice changes nothing more."""
        run: Mapping[str, Any] = self._state.start.get("run", {})
        changed = {**run, **change_belonging(run, record)}
        self._state.start = {**self._state.start, "run": changed}

    def _apply_edit(self, changes: Mapping[str, Any]) -> None:
        """Change what somebody has changed of the run meanwhile, or after its end."""
        state = self._state
        run = dict(state.start.get("run", {}))
        for field in ("name", "notes"):
            if changes.get(field):
                run[field] = changes[field]["after"]
                setattr(self._run, field, run[field] or "")
        if changes.get("tags"):
            gone = set(changes["tags"].get("removed", ()))
            tags = [*run.get("tags", ()), *state.tags, *changes["tags"].get("added", ())]
            run["tags"], state.tags = [tag for tag in tags if tag not in gone], []
        belongs = change_by_edit(run, changes)
        state.start = {**state.start, "run": {**run, **belongs}}
        if belongs:
            self._tell_run()
        if changes.get("tags"):
            self._run.tags = tuple(describe_start(self._opening, state)["tags"])

    def _tell_run(self) -> None:
        """Name the run, and say in its configuration which run it mirrors."""
        said = describe_start(self._opening, self._state)
        if said["name"]:
            self._run.name = said["name"]
        if said["notes"]:
            self._run.notes = said["notes"]
        if tuple(said["tags"]) != tuple(self._run.tags or ()):
            self._run.tags = tuple(said["tags"])
        run: Mapping[str, Any] = self._state.start.get("run", {})
        known = {
            "run_id": self._opening.run_id,
            "project": self._opening.project,
            "attempt": max(0, self._state.attempt),
            "parent_run_id": run.get("parent_run_id"),
            "git_commit": run.get("git_commit"),
            "groups": list(run.get("groups") or ()) or None,
            "fields": dict(run.get("fields") or {}) or None,
        }
        self._run.config.update({"quark_run": known}, allow_val_change=True)
        self._tell_config()

    def _tell_summary(self) -> None:
        """Say in the summary what was annotated, and the best value of the objective."""
        run: Mapping[str, Any] = self._state.start.get("run", {})
        known = describe_best(self._state)
        for name, value in (run.get("fields") or {}).items():
            # The summary has the last value of each metric under its name.
            known[f"field/{name}" if self._is_metric(name) else _config_key(name)] = value
        for key in [*known.keys(), *self._summary.keys()]:
            if key not in known:
                if not self._is_metric(key):
                    with contextlib.suppress(KeyError):
                        del self._run.summary[key]
            elif key not in self._summary or self._summary[key] != known[key]:
                self._run.summary[key] = known[key]
        self._summary = known

    def _is_metric(self, name: str) -> bool:
        return name in self._metrics or name in self._state.metric_keys

    def _tell_config(self) -> None:
        values = {_config_key(key): value for key, value in self._state.config.items()}
        self._run.config.update(values, allow_val_change=True)
        digests = list_digests(self._state.config)
        if digests:
            self._run.config.update({"quark_digests": digests}, allow_val_change=True)


def _config_key(key: str) -> str:
    # W&B keeps its own things there.
    return f"key{key}" if key.startswith("_") else key


def _find_record_type(wandb: Any) -> Any:
    module = importlib.import_module(f"{wandb.__name__}.proto.wandb_internal_pb2")
    return module.Record
