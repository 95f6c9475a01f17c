"""Opens runs: started, resumed, attached from a context, or for reading only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quark_core.backends.run_summary import RunSummary, StoredRun
from quark_core.config import settings
from quark_core.config.arguments import (
    VERSION_FIELD,
    IfExists,
    check_fields,
    check_groups,
    check_if_exists,
    check_label,
    check_notes,
    check_run_id,
    check_tags,
    describe_argument,
    resolve_storage_dir,
    working_directory,
)
from quark_core.config.objective import Objective, ObjectiveMode, choose_objective, keep_objective
from quark_core.delivery.segments import Origin
from quark_core.delivery.stream import FlushLevel, RunStream
from quark_core.errors import (
    InvalidRunStateError,
    QuarkError,
    RunNotFoundError,
    SchemaValidationError,
    StoreUnavailableError,
)
from quark_core.ranks.launches import RankInfo, choose_ranks, detect_rank, parse_ranks
from quark_core.records import ConfigSnapshot, ProjectRecord, RunRecord, format_time
from quark_core.records.base import now_us
from quark_core.records.json_object import JsonObject
from quark_core.records.query import check_step
from quark_core.records.runs import RunContext
from quark_core.records.schema import CURRENT_SCHEMA_VERSION, TERMINAL_STATUSES
from quark_core.runs import backend_choice, rank_roles, recovery
from quark_core.runs.attempts import (
    HAND_OVER_S,
    Here,
    announce,
    announce_rank,
    continue_run,
    find_known_here,
    open_part,
    open_run_stream,
    reach_run,
)
from quark_core.runs.config_reading import read_config
from quark_core.runs.environment import GitState, read_git_state
from quark_core.runs.open_run import OpenRun, RunDraft, open_runs
from quark_core.runs.primary_store import (
    ATTACHING,
    JOINING,
    PrimaryReach,
    choose_policy,
    find_parent,
)
from quark_core.runs.rank_roles import RankPart
from quark_core.runs.run_reader import (
    RunReader,
    describe_context,
    find_session_run,
    open_foreign_store,
    open_run_reader,
)

if TYPE_CHECKING:
    from quark_core.runs.primary_store import EarlierRuns

_log = logging.getLogger("quark")

_FORM = (
    "fork_from must be a pair (run_id, step) of a run and the last step to keep, such as "
    "(run.run_id, 1000)"
)


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The run that a fork leaves, and where.

    Attributes:
        run_id: Its id, or the beginning of it.
        step: The last step that the fork has of it.
    """

    run_id: str
    step: int

    def flush(self) -> None:
        """Bring what this process has logged of that run to the store, where it has it open."""
        run = open_runs.find(self.run_id)
        if run is None or run.forked:
            return
        try:
            run.stream.flush(settings.persistence_timeout_s(), sync=False)
        except QuarkError as error:
            _log.warning("fork_from: run %s is not fully stored yet: %s", self.run_id, error)


def check_fork_from(fork_from: object, parent_run_id: str | None) -> ForkPoint | None:
    """Return where a run is forked, or None where it is none.

    Args:
        fork_from: What was given: a run (its id, a session or a RunContext) and a step.
        parent_run_id: What was given as the run's parent, checked.

    Raises:
        SchemaValidationError: Not such a pair, or the parent is another run.
    """
    if fork_from is None:
        return None
    if isinstance(fork_from, str) and "?_step=" in fork_from:
        left, _, at = fork_from.partition("?_step=")
        raise SchemaValidationError(f"{_FORM}; {fork_from!r:.80} is ({left!r:.80}, {at:.20}) here")
    if not isinstance(fork_from, (tuple, list)) or len(fork_from) != 2:
        raise SchemaValidationError(f"{_FORM}, got {describe_argument(fork_from)}")
    run, given = fork_from
    run_id = run if isinstance(run, str) else getattr(run, "run_id", None)
    if not isinstance(run_id, str):
        raise SchemaValidationError(
            f"{_FORM}; its run must be an ID, a session or a RunContext, not {type(run).__name__}"
            + (" without an id" if hasattr(run, "run_id") else "")
        )
    check_run_id(run_id, "fork_from[0]")
    step = check_step(given, "fork_from[1]")
    if step is None:
        raise SchemaValidationError(f"{_FORM}; its step must not be None")
    if parent_run_id is None or run_id.startswith(parent_run_id):
        return ForkPoint(run_id, step)
    if parent_run_id.startswith(run_id):
        return ForkPoint(parent_run_id, step)
    raise SchemaValidationError(
        f"parent_run_id ({parent_run_id}) and fork_from ({run_id}) name two runs. The forked "
        "run is the parent, so remove parent_run_id"
    )


