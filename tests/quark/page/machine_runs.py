"""A run of three ranks with telemetry and batches: rank 2 is slower, and rank 1 stops early."""

import pytest

import quark
from quark_core.records import SystemTelemetryRecord
from quark_core.records.base import start_fields

STEPS = 100
SILENT_FROM = 60
SLOWER = 1.5


def log_machine(root, run_id="machine"):
    sessions = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUARK_RUN_ID", run_id)
        patch.setenv("WORLD_SIZE", "3")
        for rank in range(3):
            patch.setenv("RANK", str(rank))
            patch.setenv("LOCAL_RANK", str(rank))
            sessions.append(quark.start_run(project="p", storage_dir=root, ranks="all"))
        for rank, session in enumerate(sessions):
            steps = range(SILENT_FROM if rank == 1 else STEPS)
            session.write([make_telemetry(rank, step) for step in steps])
        log_batches(sessions[0])
        for session in reversed(sessions):
            session.end_run("completed")


def make_telemetry(rank, step):
    pace_ms = 100.0 * (SLOWER if rank == 2 else 1.0)
    return SystemTelemetryRecord(
        *start_fields(None), "step", step=step, step_time_ms=pace_ms, data_time_ms=10.0,
        compute_time_ms=pace_ms - 10.0, cpu_usage_percent=50.0,
    )  # fmt: skip


def log_batches(session):
    """Class b is twice as dear as a; the batch at step 30 is far above all others."""
    with quark.DataDiagnostics(session) as batches:
        for step in range(40):
            label = "a" if step % 2 else "b"
            loss = 50.0 if step == 30 else 1.0 if label == "a" else 2.0
            batches.log_batch(
                loss, step=step, batch_size=2, labels=[label] * 2,
                sample_ids=[step % 10, 100 + step],
            )  # fmt: skip
