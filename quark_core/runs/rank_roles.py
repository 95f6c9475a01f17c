"""Roles of a rank in a run: it begins it, resumes it, joins it, or only knows of it."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from quark_core.backends.run_summary import StoredRun
from quark_core.config import settings
from quark_core.config.arguments import check_run_id
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.ranks.launches import RANK_ZERO, Launch, RankInfo, RunClaims, find_launch
from quark_core.runs.backend_choice import Plan
from quark_core.runs.primary_store import KnownRun, PrimaryReach
from quark_core.runs.run_ids import complete_id

_log = logging.getLogger("quark")

# Where a rank keeps nothing, all that it waits for is a name.
_IDLE_WAIT_S = 3.0


@dataclass(frozen=True, slots=True)
class RankPart:
    """This rank's part in a run.

    Attributes:
        run_id: The run; None on a rank that cannot know it.
        leads: Whether this rank begins, describes and ends the run.
        attempt: The attempt, as far as it is known already.
        restarts: Whether the launcher has restarted a launch that has this run.
        derived: Whether the id follows from the launch, so that another process
            that contradicts this one may have taken it.
        claims: Where the run is claimed, in a launch.
        missed: Whether the leading rank was waited for in vain.
        is_done: Whether the run is an earlier one, and there is nothing to do.
    """

    run_id: str | None
    leads: bool
    attempt: int = 0
    restarts: bool = False
    derived: bool = False
    claims: RunClaims | None = None
    missed: bool = False
    is_done: bool = False

    def claim(self) -> None:
        """Tell the other ranks of the launch which attempt of which run it is."""
        if self.claims is not None and self.run_id is not None:
            self.claims.claim(self.run_id, self.attempt, is_done=self.is_done)

    def stand_alone(self) -> RankPart:
        """The same for a run of this process's own, whatever others do."""
        return RankPart(_make_run_id(), leads=True)


def is_leader(plan: Plan, rank: RankInfo) -> bool:
    """Whether a rank begins and ends the run."""
    return rank.rank == (plan.ranks or RANK_ZERO).leader


def is_restarted(plan: Plan) -> bool:
    """Whether the launcher says that it has started this launch before."""
    launch = find_launch() if plan.ranks is not None else None
    return launch is not None and _count_restarts(launch) > 0


def find_given_run_id() -> str | None:
    """QUARK_RUN_ID, or None.

    Raises:
        SchemaValidationError: It could not name a run.
    """
    given = os.environ.get(settings.RUN_ID, "").strip()
    return check_run_id(given, settings.RUN_ID) if given else None


def lead(
    plan: Plan,
    rank: RankInfo,
    storage_dir: Path,
    name: str,
    given: str | None,
    reach: PrimaryReach,
) -> RankPart:
    """Choose the run that this rank begins or continues, and tell the other ranks.

    Args:
        plan: The backends here.
        rank: Place of this process.
        storage_dir: The storage root.
        name: What all ranks call the run, such as its project.
        given: The run's id, where it is set.
        reach: The store, which knows what ids are used, where it answers.
    """
    claims = _find_claims(plan, storage_dir, name)
    if claims is None:
        return RankPart(given or _make_run_id(), leads=True)
    launch = claims.launch
    if given is not None:
        restarted = claims.is_first and _count_restarts(launch) > 0
        if not (restarted and _may_be_stored(reach, given)):
            claims.claim(given, 0)
            return RankPart(given, leads=True, claims=claims)
        earlier = claims.find_restarted()
        attempt = _count_restarts(launch)
        if earlier is not None and earlier.run_id == given:
            attempt = earlier.attempt + 1
        return RankPart(given, leads=True, attempt=attempt, restarts=True, claims=claims)
    earlier = claims.find_restarted()
    if earlier is not None:
        return RankPart(
            earlier.run_id, leads=True, attempt=earlier.attempt + 1, restarts=True, claims=claims
        )
    derived = claims.derived_run_id
    lasts = launch.restart == 0 or claims.is_used
    # Without a folder that lasts, the store remembers.
    if derived is not None and not lasts and _may_be_stored(reach, derived):
        attempt = launch.restart
        return RankPart(derived, True, attempt, restarts=True, derived=True, claims=claims)
    stored = derived is not None and find_stored(reach, derived) is not None
    used = claims.is_used
    rival = claims.find_rival()
    fresh = derived is not None and not stored and not used
    run_id = derived if fresh and derived is not None else _make_run_id()
    if rival is not None or not claims.claim(run_id, 0, replaces=used):
        _warn_of_rival(rank)
        return RankPart(_make_run_id(), leads=True)
    return RankPart(run_id, leads=True, derived=fresh, claims=claims)


