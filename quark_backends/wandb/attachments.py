"""What goes to W&B beside rows: artifacts, tables, and files of the run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from quark_backends.mirroring.saved_state import make_file_name
from quark_backends.wandb.log_file import mark_artifact
from quark_core.api import (
    HIDDEN_TYPES,
    KEPT_SOURCES,
    MANIFEST_KEY,
    AlertRecord,
    ArtifactDamagedError,
    ArtifactRecord,
    BatchDiagnosticRecord,
    EventRecord,
    HealthScoreRecord,
    PayloadFolder,
    PhaseRecord,
    StreamRecord,
    decode_name,
    encode_json,
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
