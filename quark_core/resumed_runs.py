"""Takes up runs again: their next attempt, on the rank that leads it and on those that join."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from quark_core import composition, rank_parts, settings
from quark_core.announcement import announce, announce_rank
from quark_core.backend import StoredRun, SupportsPrimary
from quark_core.composition import Plan
from quark_core.context import RunContext
from quark_core.environment import read_git_state
from quark_core.errors import SessionStoreError
from quark_core.open_run import OpenRun
from quark_core.query import check_index
from quark_core.rank_choice import RankChoice, choose_ranks
from quark_core.rank_parts import RankPart
from quark_core.ranks import RankInfo, detect_rank
from quark_core.records import ConfigSnapshot, ProjectRecord, RunRecord, format_time
from quark_core.run_arguments import check_run_id, resolve_storage_dir, working_directory
from quark_core.run_streams import open_part, open_plan_primary
from quark_core.stored_runs import check_resumable, load_run
from quark_core.times import now_us

__all__ = ["continue_run", "resume"]


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
    check_run_id(run_id)
    first_step = check_index(from_step, "from_step")
    settings.check_timeouts()
    root = resolve_storage_dir(storage_dir)
    rank = detect_rank()
    chosen = choose_ranks(ranks)
    plan = composition.plan_backends(backends, rank, ranks=chosen)
    if not rank_parts.is_leader(plan, rank):
        return _follow_resumed(run_id, plan, root, rank, chosen)
    if plan.primary is None:
        raise SessionStoreError(
            "run_id cannot be resumed here: this process has no primary store "
            f"(backends={backends!r}, rank {rank.rank})"
        )
    # Looked up before anything is opened for writing: a wrong storage_dir must leave no store.
    reader = composition.open_primary(
        plan.primary, replace(plan.primary.configure(root), read_only=True)
    )
    stored = load_run(reader, run_id)
    check_resumable(stored, reopen=reopen)
    primary = open_plan_primary(plan, root)
    claims = rank_parts.find_resume_claims(plan, root, run_id)
    part = RankPart(run_id, leads=True, claims=claims)
    return continue_run(stored, plan, primary, root, rank, chosen, part, from_step=first_step)


def continue_run(
    stored: StoredRun,
    plan: Plan,
    primary: SupportsPrimary | None,
    root: Path,
    rank: RankInfo,
    chosen: RankChoice | None,
    part: RankPart,
    config: ConfigSnapshot | None = None,
    *,
    from_step: int | None = None,
) -> OpenRun:
    """Begin the next attempt of a run, and tell the other ranks of it."""
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
    location = composition.locate_run(primary, root, record.id or "")
    context = RunContext(
        storage_dir=root,
        store_root=location.store_root,
        db_path=location.db_path,
        project=stored.project,
        run=record,
        backends=plan.specifications,
        ranks=None if chosen is None else str(chosen),
    )
    if part.claims is not None:
        part.claims.claim(record.id or "", attempt)
    run = open_part(context, plan, primary, rank, part)
    announce(run, config, rank, git, "run_resumed", from_step=from_step)
    return announce_rank(run, plan, rank)


def _follow_resumed(
    run_id: str, plan: Plan, root: Path, rank: RankInfo, chosen: RankChoice | None
) -> OpenRun:
    """Join a run that the leading rank takes up again."""
    primary = open_plan_primary(plan, root, leads=False)
    stored = rank_parts.find_stored(primary, run_id)
    part = rank_parts.follow_resumed(plan, root, run_id, stored)
    moment = format_time(now_us())
    location = composition.locate_run(primary, root, run_id)
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
            run_path=location.run_path,
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
    context = RunContext(
        storage_dir=root,
        store_root=location.store_root,
        db_path=location.db_path,
        project=project,
        run=record,
        backends=plan.specifications,
        ranks=None if chosen is None else str(chosen),
    )
    return announce_rank(open_part(context, plan, primary, rank, part), plan, rank)