def lead_earlier(
    plan: Plan, storage_dir: Path, name: str, run_id: str, *, is_done: bool
) -> RankPart:
    """The part of the rank that leads, in an earlier run in place of one that it would begin.

    Args:
        plan: The backends here.
        storage_dir: The storage root.
        name: What all ranks call the run, such as its project.
        run_id: The earlier run.
        is_done: Whether there is nothing to do in it.
    """
    claims = _find_claims(plan, storage_dir, name)
    return RankPart(run_id, leads=True, claims=claims, is_done=is_done)


def lead_checkpoint(plan: Plan, storage_dir: Path, name: str, run_id: str) -> RankPart:
    """The part of the rank that leads, in the run of its checkpoint.

    Args:
        plan: The backends here.
        storage_dir: The storage root.
        name: What all ranks call the run, such as its project.
        run_id: The run that the checkpoint is of.

    Raises:
        SchemaValidationError: The launch has another run, which was restarted.
    """
    given = find_given_run_id()
    claims = _find_claims(plan, storage_dir, name)
    earlier = None if claims is None else claims.find_restarted()
    own = given if earlier is None else earlier.run_id
    if own is not None and own != run_id:
        whose = settings.RUN_ID if earlier is None else "this launch, which was restarted,"
        raise SchemaValidationError(
            f"state is of run {run_id}, but {whose} says {own}. Pass the state of that run from "
            "a checkpoint that it saved, or none"
        )
    attempt = 0 if earlier is None else earlier.attempt + 1
    return RankPart(run_id, True, attempt, restarts=earlier is not None, claims=claims)


def find_resume_claims(plan: Plan, storage_dir: Path, run_id: str) -> RunClaims | None:
    """The claims of a run that the script itself takes up again; None outside a launch."""
    return _find_claims(plan, storage_dir, f"resumed {run_id}")


def follow_resumed(
    plan: Plan, storage_dir: Path, run_id: str, stored: StoredRun | None
) -> RankPart:
    """Find the attempt that the leading rank takes up; waits for it, within a bound.

    Args:
        plan: The backends here.
        storage_dir: The storage root.
        run_id: The run.
        stored: The run as the store knows it, if it does.
    """
    claims = find_resume_claims(plan, storage_dir, run_id) if plan.choices else None
    timeout_s = settings.launch_timeout_s()
    claim = None if claims is None else claims.wait(timeout_s)
    if claim is not None and claim.run_id == run_id:
        return RankPart(run_id, leads=False, attempt=claim.attempt)
    attempt = 1 if stored is None else stored.run.attempt + (stored.state != "running")
    if claims is not None:
        _tell_missed(plan, run_id, timeout_s)
    return RankPart(run_id, leads=False, attempt=attempt, missed=claims is not None)