class Checkpoint(NamedTuple):
    """What a state says.

    Attributes:
        run_id: The run.
        next_step: The step after the last one that the checkpoint has seen, or None.
    """

    run_id: str
    next_step: int | None


def make_state(context: RunContext, step: int | None) -> dict[str, Any]:
    """Plain values that name a run and the last step that a checkpoint has seen.

    Raises:
        SchemaValidationError: `step` is no non-negative integer.
    """
    return {
        "run_id": context.run_id,
        "attempt": context.run.attempt,
        "step": check_step(step, "step"),
        "schema_version": CURRENT_SCHEMA_VERSION,
    }


def read_state(state: object) -> Checkpoint | None:
    """What a state says; None for None.

    Raises:
        SchemaValidationError: It is not what `state_dict` gave.
    """
    if state is None:
        return None
    if not isinstance(state, Mapping) or state.get("run_id") is None:
        raise SchemaValidationError("state must be the result of session.state_dict()")
    step = check_step(state.get("step"), "state['step']")
    run_id = check_run_id(state["run_id"], "state['run_id']")
    return Checkpoint(run_id, None if step is None else step + 1)


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
    objective: str | None = None,
    mode: ObjectiveMode | None = None,
    group: str | Iterable[str] | None = None,
    version: str | Callable[[], object] | None = None,
    if_exists: IfExists | None = None,
    fork_from: object = None,
    state: Mapping[str, Any] | None = None,
) -> OpenRun:
    """Start a new run; see `TrainingSession.start_run` for arguments and errors."""
    began_s = time.monotonic()
    project, name = _check_arguments(project, name, strict_mode, parent_run_id)
    settings.check_timeouts()
    settings.source_mode()
    checkpoint = read_state(state)
    fork = check_fork_from(fork_from, parent_run_id)
    checked_notes = check_notes(notes)
    checked_tags = check_tags(tags)
    groups, wished = check_groups(group), check_if_exists(if_exists)
    _check_origins(checkpoint, fork, parent_run_id, wished)
    goal = choose_objective(objective, mode)
    draft = RunDraft(
        storage_dir=storage_dir, config=read_config(config), objective=goal,
        tags=checked_tags, groups=groups,
    ).complete()  # fmt: skip
    snapshot = keep_objective(draft.config or ConfigSnapshot(JsonObject()), draft.objective)
    root = resolve_storage_dir(draft.storage_dir)
    rank = detect_rank()
    chosen = choose_ranks(ranks)
    plan = backend_choice.plan_backends(backends, rank, ranks=chosen)
    start = _Start(
        project=project,
        name=name,
        notes=checked_notes,
        tags=draft.tags,
        parent_run_id=parent_run_id if fork is None else fork.run_id,
        fork=fork,
        inherits_config=(fork is not None or checkpoint is not None) and config is None,
        goal=draft.objective,
        strict_mode=strict_mode,
        snapshot=snapshot,
        here=Here(plan, root, rank, chosen),
        groups=draft.groups,
        fields=_find_version(version),
        launch_key=draft.launch_key,
        extensions=draft.extensions,
    )
    given = rank_roles.find_given_run_id()
    leads = rank_roles.is_leader(plan, rank)
    if leads and checkpoint is not None:
        return _go_on_from(start, checkpoint, began_s)
    policy = JOINING
    if leads:
        policy = choose_policy(restarts=rank_roles.is_restarted(plan), strict=strict_mode)
    with PrimaryReach(plan, root, policy, began_s=began_s) as reach:
        if wished is None or not leads or rank_roles.is_restarted(plan):
            return _begin(start, reach, given)
        # Who asks for nothing of the kind does not wait for the import.
        from quark_core.runs.primary_store import hold_configuration

        with hold_configuration(root, project, snapshot):
            return _begin_unless_done(start, wished, reach, given)


