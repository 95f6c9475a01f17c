"""Opens and ends the W&B run, and adds files to it, in the process of the mirror only."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from quark_backends.mirror_records import split_tag
from quark_backends.mirror_state import make_file_name
from quark_backends.wandb.backend import OpenRun
from quark_backends.wandb.history import AXES
from quark_backends.wandb.local_files import WandbState, mark_artifact
from quark_core.api import (
    HIDDEN_TYPES,
    KEPT_SOURCES,
    MANIFEST_KEY,
    AlertRecord,
    ArtifactDamagedError,
    ArtifactRecord,
    BackendUnauthorized,
    BackendUnavailable,
    BatchDiagnosticRecord,
    EventRecord,
    HealthScoreRecord,
    PayloadFolder,
    PhaseRecord,
    StreamRecord,
    decode_name,
    encode_json,
    lower_started,
    redact_text,
    split_generation,
    split_path,
    unpack_sources,
)

_MAX_NAME_LENGTH = 128
_MAX_METADATA = 100
_MAX_ROWS = 1000
_HARD_BATCHES = 100


def make_artifact_name(key: str) -> str:
    """An artifact's name in W&B: letters, digits, `.`, `_` and `-`, 128 at most."""
    name = make_file_name(key.replace("/", "."))
    if name == key.replace("/", ".") and len(name) <= _MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{name[: _MAX_NAME_LENGTH - 9]}-{digest}"