def follow(plan: Plan, rank: RankInfo, storage_dir: Path, name: str, given: str | None) -> RankPart:
    """Find the run that the leading rank begins; waits for it, within a bound.

    Arguments as in `lead`. Warns where the run cannot be known.
    """
    claims = _find_claims(plan, storage_dir, name)
    keeps = bool(plan.choices)
    claim, timeout_s = None, 0.0
    if claims is not None and (given is None or keeps):
        timeout_s = settings.launch_timeout_s()
        if given is not None:
            timeout_s = 0.0
        elif not keeps:
            timeout_s = min(timeout_s, _IDLE_WAIT_S)
        claim = claims.wait(timeout_s)
    restart = claims.launch.restart if claims is not None else 0
    if given is not None and claims is not None:
        # The store does not know of the next attempt before the leading rank has begun it.
        restart = max(restart, claims.launch.requeues)
    if claim is not None and (claim.is_done or given in (None, claim.run_id)):
        return RankPart(claim.run_id, False, attempt=claim.attempt, is_done=claim.is_done)
    run_id = given
    if run_id is None and claims is not None:
        run_id = claims.derived_run_id
    if run_id is None:
        lost = "This rank stores no records. " if keeps else ""
        warnings.warn(
            f"run_id is unknown on rank {rank.rank}. To share it, set {settings.RUN_ID} to the "
            f"same value on all ranks. {lost}Training and logging continue unchanged.",
            RuntimeWarning,
            stacklevel=4,
        )
    missed = keeps and run_id is not None and timeout_s > 0.0
    if missed:
        _tell_missed(plan, run_id, timeout_s)
    return RankPart(run_id, leads=False, attempt=restart, missed=missed)


def settle_attempt(part: RankPart, reach: PrimaryReach) -> RankPart:
    """The part with the newer of two attempts: what it says, and what the store knows."""
    stored = find_stored(reach, part.run_id)
    if stored is None or stored.run.attempt <= part.attempt:
        return part
    return replace(part, attempt=stored.run.attempt)


def number_offline(part: RankPart, known: KnownRun | None) -> RankPart:
    """The part with an attempt after all that this machine knows of; the store may know more."""
    if not part.restarts or known is None or known.run.attempt < part.attempt:
        return part
    return replace(part, attempt=known.run.attempt + 1)


def find_stored(reach: PrimaryReach, run_id: str | None) -> StoredRun | None:
    """A run of the store; None where it is not there, or the store cannot say."""
    if reach.primary is None or run_id is None:
        return None
    try:
        return reach.load_run(run_id)
    except QuarkError as error:
        _log.debug("run %s is unknown: %s", run_id, error)
        return None


def complete_run_id(reach: PrimaryReach, given: str) -> str:
    """The id that begins so, as the store knows it; what was given where it cannot say."""
    primary = reach.primary
    if primary is None:
        return given
    try:
        return reach.ask(lambda: complete_id(primary, given))
    except QuarkError as error:
        _log.debug("run %s is unknown: %s", given, error)
        return given


def _find_claims(plan: Plan, storage_dir: Path, name: str) -> RunClaims | None:
    """Where the ranks of this launch meet; None outside a launch, or where nothing is kept."""
    launch = find_launch() if plan.ranks is not None else None
    return None if launch is None else RunClaims(storage_dir, launch, name)


def _may_be_stored(reach: PrimaryReach, run_id: str) -> bool:
    """Whether the store has a run, or is out of reach and may have it."""
    return find_stored(reach, run_id) is not None or reach.outage is not None


def _count_restarts(launch: Launch) -> int:
    return max(launch.restart, launch.requeues)


def _make_run_id() -> str:
    return os.urandom(8).hex()


def _tell_missed(plan: Plan, run_id: str | None, timeout_s: float) -> None:
    _log.warning(
        "run %s: its lead rank %d has not started it within %g s (%s). This rank continues to "
        "train, and its records wait in its journal until the run exists",
        run_id,
        (plan.ranks or RANK_ZERO).leader,
        timeout_s,
        settings.LAUNCH_TIMEOUT,
    )


def _warn_of_rival(rank: RankInfo) -> None:
    if rank.world_size > 1:
        _log.warning(
            "another process is already lead rank %d of this launch. This process starts its "
            "own run, and the other ranks do not join it. Check the rank variables (%s).",
            rank.rank,
            rank.source,
        )