def _check_origins(
    checkpoint: object, fork: object, parent_run_id: str | None, wished: str | None
) -> None:
    """Refuse a run that is asked to go on from two places at once."""
    if checkpoint is not None and (fork, parent_run_id, wished) != (None, None, None):
        raise SchemaValidationError(
            "state continues its own run, so it cannot be combined with fork_from, "
            "parent_run_id or if_exists, which start a new run"
        )
    if fork is not None and wished is not None:
        raise SchemaValidationError(
            "if_exists and fork_from cannot be combined, because a fork is always a new run"
        )


def _begin(start: _Start, reach: PrimaryReach, given: str | None) -> OpenRun:
    """Begin the run, or this rank's part in it."""
    plan, rank, root = start.here.plan, start.here.rank, start.here.root
    leads = rank_roles.is_leader(plan, rank)
    part = _choose_part(plan, rank, root, start.launch_name, given, reach)
    if part.is_done and part.run_id is not None:
        return _stand_by(start, rank_roles.find_stored(reach, part.run_id), part, reach)
    if part.restarts and part.run_id is not None:
        taken_up = _take_up(start, part, part.run_id, reach)
        if isinstance(taken_up, OpenRun):
            return taken_up
        part = taken_up
    if start.fork is not None:
        start.fork.flush()
    parent = _find_parent(reach, start) if leads else None
    opener = _Opener(
        start, reach, parent, read_git_state(working_directory()), format_time(now_us())
    )
    try:
        return opener.open(part)
    except InvalidRunStateError:
        if not part.derived:
            raise
        # Two processes lead one launch, and the other one was first.
        return opener.open(part.stand_alone())
    except StoreUnavailableError:
        if reach.outage is None:
            raise
        part.claim()
        return opener.open(part)


def _begin_unless_done(
    start: _Start, if_exists: IfExists, reach: PrimaryReach, given: str | None
) -> OpenRun:
    """Begin the run, or what an earlier run of its configuration asks for in place of that."""
    found = _look_back(start, if_exists, reach)
    if found is not None and found.unfinished is not None:
        try:
            return _go_on(start, found.unfinished, reach)
        except InvalidRunStateError as error:
            # Somebody else has taken it up meanwhile, on another machine.
            _log.warning("run %s is not resumed: %s", found.unfinished.run.id, error)
            found = _look_back(start, if_exists, reach)
    if found is None:
        return _begin(start, reach, given)
    if found.done is not None:
        run_id = str(found.done.run.id)
        part = rank_roles.lead_earlier(
            start.here.plan, start.here.root, start.launch_name, run_id, is_done=True
        )
        part.claim()
        return _stand_by(start, found.done, part, reach)
    fields = JsonObject({**start.fields, **found.fields})
    return _begin(replace(start, fields=fields), reach, given)


def _look_back(start: _Start, if_exists: IfExists, reach: PrimaryReach) -> EarlierRuns | None:
    from quark_core.runs.primary_store import look_back

    version = start.fields.get(VERSION_FIELD)
    return look_back(if_exists, reach, start.project, start.snapshot, version)


def _go_on(start: _Start, stored: StoredRun, reach: PrimaryReach) -> OpenRun:
    """The next attempt of an earlier run that has not come to its end."""
    run_id = str(stored.run.id)
    part = rank_roles.lead_earlier(
        start.here.plan, start.here.root, start.launch_name, run_id, is_done=False
    )
    return continue_run(
        stored, start.here, reach, part, start.snapshot, extensions=start.extensions
    )


