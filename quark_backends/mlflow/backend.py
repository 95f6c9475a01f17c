"""The MLflow mirror as a backend.

A run becomes a run of the MLflow experiment that is named like its project:
metrics, params (from the configuration), tags and status. Events and every
other kind of record are taken and only counted; they come later.

Where: `mlflow+URI`, such as `mlflow+http://127.0.0.1:5000` or
`mlflow+sqlite:///runs.db`; plain `mlflow` goes to MLFLOW_TRACKING_URI.
Options, as in `mlflow:http://127.0.0.1:5000?on_deleted=restore`:

    on_deleted   `new` (default) or `restore`: what to do where the run or its
                 experiment was deleted in MLflow
    max_params   how many params the server takes; further ones are left out

Credentials come from MLflow's own environment variables.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import xxhash

from quark_backends.mlflow.errors import Missing, Refused, translate, unavailable
from quark_backends.mlflow.lifecycle import Lifecycle
from quark_backends.mlflow.metrics import (
    MAX_POINTS,
    Point,
    TimeRange,
    chunk,
    key_and_text,
    make_points,
    note_infinities,
)
from quark_backends.mlflow.names import NameMap
from quark_backends.mlflow.refused import RefusedRecords
from quark_backends.mlflow.run import MirroredRun
from quark_backends.mlflow.server import Server
from quark_backends.mlflow.state import MirrorState, WriterState
from quark_core.backend import BackendConfig, Batch
from quark_core.errors import BackendRejected, SchemaValidationError
from quark_core.forking import importing
from quark_core.records import LifecycleRecord, MetricRecord
from quark_core.redaction import redact_text

__all__ = ["MlflowBackend"]

_log = logging.getLogger("quark")
_URI_VARIABLE = "MLFLOW_TRACKING_URI"
# MLflow's own retries take minutes; the lane waits and tries again itself.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class MlflowBackend:
    """Mirrors one run into MLflow; see the module for what.

    A batch is acknowledged in a file of this machine, and not sent again
    from then on. One that was sent without that goes out again as it was,
    and SQL stores keep its points once.

    Attributes:
        ignored: Kind -> count of records that were taken and not mirrored.
    """

    def __init__(self, config: BackendConfig) -> None:
        uri = config.location or os.environ.get(_URI_VARIABLE, "").strip()
        if not uri:
            raise unavailable(
                f"no MLflow server is named: set {_URI_VARIABLE} or write backends="
                '"mlflow+http://HOST:PORT"; the records wait'
            )
        restore, max_params = _read_options(config.options)
        if config.run_id is None or config.read_only:
            raise unavailable("the MLflow mirror is opened for writing one run only")
        run_path = config.run_path or config.storage_dir / ".quark" / "runs" / config.run_id
        self.ignored: Counter[str] = Counter()
        try:
            self._server = Server(_import_mlflow(uri), uri)
        except (Refused, Missing) as error:
            raise unavailable(f"MLflow does not open {redact_text(uri)}: {error}") from error
        self._state = MirrorState(run_path / "mirrors" / "mlflow", uri)
        self._refused = RefusedRecords(run_path / "quarantine" / "mlflow")
        try:
            self._names = NameMap(self._state.folder / "names.json")
            self._run = MirroredRun(
                self._server,
                self._state,
                config.run_id,
                config.project or "quark",
                restore=restore,
            )
        except OSError as error:
            raise unavailable(f"the mirror's files cannot be read: {error}") from error
        self._lifecycle = Lifecycle(
            self._server, self._run, self._names, self._refused, max_params=max_params
        )

    def write(self, batch: Batch) -> None:
        """Send a batch; single records that MLflow refuses are put aside.

        Raises:
            BackendRejected: Other content under a known number, a body that
                cannot be read, or MLflow refuses every record of it.
            BackendUnavailable: MLflow does not take it now.
        """
        try:
            writer = self._state.load_writer(batch.writer_id)
            digest = xxhash.xxh3_64_hexdigest(batch.body)
            if batch.number <= writer.head:
                if batch.number == writer.head and digest != writer.digest:
                    raise BackendRejected(
                        f"batch {batch.number} of writer {batch.writer_id} came again with other "
                        "content",
                        backend="mlflow",
                    )
                return
            recent = self._deliver(batch, writer)
            self._lifecycle.catch_up()
            done = WriterState(batch.number, digest, recent=recent)
            self._state.save_writer(batch.writer_id, done)
        except SchemaValidationError as error:
            raise BackendRejected(str(error), backend="mlflow") from error
        except (Refused, Missing) as error:
            # Not a record but the run or the experiment itself.
            raise unavailable(f"MLflow does not take the run: {error}; the records wait") from error
        except OSError as error:
            raise unavailable(f"the mirror's files cannot be written: {error}") from error

    def close(self) -> None:
        """Nothing is left to do: what was written is in MLflow."""

    def _deliver(self, batch: Batch, writer: WriterState) -> list[TimeRange]:
        if batch.kind not in (MetricRecord.KIND, LifecycleRecord.KIND):
            self.ignored[batch.kind] += batch.count
            return writer.recent
        records: Any = batch.to_records()
        if batch.kind == MetricRecord.KIND:
            return self._send_metrics(batch, writer, records)
        for record in records:
            self._lifecycle.apply(record)
        return writer.recent

    def _send_metrics(
        self, batch: Batch, writer: WriterState, records: Sequence[MetricRecord]
    ) -> list[TimeRange]:
        names = self._names.find("metrics", map(key_and_text, records))
        points, recent = make_points(records, names, writer.recent)
        done = writer.offset if writer.partial == batch.number else 0
        refused: list[tuple[Point, str]] = []
        rest = points[done:]
        for part in chunk(rest, (point.size_bytes for point in rest), MAX_POINTS):
            self._push(part, refused)
            done += len(part)
            # A part is noted only where no point was refused: the file of refused records
            # gets them all at the end, once it is known that the batch as a whole is good.
            if not refused and done < len(points):
                writer = msgspec.structs.replace(writer, partial=batch.number, offset=done)
                self._state.save_writer(batch.writer_id, writer)
        self._lifecycle.note_infinities(note_infinities(points))
        if len(refused) == len(points):
            raise BackendRejected(refused[0][1], backend="mlflow")
        for point, reason in refused:
            self._refused.add("metric", point.record.to_dict(), reason)
        return recent

    def _push(self, points: Sequence[Point], refused: list[tuple[Point, str]]) -> None:
        """Send points; halve what is refused until the bad ones are alone."""
        try:
            self._run.call(lambda run_id: self._server.log_metrics(run_id, points))
        except Refused as error:
            middle = len(points) // 2
            if not middle:
                refused.append((points[0], str(error)))
                return
            self._push(points[:middle], refused)
            self._push(points[middle:], refused)


def _read_options(options: Mapping[str, str]) -> tuple[bool, int | None]:
    unknown = sorted(set(options) - {"on_deleted", "max_params"})
    if unknown:
        raise unavailable(
            f"the MLflow mirror has no option {unknown[0]!r}; it has on_deleted and max_params"
        )
    on_deleted = options.get("on_deleted", "new")
    if on_deleted not in ("new", "restore"):
        raise unavailable(f"on_deleted must be new or restore, got {on_deleted!r}")
    max_params = options.get("max_params")
    if max_params is not None and not max_params.isdecimal():
        raise unavailable(f"max_params must be a number, got {max_params!r}")
    return on_deleted == "restore", None if max_params is None else int(max_params)


class _QuietLane(logging.Filter):
    """Drops what lanes make urllib3 say: the lane itself reports an outage, once."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is said."""
        return not (record.threadName or "").startswith("quark-lane-")


_QUIET_LANE = _QuietLane()


def _import_mlflow(uri: str) -> ModuleType:
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    logging.getLogger("urllib3.connectionpool").addFilter(_QUIET_LANE)
    if uri.startswith("file:") or ("://" not in uri and Path(uri).is_absolute()):
        _log.warning(
            "backend mlflow: %s is a folder, which MLflow only maintains and which may keep points "
            "twice; mlflow+sqlite:///FILE keeps them once",
            uri,
        )
    try:
        mlflow = importlib.import_module("mlflow")
        with importing():
            importlib.import_module("mlflow.entities")
    except ModuleNotFoundError as error:
        if error.name != "mlflow":
            raise translate(error, uri) from error
        raise unavailable(
            'MLflow is not installed: pip install "quark-tracker[mlflow]"; the records wait'
        ) from error
    except Exception as error:
        # Foreign code: a wrong protobuf ends in a TypeError, for one.
        raise unavailable(
            f"MLflow is installed but cannot be imported ({type(error).__name__}: {error})"
        ) from error
    return mlflow
