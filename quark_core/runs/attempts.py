"""Begins the attempts of a run: their stream, their first records, and repeated steps."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quark_core.backends.contract import (
    BackendConfig,
    Batch,
    SupportsPrimary,
    SupportsRead,
    SupportsSearch,
)
from quark_core.backends.run_summary import MetricSummary, StoredRun
from quark_core.config import settings
from quark_core.config.arguments import check_run_id, resolve_storage_dir, working_directory
from quark_core.config.redaction import redact_text
from quark_core.delivery.journal_folder import journal_directory
from quark_core.delivery.segments import Origin
from quark_core.delivery.stream import RunStream, StandInStream
from quark_core.errors import (
    InvalidRunStateError,
    QuarkError,
    RunNotFoundError,
    SessionStoreError,
    StoreUnavailableError,
)
from quark_core.ranks.launches import RankChoice, RankInfo, choose_ranks, detect_rank
from quark_core.records import (
    ConfigSnapshot,
    LifecycleRecord,
    MetricRecord,
    ProjectRecord,
    RunRecord,
    format_time,
    parse_time,
)
from quark_core.records.base import now_us
from quark_core.records.json_object import JsonObject
from quark_core.records.names import decode_name
from quark_core.records.query import check_step
from quark_core.records.runs import RunContext
from quark_core.runs import backend_choice, rank_roles, recovery
from quark_core.runs.backend_choice import Plan
from quark_core.runs.environment import (
    EnvironmentRecorder,
    GitState,
    capture_environment,
    read_git_state,
)
from quark_core.runs.open_run import OpenRun, RunDraft, StopLookout, ask_extensions
from quark_core.runs.primary_store import (
    JOINING,
    KnownRun,
    PrimaryReach,
    StartPolicy,
    check_resumable,
    choose_policy,
    complete_known_id,
    find_known_run,
    note_run,
)
from quark_core.runs.rank_roles import RankPart
from quark_core.runs.run_ids import find_run
from quark_core.system.process import current_process, find_memory_kills

_log = logging.getLogger("quark")

HAND_OVER_S = 1.0
"""How long a new writer waits until what it begins with is journaled."""


@dataclass(frozen=True, slots=True)
class Here:
    """Where this process begins an attempt, and what it was asked to keep.

    Attributes:
        plan: The backends here.
        root: The storage root.
        rank: Place of this process.
        ranks: Which ranks keep records, where that was said.
    """

    plan: Plan
    root: Path
    rank: RankInfo
    ranks: RankChoice | None

    def describe(
        self, primary: SupportsPrimary | None, project: ProjectRecord, run: RunRecord
    ) -> RunContext:
        """The context of a run that this process begins."""
        location = backend_choice.locate_run(primary, self.root, run.id or "")
        return RunContext(
            storage_dir=self.root,
            store_root=location.store_root,
            db_path=location.db_path,
            project=project,
            run=run,
            backends=self.plan.specifications,
            ranks=None if self.ranks is None else str(self.ranks),
        )


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
            "the primary store is unreachable, and the start of the run could not be written to "
            f"the journal within {HAND_OVER_S:g} s either"
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
        "run %s starts its attempt %d without its store: %s. Its records go to the journal and "
        "are delivered when the store answers. If this process ends first, run: quark sync %s",
        run.context.run_id,
        run.origin.attempt,
        outage,
        run.context.storage_dir,
    )


def find_reached_steps(reach: PrimaryReach, run_id: str) -> dict[str, int]:
    """Metric -> the step at which a run has it last; empty where the store cannot say at once."""
    primary = reach.primary
    if primary is None:
        return {}
    try:
        metrics = reach.ask(lambda: _load_metrics(primary, run_id))
    except QuarkError as error:
        _log.debug("the last step of run %s is unknown: %s", run_id, error)
        return {}
    steps = ((key, metrics[key].last_step) for key in metrics)
    return {key: step for key, step in steps if step is not None}


def _load_metrics(reader: SupportsRead, run_id: str) -> Mapping[str, MetricSummary]:
    """The metrics of a run, where they are known without reading its points."""
    return reader.summarize(run_id).metrics if isinstance(reader, SupportsSearch) else {}


def watch_for_repeated_steps(run: OpenRun, reached: Mapping[str, int]) -> None:
    """Tell of the first step that a run repeats; called before it logs anything.

    Args:
        run: The run, whose new attempt does not say from which step it goes on.
        reached: The last step of each metric before that.
    """
    if not reached:
        return
    waiting = dict(reached)
    channel = run.stream.channel(MetricRecord.KIND)

    def look(batch: Batch) -> None:
        # Of each metric the first step decides, as for readers.
        body = batch.decoded
        for key, step in zip(body.to_list("metric_key"), body.to_list("step"), strict=True):
            last = waiting.get(key) if step is not None else None
            if last is None:
                continue
            if step <= last:
                _tell(run, key, step, last)
                waiting.clear()
                break
            del waiting[key]
        if not waiting:
            channel.leave(look)

    channel.listen(look)


def _tell(run: OpenRun, key: str, step: int, last: int) -> None:
    _log.warning(
        "run %s: attempt %d logs %s from step %d on, but step %d was already logged. The new "
        "points replace the earlier ones at the same steps. The earlier ones are kept: "
        "read(all_attempts=True) and `quark export --all-attempts` return them. To drop all "
        "earlier points from that step on, use resume_run(from_step=%d).",
        run.context.run_id,
        run.context.run.attempt,
        decode_name(key),
        step,
        last,
        step,
    )


def resume(
    *,
    run_id: str,
    storage_dir: str | Path | None,
    backends: str | Sequence[str] | None,
    reopen: bool,
    from_step: int | None = None,
    ranks: str | Iterable[int] | None = None,
) -> OpenRun:
    """Continue a run; see `TrainingSession.resume_run` for arguments and errors."""
    began_s = time.monotonic()
    check_run_id(run_id)
    first_step = check_step(from_step, "from_step")
    settings.check_timeouts()
    settings.source_mode()
    draft = RunDraft(storage_dir=storage_dir).complete()
    root = resolve_storage_dir(draft.storage_dir)
    rank = detect_rank()
    chosen = choose_ranks(ranks)
    plan = backend_choice.plan_backends(backends, rank, ranks=chosen)
    here = Here(plan, root, rank, chosen)
    if not rank_roles.is_leader(plan, rank):
        run = _follow_resumed(run_id, here)
        run.extensions = draft.extensions
        return run
    with reach_run(run_id, here, reopen=reopen, began_s=began_s) as (stored, reach):
        run_id = stored.run.id or run_id
        claims = rank_roles.find_resume_claims(plan, root, run_id)
        part = RankPart(run_id, leads=True, claims=claims)
        return continue_run(
            stored, here, reach, part, from_step=first_step, extensions=draft.extensions
        )


@contextmanager
def reach_run(
    run_id: str,
    here: Here,
    *,
    reopen: bool,
    began_s: float,
    restarts: bool = False,
) -> Iterator[tuple[StoredRun, PrimaryReach]]:
    """A run that its leading rank takes up again, and the store, open for writing.

    Args:
        run_id: The run, or what its id begins with.
        here: Where this process begins its attempt.
        reopen: Whether a completed run may be continued.
        began_s: When the start began, on the clock of `time.monotonic`.
        restarts: Whether the launcher has ended the attempt before, whatever it has said of itself.

    Raises:
        RunNotFoundError: The store has no such run.
        InvalidRunStateError: The run is completed, or alive.
        SessionStoreError: There is no primary store here, or it cannot serve the call.
    """
    plan, root = here.plan, here.root
    if plan.primary is None:
        raise SessionStoreError(
            "run_id cannot be resumed here: this process has no primary store (backends="
            f"{[choice.specification for choice in plan.choices]}, rank {here.rank.rank})"
        )
    known = None
    if plan.primary.definition.remote:
        run_id = complete_known_id(root, run_id)
        known = find_known_run(root, run_id)
    policy = _choose_policy(known)
    with PrimaryReach(plan, root, policy, read_only=True, began_s=began_s) as reach:
        # Looked up before anything is opened for writing: a wrong storage_dir must leave no store.
        stored = _find_stored(reach, root, run_id, known)
        if not restarts:
            check_resumable(stored, reopen=reopen)
        if reach.outage is None:
            reach.open_for_writing()
        yield stored, reach


def find_known_here(reach: PrimaryReach, root: Path, run_id: str) -> KnownRun | None:
    """What this machine knows of the run that the store has under an id, or would have."""
    known = find_known_run(root, run_id)
    place = backend_choice.locate_run(reach.primary, root, run_id).run_path
    return known if known is not None and known.is_at(place) else None


def _choose_policy(known: KnownRun | None) -> StartPolicy:
    if known is None:
        return StartPolicy(False, False, "; this machine cannot find the run without it")
    return choose_policy(restarts=True, strict=known.run.strict_mode)


def _find_stored(reach: PrimaryReach, root: Path, run_id: str, known: KnownRun | None) -> StoredRun:
    """The run, out of the store or as this machine knows it.

    Raises:
        RunNotFoundError: The store has no such run, and none waits here for it.
        StoreUnavailableError: It is out of reach, and this machine does not know the run there.
        SessionStoreError: It cannot say.
    """
    primary = reach.primary
    if primary is None:
        raise SessionStoreError(f"run_id {run_id}: the store cannot be opened: {reach.outage}")
    if known is not None and not known.is_at(primary.locate(run_id).run_path):
        known = None
    try:
        return reach.ask(lambda: find_run(primary, run_id))
    except StoreUnavailableError:
        if known is None or reach.outage is None:
            raise
        return known.to_stored()
    except RunNotFoundError:
        if known is None or not recovery.count_unstored(root, run_id):
            raise
    # It was begun without the store, which has yet to hear of it.
    recovery.adopt_run(root, run_id, reach.left_s / 2)
    return rank_roles.find_stored(reach, run_id) or known.to_stored()


def continue_run(
    stored: StoredRun,
    here: Here,
    reach: PrimaryReach,
    part: RankPart,
    config: ConfigSnapshot | None = None,
    *,
    from_step: int | None = None,
    extensions: dict[type, object],
) -> OpenRun:
    """Begin the next attempt of a run, and tell the other ranks of it."""
    git = read_git_state(working_directory())
    attempt = stored.run.attempt + 1
    if reach.outage is not None:
        attempt = max(attempt, part.attempt)
    record = msgspec.structs.replace(
        stored.run,
        status="running",
        attempt=attempt,
        resume_count=attempt,
        git_commit=git.commit if git else None,
        updated_at=format_time(now_us()),
        ended_at=None,
    )
    context = here.describe(reach.primary, stored.project, record)
    reached = find_reached_steps(reach, record.id or "") if from_step is None else {}

    def begin() -> OpenRun:
        if part.claims is not None:
            part.claims.claim(record.id or "", attempt)
        run = open_part(context, here.plan, reach.primary, here.rank, part)
        run.config = stored.config if config is None else config
        run.fields = stored.fields
        run.first_step = from_step
        run.extensions = extensions
        if from_step is None:
            watch_for_repeated_steps(run, reached)
        reach.hand_over(run)
        announce(run, config, here.rank, git, "run_resumed", reach, from_step=from_step)
        return announce_rank(run, here.plan, here.rank)

    try:
        return begin()
    except StoreUnavailableError:
        if reach.outage is None:
            raise
        return begin()


def _follow_resumed(run_id: str, here: Here) -> OpenRun:
    """Join a run that the leading rank takes up again."""
    plan, root = here.plan, here.root
    with PrimaryReach(plan, root, JOINING) as reach:
        primary = reach.primary
        run_id = rank_roles.complete_run_id(reach, complete_known_id(root, run_id))
        stored = rank_roles.find_stored(reach, run_id)
        if stored is None and reach.outage is not None:
            known = find_known_here(reach, root, run_id)
            stored = None if known is None else known.to_stored()
        part = rank_roles.follow_resumed(plan, root, run_id, stored)
        moment = format_time(now_us())
        if stored is None:
            # Nothing is said of it here that a store would keep.
            project = ProjectRecord("", "", str(root), moment, moment)
            record = RunRecord(
                id=run_id,
                project_id="",
                project_name="",
                status="running",
                parent_run_id=None,
                lineage_root_run_id=run_id,
                resume_count=part.attempt,
                run_path=backend_choice.locate_run(primary, root, run_id).run_path,
                git_commit=None,
                strict_mode=False,
                tags=(),
                attempt=part.attempt,
                name=None,
                notes=None,
                created_at=moment,
                updated_at=moment,
                ended_at=None,
            )
        else:
            project = stored.project
            record = msgspec.structs.replace(
                stored.run, status="running", attempt=part.attempt, resume_count=part.attempt
            )
        context = here.describe(primary, project, record)
        run = open_part(context, plan, primary, here.rank, part)
        run.config = None if stored is None else stored.config
        run.fields = {} if stored is None else stored.fields
        reach.hand_over(run)
        return announce_rank(run, plan, here.rank)