def _go_on_from(start: _Start, checkpoint: Checkpoint, began_s: float) -> OpenRun:
    """The next attempt of the run that a checkpoint is of.

    Raises:
        SchemaValidationError: The launch, or the project, has another run.
        RunNotFoundError: The store has no such run.
        InvalidRunStateError: It is completed, or alive.
    """
    plan, root = start.here.plan, start.here.root
    part = rank_roles.lead_checkpoint(plan, root, start.launch_name, checkpoint.run_id)
    with reach_run(
        checkpoint.run_id, start.here, reopen=False, began_s=began_s, restarts=part.restarts
    ) as (stored, reach):
        if stored.project.name != start.project:
            raise SchemaValidationError(
                f"state is of run {checkpoint.run_id} of project {stored.project.name!r:.80}, not "
                f"of {start.project!r:.80}. Pass that project, or omit state to start a new run"
            )
        return continue_run(
            stored, start.here, reach, part, None if start.inherits_config else start.snapshot,
            from_step=checkpoint.next_step, extensions=start.extensions,
        )  # fmt: skip


def _stand_by(
    start: _Start, stored: StoredRun | None, part: RankPart, reach: PrimaryReach
) -> OpenRun:
    """What a process holds whose run another run has done: it knows that one, and keeps nothing."""
    if stored is None:
        context = _Opener(start, reach, None, None, format_time(now_us())).describe(part)
        stored = StoredRun(
            project=context.project,
            run=context.run,
            state="completed",
            config=start.snapshot,
            environment=None,
            heartbeat_at=None,
        )
    else:
        context = describe_context(stored, reach.primary, start.here.root)
    run = OpenRun(
        msgspec.structs.replace(context, read_only=False, backends=()),
        RunStream(Origin(part.run_id, attempt=part.attempt, rank=start.here.rank.rank)),
        None,
        leads=False,
    )
    run.config, run.fields = stored.config, stored.fields
    run.already_done = _summarize(stored, reach)
    run.extensions = start.extensions
    return run