class Attachments:
    """Collects what tables show at the end, and sends files as they come.

    Tables hold what this process has seen, of alerts and phases the newest
    1000, of each analyzer those of its newest generation, and of batches the
    100 with the highest loss.

    Args:
        wandb: The imported library.
        folder: The mirror's folder, where payloads and files of the run lie.
    """

    def __init__(self, wandb: Any, folder: Path) -> None:
        self._wandb = wandb
        self._folder = folder
        self._payloads = PayloadFolder(folder)
        # Each with its writer, which for outputs of analyzers is a generation.
        self._alerts: list[tuple[str, list[Any]]] = []
        self._phases: list[tuple[str, list[Any]]] = []
        self._newest: dict[str, int] = {}
        self._batches: list[tuple[float, int, list[Any]]] = []

    def collect(self, records: Sequence[StreamRecord]) -> None:
        """Note what tables will show of the records."""
        for record in records:
            if isinstance(record, (AlertRecord, HealthScoreRecord, PhaseRecord)):
                self._note_generation(record.writer_id)
            if isinstance(record, AlertRecord):
                alert = [record.step, record.severity, record.rule_id, record.culprit]
                self._alerts.append((record.writer_id, [*alert, record.summary]))
            elif isinstance(record, PhaseRecord):
                phase = [record.display_name, record.step_start, record.step_end, record.summary]
                self._phases.append((record.writer_id, phase))
            elif isinstance(record, BatchDiagnosticRecord) and record.loss == record.loss:
                ids = ", ".join(map(str, (record.sample_ids or ())[:20]))
                row = [record.step, record.epoch, record.loss, record.batch_size, ids]
                self._batches.append((-record.loss, record.sequence, row))
        del self._alerts[:-_MAX_ROWS], self._phases[:-_MAX_ROWS]
        if len(self._batches) > 2 * _HARD_BATCHES:
            self._batches = sorted(self._batches)[:_HARD_BATCHES]

    def make_tables(self) -> dict[str, Any]:
        """W&B's tables by their keys; empty ones are left out."""
        batches = [row for _, _, row in sorted(self._batches)[:_HARD_BATCHES]]
        tables = {
            "quark/tables/alerts": (
                ["step", "severity", "rule", "culprit", "summary"],
                self._list_shown(self._alerts),
            ),
            "quark/tables/phases": (
                ["phase", "start", "end", "summary"],
                self._list_shown(self._phases),
            ),
            "quark/tables/hard_batches": (
                ["step", "epoch", "loss", "batch_size", "sample_ids"],
                batches,
            ),
        }
        return {
            key: self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
            for key, (columns, rows) in tables.items()
            if rows
        }

    def _note_generation(self, writer_id: str) -> None:
        found = split_generation(writer_id)
        if found is not None:
            analyzer, number = found
            self._newest[analyzer] = max(number, self._newest.get(analyzer, 0))

    def _list_shown(self, rows: Sequence[tuple[str, list[Any]]]) -> list[list[Any]]:
        """Rows that no newer generation of their analyzer has replaced."""
        shown = []
        for writer_id, row in rows:
            found = split_generation(writer_id)
            if found is None or found[1] == self._newest.get(found[0]):
                shown.append(row)
        return shown

    def log_artifact(
        self, run: Any, record: ArtifactRecord, alias: str | None = None
    ) -> str | None:
        """Send an artifact with its payload, or without one that was not kept; its mark.

        What is a part of another artifact goes with that, and has no mark.

        Args:
            run: The W&B run.
            record: The artifact; one that was sent before gets further aliases.
            alias: One besides those by its step.
        """
        if record.artifact_type == KEPT_SOURCES:
            self._log_sources(run, record)
        if record.artifact_type in HIDDEN_TYPES:
            return None
        metadata = {
            "artifact_key": record.artifact_key,
            "sha256": record.sha256,
            "size_bytes": record.size_bytes,
            "step": record.step,
            "epoch": record.epoch,
            **{str(key): value for key, value in (record.metadata or {}).items()},
        }
        kind = record.artifact_type
        if kind == "job" or kind.startswith("wandb-"):
            kind = f"quark-{kind}"  # W&B's own types
        artifact = self._wandb.Artifact(
            make_artifact_name(decode_name(record.artifact_key)),
            type=kind,
            metadata=dict(list(metadata.items())[:_MAX_METADATA]),
        )
        path = self._payloads.find(record.sha256)
        if path is not None and record.artifact_type == "directory":
            self._add_directory(artifact, path)
        elif path is not None and record.artifact_type == "reference":
            self._add_reference(artifact, path)
        elif path is not None:
            suffix = PurePosixPath(record.payload_relative_path or "").suffix
            name = make_artifact_name(record.artifact_name) + re.sub(r"[^.\w-]", "_", suffix)
            # Payloads never change, so W&B need not copy them first.
            artifact.add_file(str(path), name=name, policy="immutable", skip_cache=True)
            self._add_masks(artifact, record)
        aliases = ["latest"] if record.step is None else ["latest", f"step-{record.step}"]
        if alias is not None:
            aliases.append(make_artifact_name(alias))
        run.log_artifact(artifact, aliases=aliases)
        return mark_artifact(artifact)

    def _log_sources(self, run: Any, record: ArtifactRecord) -> None:
        """Send the code of a run; of one whose user has not asked for that nothing is here."""
        manifest = self._payloads.find(record.sha256)
        if manifest is None or record.artifact_key != MANIFEST_KEY:
            return
        # Names that begin with `source-` are W&B's own.
        name = make_artifact_name(f"quark-source-{self._folder.parents[2].name}")
        artifact = self._wandb.Artifact(name, type="code", metadata={"sha256": record.sha256})
        with contextlib.suppress(ArtifactDamagedError):
            for path, data in unpack_sources(manifest.read_bytes(), self._read_payload):
                with artifact.new_file(path, mode="wb") as file:
                    file.write(data)
        run.log_artifact(artifact, aliases=["latest"])

    def _read_payload(self, sha256: str) -> bytes:
        with self._payloads.open(sha256) as file:
            return file.read()

    def _add_directory(self, artifact: Any, path: Path) -> None:
        """The files of a directory, whose payloads came before."""
        for file in json.loads(path.read_bytes()).get("files", ()):
            found = self._payloads.find(str(file.get("sha256", "")))
            parts = split_path(str(file.get("path", "")))
            if found is not None and parts is not None:
                name = "/".join(parts)
                artifact.add_file(str(found), name=name, policy="immutable", skip_cache=True)

    def _add_reference(self, artifact: Any, path: Path) -> None:
        """Where a file lies that is not stored; W&B does not look there either."""
        uri = str(json.loads(path.read_bytes()).get("uri", ""))
        uri = uri if "://" in uri else Path(uri).absolute().as_uri()
        try:
            artifact.add_reference(uri, checksum=False)
        except Exception:  # noqa: BLE001 - the library of that place is not installed, mostly
            with contextlib.suppress(Exception):
                entries = f"{self._wandb.__name__}.sdk.artifacts.artifact_manifest_entry"
                make = importlib.import_module(entries).ArtifactManifestEntry
                name = PurePosixPath(uri).name or "reference"
                artifact.manifest.add_entry(make(path=name, ref=uri, digest=uri, size=0))

    def _add_masks(self, artifact: Any, record: ArtifactRecord) -> None:
        metadata: Mapping[str, Any] = record.metadata or {}
        masks = metadata.get("masks") if record.artifact_type == "image" else None
        for mask in masks or ():
            found = self._payloads.find(str(mask.get("sha256", "")))
            if found is not None:
                name = f"masks/{make_artifact_name(str(mask.get('mask', 'mask')))}.png"
                artifact.add_file(str(found), name=name, policy="immutable", skip_cache=True)

    def append_events(self, run: Any, records: Sequence[EventRecord], size_bytes: int) -> int:
        """Add events to the run's file `events.jsonl`; returns its new size.

        Args:
            run: The W&B run.
            records: The events.
            size_bytes: What is acknowledged; anything beyond is written anew.
        """
        path = self._folder / "events.jsonl"
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(size_bytes)
            file.seek(0, 2)
            for record in records:
                file.write(encode_json(record.to_dict()) + b"\n")
            size_bytes = file.tell()
        # Linked, and uploaded as it grows.
        run.save(str(path), base_path=str(self._folder), policy="live")
        return size_bytes

    def save_environment(self, run: Any, values: object) -> None:
        """Keep the run's environment as its file `environment.json`."""
        path = self._folder / "environment.json"
        path.write_bytes(encode_json(values))
        run.save(str(path), base_path=str(self._folder), policy="now")


