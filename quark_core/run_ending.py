"""What the end of a run says: the error that ended it, and what is not delivered."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING

from quark_core.writers.events import emit_log

if TYPE_CHECKING:
    from quark_core.delivery.report import DeliveryReport
    from quark_core.open_run import OpenRun
    from quark_core.records import RunStatus

__all__ = ["emit_end", "log_error", "say_what_is_left"]

_log = logging.getLogger("quark")


def emit_end(run: OpenRun, status: RunStatus, ended_us: int) -> None:
    """Say that this process has ended the run, or on a rank that joined it, its part of it."""
    if not run.leads:
        run.emit_event("rank_left", "info", status=status, time_us=ended_us)
        return
    run.emit_event("run_ended", "info", status=status, time_us=ended_us)
    run.emit_lifecycle("status", {"status": status}, time_us=ended_us)


def log_error(run: OpenRun, error: BaseException, status: RunStatus) -> None:
    """Write the exception that ends a run into it, with its traceback.

    Args:
        run: The run.
        error: The exception.
        status: "failed" logs a `runtime_error`, "interrupted" a
            `runtime_interruption`.
    """
    failed = status == "failed"
    emit_log(
        run,
        f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
        identifier="Error" if failed else "Warning",
        status=status,
        payload={
            "exception_type": type(error).__name__,
            "traceback": "".join(traceback.format_exception(error)),
        },
        event_type="runtime_error" if failed else "runtime_interruption",
        always=True,
    )


def say_what_is_left(run: OpenRun, report: DeliveryReport) -> None:
    """Log what waits where, and how it gets delivered; nothing where all is delivered."""
    if report.complete:
        return
    lanes = "; ".join(lane.describe() for lane in report.lanes if not lane.complete)
    hint = ""
    if run.stream.left_behind is not None:
        hint = f". Deliver what waits with: quark sync {run.context.storage_dir}"
    _log.warning("run %s: %s%s", run.context.run_id, lanes, hint)
