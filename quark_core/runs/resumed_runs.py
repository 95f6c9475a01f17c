"""Takes up runs again: their next attempt, on the rank that leads it and on those that join."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from quark_core.backends.contract import StoredRun
from quark_core.config import settings
from quark_core.config.arguments import check_run_id, resolve_storage_dir, working_directory
from quark_core.errors import RunNotFoundError, SessionStoreError, StoreUnavailableError
from quark_core.ranks.choice import RankChoice, choose_ranks
from quark_core.ranks.launches import RankInfo, detect_rank
from quark_core.records import ConfigSnapshot, ProjectRecord, RunRecord, format_time
from quark_core.records.query import check_step
from quark_core.records.runs import RunContext
from quark_core.records.times import now_us
from quark_core.runs import backend_choice, rank_parts, recovery
from quark_core.runs.announcement import announce, announce_rank
from quark_core.runs.backend_choice import Plan
from quark_core.runs.environment import read_git_state
from quark_core.runs.extensions import RunDraft
from quark_core.runs.known_runs import (
    KnownRun,
    check_resumable,
    complete_known_id,
    find_known_run,
)
from quark_core.runs.open_run import OpenRun
from quark_core.runs.primary_reach import JOINING, PrimaryReach, StartPolicy, choose_policy
from quark_core.runs.rank_parts import RankPart
from quark_core.runs.repeated_steps import find_reached_steps, watch_for_repeated_steps
from quark_core.runs.run_ids import find_run
from quark_core.runs.streams import open_part


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
    if not rank_parts.is_leader(plan, rank):
        run = _follow_resumed(run_id, plan, root, rank, chosen)
        run.extensions = draft.extensions
        return run
    with reach_run(run_id, plan, root, rank, reopen=reopen, began_s=began_s) as (stored, reach):
        run_id = stored.run.id or run_id
        claims = rank_parts.find_resume_claims(plan, root, run_id)
        part = RankPart(run_id, leads=True, claims=claims)
        return continue_run(
            stored, plan, reach, root, rank, chosen, part,
            from_step=first_step, extensions=draft.extensions,
        )  # fmt: skip


@contextmanager
def reach_run(
    run_id: str,
    plan: Plan,
    root: Path,
    rank: RankInfo,
    *,
    reopen: bool,
    began_s: float,
    restarts: bool = False,
) -> Iterator[tuple[StoredRun, PrimaryReach]]:
    """A run that its leading rank takes up again, and the store, open for writing.

    Args:
        run_id: The run, or what its id begins with.
        plan: The backends here.
        root: The storage root.
        rank: Place of this process.
        reopen: Whether a completed run may be continued.
        began_s: When the start began, on the clock of `time.monotonic`.
        restarts: Whether the launcher has ended the attempt before, whatever it has said of itself.

    Raises:
        RunNotFoundError: The store has no such run.
        InvalidRunStateError: The run is completed, or alive.
        SessionStoreError: There is no primary store here, or it cannot serve the call.
    """
    if plan.primary is None:
        raise SessionStoreError(
            "run_id cannot be resumed here: this process has no primary store "
            f"(backends={[choice.specification for choice in plan.choices]}, rank {rank.rank})"
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


def _choose_policy(known: KnownRun | None) -> StartPolicy:
    if known is None:
        return StartPolicy(False, False, "; this machine does not know the run without it")
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
    return rank_parts.find_stored(reach, run_id) or known.to_stored()


def continue_run(
    stored: StoredRun,
    plan: Plan,
    reach: PrimaryReach,
    root: Path,
    rank: RankInfo,
    chosen: RankChoice | None,
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
    location = backend_choice.locate_run(reach.primary, root, record.id or "")
    context = RunContext(
        storage_dir=root,
        store_root=location.store_root,
        db_path=location.db_path,
        project=stored.project,
        run=record,
        backends=plan.specifications,
        ranks=None if chosen is None else str(chosen),
    )

    reached = find_reached_steps(reach, record.id or "") if from_step is None else {}

    def begin() -> OpenRun:
        if part.claims is not None:
            part.claims.claim(record.id or "", attempt)
        run = open_part(context, plan, reach.primary, rank, part)
        run.config = stored.config if config is None else config
        run.fields = stored.fields
        run.first_step = from_step
        run.extensions = extensions
        if from_step is None:
            watch_for_repeated_steps(run, reached)
        reach.hand_over(run)
        announce(run, config, rank, git, "run_resumed", reach, from_step=from_step)
        return announce_rank(run, plan, rank)

    try:
        return begin()
    except StoreUnavailableError:
        if reach.outage is None:
            raise
        return begin()


def _follow_resumed(
    run_id: str, plan: Plan, root: Path, rank: RankInfo, chosen: RankChoice | None
) -> OpenRun:
    """Join a run that the leading rank takes up again."""
    with PrimaryReach(plan, root, JOINING) as reach:
        primary = reach.primary
        run_id = rank_parts.complete_run_id(reach, complete_known_id(root, run_id))
        stored = rank_parts.find_stored(reach, run_id)
        if stored is None and reach.outage is not None:
            known = find_known_run(root, run_id)
            place = backend_choice.locate_run(primary, root, run_id).run_path
            stored = known.to_stored() if known is not None and known.is_at(place) else None
        part = rank_parts.follow_resumed(plan, root, run_id, stored)
        moment = format_time(now_us())
        location = backend_choice.locate_run(primary, root, run_id)
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
        run = open_part(context, plan, primary, rank, part)
        run.config = None if stored is None else stored.config
        run.fields = {} if stored is None else stored.fields
        reach.hand_over(run)
        return announce_rank(run, plan, rank)