FLUSH_INTERVAL_S = 0.02
"""How often W&B writes its file: the mirror waits for that at each batch."""

_INIT_TIMEOUT_S = 20.0
_MAX_TAG_LENGTH = 64
_MAX_ID_LENGTH = 120
_MAX_SUFFIX = 10
_BAD_ID = re.compile(r"[:;,#?/'\\%\s]")
_INTERRUPTED = {"": 130, "SIGINT": 130, "SIGTERM": 143}


def make_wandb_id(run_id: str) -> str:
    """A run's id as W&B takes it: itself, wherever W&B allows that."""
    kept = _BAD_ID.sub("-", run_id)
    if kept == run_id and len(run_id) <= _MAX_ID_LENGTH:
        return run_id
    return f"{kept[:100]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


def init_run(wandb: Any, opening: OpenRun, state: WandbState) -> Any:
    """Start or continue the W&B run, and note its id.

    Raises:
        BackendUnauthorized: W&B has no valid credentials.
        BackendUnavailable: W&B's server does not answer in time, or refuses.
    """
    wandb_id = make_wandb_id(opening.run_id)
    # The folder may be somebody's who means another of the user's runs.
    if re.fullmatch(rf"{re.escape(wandb_id)}(?:-r[0-9]+)?", state.wandb_id):
        wandb_id = state.wandb_id
    for number in range(2, _MAX_SUFFIX):
        try:
            run = _init(wandb, opening, state, wandb_id)
        except Exception as error:
            if "deleted" in str(error) and "previously" in str(error):
                # W&B never gives the id of a deleted run again.
                wandb_id = f"{make_wandb_id(opening.run_id)}-r{number}"
                continue
            raise _translate(wandb, error) from error
        state.wandb_id = wandb_id
        lower_started()  # W&B's own process, which does about half of the work
        for key in AXES:
            run.define_metric(key, hidden=True, summary="none")
        define_steps(run, state)
        for pattern, kind in (("layers/*", "layer"), ("params_stats/*", "parameter")):
            axis = f"quark/{kind}_step"
            run.define_metric(pattern, step_metric=axis, step_sync=False, hidden=True)
        return run
    raise BackendUnavailable(
        f"the W&B runs {opening.run_id} to {wandb_id} were all deleted", backend="wandb"
    )


def define_steps(run: Any, state: WandbState) -> None:
    """Give metrics the axis `quark/step` where W&B's own step is not the run's."""
    if state.steps == "own":
        return
    # Otherwise W&B would add the newest step to rows that have none.
    run.define_metric("*", step_metric="quark/step", step_sync=False)
    for key in state.metric_keys:
        with contextlib.suppress(Exception):  # a star in the middle, which W&B refuses
            run.define_metric(key, step_metric="quark/step", step_sync=False)


