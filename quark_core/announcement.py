"""The first records of an attempt: its start, config and environment."""

from __future__ import annotations

import logging
import os
import platform
import threading
from typing import Any

import msgspec

from quark_core import recovery, settings
from quark_core.composition import Plan
from quark_core.environment import GitState, capture_environment, complete_environment
from quark_core.errors import InvalidRunStateError
from quark_core.json_object import JsonObject
from quark_core.open_run import OpenRun
from quark_core.process import current_process
from quark_core.ranks import RankInfo
from quark_core.records import ConfigSnapshot, parse_time
from quark_core.run_streams import HAND_OVER_S

__all__ = ["announce", "announce_rank"]

_log = logging.getLogger("quark")


def announce(
    run: OpenRun,
    config: ConfigSnapshot | None,
    rank: RankInfo,
    git: GitState | None,
    event_type: str,
    *,
    from_step: int | None = None,
) -> None:
    """Send the start of an attempt, and wait until the primary has it.

    Raises:
        InvalidRunStateError: Another process has started this attempt.
        SessionStoreError: The primary does not acknowledge in time.
    """
    record = run.context.run
    project = run.context.project
    process = current_process()
    run.emit_lifecycle(
        "start",
        {
            "project": {"id": project.id, "name": project.name, "root_path": project.root_path},
            "run": {
                "name": record.name,
                "notes": record.notes,
                "parent_run_id": record.parent_run_id,
                "lineage_root_run_id": record.lineage_root_run_id,
                "run_path": record.run_path,
                "git_commit": record.git_commit,
                "strict_mode": record.strict_mode,
                "tags": list(record.tags),
            },
            "store": {
                # A primary elsewhere may have been told another name by its URI.
                "name": getattr(run.reader, "store_name", None)
                or settings.store_name(run.context.storage_dir),
                "path": str(run.context.storage_dir),
            },
            "process": msgspec.to_builtins(process),
            **({} if from_step is None else {"from_step": from_step}),
        },
        time_us=parse_time(record.updated_at),
    )
    if config is not None:
        raw = {} if config.raw is None else {"raw": config.raw}
        notes = list(config.notes)
        run.emit_lifecycle("config", {"values": config.values, "notes": notes, **raw})
    environment = capture_environment(rank, git)
    run.emit_lifecycle("environment", environment)
    if not run.stream.active:
        return
    try:
        run.flush()
        _check_accepted(run)
    except BaseException:
        run.end_stream("the run could not be started", 0.5)
        run.stream.discard()
        raise
    payload = None if from_step is None else JsonObject({"from_step": from_step})
    run.emit_event(event_type, "info", status="running", payload=payload)
    recovery.adopt_orphans(run.context.storage_dir)
    run.background = threading.Thread(
        target=_complete_environment,
        args=(run, environment, git),
        name="quark-environment",
        daemon=True,
    )
    try:
        run.background.start()
    except RuntimeError:
        # Without a thread to spare the environment stays as far as it is known at once.
        run.background = None


def announce_rank(run: OpenRun, plan: Plan, rank: RankInfo) -> OpenRun:
    """Say which process this rank of the run is, where the run has several; returns the run.

    On a rank that joins the run this waits for the journal only.
    """
    if not run.stream.active:
        return run
    if not run.leads:
        # Gives the writer its start time at the store, whatever timestamps follow.
        run.emit_lifecycle("heartbeat")
    if rank.world_size > 1 and plan.ranks is not None and not plan.ranks.is_one:
        payload = JsonObject(
            {
                "local_rank": rank.local_rank,
                "world_size": rank.world_size,
                "host": platform.node(),
                "pid": os.getpid(),
                "source": rank.source,
            }
        )
        run.emit_event("rank_joined", "info", status="running", payload=payload)
    if not run.leads:
        run.stream.hand_over(HAND_OVER_S)
    return run


def _complete_environment(run: OpenRun, environment: dict[str, Any], git: GitState | None) -> None:
    try:
        snapshot = complete_environment(environment, git)
    except Exception as error:  # noqa: BLE001 - what is known at once must do
        _log.debug("the environment could not be completed: %s", error)
        return
    if not run.is_over:
        run.emit_lifecycle("environment", snapshot.values)


def _check_accepted(run: OpenRun) -> None:
    report = run.stream.report_primary()
    if report is not None and report.quarantined:
        reason = next(iter(report.quarantined))
        raise InvalidRunStateError(f"run_id: {reason}")
