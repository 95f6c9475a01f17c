"""The CSV mirror as a backend, and the folder of CSV files that it publishes.

Files of a run:

    metrics_long.csv  one row per value, append-only: the truth
    metrics.csv       one row per step, one column per metric; derived
    events.csv, telemetry.csv, layers.csv, parameters.csv,
    parameter_distributions.csv, batches.csv, artifacts.csv, alerts.csv,
    health_scores.csv, phases.csv, lifecycle.csv
                      one row per record of that kind, append-only; any further
                      kind has the table that its type names
    artifacts/        payloads of artifacts, laid out as in the run's directory
    tables/           the newest table of each key, as CSV; derived
    config.json       the newest attempt's configuration
    run.json          project, run and status
    state.json        how far the append-only files are acknowledged

A file is made when the first record of its kind comes. They lie in `csv/` of
the run's directory, or in `DIR/<run id>/` for `csv:DIR` (a relative DIR
counts from storage_dir). `csv:?publish=DIR` puts metrics.csv, config.json and
the tables into DIR as well, as other CSV loggers do; see `published`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from quark_backends.csv.files import (
    AppendOnlyTable,
    CsvReader,
    CsvState,
    CsvWriter,
    FolderClaim,
    RunFile,
    encode_rows,
    find_form,
    load_csv_state,
)
from quark_backends.csv.wide_table import derive_aside, write_wide_tables
from quark_backends.mirror_state import (
    digest_batch,
    is_new,
    keep_payload,
    replace_file,
    save_state,
)
from quark_core.api import (
    ARTIFACT_STORAGE_LAYOUT,
    KEPT_SOURCES,
    RECORD_TYPES,
    ArtifactRecord,
    BackendConfig,
    BackendRejected,
    BackendUnavailable,
    BackendUnusable,
    Batch,
    EventRecord,
    LifecycleRecord,
    MetricRecord,
    PayloadFolder,
    StoredRun,
    decode_json,
    decode_name,
    is_sha256,
    object_path,
    split_path,
    uses_helpers,
)

if TYPE_CHECKING:
    from quark_core.api import Columns, Payload, Query

# What people expect of a CSV logger, in a folder of their own choice.
#
# metrics.csv   one row per step; a column is added when its metric appears
# config.json   the configuration, merged into what the file has already
# <key>.csv     the newest table of that key
#
# All of it is derived from the mirror's own files. A later run that publishes
# into the same folder replaces metrics.csv and tables, and merges its config.
#
# Payloads, which lie under their hashes, get names for people in the mirror's own
# folder too.

_OURS = ("metrics",)
_ROOT = ARTIFACT_STORAGE_LAYOUT["root"]


def publish_config(directory: Path, values: Mapping[str, Any]) -> None:
    """Merge a configuration into config.json; what is no JSON object there is replaced.

    Raises:
        OSError: The file cannot be written.
    """
    path = directory / "config.json"
    merged: dict[str, Any] = {}
    try:
        loaded = json.loads(path.read_text("utf-8"))
        merged = loaded if isinstance(loaded, dict) else {}
    except (FileNotFoundError, ValueError):
        pass
    merged.update(values)
    text = json.dumps(merged, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, text.encode("utf-8", "replace"), is_synced=True)


def publish_table(
    directory: Path, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> None:
    """Replace `<key>.csv`, whole; a slash in the key makes folders.

    Raises:
        OSError: The file cannot be written.
    """
    name = f"table-{key}" if key.lower() in _OURS else key
    path = directory.joinpath(*f"{name}.csv".split("/"))
    data = encode_rows([columns, *(list(map(_spell, row)) for row in rows)])
    replace_file(path, data, is_synced=True)


def find_tables(
    folder: Path, records: Sequence[ArtifactRecord]
) -> list[tuple[str, list[str], list[list[Any]]]]:
    """Key, columns and rows of the tables among artifacts whose payloads are in the mirror.

    Raises:
        OSError: A payload cannot be read.
    """
    found = []
    for record in records:
        if record.artifact_type != "table" or record.payload_format != "json":
            continue
        if record.payload_relative_path is None or split_path(record.artifact_key) is None:
            continue
        path = PayloadFolder(folder).find(record.sha256)
        if path is None:
            continue
        try:
            table = decode_json(path.read_bytes())
            columns, rows = list(table["columns"]), [list(row) for row in table["rows"]]
        except (ValueError, KeyError, TypeError):
            # An artifact of that type whose payload is no table of ours.
            continue
        found.append((_to_file_key(record.artifact_key), columns, rows))
    return found


def _to_file_key(key: str) -> str:
    """The key as it was given, where that is a path that leads nowhere else."""
    given = decode_name(key)
    parts = split_path(given) or ("",)
    return given if all(part.strip(". ") for part in parts) else key


def _spell(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return value


def name_payloads(folder: Path, records: Sequence[ArtifactRecord]) -> None:
    """Give payloads the names that their records have in the run's own directory.

    Raises:
        OSError: The disk takes no more.
    """
    for record in records:
        if not is_sha256(record.sha256):
            continue
        target = folder / object_path(record.sha256)
        path = _resolve(folder, record.payload_relative_path)
        if path is not None and path != target and target.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_symlink():
                # Without links the payload lies under its hash alone, as in the run's directory.
                with contextlib.suppress(FileExistsError, NotImplementedError, PermissionError):
                    os.symlink(os.path.relpath(target, path.parent), path)
        path = _resolve(folder, record.metadata_relative_path)
        if path is not None and not path.exists():
            text = msgspec.json.format(msgspec.json.encode(record.to_dict()), indent=2)
            replace_file(path, text, is_synced=True)


def _resolve(folder: Path, relative: str | None) -> Path | None:
    """A path of a record's, unless it leads out of the artifacts."""
    if relative is None:
        return None
    parts = split_path(relative)
    return None if parts is None or parts[0] != _ROOT else folder.joinpath(*parts)