def describe_start(opening: OpenRun, state: WandbState) -> dict[str, Any]:
    """What the start of a run says about its W&B run: name, notes, tags, group and job type."""
    run: Mapping[str, Any] = state.start.get("run", {})
    tags = dict.fromkeys([*run.get("tags", ()), *state.tags, *opening.options.tags])
    lineage = run.get("lineage_root_run_id")
    named = dict(map(split_tag, tags))
    groups: Sequence[str] = run.get("groups") or ()
    group = opening.options.group or named.get("group") or next(iter(groups), None)
    if group is None and lineage not in (None, opening.run_id):
        group = lineage
    return {
        "name": run.get("name"),
        "notes": run.get("notes"),
        "tags": [
            tag[:_MAX_TAG_LENGTH] for tag in (*tags, *(f"group:{path}" for path in groups)) if tag
        ],
        "group": group,
        "job_type": opening.options.job_type or named.get("job_type") or None,
    }


def note_page(state: WandbState, run: Any) -> None:
    """Note where a W&B run is to be seen; one that is offline has no page yet."""
    url = None if run.offline else getattr(run, "url", None)
    if isinstance(url, str) and url:
        # Of an anonymous user, what stands behind the question mark is a key.
        state.url = url.partition("?")[0]
        state.entity = str(getattr(run, "entity", None) or "")


def find_exit_code(state: WandbState) -> int:
    """The exit code by which W&B tells how a run ended; 1 where its end was never seen."""
    if state.exit_code and state.status != "completed":
        return state.exit_code
    if state.status == "interrupted":
        return _INTERRUPTED.get(state.signal, 130)
    return 0 if state.status == "completed" else 1


def _init(wandb: Any, opening: OpenRun, state: WandbState, wandb_id: str) -> Any:
    options = opening.options
    Path(opening.folder).mkdir(parents=True, exist_ok=True)
    said = describe_start(opening, state)
    with _starting(wandb, state):
        return wandb.init(
            id=wandb_id,
            project=options.project or os.environ.get("WANDB_PROJECT") or opening.project,
            entity=options.entity,
            name=said["name"],
            notes=said["notes"],
            tags=said["tags"] or None,
            group=said["group"],
            job_type=said["job_type"],
            dir=opening.folder,
            mode=options.mode,
            resume="allow",
            reinit="create_new",
            force=False,
            save_code=False,
            settings=_make_settings(wandb, opening),
        )


class _StartClock:
    """The module `time`, by whose clock it is the moment at which a run began."""

    def __init__(self, started_us: int) -> None:
        self._started_us = started_us

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        return self._started_us / 1e6


@contextlib.contextmanager
def _starting(wandb: Any, state: WandbState) -> Iterator[None]:
    """Let a W&B run begin when the run began: W&B asks the clock, and takes no answer of ours."""
    # Of a later process the module `wandb_init` would name its folder as that of the first one,
    # which older versions of W&B write over.
    names = ["wandb_run"] if state.file else ["wandb_run", "wandb_init"]
    found = []
    for name in names:
        with contextlib.suppress(ImportError):
            found.append(importlib.import_module(f"{wandb.__name__}.sdk.{name}"))
    asked = [module for module in found if getattr(module, "time", None) is time]
    try:
        for module in asked if state.started_us else ():
            vars(module)["time"] = _StartClock(state.started_us)
        yield
    finally:
        for module in asked:
            vars(module)["time"] = time


def _make_settings(wandb: Any, opening: OpenRun) -> Any:
    wanted = {
        "console": "off",
        "x_disable_stats": True,
        "x_disable_meta": True,
        "disable_git": True,
        "disable_code": True,
        "disable_job_creation": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        "silent": True,
        "init_timeout": _INIT_TIMEOUT_S,
        "finish_timeout": opening.finish_timeout_s,
        "x_transaction_log_flush_interval": FLUSH_INTERVAL_S,
    }
    # Those that begin with x_ come and go from version to version.
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


def _translate(wandb: Any, error: Exception) -> BackendUnavailable:
    text = " ".join(redact_text(str(error) or type(error).__name__).split())[:500]
    unauthorized = isinstance(error, getattr(wandb.errors, "AuthenticationError", ()))
    if unauthorized or "api_key" in text.lower() or "api key" in text.lower():
        return BackendUnauthorized(
            f"W&B rejected the credentials ({text}). Run `wandb login`, or set WANDB_API_KEY. "
            "Without an account, use wandb:?mode=offline; the records wait",
            backend="wandb",
        )
    return BackendUnavailable(f"W&B cannot be reached ({text}); the records wait", backend="wandb")
