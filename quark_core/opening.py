"""Opens runs: started, resumed, attached from a context, or for reading only."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace as replace_dataclass
from pathlib import Path

import msgspec
import xxhash

from quark_core import composition, recovery, settings
from quark_core.announcement import announce
from quark_core.backend import BackendConfig, StoredRun, SupportsPrimary
from quark_core.composition import Plan
from quark_core.context import RunContext
from quark_core.delivery.deferral import StandInStream
from quark_core.delivery.journal_folder import journal_directory
from quark_core.delivery.origin import Origin
from quark_core.delivery.stream import RunStream
from quark_core.environment import read_git_state
from quark_core.errors import (
    InvalidRunStateError,
    RunNotFoundError,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.foreign_runs import open_foreign_run
from quark_core.open_run import OpenRun, open_runs
from quark_core.query import check_index
from quark_core.ranks import RankInfo, detect_rank
from quark_core.records import ProjectRecord, RunRecord, format_time
from quark_core.run_arguments import (
    check_label,
    check_notes,
    check_run_id,
    check_tags,
    resolve_storage_dir,
    working_directory,
)
from quark_core.run_config import snapshot_config
from quark_core.schema import TERMINAL_STATUSES
from quark_core.times import now_us

_HAND_OVER_S = 1.0
_LISTED = 5

__all__ = ["attach_run", "open_for_reading", "resolve_target", "resume", "start"]


def start(
    *,
    project: str,
    config: object,
    tags: Iterable[str] | None,
    parent_run_id: str | None,
    storage_dir: str | Path | None,
    strict_mode: bool,
    backends: str | Sequence[str] | None,
    name: str | None,
    notes: str | None,
) -> OpenRun:
    """Start a new run; see `TrainingSession.start_run` for arguments and errors."""
    check_label(project, "project")
    if name is not None:
        check_label(name, "name")
    if not isinstance(strict_mode, bool):
        raise SchemaValidationError(
            f"strict_mode must be True or False, not a {type(strict_mode).__name__}"
        )
    if parent_run_id is not None:
        check_run_id(parent_run_id, "parent_run_id")
    settings.check_timeouts()
    checked_notes = check_notes(notes)
    checked_tags = check_tags(tags)
    snapshot = snapshot_config(config)
    root = resolve_storage_dir(storage_dir)
    rank = detect_rank()
    plan = composition.plan_backends(backends, rank)
    run_id = _choose_run_id(rank)
    primary = _open_primary(plan, root)
    parent = _find_parent(primary, parent_run_id)
    location = composition.locate_run(primary, root, run_id or "unknown")
    git = read_git_state(working_directory())
    moment = format_time(now_us())
    record = RunRecord(
        id=run_id,
        project_id=_derive_project_id(project),
        project_name=project,
        status="running",
        parent_run_id=parent_run_id,
        lineage_root_run_id=parent.lineage_root_run_id if parent else (parent_run_id or run_id),
        resume_count=0,
        run_path=location.run_path,
        git_commit=git.commit if git else None,
        strict_mode=strict_mode,
        tags=checked_tags,
        attempt=0,
        name=name,
        notes=checked_notes,
        created_at=moment,
        updated_at=moment,
        ended_at=None,
    )
    context = RunContext(
        storage_dir=root,
        store_root=location.store_root,
        db_path=location.db_path,
        project=ProjectRecord(record.project_id, project, str(root), moment, moment),
        run=record,
        backends=plan.specifications,
    )
    run = _open(context, plan, primary, rank)
    announce(run, snapshot, rank, git, "run_started")
    return run


def resume(
    *,
    run_id: str,
    storage_dir: str | Path | None,
    backends: str | Sequence[str] | None,
    reopen: bool,
    from_step: int | None = None,
) -> OpenRun:
    """Continue a run; see `TrainingSession.resume_run` for arguments and errors."""
    check_run_id(run_id)
    first_step = check_index(from_step, "from_step")
    settings.check_timeouts()
    root = resolve_storage_dir(storage_dir)
    rank = detect_rank()
    plan = composition.plan_backends(backends, rank)
    if plan.primary is None:
        raise SessionStoreError(
            "run_id cannot be resumed here: this process has no primary store "
            f"(backends={backends!r}, rank {rank.rank})"
        )
    # Looked up before anything is opened for writing: a wrong storage_dir must leave no store.
    reader = composition.open_primary(
        plan.primary, replace_dataclass(plan.primary.configure(root), read_only=True)
    )
    stored = _load_run(reader, run_id)
    _check_resumable(stored, reopen=reopen)
    primary = _open_primary(plan, root)
    git = read_git_state(working_directory())
    attempt = stored.run.attempt + 1
    record = msgspec.structs.replace(
        stored.run,
        status="running",
        attempt=attempt,
        resume_count=attempt,
        git_commit=git.commit if git else None,
        updated_at=format_time(now_us()),
        ended_at=None,
    )
    location = composition.locate_run(primary, root, run_id)
    context = RunContext(
        storage_dir=root,
        store_root=location.store_root,
        db_path=location.db_path,
        project=stored.project,
        run=record,
        backends=plan.specifications,
    )
    run = _open(context, plan, primary, rank)
    announce(run, None, rank, git, "run_resumed", from_step=first_step)
    return run


def open_for_reading(run_id: str, storage_dir: str | Path | None) -> OpenRun:
    """Open a run without touching it; see `quark.open_run`."""
    check_run_id(run_id)
    root = resolve_storage_dir(storage_dir)
    reader = composition.open_reader(root)
    stored = _load_run(reader, run_id)
    return OpenRun(
        to_context(stored, reader, root),
        RunStream(Origin(run_id)),
        reader,
        refusal="the run was opened for reading only; use resume_run to continue it",
    )


def attach_run(context: RunContext) -> OpenRun:
    """Open a stream of this process's own into a run that another process holds open.

    A run that has ended is opened for reading only.
    """
    if context.read_only and context.run_id is not None:
        if context.backends:
            return open_foreign_run(context.run_id, context.storage_dir, context.backends[0])
        return open_for_reading(context.run_id, context.storage_dir)
    rank = detect_rank()
    plan = composition.plan_backends(list(context.backends) or "none", rank)
    if plan.primary is None or context.run_id is None:
        return OpenRun(context, RunStream(Origin(context.run_id)), None)
    root = context.storage_dir
    reader = composition.open_primary(
        plan.primary, replace_dataclass(plan.primary.configure(root), read_only=True)
    )
    stored = reader.load_run(context.run_id)
    if stored.run.status in TERMINAL_STATUSES:
        return OpenRun(
            to_context(stored, reader, root),
            RunStream(Origin(context.run_id)),
            reader,
            refusal=f"the run has ended ({stored.run.status}); use resume_run to continue it",
        )
    run = _open(context, plan, _open_primary(plan, root), rank)
    # Gives the writer its start time at the store, whatever timestamps follow.
    run.emit_lifecycle("heartbeat")
    run.stream.hand_over(_HAND_OVER_S)
    return run


def to_context(stored: StoredRun, primary: SupportsPrimary, storage_dir: Path) -> RunContext:
    """The context of a run as its store knows it."""
    location = composition.locate_run(primary, storage_dir, stored.run.id or "")
    return RunContext(
        storage_dir=storage_dir,
        store_root=location.store_root,
        db_path=location.db_path,
        project=stored.project,
        run=stored.run,
        read_only=True,
    )


def resolve_target(target: object) -> OpenRun:
    """The open run behind a session or a context.

    Raises:
        SchemaValidationError: `target` is neither.
    """
    if isinstance(target, RunContext):
        found = open_runs.find(target.run_id)
        if found is None:
            found = attach_run(target)
            if found.refusal is None and found.stream.active:
                found = open_runs.attach(found)
        return found
    run = getattr(target, "open_run", None)
    if not isinstance(run, OpenRun):
        raise SchemaValidationError(
            f"session must be a TrainingSession or a RunContext, not {type(target).__name__}"
        )
    return run


def _open(
    context: RunContext, plan: Plan, primary: SupportsPrimary | None, rank: RankInfo
) -> OpenRun:
    origin = Origin(context.run_id, attempt=context.run.attempt, rank=rank.rank)
    run = OpenRun(context, RunStream(origin), primary)
    run_path = _local_run_path(context)
    children = recovery.ChildDelivery(
        journal_directory(run_path, context.run_id or ""), origin.writer_id, origin.attempt
    )
    run.stream = composition.open_stream(
        plan,
        primary,
        _configure(context),
        origin,
        run_path,
        on_primary_failure=run.note_failure,
        on_second=children.poll,
        on_beat=lambda: run.emit_lifecycle("heartbeat"),
        on_gap=run.emit_gap,
    )
    run.children = children
    run.payload_directory = composition.find_payload_directory(primary, context.run_id)
    run.reopen = lambda child, child_origin: _open_child(child, plan, child_origin)
    run.stream.start()
    return run


def _open_child(run: OpenRun, plan: Plan, origin: Origin) -> None:
    """Give a forked child a stream of its own, which its parent or a later process delivers."""
    stream = composition.open_child_stream(
        plan,
        _configure(run.context),
        origin,
        _local_run_path(run.context),
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
    stream.hand_over(_HAND_OVER_S)
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


def _check_resumable(stored: StoredRun, *, reopen: bool) -> None:
    run_id = stored.run.id
    if stored.state == "running":
        here = open_runs.find(run_id) is not None
        where = "in this process; end it first" if here else "in another process"
        raise InvalidRunStateError(f"run_id {run_id} is alive {where}, so it cannot be resumed")
    if stored.state == "completed" and not reopen:
        raise InvalidRunStateError(
            f"run_id {run_id} is completed, so it cannot be resumed "
            "(reopen=True allows a final evaluation)"
        )


def _open_primary(plan: Plan, root: Path) -> SupportsPrimary | None:
    if plan.primary is None:
        return None
    return composition.open_primary(plan.primary, plan.primary.configure(root))


def _find_parent(primary: SupportsPrimary | None, parent_run_id: str | None) -> RunRecord | None:
    if parent_run_id is None:
        return None
    if primary is None:
        return None
    try:
        return primary.load_run(parent_run_id).run
    except RunNotFoundError as error:
        reason = str(error).removeprefix(f"run_id {parent_run_id}: ")
        raise RunNotFoundError(f"parent_run_id {parent_run_id}: {reason}") from error


def _load_run(reader: SupportsPrimary, run_id: str) -> StoredRun:
    """A run of a store; an unknown one is refused with those that may be meant."""
    try:
        return reader.load_run(run_id)
    except RunNotFoundError as error:
        raise RunNotFoundError(f"{error}{_describe_near_runs(reader, run_id)}") from None


def _describe_near_runs(reader: SupportsPrimary, given: str) -> str:
    """Which runs a text that is no run's id may have meant: a beginning, or a name."""
    try:
        runs = [stored.run for stored in reader.list_runs()]
    except SessionStoreError:
        return ""
    begin = [run.id for run in runs if run.id and run.id.startswith(given)]
    named = [run.id for run in runs if run.id and run.name == given]
    if not begin and not named:
        return ""
    found = begin or named
    listed = ", ".join(found[:_LISTED]) + (", …" if len(found) > _LISTED else "")
    what = "begins so" if begin else "has that name, which is no id"
    if len(found) > 1:
        what = "begin so" if begin else "have that name, which is no id"
    return f"; {listed} {what}"


def _choose_run_id(rank: RankInfo) -> str | None:
    given = os.environ.get(settings.RUN_ID, "").strip()
    if given:
        return check_run_id(given, settings.RUN_ID)
    if rank.rank == 0:
        return os.urandom(8).hex()
    warnings.warn(
        f"run_id is unknown on rank {rank.rank}: set {settings.RUN_ID} to the same value on all "
        "ranks to know it everywhere. Training and logging go on as they are.",
        RuntimeWarning,
        stacklevel=4,
    )
    return None


def _derive_project_id(project: str) -> str:
    """The same in every process, so that no one need ask the store for it."""
    return f"p{xxhash.xxh3_64_hexdigest(project.encode('utf-8', 'replace'))}"
