"""Runs in W&B's own files: `offline-run-…/run-ID.wandb`, and those of runs that were online.

    entity/project             project
    config, tags, notes        the same; the group as a group, the job type as a tag `job_type=…`
    history: numbers, bools    metrics at `_step`, with `_timestamp`; nested ones and `a.b` as `a/b`
    history: histograms, media artifacts of these types, out of `files/` beside the file
    summary                    fields, but for what is the last value of a metric
    host, git …                environment
    system metrics             telemetry, as far as it has the figure
    alerts                     alerts that somebody has raised: events `alert_raised`
    artifacts                  artifacts, where their files are still on this machine, with aliases
    saved files                artifacts `file`; one that is a link, as far as it stays in the place
    the exit code              completed or failed; none: the run goes on, or was killed

CSV files outside of such folders are what W&B lets one download: `sources.csv` reads them.
Several files of one run (resumed offline) are one run; where a later one begins at a step that
the earlier one had passed, it is a further attempt.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.importing.neutral_run import (
    ForeignRun,
    ImportFailure,
    Losses,
    Portion,
    RunFacts,
    find_place,
)
from quark.importing.safe_files import find_files
from quark.importing.sources.wandb_values import NONFINITE, WandbValues, read_stats
from quark_core.config.redaction import redact_values

if TYPE_CHECKING:
    from quark_backends.wandb.local_files import LogFile

_WRITTEN_BY_PEOPLE = ("config", "summary", "environment", "name", "notes", "tags")
_ASIDE = frozenset({"_step", "_timestamp", "_runtime", "_wandb"})
# What W&B writes for itself.
_OWN_RECORDS = ("header", "footer", "final", "telemetry", "request", "tbrecord")
_NO_PLACE = {
    "metric": "settings of define_metric cannot be imported",
    "use_artifact": "the artifact of this file is known to the W&B server only",
    "preempting": "a stop request cannot be imported",
}
_INSTALL = 'W&B files require its library: pip install "quark-tracker[wandb]"'


def find_runs(place: str | Path, *, project: str | None = None) -> Iterator[ForeignRun]:
    """The runs under a folder of W&B's, or of one file.

    Args:
        place: The folder, such as `wandb`, or a file that ends in `.wandb`.
        project: The project of tables that do not say it.

    Raises:
        ImportFailure: There is no such place, or W&B is not installed.
    """
    root = find_place(place)
    paths = sorted({one.resolve() for one in find_files(root, "*.wandb")})
    grouped: dict[str, list[Path]] = {}
    for path in sorted(paths, key=lambda one: (one.parent.name, one.name)):
        if path.suffix == ".wandb":
            grouped.setdefault(path.stem, []).append(path)
    if grouped:
        _load_types()
    for files in grouped.values():
        yield WandbRun(files, root)
    from quark.importing.sources.csv import find_runs as find_tables

    folders = {path.parent for files in grouped.values() for path in files}
    for path in find_files(root, "*.csv"):
        if path.suffix == ".csv" and not folders.intersection(path.parents):
            yield from find_tables(path, project=project)


def _load_types() -> Any:
    """W&B's module of record types.

    Raises:
        ImportFailure: It is not installed, or of a version that has none.
    """
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError:
        raise ImportFailure(_INSTALL) from None
    return wandb_internal_pb2


class WandbRun(ForeignRun):
    """One run, of one file or several.

    Its position is the offset in each file, and what the records before it have said of the
    run itself: none of them says it again.
    """

    def __init__(self, files: list[Path], root: Path) -> None:
        self.key = files[0].stem
        self._root = root
        self._files = files
        self._said: dict[str, Any] = {}

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        said = self._said or self._read_head()
        if "run_id" not in said:
            raise ImportFailure(f"{self._files[0]} does not name its run yet")
        last_us = said.get("last_us")
        code = said.get("exit_code")
        tags = list(said.get("tags", ()))
        tags += [f"job_type={said['job_type']}"] if said.get("job_type") else []
        project = said.get("project") or "uncategorized"
        entity = said.get("entity")
        environment = {"folder": str(self._files[0].parent), "run_id": said["run_id"]}
        environment |= said.get("environment", {})
        return RunFacts(
            identity=f"{entity or ''}/{project}/{said['run_id']}",
            project=project,
            name=said.get("name"),
            notes=said.get("notes"),
            tags=tags,
            config={key: text for key, text in said.get("config", {}).items() if key != "_wandb"},
            environment={"wandb": environment},
            groups=[said["group"]] if said.get("group") else [],
            fields=said.get("summary", {}),
            status="running" if code is None else "failed" if code else "completed",
            started_us=said.get("started_us"),
            ended_us=said.get("ended_us") or last_us,
            git_commit=said.get("git_commit"),
        )

    def mark(self) -> str | None:
        """See `ForeignRun`."""
        return "".join(f"{file.name}:{file.stat().st_size};" for file in self._files)

    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """See `ForeignRun`."""
        from quark_backends.wandb.local_files import LogFile

        types = _load_types()
        offsets: dict[str, int] = dict(position.get("files", {}))
        self._said = json.loads(json.dumps(position.get("said", {})))
        for file in self._files:
            known = f"{file.parent.name}/{file.name}"
            log = LogFile(file, types.Record, offsets.get(known, 0))
            is_later = known not in offsets and bool(offsets)
            yield from self._read_file(file, log, known, offsets, losses, is_later=is_later)
            left = file.stat().st_size - log.offset
            if log.damage is not None:
                losses.add("bytes", file.name, f"{log.damage}, and what follows it", left)
            elif left > 0 and "exit_code" not in self._said:
                losses.add("bytes", file.name, "a record is incomplete; import it later", left)

    def _read_file(
        self,
        file: Path,
        log: LogFile,
        known: str,
        offsets: dict[str, int],
        losses: Losses,
        *,
        is_later: bool,
    ) -> Iterator[Portion]:
        from google.protobuf.message import DecodeError

        types = _load_types()
        values = WandbValues(file.parent / "files", losses, self._root)
        begun, from_step, is_new = not is_later, None, False
        for data in log.read_records():
            try:
                record = types.Record.FromString(data)
            except DecodeError:
                losses.add("record", file.name, "it cannot be decoded")
                continue
            form = record.WhichOneof("record_type")
            if form == "history":
                step = self._find_step(record.history)
                if not begun and step <= self._said.get("last_step", -1):
                    from_step = step
                begun = True
                self._take_history(record.history, step, values)
            else:
                self._take_record(form, record, values, file, losses)
            offsets[known], is_new = log.offset, True
            if values.is_full:
                yield self._make_portion(values, offsets, from_step)
                from_step, is_new = None, False

        if is_new:
            yield self._make_portion(values, offsets, from_step)

    def _make_portion(
        self, values: WandbValues, offsets: Mapping[str, int], from_step: int | None
    ) -> Portion:
        position = {"files": dict(offsets), "said": self._copy_said()}
        return values.make_portion(position, from_step)

    def _copy_said(self) -> dict[str, Any]:
        """What was said, to be noted in the store: without secrets, as all that is in there."""
        said: dict[str, Any] = json.loads(json.dumps(self._said))
        open_text = {name: said[name] for name in _WRITTEN_BY_PEOPLE if name in said}
        return said | redact_values(open_text)

    def _find_step(self, history: Any) -> int:
        for item in history.item:
            if item.key == "_step" or list(item.nested_key) == ["_step"]:
                try:
                    return int(json.loads(item.value_json))
                except (ValueError, TypeError):
                    break
        return int(history.step.num)

    def _take_history(self, history: Any, step: int, values: WandbValues) -> None:
        row = read_items(history.item)
        moment = row.get("_timestamp")
        last_us = self._said.get("last_us", self._said.get("started_us", 0))
        time_s = float(moment) if isinstance(moment, (int, float)) else last_us / 1e6
        self._said["last_us"] = max(last_us, round(time_s * 1e6))
        self._said["last_step"] = max(step, self._said.get("last_step", -1))
        summary, newest = self._said.get("summary", {}), self._said.setdefault("newest", {})
        for key, value in row.items():
            if key in _ASIDE:
                continue
            values.take(key, value, step, time_s)
            if _is_measured(value):
                newest[key] = value
                if summary.get(key) == value:
                    del summary[key]

    def _take_record(
        self, form: str | None, record: Any, values: WandbValues, file: Path, losses: Losses
    ) -> None:
        said = self._said
        if form == "run":
            self._take_run(record.run)
        elif form == "config":
            said.setdefault("config", {}).update(read_items(record.config.update))
            for item in record.config.remove:
                said["config"].pop(item.key, None)
        elif form == "summary":
            self._take_summary(record.summary)
        elif form == "exit":
            said["exit_code"] = int(record.exit.exit_code)
            began_us, runtime_s = said.get("started_us"), record.exit.runtime
            if began_us is not None and runtime_s:
                said["ended_us"] = max(began_us + runtime_s * 1_000_000, said.get("last_us", 0))
        elif form == "stats":
            values.records += read_stats(record.stats, losses)
        elif form == "alert":
            values.take_alert(record.alert, said.get("last_step"), said.get("last_us"))
        elif form == "artifact":
            values.take_artifact(record.artifact, said.get("last_us"))
        elif form == "files":
            values.take_saved(record.files, self._find_own_root(file), said.get("last_us"))
        elif form == "environment":
            self._take_environment(record.environment)
        elif form in ("output", "output_raw"):
            losses.add("console", "output", "console lines cannot be imported")
        elif form not in _OWN_RECORDS:
            name = record.metric.name or record.metric.glob_name if form == "metric" else str(form)
            reason = _NO_PLACE.get(str(form), "this record cannot be imported")
            losses.add(str(form), name, reason)

    def _take_summary(self, found: Any) -> None:
        """What the summary says beyond the last value of each metric, which W&B puts there too."""
        summary = self._said.setdefault("summary", {})
        newest = self._said.get("newest", {})
        for key, value in read_items(found.update).items():
            if key not in _ASIDE and not (isinstance(value, dict) and "_type" in value):
                summary[key] = value
            if key in newest and newest[key] == value:
                summary.pop(key, None)
        for item in found.remove:
            summary.pop((list(item.nested_key) or [item.key])[0], None)

    def _find_own_root(self, file: Path) -> Path | None:
        """The folder that W&B's own lies in, where the run says that it was logged there.

        Its links lead to files beside W&B's folder. Of a run that comes from elsewhere they
        would lead to anything that lies here.
        """
        said = self._said.get("environment", {})
        here = file.parent.parent.parent
        root = said.get("root")
        is_own = said.get("host") == socket.gethostname() and root is not None
        return here if is_own and Path(root).resolve() == here else None

    def _take_run(self, run: Any) -> None:
        said = self._said
        said["run_id"] = run.run_id
        for name, text in (
            ("entity", run.entity),
            ("project", run.project),
            ("name", run.display_name),
            ("notes", run.notes),
            ("group", run.run_group),
            ("job_type", run.job_type),
            ("git_commit", run.git.commit),
        ):
            if text:
                said[name] = text
        if run.tags:
            said["tags"] = list(run.tags)
        said.setdefault("config", {}).update(read_items(run.config.update))
        if run.HasField("start_time"):
            moment = run.start_time.seconds * 1_000_000 + run.start_time.nanos // 1000
            said.setdefault("started_us", moment)
        environment = said.setdefault("environment", {})
        if run.host:
            environment["host"] = run.host
        if run.sweep_id:
            environment["sweep"] = run.sweep_id

    def _take_environment(self, found: Any) -> None:
        environment = self._said.setdefault("environment", {})
        names = ("os", "python", "program", "host", "executable", "gpu_type", "root")
        environment |= {name: getattr(found, name) for name in names if getattr(found, name)}
        if found.args:
            environment["args"] = list(found.args)

    def _read_head(self) -> dict[str, Any]:
        """What the first records say, as far as the one that says which run it is."""
        from google.protobuf.message import DecodeError

        from quark_backends.wandb.local_files import LogFile

        types = _load_types()
        log = LogFile(self._files[0], types.Record)
        for data in log.read_records():
            try:
                record = types.Record.FromString(data)
            except DecodeError as error:
                raise ImportFailure(f"{self._files[0]} is not a W&B file: {error}") from None
            if record.WhichOneof("record_type") == "run":
                self._take_run(record.run)
                break
        found, self._said = self._said, {}
        return found


def _is_measured(value: Any) -> bool:
    """Whether a value of the history is one of a metric, or of several."""
    if isinstance(value, dict):
        return "_type" not in value and all(map(_is_measured, value.values()))
    return isinstance(value, (bool, int, float)) or str(value) in NONFINITE


def read_items(items: Any) -> dict[str, Any]:
    """Items of history, config or summary as one dict, nested as they were."""
    found: dict[str, Any] = {}
    for item in items:
        path = list(item.nested_key) or [item.key]
        try:
            value = json.loads(item.value_json)
        except ValueError:
            value = item.value_json
        place = found
        for part in path[:-1]:
            inner = place.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = place[part] = {}
            place = inner
        place[path[-1]] = value
    return found
