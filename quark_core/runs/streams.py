"""Gives an open run its stream: the process's own, or that of a forked child."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from quark_core.backends.contract import BackendConfig, SupportsPrimary
from quark_core.config import settings
from quark_core.delivery.journal_folder import journal_directory
from quark_core.delivery.segments import Origin
from quark_core.delivery.stream import RunStream, StandInStream
from quark_core.ranks.launches import RankInfo
from quark_core.records import LifecycleRecord
from quark_core.records.runs import RunContext
from quark_core.runs import backend_choice, recovery
from quark_core.runs.backend_choice import Plan
from quark_core.runs.extensions import ask_extensions
from quark_core.runs.open_run import OpenRun
from quark_core.runs.rank_parts import RankPart
from quark_core.runs.stop_requests import StopLookout
from quark_core.system.memory_kills import find_memory_kills

_log = logging.getLogger("quark")

HAND_OVER_S = 1.0
"""How long a new writer waits until what it begins with is journaled."""


def open_run_stream(
    context: RunContext,
    plan: Plan,
    primary: SupportsPrimary | None,
    rank: RankInfo,
    *,
    leads: bool = True,
    awaits_run: bool | None = None,
) -> OpenRun:
    """Open a run in this process, with a stream that has been started.

    Args:
        context: The run.
        plan: Its backends on this rank.
        primary: The primary store, where it is open already.
        rank: Place of this process.
        leads: Whether this process begins and ends the run. Where it does not,
            its records wait until the run is in the primary, whatever that takes.
        awaits_run: Whether they wait so; by default where it does not lead.
    """
    origin = Origin(context.run_id, attempt=context.run.attempt, rank=rank.rank)
    run = OpenRun(context, RunStream(origin), primary, leads=leads)
    run_path = _local_run_path(context)
    children = recovery.ChildDelivery(
        journal_directory(run_path, context.run_id or ""),
        origin,
        leads=leads,
        open_lane=backend_choice.make_lane_opener(plan.choices),
    )
    run.stream = backend_choice.open_stream(
        plan,
        primary,
        _configure(context),
        origin,
        run_path,
        awaits_run=not leads if awaits_run is None else awaits_run,
        on_primary_failure=run.note_failure,
        on_second=children.poll,
        on_beat=_make_beat(run),
        on_gap=run.emit_gap,
    )
    run.children = children
    run.choices = plan.choices
    run.payload_directory = backend_choice.find_payload_directory(primary, context.run_id)
    run.reopen = lambda child, child_origin: _open_child(child, plan, child_origin)
    run.stream.start()
    return run


def _make_beat(run: OpenRun) -> Callable[[], None]:
    """What an open run does at each heartbeat."""
    lookout = StopLookout(run)
    kills = find_memory_kills()

    def beat() -> None:
        nonlocal kills
        if run.stream.channel(LifecycleRecord.KIND).newest is None:
            # What the writer begins with is not in a batch yet, however long that takes. A store
            # takes nothing of an attempt before its start.
            return
        # A run is as alive as the process that began it.
        if run.leads:
            # A process of the cgroup that was killed, and which this one has outlived, counts
            # no more for how this one ends.
            before, kills = kills, find_memory_kills()
            told = {} if kills in (before, None) else {"memory_kills": msgspec.to_builtins(kills)}
            for said in ask_extensions(run.extensions, lambda each: each.describe_heartbeat()):
                told.update(said)
            run.emit_lifecycle("heartbeat", told or None)
        lookout.look()

    return beat


def open_part(
    context: RunContext,
    plan: Plan,
    primary: SupportsPrimary | None,
    rank: RankInfo,
    part: RankPart,
) -> OpenRun:
    """Open a run as this rank's part in it says; one without an id keeps nothing."""
    if context.run_id is None:
        # Records that belong to no run can be kept nowhere.
        origin = Origin(None, rank=rank.rank)
        return OpenRun(context, RunStream(origin), None, leads=False)
    run = open_run_stream(context, plan, primary, rank, leads=part.leads)
    run.missed_leader = part.missed
    if part.leads:
        run.claims = part.claims
    return run


def _open_child(run: OpenRun, plan: Plan, origin: Origin) -> None:
    """Give a forked child a stream of its own, which its parent or a later process delivers."""
    stream = backend_choice.open_child_stream(
        plan,
        _configure(run.context),
        origin,
        _local_run_path(run.context),
        # It may be delivered by itself, before the start of a run that was begun offline.
        awaits_run=not run.leads or run.begun_offline,
        payloads_in_place=run.payload_directory,
        on_gap=run.emit_gap,
    )
    stand_in = run.stream
    if isinstance(stand_in, StandInStream):
        stand_in.succeed(stream)
    run.bind_stream(stream)
    stream.start()
    # Gives the writer its start time at the store, whatever timestamps follow.
    run.emit_lifecycle("heartbeat")
    stream.hand_over(HAND_OVER_S)
    _flush_at_exit_of_workers(run)


def _configure(context: RunContext) -> BackendConfig:
    return BackendConfig(
        storage_dir=context.storage_dir, run_id=context.run_id, project=context.project.name
    )


def _flush_at_exit_of_workers(run: OpenRun) -> None:
    """Multiprocessing ends its forked workers without atexit; it has finalizers of its own."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(
            None,
            run.end_stream,
            args=("the process ends", settings.exit_timeout_s()),
            exitpriority=10,
        )


def _local_run_path(context: RunContext) -> Path:
    """Where this process puts the run's own files: the run's path, where that is a directory."""
    if "://" in context.run.run_path:
        return context.storage_dir / ".quark" / "runs" / (context.run_id or "unknown")
    return Path(context.run.run_path)
