"""Sends a batch's points: in parts, and again without the ones that MLflow refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quark_backends.mlflow.errors import Refused, RefusedRecords
from quark_backends.mlflow.names import NameMap
from quark_backends.mlflow.points import (
    MAX_POINTS,
    Point,
    chunk,
    key_and_text,
    make_points,
    note_infinities,
)
from quark_backends.mlflow.run import MirroredRun
from quark_backends.mlflow.server import Server
from quark_backends.mlflow.state import MlflowWriter
from quark_core.api import BackendRejected, Batch, MetricRecord


class PointSender:
    """Brings metric records into MLflow, each point once.

    Args:
        server: Where the run is.
        run: The run.
        names: Names of metrics.
        refused: Takes what MLflow refuses.
        save: Keeps how far a writer is.
    """

    def __init__(
        self,
        server: Server,
        run: MirroredRun,
        names: NameMap,
        refused: RefusedRecords,
        save: Callable[[str, MlflowWriter], None],
    ) -> None:
        self._server = server
        self._run = run
        self._names = names
        self._refused = refused
        self._save = save

    def send(
        self, batch: Batch, writer: MlflowWriter, records: Sequence[MetricRecord]
    ) -> tuple[MlflowWriter, dict[str, dict[str, int]]]:
        """Send the points of a batch.

        Args:
            batch: The batch that the records are of.
            writer: How far its writer is.
            records: Metric records, of the batch itself or made from it.

        Returns:
            How far the writer is then, its head aside; and of each name where
            its value first became infinite, as `note_infinities` says.

        Raises:
            BackendRejected: MLflow refuses every one of a batch of metrics.
        """
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
                self._save(batch.writer_id, writer)
        if points and len(refused) == len(points) and batch.kind == MetricRecord.KIND:
            raise BackendRejected(refused[0][1], backend="mlflow")
        for point, reason in refused:
            self._refused.add(batch.kind, point.record.to_dict(), reason)
        return msgspec.structs.replace(writer, recent=recent), note_infinities(points)

    def send_together(
        self, writer: MlflowWriter, parts: Sequence[Sequence[MetricRecord]]
    ) -> tuple[MlflowWriter, dict[str, dict[str, int]]] | None:
        """Send the points of a writer's next batches of metrics in one request.

        Each batch makes the points that it would make by itself, so that it
        may come again in another company.

        Returns:
            As `send` does; None where MLflow refuses any of the points.
        """
        recent = writer.recent
        points: list[Point] = []
        for records in parts:
            names = self._names.find("metrics", map(key_and_text, records))
            made, recent = make_points(records, names, recent)
            points += made
        try:
            for part in chunk(points, (point.size_bytes for point in points), MAX_POINTS):
                self._log(part)
        except Refused:
            return None
        return msgspec.structs.replace(writer, recent=recent), note_infinities(points)

    def _log(self, points: Sequence[Point]) -> None:
        self._run.call(lambda run_id: self._server.log_metrics(run_id, points))

    def _push(self, points: Sequence[Point], refused: list[tuple[Point, str]]) -> None:
        """Send points; halve what is refused until the bad ones are alone."""
        try:
            self._log(points)
        except Refused as error:
            middle = len(points) // 2
            if not middle:
                refused.append((points[0], str(error)))
                return
            self._push(points[:middle], refused)
            self._push(points[middle:], refused)


def group_batches(
    decoded: Sequence[tuple[Batch, Any]],
) -> list[list[tuple[Batch, Any]]]:
    """Cut into parts, in order: small batches of metrics of one writer together, others alone."""
    parts: list[list[tuple[Batch, Any]]] = []
    room = 0
    for batch, records in decoded:
        fits = batch.kind == MetricRecord.KIND and batch.count <= room
        if fits and parts[-1][0][0].writer_id == batch.writer_id:
            parts[-1].append((batch, records))
            room -= batch.count
        else:
            parts.append([(batch, records)])
            room = MAX_POINTS - batch.count if batch.kind == MetricRecord.KIND else 0
    return parts
