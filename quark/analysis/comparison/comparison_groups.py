"""The sides of a comparison: runs found, opened and read, with their analyses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from quark.analysis.comparison.changes import find_seed
from quark.analysis.comparison.results import AnalysisOrigin, RunReference
from quark.analysis.health import is_of_another_end, tell_end
from quark.analysis.outputs import AnalysisTarget
from quark.analysis.run_data import RunData
from quark_core.backends.contract import SupportsRead
from quark_core.backends.run_summary import StoredRun
from quark_core.errors import SchemaValidationError
from quark_core.records import AlertRecord, HealthScoreRecord, PhaseRecord, StreamRecord
from quark_core.records.runs import RunContext
from quark_core.runs.open_run import open_runs
from quark_core.runs.run_reader import RunReader, find_session_run, open_run_reader, read_run

AnyRecord = TypeVar("AnyRecord", bound=StreamRecord)

Target = RunReader | RunContext | str
"""A run of a side as the engines pass it on: sessions are readers by then."""

PHASES_NAME = "phases"
"""Under this name the phases' generations are stored."""

_OUTDATED = "records arrived after its stored analysis, so it was analyzed again in memory"


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run of a side.

    Attributes:
        stored: The run as its store knows it.
        data: Its records.
        alerts, health_scores, phases: Its analysis.
        origin: Where the analysis comes from.
        remark: Why there is none, or None.
        context: The run's context.
        reader: Where its records are read, or None.
    """

    stored: StoredRun
    data: RunData
    alerts: tuple[AlertRecord, ...]
    health_scores: tuple[HealthScoreRecord, ...]
    phases: tuple[PhaseRecord, ...]
    origin: AnalysisOrigin
    remark: str | None
    context: RunContext
    reader: SupportsRead | None

    @property
    def run_id(self) -> str:
        """The run."""
        return self.data.run_id

    def refer(self) -> RunReference:
        """The run as the result shows it."""
        return refer_to_run(self.stored, self.data, self.origin)


def refer_to_run(stored: StoredRun, data: RunData, analysis: AnalysisOrigin) -> RunReference:
    """A run as a result shows it."""
    run = stored.run
    return RunReference(
        run_id=data.run_id,
        run_count=1,
        project_name=run.project_name,
        name=run.name,
        status=run.status,
        state=stored.state,
        tags=run.tags,
        git_commit=run.git_commit,
        created_at=run.created_at,
        ended_at=run.ended_at,
        seed=find_seed(stored),
        last_step=data.last_step,
        analysis=analysis,
        ending=stored.ending,
    )


def list_targets(target: object, argument: str) -> list[Target]:
    """The runs of one side, checked by type.

    Raises:
        SchemaValidationError: Not a TrainingSession, a RunContext, a run id or
            a list or tuple of them; the message names `argument`.
    """
    targets = list(target) if isinstance(target, (list, tuple)) else [target]
    if not targets:
        raise SchemaValidationError(f"{argument} must name at least one run, got an empty list")
    return [_check_target(item, argument) for item in targets]


def _check_target(item: object, argument: str) -> RunReader | RunContext | str:
    run = find_session_run(item)
    if run is not None:
        return RunReader.of(run)
    if isinstance(item, (RunReader, RunContext)) or (isinstance(item, str) and item):
        return item
    raise SchemaValidationError(
        f"{argument} must be a TrainingSession, a RunContext, a run ID, or a list of them, not "
        f"{type(item).__name__}"
    )


def find_storage_dir(*sides: Sequence[Target]) -> Path | None:
    """Where ids are looked up: the first reader's or context's storage_dir, or None."""
    for side in sides:
        for item in side:
            if not isinstance(item, str):
                return (item.context if isinstance(item, RunReader) else item).storage_dir
    return None


def load_side(
    targets: Sequence[Target], storage_dir: Path | None, opened: ExitStack
) -> list[ComparedRun]:
    """Read the runs of one side, each once however often it is named.

    Args:
        targets: The runs.
        storage_dir: Where ids are looked up.
        opened: Closes the stores that are opened for them.

    Raises:
        RunNotFoundError: The store has no such run.
        SessionStoreError: The store cannot be read.
    """
    found: dict[str, ComparedRun] = {}
    for target in targets:
        run = _load(target, storage_dir, opened)
        found.setdefault(run.run_id, run)
    return list(found.values())


def describe_side(members: tuple[RunReference, ...]) -> RunReference:
    """One side as a result shows it, out of its runs."""
    if len(members) == 1:
        return members[0]
    origins = [member.analysis for member in members]
    worst = next(origin for origin in ("none", "in_memory", "stored") if origin in origins)
    return msgspec.structs.replace(
        members[0], run_count=len(members), analysis=worst, members=members
    )


def open_target(item: Target, storage_dir: Path | None, opened: ExitStack) -> AnalysisTarget:
    """Open a run of a side to read it; `opened` closes its store, unless the caller has it.

    Raises:
        RunNotFoundError: There is no such run.
        SessionStoreError: The store cannot be read.
    """
    if isinstance(item, RunReader):
        return AnalysisTarget(item)
    if isinstance(item, RunContext):
        run = read_run(item)
    else:
        # The beginning of an id may mean a run of this process, of which not all is stored yet.
        found = open_runs.find(item)
        run = open_run_reader(item, storage_dir) if found is None else RunReader.of(found)
        if (found := open_runs.find(run.run_id)) is not None and run.held is None:
            run.close()
            run = RunReader.of(found)
    opened.callback(run.close)
    return AnalysisTarget(run)


def _load(item: Target, storage_dir: Path | None, opened: ExitStack) -> ComparedRun:
    target = open_target(item, storage_dir, opened)
    data, context = target.load(), target.context
    stored = data.stored or StoredRun(
        project=context.project, run=context.run, state=context.status
    )
    return _analyze(stored, target, data)


def _analyze(stored: StoredRun, target: AnalysisTarget, data: RunData) -> ComparedRun:
    """Take the stored analysis; what is not there, or is outdated, is found out and not stored."""
    # Late: the rules take long to load, and who asks for runs alone needs none.
    from quark.analysis.engine import ANALYZER_NAME, analyze_run
    from quark.analysis.phases import analyze_phases

    alerts = _read(target, AlertRecord, ANALYZER_NAME)
    scores = _read(target, HealthScoreRecord, ANALYZER_NAME)
    phases = _read(target, PhaseRecord, PHASES_NAME)
    origin: AnalysisOrigin = "stored"
    remark: str | None = None
    # The data count as read up to their newest record: metrics now, layers and parameters below.
    if data.metrics and _is_outdated(phases, data):
        phases, remark = (), _OUTDATED
    if data.last_step is not None and _is_outdated(scores, data):
        alerts, scores, remark = (), (), _OUTDATED
    elif is_of_another_end(stored, alerts):
        alerts, scores = (), ()
    try:
        if not alerts and not scores:
            result = analyze_run(data)
            alerts, scores, origin = tuple(result.alerts), tuple(result.health_scores), "in_memory"
        alerts, scores = tell_end(stored, alerts, scores, data.last_step)
        if not phases:
            phases = analyze_phases(data).phases
            origin = "in_memory" if phases else origin
    except Exception as error:  # noqa: BLE001 - a rule of a third party may raise anything
        origin, remark = "none", f"the analysis failed: {type(error).__name__}: {error}"
    reader = target.run.reader if target.run_id else None
    return ComparedRun(stored, data, alerts, scores, phases, origin, remark, target.context, reader)


def _is_outdated(outputs: Sequence[StreamRecord], data: RunData) -> bool:
    """Whether what was read is newer than what an analysis had seen."""
    return bool(outputs) and min(output.time_us for output in outputs) < data.newest_us


def _read(target: AnalysisTarget, kind: type[AnyRecord], analyzer: str) -> tuple[AnyRecord, ...]:
    if not target.can_store:
        return ()
    return target.read_outputs(kind.KIND, analyzer).to_records()  # type: ignore[return-value]