def _summarize(stored: StoredRun, reach: PrimaryReach) -> RunSummary:
    """An earlier run with its metrics, where the store can say them."""
    from quark_core.runs.run_search import summarize_run

    primary = reach.primary
    try:
        if primary is not None:
            return reach.ask(lambda: summarize_run(primary, str(stored.run.id)))
    except QuarkError as error:
        _log.debug("the metrics of run %s are unknown: %s", stored.run.id, error)
    return RunSummary(stored=stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What a run is started with, checked, and where."""

    project: str
    name: str | None
    notes: str | None
    tags: tuple[str, ...]
    parent_run_id: str | None
    fork: ForkPoint | None
    inherits_config: bool
    goal: Objective | None
    strict_mode: bool
    snapshot: ConfigSnapshot
    here: Here
    groups: tuple[str, ...]
    fields: JsonObject
    launch_key: str
    extensions: dict[type, object]

    @property
    def launch_name(self) -> str:
        """What all ranks of a launch call the run."""
        return f"{self.project}\0{self.launch_key}" if self.launch_key else self.project

    def choose_config(self, parent: StoredRun | None) -> ConfigSnapshot:
        """What the run begins with: a fork that is given no configuration has its parent's."""
        if not self.inherits_config or parent is None or parent.config is None:
            return self.snapshot
        return keep_objective(parent.config, self.goal)


def _take_up(start: _Start, part: RankPart, run_id: str, reach: PrimaryReach) -> OpenRun | RankPart:
    """The next attempt of a run that was restarted, or this rank's part in a new one."""
    stored = _find_restarted(reach, start.here.root, run_id)
    if stored is None:
        part = rank_roles.number_offline(part, find_known_here(reach, start.here.root, run_id))
        part.claim()
        return part
    try:
        return continue_run(
            stored, start.here, reach, part, None if start.inherits_config else start.snapshot,
            extensions=start.extensions,
        )  # fmt: skip
    except InvalidRunStateError as error:
        _log.warning("the restarted run is not resumed: %s", error)
        return part.stand_alone()


@dataclass(frozen=True, slots=True)
class _Opener:
    """Opens the stream of a new run, and announces the run where this rank leads it."""

    start: _Start
    reach: PrimaryReach
    parent: StoredRun | None
    git: GitState | None
    moment: str

    def open(self, part: RankPart) -> OpenRun:
        start, reach = self.start, self.reach
        run = open_part(self.describe(part), start.here.plan, reach.primary, start.here.rank, part)
        config = run.config = start.choose_config(self.parent)
        run.fields, run.extensions = start.fields, start.extensions
        reach.hand_over(run)
        if part.leads:
            goes_on = reach.outage is not None and part.attempt > 0
            event_type = "run_resumed" if goes_on else "run_started"
            announce(run, config, start.here.rank, self.git, event_type, reach, is_new=True)
        return announce_rank(run, start.here.plan, start.here.rank)

    def describe(self, part: RankPart) -> RunContext:
        """The context of the run before it is begun."""
        start, run_id = self.start, part.run_id
        primary = self.reach.primary
        location = backend_choice.locate_run(primary, start.here.root, run_id or "unknown")
        parent = None if self.parent is None else self.parent.run
        record = RunRecord(
            id=run_id,
            project_id=ProjectRecord.derive_id(start.project),
            project_name=start.project,
            status="running",
            parent_run_id=parent.id if parent else start.parent_run_id,
            lineage_root_run_id=parent.lineage_root_run_id
            if parent
            else (start.parent_run_id or run_id),
            resume_count=part.attempt,
            run_path=location.run_path,
            git_commit=self.git.commit if self.git else None,
            strict_mode=start.strict_mode,
            tags=start.tags,
            attempt=part.attempt,
            name=start.name,
            notes=start.notes,
            created_at=self.moment,
            updated_at=self.moment,
            ended_at=None,
            groups=start.groups,
            fork_step=None if start.fork is None else start.fork.step,
        )
        project = ProjectRecord(
            record.project_id, start.project, str(start.here.root), self.moment, self.moment
        )
        return start.here.describe(primary, project, record)


def _check_arguments(
    project: object, name: object, strict_mode: object, parent_run_id: object
) -> tuple[str, str | None]:
    """Refuse what no run can have; its project and its name as they are kept.

    Raises:
        SchemaValidationError: One of them; the message names it.
    """
    labels = check_label(project, "project"), None if name is None else check_label(name, "name")
    if not isinstance(strict_mode, bool):
        raise SchemaValidationError(
            f"strict_mode must be True or False, not {type(strict_mode).__name__}"
        )
    if parent_run_id is not None:
        check_run_id(parent_run_id, "parent_run_id")
    return labels


def _find_version(version: object) -> JsonObject:
    """The field that says what a run's code is called; none where nobody has called it."""
    if callable(version):
        try:
            version = version()
        except Exception as error:  # noqa: BLE001 - a name is worth no run
            _log.warning("version() failed (%s), so the run has no version", error)
            version = None
    if version is None:
        return JsonObject()
    return check_fields({VERSION_FIELD: check_label(version, "version")}, "version")


def _choose_part(
    plan: backend_choice.Plan,
    rank: RankInfo,
    root: Path,
    project: str,
    given: str | None,
    reach: PrimaryReach,
) -> RankPart:
    """This rank's part in the run that it, or another rank of its launch, begins."""
    if rank_roles.is_leader(plan, rank):
        return rank_roles.lead(plan, rank, root, project, given, reach)
    part = rank_roles.follow(plan, rank, root, project, given)
    return rank_roles.settle_attempt(part, reach)


def _find_restarted(reach: PrimaryReach, root: Path, run_id: str) -> StoredRun | None:
    """A run that the launcher has restarted; None where its first attempt left nothing of it."""
    stored = rank_roles.find_stored(reach, run_id)
    if stored is None and reach.outage is None:
        recovery.adopt_run(root, run_id, min(_ADOPT_S, reach.left_s / 2))
        stored = rank_roles.find_stored(reach, run_id)
    return stored


def _find_parent(reach: PrimaryReach, start: _Start) -> StoredRun | None:
    """The run that another one descends from; as this machine knows it where nobody can be asked.

    Raises:
        RunNotFoundError: The store has no such run.
    """
    run_id = start.parent_run_id
    if run_id is None or reach.primary is None:
        return None
    try:
        return find_parent(reach, run_id, "parent_run_id" if start.fork is None else "fork_from")
    except StoreUnavailableError:
        if reach.outage is None:
            raise
    known = find_known_here(reach, start.here.root, run_id)
    return None if known is None else known.to_stored()


class _ReadStream(RunStream):
    """The stream of a run that is read: a flush brings what others have left of it.

    Args:
        run: Reads the run.
    """

    def __init__(self, run: RunReader) -> None:
        super().__init__(Origin(run.run_id))
        self._reader = run

    def flush(
        self,
        timeout_s: float,  # noqa: ARG002 - of what this process has logged, which is nothing
        level: FlushLevel = "stored",  # noqa: ARG002
        *,
        sync: bool = True,  # noqa: ARG002
    ) -> None:
        """Bring to the store what processes that are gone have left of the run."""
        self._reader.catch_up()


def open_for_reading(
    run_id: str, storage_dir: str | Path | None, backend: str | None = None
) -> OpenRun:
    """Open a run without touching it; see `quark.open_run`."""
    if backend is None:
        found = open_run_reader(run_id, storage_dir)
        why = "was opened for reading only; call resume_run to continue it"
    else:
        check_run_id(run_id)
        store = open_foreign_store(storage_dir, backend)
        found = store.open_run(run_id)
        why = f"was opened from {store.name} for reading only"
    run = OpenRun(found.context, _ReadStream(found), found.reader, refusal=f"the run {why}")
    assert found.stored is not None
    run.config, run.fields = found.stored.config, found.stored.fields
    return run


def attach_run(context: RunContext) -> OpenRun:
    """Open a stream of this process's own into a run that another process holds open.

    A run that has ended is opened for reading only.
    """
    if context.read_only and context.run_id is not None:
        return open_for_reading(context.run_id, context.storage_dir, *context.backends[:1])
    rank = detect_rank()
    plan = backend_choice.plan_backends(
        list(context.backends) or "none",
        rank,
        ranks=None if context.ranks is None else parse_ranks(context.ranks, "context.ranks"),
    )
    leads = rank_roles.is_leader(plan, rank)
    if plan.primary is None or context.run_id is None:
        return OpenRun(context, RunStream(Origin(context.run_id)), None)
    root = context.storage_dir
    with PrimaryReach(plan, root, ATTACHING, read_only=True) as reach:
        awaits_run = not leads
        try:
            stored = reach.load_run(context.run_id)
        except StoreUnavailableError:
            if context.status in TERMINAL_STATUSES:
                raise
            stored, awaits_run = None, True
        except RunNotFoundError:
            known = find_known_here(reach, root, context.run_id)
            if leads and (known is None or not known.is_running):
                raise
            stored, awaits_run = None, True  # it is about to come
        if stored is not None and stored.run.status in TERMINAL_STATUSES:
            ended = OpenRun(
                describe_context(stored, reach.primary, root),
                RunStream(Origin(context.run_id)),
                reach.primary,
                refusal=f"the run has ended ({stored.run.status}); call resume_run to continue it",
            )
            reach.hand_over(ended)
            return ended
        if reach.outage is None:
            reach.open_for_writing()
        run = open_run_stream(
            context, plan, reach.primary, rank, leads=leads, awaits_run=awaits_run
        )
        reach.hand_over(run)
        # Gives the writer its start time at the store, whatever timestamps follow.
        run.emit_lifecycle("heartbeat")
        run.stream.hand_over(HAND_OVER_S)
        return run


def resolve_target(target: object) -> OpenRun:
    """Return the open run of a session or of a `RunContext`.

    Raises:
        SchemaValidationError: `target` is neither.
    """
    if isinstance(target, RunContext):
        with open_runs.attaching(target.run_id):
            found = open_runs.find(target.run_id)
            if found is None:
                found = attach_run(target)
                if found.refusal is None and found.stream.active:
                    found = open_runs.attach(found)
        return found
    run = find_session_run(target)
    if run is None:
        raise SchemaValidationError(
            f"session must be a TrainingSession or a RunContext, not {type(target).__name__}"
        )
    return run
