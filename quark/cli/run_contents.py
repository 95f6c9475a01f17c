"""What a run has beside its metrics: hardware, batches and artifacts, in a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from quark_core.backend import SupportsRead
    from quark_core.records import (
        ArtifactRecord,
        BatchDiagnosticRecord,
        SystemTelemetryRecord,
    )

__all__ = ["describe_contents", "print_contents"]

_ARTIFACTS = 8


def describe_contents(reader: SupportsRead, run_id: str) -> dict[str, Any]:
    """Newest telemetry and newest artifacts of a run, as JSON values."""
    telemetry = _read_newest_telemetry(reader, run_id)
    return {
        "telemetry": None if telemetry is None else telemetry.to_dict(),
        "artifacts": [record.to_dict() for record in _read_artifacts(reader, run_id)],
    }


def print_contents(console: Console, reader: SupportsRead, run_id: str) -> None:
    """Print a line on the hardware and the newest artifacts; nothing where there is nothing."""
    from rich.text import Text

    from quark.cli.artifacts import make_artifact_table

    telemetry = _read_newest_telemetry(reader, run_id)
    if telemetry is not None:
        line = _describe_hardware(telemetry)
        if line:
            console.print(Text.assemble(("hardware  ", "bold"), line))
    batch = _read_newest_batch(reader, run_id)
    if batch is not None:
        console.print(Text.assemble(("newest batch  ", "bold"), _describe_batch(batch)))
    records = _read_artifacts(reader, run_id)
    if records:
        console.print(make_artifact_table(records))
        if len(records) == _ARTIFACTS:
            console.print(f"The newest {_ARTIFACTS}; `quark artifacts` lists all.", style="dim")


def _read_newest_telemetry(reader: SupportsRead, run_id: str) -> SystemTelemetryRecord | None:
    from quark_core.query import Query
    from quark_core.records import SystemTelemetryRecord

    found = reader.read(run_id, SystemTelemetryRecord.KIND, Query(limit=1)).to_records()
    return found[0] if found else None  # type: ignore[return-value]


def _read_newest_batch(reader: SupportsRead, run_id: str) -> BatchDiagnosticRecord | None:
    from quark_core.query import Query
    from quark_core.records import BatchDiagnosticRecord

    found = reader.read(run_id, BatchDiagnosticRecord.KIND, Query(limit=1)).to_records()
    return found[0] if found else None  # type: ignore[return-value]


def _describe_batch(record: BatchDiagnosticRecord) -> str:
    """Such as `step 120, loss 0.31, 64 samples of 10 classes`."""
    parts = [] if record.step is None else [f"step {record.step}"]
    parts.append(f"loss {record.loss:.4g}")
    if record.batch_size is not None:
        classes = f" of {len(record.class_counts)} classes" if record.class_counts else ""
        parts.append(f"{record.batch_size} samples{classes}")
    return ", ".join(parts)


def _read_artifacts(reader: SupportsRead, run_id: str) -> tuple[ArtifactRecord, ...]:
    from quark_core.query import Query
    from quark_core.records import ArtifactRecord

    found = reader.read(run_id, ArtifactRecord.KIND, Query(limit=_ARTIFACTS))
    return found.to_records()  # type: ignore[return-value]


def _describe_hardware(record: SystemTelemetryRecord) -> str:
    """The newest figures, such as `step 12.5 ms (data 8 %), CPU 34 %, RAM 40 %, GPU 0 97 %`."""
    from rich.filesize import decimal

    parts = []
    if record.step_time_ms is not None:
        part = f"step {record.step_time_ms:.4g} ms"
        if record.data_time_ms is not None and record.step_time_ms > 0:
            part += f" (data {100 * record.data_time_ms / record.step_time_ms:.0f} %)"
        parts.append(part)
    if record.cpu_usage_percent is not None:
        parts.append(f"CPU {record.cpu_usage_percent:.0f} %")
    if record.ram_usage_percent is not None:
        parts.append(f"RAM {record.ram_usage_percent:.0f} %")
    if record.process_rss_bytes is not None:
        parts.append(f"process {decimal(record.process_rss_bytes)}")
    for gpu in record.gpus or ():
        part = f"GPU {gpu.index}"
        if gpu.utilization_percent is not None:
            part += f" {gpu.utilization_percent:.0f} %"
        if gpu.memory_used_bytes is not None:
            part += f" {decimal(gpu.memory_used_bytes)}"
        parts.append(part)
    for count, noun in (
        (record.overflow_count, "overflow"),
        (record.skipped_step_count, "skipped step"),
    ):
        if count:
            since = " since it was resumed" if record.attempt else ""
            parts.append(f"{count} {noun}{'s' if count > 1 else ''}{since}")
    return ", ".join(parts)
