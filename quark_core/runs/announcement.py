"""The first records of an attempt: its start, config and environment."""

from __future__ import annotations

import logging
import os
import platform
from typing import Any

import msgspec

from quark_core.config import settings
from quark_core.config.redaction import redact_text
from quark_core.errors import InvalidRunStateError, SessionStoreError, StoreUnavailableError
from quark_core.ranks.launches import RankInfo
from quark_core.records import ConfigSnapshot, RunRecord, parse_time
from quark_core.records.json_object import JsonObject
from quark_core.runs import recovery
from quark_core.runs.backend_choice import Plan
from quark_core.runs.environment import GitState, capture_environment
from quark_core.runs.environment_recorder import EnvironmentRecorder
from quark_core.runs.extensions import ask_extensions
from quark_core.runs.known_runs import note_run
from quark_core.runs.open_run import OpenRun
from quark_core.runs.primary_reach import PrimaryReach
from quark_core.runs.streams import HAND_OVER_S
from quark_core.system.memory_kills import find_memory_kills
from quark_core.system.process import current_process

_log = logging.getLogger("quark")

# How long a start that has failed may take to end what it began.
_GIVE_UP_S = 0.3
_REASON_CHARACTERS = 1000


def announce(
    run: OpenRun,
    config: ConfigSnapshot | None,
    rank: RankInfo,
    git: GitState | None,
    event_type: str,
    reach: PrimaryReach,
    *,
    from_step: int | None = None,
    is_new: bool = False,
) -> None:
    """Send the start of an attempt, and wait until the primary has it, or the journal alone.

    Of a run that is new its groups and fields are sent too, before anything is waited for.

    Raises:
        InvalidRunStateError: Another process has started this attempt.
        StoreUnavailableError: The primary does not acknowledge in time. Where `reach` says
            by then that there is an outage, the attempt may be begun once more without it.
        SessionStoreError: Nobody takes the start: neither the primary nor the journal.
    """
    data = _describe_start(run, reach, from_step)
    run.emit_lifecycle("start", data, time_us=parse_time(run.context.run.updated_at))
    if is_new:
        _emit_belonging(run)
    if config is not None:
        run.emit_lifecycle("config", config.to_data())
    environment = capture_environment(rank, git)
    run.emit_lifecycle("environment", environment)
    if not run.stream.active:
        return
    try:
        if reach.outage is None:
            _wait_for_primary(run, reach)
        else:
            _wait_for_journal(run)
    except BaseException as error:
        run.end_stream("the run could not be started", _GIVE_UP_S)
        run.stream.discard()
        if isinstance(error, StoreUnavailableError):
            reach.left_writer = run.origin.writer_id
            raise reach.settle(error) from None
        raise
    if reach.outage is not None:
        _tell_of_outage(run, reach.outage)
    if reach.is_remote:
        run.is_noted = True
        note_run(run.context)
    payload = None if from_step is None else JsonObject({"from_step": from_step})
    run.emit_event(event_type, "info", status="running", payload=payload)
    recovery.clear_leftovers_at_start(recovery.adopt_orphans(run.context.storage_dir))
    run.extensions[EnvironmentRecorder] = EnvironmentRecorder(run, environment, git)


def _emit_belonging(run: OpenRun) -> None:
    """Say which groups a run is in from its start on, and what was noted of it."""
    groups = run.context.run.groups
    if groups:
        run.emit_lifecycle("group", {"add": list(groups), "remove": []})
    if run.fields:
        run.emit_lifecycle("fields", {"set": dict(run.fields), "remove": []})


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


def _describe_start(run: OpenRun, reach: PrimaryReach, from_step: int | None) -> dict[str, Any]:
    """All that a store must know to make the run, should it not have it yet."""
    record, project = run.context.run, run.context.project
    told = ask_extensions(run.extensions, lambda each: each.describe_start())
    return {
        **{key: value for each in told for key, value in each.items()},
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
            **({"groups": list(record.groups)} if record.groups else {}),
            **({"fields": dict(run.fields)} if run.fields else {}),
        },
        "store": {
            # A primary elsewhere may have been told another name by its URI.
            "name": getattr(run.reader, "store_name", None)
            or settings.store_name(run.context.storage_dir),
            "path": str(run.context.storage_dir),
        },
        "process": _describe_process(),
        **({} if from_step is None else {"from_step": from_step}),
        **_describe_fork(record),
        **_describe_outage(reach),
    }


def _describe_process() -> dict[str, Any]:
    """This process, with what tells later that memory ran out when it vanished."""
    process = msgspec.structs.replace(current_process(), memory_kills=find_memory_kills())
    told: dict[str, Any] = msgspec.to_builtins(process)
    return told


def _wait_for_primary(run: OpenRun, reach: PrimaryReach) -> None:
    """Wait until the primary has the start.

    Raises:
        InvalidRunStateError: It refuses the start.
        SessionStoreError: It does not acknowledge in time; of a remote one a
            StoreUnavailableError.
    """
    try:
        run.flush(reach.left_s)
    except SessionStoreError:
        if not reach.is_remote:
            raise
        report = run.stream.report_primary()
        reasons = [] if report is None else list(report.errors)
        raise StoreUnavailableError(
            f"{reach.describe()} does not acknowledge the start of the run within "
            f"{reach.given_s:g} s{f'; last error: {reasons[-1]}' if reasons else ''}"
        ) from None
    report = run.stream.report_primary()
    if report is not None and report.quarantined:
        reason = next(iter(report.quarantined))
        raise InvalidRunStateError(f"run_id: {reason}")


def _wait_for_journal(run: OpenRun) -> None:
    """Wait until the start is journaled, before anything else comes into the stream.

    Raises:
        SessionStoreError: It is not in time, and nobody would know of the run otherwise.
    """
    if run.stream.hand_over(HAND_OVER_S) is None and run.origin.attempt == 0:
        raise SessionStoreError(
            "the primary store is out of reach, and the journal's disk does not take the start "
            f"of the run within {HAND_OVER_S:g} s either"
        )


def _describe_fork(record: RunRecord) -> dict[str, Any]:
    if record.fork_step is None:
        return {}
    return {"fork": {"run_id": record.parent_run_id, "step": record.fork_step}}


def _describe_outage(reach: PrimaryReach) -> dict[str, Any]:
    """What the start says of an outage, so that the store settles what others have begun."""
    if reach.outage is None:
        return {}
    reason = redact_text(str(reach.outage))[:_REASON_CHARACTERS]
    return {"offline": {"reason": reason, "replaces": reach.left_writer}}


def _tell_of_outage(run: OpenRun, outage: StoreUnavailableError) -> None:
    run.begun_offline = True
    run.emit_event(
        "started_offline",
        "warning",
        status="running",
        payload=JsonObject({"reason": redact_text(str(outage))[:_REASON_CHARACTERS]}),
    )
    _log.warning(
        "run %s begins its attempt %d without its store: %s. What it logs waits in the journal "
        "and is delivered when the store answers; after the end of this process by: quark sync %s",
        run.context.run_id,
        run.origin.attempt,
        outage,
        run.context.storage_dir,
    )
