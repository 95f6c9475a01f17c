"""Opens runs: started, resumed, attached from a context, or for reading only."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace as replace_dataclass
from pathlib import Path

import xxhash

from quark_core import composition, rank_parts, recovery, settings
from quark_core.announcement import announce, announce_rank
from quark_core.backend import StoredRun, SupportsPrimary
from quark_core.context import RunContext
from quark_core.delivery.origin import Origin
from quark_core.delivery.stream import RunStream
from quark_core.environment import read_git_state
from quark_core.errors import (
    InvalidRunStateError,
    RunNotFoundError,
    SchemaValidationError,
)
from quark_core.foreign_runs import open_foreign_run
from quark_core.open_run import OpenRun, open_runs
from quark_core.rank_choice import choose_ranks, parse_ranks
from quark_core.rank_parts import RankPart
from quark_core.ranks import detect_rank
from quark_core.records import ProjectRecord, RunRecord, format_time
from quark_core.resumed_runs import continue_run
from quark_core.run_arguments import (
    check_label,
    check_notes,
    check_run_id,
    check_tags,
    resolve_storage_dir,
    working_directory,
)
from quark_core.run_config import snapshot_config
from quark_core.run_streams import HAND_OVER_S, open_part, open_plan_primary, open_run_stream
from quark_core.schema import TERMINAL_STATUSES
from quark_core.stored_runs import find_parent, load_run
from quark_core.times import now_us

__all__ = ["attach_run", "open_for_reading", "resolve_target", "start"]

_log = logging.getLogger("quark")

# What an attempt that was killed at its beginning has left, and its restart must know first.
_ADOPT_S = 5.0


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
    ranks: str | Iterable[int] | None = None,
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
    chosen = choose_ranks(ranks)
    plan = composition.plan_backends(backends, rank, ranks=chosen)
    given = rank_parts.find_given_run_id()
    leads = rank_parts.is_leader(plan, rank)
    primary = open_plan_primary(plan, root, leads=leads)
    if leads:
        part = rank_parts.lead(plan, rank, root, project, given, primary)
    else:
        part = rank_parts.follow(plan, rank, root, project, given)
        part = rank_parts.settle_attempt(part, primary)
    if part.restarts and part.run_id is not None:
        stored = _find_restarted(primary, root, part.run_id)
        if stored is not None:
            try:
                return continue_run(stored, plan, primary, root, rank, chosen, part, snapshot)
            except InvalidRunStateError as error:
                _log.warning("the restarted run is not taken up again: %s", error)
                part = part.stand_alone()
        elif part.claims is not None and part.run_id is not None:
            part.claims.claim(part.run_id, part.attempt)
    parent = find_parent(primary, parent_run_id) if leads else None
    git = read_git_state(working_directory())
    moment = format_time(now_us())

    def begin(part: RankPart) -> OpenRun:
        run_id = part.run_id
        location = composition.locate_run(primary, root, run_id or "unknown")
        record = RunRecord(
            id=run_id,
            project_id=_derive_project_id(project),
            project_name=project,
            status="running",
            parent_run_id=parent_run_id,
            lineage_root_run_id=parent.lineage_root_run_id if parent else (parent_run_id or run_id),
            resume_count=part.attempt,
            run_path=location.run_path,
            git_commit=git.commit if git else None,
            strict_mode=strict_mode,
            tags=checked_tags,
            attempt=part.attempt,
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
            ranks=None if chosen is None else str(chosen),
        )
        run = open_part(context, plan, primary, rank, part)
        if part.leads:
            announce(run, snapshot, rank, git, "run_started")
        return announce_rank(run, plan, rank)

    try:
        return begin(part)
    except InvalidRunStateError:
        if not part.derived:
            raise
        # Two processes lead one launch, and the other one was first.
        return begin(part.stand_alone())


def _find_restarted(primary: SupportsPrimary | None, root: Path, run_id: str) -> StoredRun | None:
    """A run that the launcher has restarted; None where its first attempt left nothing of it."""
    stored = rank_parts.find_stored(primary, run_id)
    if stored is None:
        recovery.adopt_run(root, run_id, _ADOPT_S)
        stored = rank_parts.find_stored(primary, run_id)
    return stored


def open_for_reading(run_id: str, storage_dir: str | Path | None) -> OpenRun:
    """Open a run without touching it; see `quark.open_run`."""
    check_run_id(run_id)
    root = resolve_storage_dir(storage_dir)
    reader = composition.open_reader(root)
    stored = load_run(reader, run_id)
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
    plan = composition.plan_backends(
        list(context.backends) or "none",
        rank,
        ranks=None if context.ranks is None else parse_ranks(context.ranks, "context.ranks"),
    )
    leads = rank_parts.is_leader(plan, rank)
    if plan.primary is None or context.run_id is None:
        return OpenRun(context, RunStream(Origin(context.run_id)), None)
    root = context.storage_dir
    reader = composition.open_primary(
        plan.primary, replace_dataclass(plan.primary.configure(root), read_only=True)
    )
    try:
        stored = reader.load_run(context.run_id)
    except RunNotFoundError:
        if leads:
            raise
        stored = None  # the leading rank is about to begin it
    if stored is not None and stored.run.status in TERMINAL_STATUSES:
        return OpenRun(
            to_context(stored, reader, root),
            RunStream(Origin(context.run_id)),
            reader,
            refusal=f"the run has ended ({stored.run.status}); use resume_run to continue it",
        )
    run = open_run_stream(context, plan, open_plan_primary(plan, root), rank, leads=leads)
    # Gives the writer its start time at the store, whatever timestamps follow.
    run.emit_lifecycle("heartbeat")
    run.stream.hand_over(HAND_OVER_S)
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


def _derive_project_id(project: str) -> str:
    """The same in every process, so that no one need ask the store for it."""
    return f"p{xxhash.xxh3_64_hexdigest(project.encode('utf-8', 'replace'))}"
