"""The backend: one file per batch, on any file system that fsspec reaches.

    ROOT/<run id>/<writer id>/00000042-metric.jsonl

The first line of a file says which batch it is; each further line is one
record. Object stores cannot append to a file, and a file that is written
whole is there once however often it is written: its name is the batch's
identity. A file with fewer lines than it promises was cut short by a kill
and does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import fsspec

from quark_core.api import (
    BackendConfig,
    BackendRejected,
    BackendUnavailable,
    Batch,
    RunNotFoundError,
    SchemaValidationError,
    SessionStoreError,
    StoredRun,
    describe_run,
    dump_batch,
    restore_batch,
    select_rows,
)

if TYPE_CHECKING:
    from quark_core.api import Columns, Query

__all__ = ["JsonLinesBackend"]


class JsonLinesBackend:
    """Keeps the batches of runs as files of JSON lines.

    `write` and `close` are called from one thread, the readers from any.

    Args:
        config: Its `location` is a folder under `storage_dir`, or a URL.
    """

    def __init__(self, config: BackendConfig) -> None:
        self._read_only = config.read_only
        try:
            self._files, self._root = fsspec.core.url_to_fs(_find_url(config))
        except (OSError, ImportError, ValueError) as error:
            # As when the library of an object store is not installed: it may be, later.
            raise BackendUnavailable(f"JSON lines: {error}", backend="jsonl") from error

    # What every backend has.

    def write(self, batch: Batch) -> None:
        """Write a batch's file, and return when it is there.

        Raises:
            BackendRejected: The batch cannot be read, or its number is taken by another one.
            BackendUnavailable: The file system does not take it now.
        """
        if self._read_only:
            raise BackendUnavailable("JSON lines: opened for reading only", backend="jsonl")
        path = (
            f"{self._folder(batch.run_id)}/{batch.writer_id}/{batch.number:08}-{batch.kind}.jsonl"
        )
        digest = hashlib.sha256(batch.body).hexdigest()
        try:
            known = self._read_header(path)
            if known is None:
                self._write_whole(path, _encode(batch, digest))
            elif known["digest"] != digest:
                raise BackendRejected(f"{path} holds another batch of this number", backend="jsonl")
        except SchemaValidationError as error:
            raise BackendRejected(f"JSON lines: {error}", backend="jsonl") from error
        except OSError as error:
            raise BackendUnavailable(f"JSON lines: {error}", backend="jsonl") from error

    def close(self) -> None:
        """Nothing is held open between two writes."""

    # What a backend has that declares READ.

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`."""
        return select_rows(self._load(run_id), kind, query)

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        return describe_run(self._load(run_id, kind="lifecycle"))

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """See `SupportsRead`."""
        try:
            self._files.invalidate_cache()
            found = self._files.ls(self._root, detail=True) if self._exists(self._root) else []
        except OSError as error:
            raise SessionStoreError(f"JSON lines: {error}") from error
        folders = [entry["name"] for entry in found if entry["type"] == "directory"]
        runs = []
        for folder in folders:
            with contextlib.suppress(RunNotFoundError):
                runs.append(self.load_run(folder.rstrip("/").rpartition("/")[2]))
        chosen = [run for run in runs if project in (None, run.project.name)]
        return sorted(chosen, key=lambda run: run.run.created_at, reverse=True)[:limit]

    # How the files are written and found.

    def _folder(self, run_id: str) -> str:
        return f"{self._root.rstrip('/')}/{run_id}"

    def _exists(self, path: str) -> bool:
        return bool(self._files.exists(path))

    def _write_whole(self, path: str, data: bytes) -> None:
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        # On a local disk the file gets its name when it is complete, as in an object store.
        with self._files.open(path, "wb", autocommit=False) as file:
            file.write(data)
            file.flush()
            if hasattr(file, "fileno"):
                with contextlib.suppress(OSError):
                    os.fsync(file.fileno())
        file.commit()

    def _read_header(self, path: str) -> dict[str, Any] | None:
        """The first line of a complete file, or None where there is none."""
        try:
            return _decode(self._files.cat_file(path))
        except FileNotFoundError:
            return None

    def _load(self, run_id: str, kind: str | None = None) -> list[Batch]:
        try:
            paths = list(self._find(run_id))
            if not paths:
                raise RunNotFoundError(f"{self._root} has no run {run_id}")
            if kind is not None:
                paths = [path for path in paths if path.endswith(f"-{kind}.jsonl")]
            data = [_decode(self._files.cat_file(path)) for path in paths]
            return [restore_batch(one) for one in data if one is not None]
        except (OSError, SchemaValidationError) as error:
            raise SessionStoreError(f"JSON lines: {self._root}: {error}") from error

    def _find(self, run_id: str) -> Iterator[str]:
        """Files of a run, without a gap where another thread is writing.

        A listing may miss a file and still show one that was written after
        it. So the second listing counts, up to what the first one has shown.
        """
        newest: dict[str, str] = {}
        for path in self._list(run_id):
            folder, _, name = path.rpartition("/")
            newest[folder] = max(name, newest.get(folder, ""))
        for path in self._list(run_id):
            folder, _, name = path.rpartition("/")
            if name <= newest.get(folder, ""):
                yield path

    def _list(self, run_id: str) -> list[str]:
        self._files.invalidate_cache()
        found = self._files.find(self._folder(run_id))
        return sorted(path for path in found if path.endswith(".jsonl"))


def _find_url(config: BackendConfig) -> str:
    """Where the runs lie."""
    if "://" in config.location:
        return config.location
    if config.location:
        return str((config.storage_dir / config.location).resolve())
    return str(config.storage_dir / "jsonl")


def _encode(batch: Batch, digest: str) -> bytes:
    data = dump_batch(batch)
    records = data.pop("records")
    header = {**data, "count": len(records), "digest": digest}
    return "".join(f"{json.dumps(line)}\n" for line in (header, *records)).encode()


def _decode(data: bytes) -> dict[str, Any] | None:
    """What a file says, with its records; None where it was cut short."""
    first, *rest = data.split(b"\n") if data.endswith(b"\n") else [b""]
    if not first:
        return None
    header: dict[str, Any] = json.loads(first)
    if header["count"] != len(rest) - 1:
        return None
    return {**header, "records": [json.loads(line) for line in rest[:-1]]}