METRIC_HEADER = find_form(MetricRecord.KIND).header
EVENT_HEADER = find_form(EventRecord.KIND).header
_WIDE_EVERY_S = 60.0
# Somebody has asked for these files, and may be looking at them.
_PUBLISHED_EVERY_S = 5.0
# The derived table may take this share of the lane's time at most.
_WIDE_SHARE = 0.05
# From here on reading all rows is long enough for training to feel it.
_ASIDE_BYTES = 1024 * 1024


class CsvBackend:
    """Mirrors one run into CSV files; see the module for which.

    A batch is acknowledged when its rows are synced and `state.json` says so;
    rows beyond that are cut off before the next batch, so none is there twice.
    """

    def __init__(self, config: BackendConfig) -> None:
        if unknown := sorted(set(config.options) - {"publish"}):
            raise BackendUnusable(
                f"the CSV mirror has no option {unknown[0]!r:.60}, only 'publish'", backend="csv"
            )
        self._root = _find_root(config)
        self._reader = CsvReader(self._root)
        self._folder: Path | None = None
        if config.read_only or config.run_id is None:
            return
        self._folder = self._reader.folder_of(config.run_id)
        published = config.options.get("publish", "")
        self._published = _resolve_folder(config, published) if published else None
        try:
            self._claim = FolderClaim(self._folder)
            suffix = self._claim.suffix
            self._state_path = self._folder / f"state{suffix}.json"
            load_csv_state(self._state_path)
        except OSError as error:
            raise BackendUnavailable(f"CSV files: {error}", backend="csv") from error
        self._tables = {
            kind: AppendOnlyTable(
                self._folder / f"{record_type.TABLE}{suffix}.csv", find_form(kind).header
            )
            for kind, record_type in RECORD_TYPES.items()
        }
        self._fitted: set[str] = set()
        # The newest number that came of each writer, and the writers that were asked for all again.
        self._heads: dict[str, int] = {}
        self._asked: set[str] = set()
        self._run_file = RunFile(self._folder)
        self._wide_every_s = _WIDE_EVERY_S if self._published is None else _PUBLISHED_EVERY_S
        self._wide_due = time.monotonic() + self._wide_every_s
        self._wide_stale = _is_behind(self._folder, self._published)

    def write(self, batch: Batch) -> None:
        """Append a batch's rows and sync them.

        Raises:
            BackendRejected: Other content under a known number, a kind of record
                that this version does not know, or a body that cannot be read.
            BackendUnavailable: The files cannot be written now.
        """
        self.write_group([batch])

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Append the rows of several batches and sync once per file; raises as `write` does."""
        folder = self._check_writable()
        with self._claim.lock:
            _as_outage(self._write, folder, batches)
        if self._wide_stale and time.monotonic() >= self._wide_due:
            _as_outage(self._derive_meanwhile)

    def put_payload(self, payload: Payload) -> None:
        """See `SupportsArtifacts`; the file lies where the run's own directory has it."""
        _as_outage(partial(keep_payload, backend="csv"), self._check_writable(), payload)

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """See `SupportsArtifacts`."""
        return PayloadFolder(self._reader.folder_of(run_id)).open(sha256)

    def payload_directory(self, _run_id: str) -> Path | None:
        """None: payloads have to be sent."""
        return None

    def close(self) -> None:
        """Write the derived tables a last time and leave the folder to the next process."""
        if self._folder is None:
            return
        try:
            if self._wide_stale:
                _as_outage(self._derive)
        finally:
            self._claim.release()

    @property
    def place(self) -> str:
        """Where its runs are, for messages."""
        return f"csv:{self._root}"

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`; records of every kind are kept."""
        return self._reader.read(run_id, kind, query)

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        return self._reader.load_run(run_id)

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """See `SupportsRead`."""
        return self._reader.list_runs(project=project, limit=limit)

    def _check_writable(self) -> Path:
        if self._folder is None:
            raise BackendUnavailable("the CSV mirror was opened for reading only", backend="csv")
        return self._folder

    def _write(self, folder: Path, batches: Sequence[Batch]) -> None:
        # Read anew: another lane of this process may have written in between.
        state = load_csv_state(self._state_path)
        rows: dict[str, list[Sequence[Any]]] = {}
        derived: list[tuple[str, list[Any]]] = []
        for batch in batches:
            writer = state.writers.get(batch.writer_id) or _find_writer(folder, batch.writer_id)
            number, digest = (writer.head, writer.digest) if writer else (-1, "")
            self._check_is_whole(folder, batch, number)
            if not is_new(batch, number, digest, backend="csv"):
                continue
            if batch.kind not in self._tables:
                raise BackendRejected(
                    f"the CSV mirror has no table for records of kind {batch.kind!r}: the "
                    "plugin that defines them is not installed, or a newer Quark wrote them",
                    backend="csv",
                )
            try:
                derived.append((batch.kind, _find_records(batch)))
                rows.setdefault(batch.kind, []).extend(_encode(batch))
                times_us = () if writer else batch.decoded.to_list("time_us")
            except (ValueError, OverflowError) as error:
                raise BackendRejected(str(error), backend="csv") from error
            started_us = writer.started_us if writer else min(times_us)
            state.writers[batch.writer_id] = CsvWriter(
                batch.attempt, batch.rank, started_us, batch.number, digest_batch(batch)
            )
        if not rows:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._fit_tables(rows)
        saved = load_csv_state(self._state_path)
        sizes_bytes, widths = dict(saved.sizes_bytes), dict(saved.widths)
        for kind, added in rows.items():
            table = self._tables[kind]
            table.size_bytes, table.width = sizes_bytes.get(kind, 0), widths.get(kind, 0)
            sizes_bytes[kind] = table.append(added)
            widths[kind] = table.width
        for kind, records in derived:
            self._derive_from(folder, kind, records)
        self._asked.clear()
        state = CsvState(state.writers, sizes_bytes, widths)
        save_state(self._state_path, state, is_synced=True)

    def _check_is_whole(self, folder: Path, batch: Batch, head: int) -> None:
        """Ask once for what a writer has written before, where its files are gone.

        Raises:
            BackendUnavailable: They are.
        """
        known = self._heads.get(batch.writer_id)
        if known is None:
            # Of another process only an empty folder says that there was something.
            known = -1 if any(folder.glob("*.csv")) else batch.number - 1
        self._heads[batch.writer_id] = max(known, batch.number)
        if head >= 0 or known < 0 or batch.writer_id in self._asked:
            return
        self._asked.add(batch.writer_id)
        raise BackendUnavailable(
            f"the files of the CSV mirror in {folder} were deleted", backend="csv", lacks_from=0
        )

    def _fit_tables(self, kinds: Iterable[str]) -> None:
        """See that the tables have all columns that we have, as far as they are acknowledged."""
        for kind in kinds:
            if kind in self._fitted:
                continue
            state = load_csv_state(self._state_path)
            table = self._tables[kind]
            table.size_bytes = state.sizes_bytes.get(kind, 0)
            table.width = state.widths.get(kind, 0)
            while table.widen():
                state.sizes_bytes[kind], state.widths[kind] = table.size_bytes, table.width
                save_state(self._state_path, state, is_synced=True)
            self._fitted.add(kind)

    def _derive_from(self, folder: Path, kind: str, records: list[Any]) -> None:
        """Bring up to date what a batch changes beside its table; twice is as good as once."""
        if kind == MetricRecord.KIND:
            self._wide_stale = True
        elif kind == ArtifactRecord.KIND:
            name_payloads(folder, records)
            for key, columns, rows in find_tables(folder, records):
                publish_table(folder / "tables", key, columns, rows)
                if self._published is not None:
                    publish_table(self._published, key, columns, rows)
        elif kind == LifecycleRecord.KIND:
            for record in records:
                self._run_file.apply(record)
                if record.action == "config" and self._published is not None:
                    publish_config(self._published, dict(record.data or {}).get("values", {}))

    def _derive(self) -> None:
        assert self._folder is not None
        began = time.monotonic()
        write_wide_tables(self._folder, self._published)
        self._note_derived(began)

    def _derive_meanwhile(self) -> None:
        """While training goes on: by another process where there is much to read."""
        assert self._folder is not None
        began = time.monotonic()
        large = self._tables[MetricRecord.KIND].size_bytes > _ASIDE_BYTES
        if not (large and uses_helpers() and derive_aside(self._folder, self._published)):
            self._derive()
            return
        self._note_derived(began)

    def _note_derived(self, began: float) -> None:
        took_s = time.monotonic() - began
        self._wide_stale = False
        self._wide_due = time.monotonic() + max(self._wide_every_s, took_s / _WIDE_SHARE)


def _as_outage(act: Callable[..., None], *arguments: Any) -> None:
    """Call, with an error of the disk as one that passes."""
    try:
        act(*arguments)
    except OSError as error:
        raise BackendUnavailable(f"CSV files: {error}", backend="csv") from error


def _encode(batch: Batch) -> Iterable[Sequence[Any]]:
    rows: Iterable[Sequence[Any]] = find_form(batch.kind).encode(
        batch.decoded, writer_id=batch.writer_id, attempt=batch.attempt, rank=batch.rank
    )
    if batch.kind != ArtifactRecord.KIND:
        return rows
    # What a run was made of is its user's own, and its payloads come to no mirror by themselves.
    types = batch.decoded.to_list("artifact_type")
    return [row for row, named in zip(rows, types, strict=True) if named != KEPT_SOURCES]


def _find_records(batch: Batch) -> list[Any]:
    """The batch's records, where more is made of them than rows."""
    if batch.kind in (ArtifactRecord.KIND, LifecycleRecord.KIND):
        return batch.to_records()
    return []


def _is_behind(folder: Path, published: Path | None) -> bool:
    """Whether metrics.csv lacks what metrics_long.csv has: a process died before it was derived."""
    try:
        newest_ns = max(path.stat().st_mtime_ns for path in folder.glob("metrics_long*.csv"))
        for place in (folder, published):
            if place is not None and (place / "metrics.csv").stat().st_mtime_ns < newest_ns:
                return True
    except ValueError:
        return False
    except OSError:
        return True
    return False


def _find_writer(folder: Path, writer_id: str) -> CsvWriter | None:
    """How far another process has brought a writer that it had before it was killed."""
    states = map(load_csv_state, folder.glob("state*.json"))
    found = [state.writers[writer_id] for state in states if writer_id in state.writers]
    return max(found, key=lambda writer: writer.head, default=None)


def _find_root(config: BackendConfig) -> Path | None:
    """The folder that holds a folder per run; None for each run's own directory."""
    if config.location:
        return _resolve_folder(config, config.location)
    if config.run_path is not None:
        return config.run_path.parent
    return config.storage_dir / ".quark" / "runs"


def _resolve_folder(config: BackendConfig, given: str) -> Path:
    return (config.storage_dir / Path(given).expanduser()).resolve()
