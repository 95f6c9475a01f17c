"""What is compared: runs found, opened and read; their analyses, stored or made here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from quark_core.analysis.comparison.changes import find_seed
from quark_core.analysis.comparison.results import AnalysisOrigin, RunReference
from quark_core.analysis.outputs import AnalysisTarget, open_analysis
from quark_core.analysis.run_data import RunData
from quark_core.backends.contract import StoredRun
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records import (
    AlertRecord,
    HealthScoreRecord,
    PhaseRecord,
    StreamRecord,
)
from quark_core.records.runs import RunContext
from quark_core.runs.open_run import open_runs
from quark_core.runs.opening import open_for_reading
from quark_core.sessions.session import TrainingSession

__all__ = [
    "ComparedRun",
    "describe_side",
    "find_storage_dir",
    "list_targets",
    "load_side",
    "open_target",
    "refer_to_run",
]

AnyRecord = TypeVar("AnyRecord", bound=StreamRecord)

PHASES_NAME = "phases"
"""Under this name the phases' generations are stored."""

_OUTDATED = "records came after its stored analysis, so it was made anew in memory"


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
    """

    stored: StoredRun
    data: RunData
    alerts: tuple[AlertRecord, ...]
    health_scores: tuple[HealthScoreRecord, ...]
    phases: tuple[PhaseRecord, ...]
    origin: AnalysisOrigin
    remark: str | None
    context: RunContext

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
    )


def list_targets(target: object, argument: str) -> list[object]:
    """The runs of one side, checked by type.

    Raises:
        SchemaValidationError: Not a TrainingSession, a RunContext, a run id or
            a list or tuple of them; the message names `argument`.
    """
    targets = list(target) if isinstance(target, (list, tuple)) else [target]
    if not targets:
        raise SchemaValidationError(f"{argument} must name at least one run, got an empty list")
    for item in targets:
        known = isinstance(item, (TrainingSession, RunContext))
        if not known and not (isinstance(item, str) and item):
            raise SchemaValidationError(
                f"{argument} must be a TrainingSession, a RunContext, the id of a run, or a list "
                f"of them, not {type(item).__name__}"
            )
    return targets


def find_storage_dir(*sides: Sequence[object]) -> Path | None:
    """Where ids are looked up: the first session's or context's storage_dir, or None."""
    for side in sides:
        for item in side:
            context = item.context if isinstance(item, TrainingSession) else item
            if isinstance(context, RunContext):
                return context.storage_dir
    return None


def load_side(targets: Sequence[object], storage_dir: Path | None) -> list[ComparedRun]:
    """Read the runs of one side, each once however often it is named.

    Raises:
        RunNotFoundError: The store has no such run.
        SessionStoreError: The store cannot be read.
    """
    found: dict[str, ComparedRun] = {}
    for target in targets:
        run = _load(target, storage_dir)
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


def open_target(item: object, storage_dir: Path | None) -> TrainingSession | RunContext:
    """A run of a side, where it is an id opened.

    Raises:
        RunNotFoundError: There is no such run.
        SessionStoreError: The store cannot be read.
    """
    if isinstance(item, str):
        found = open_runs.find(item)
        if found is None:
            read = open_for_reading(item, storage_dir)
            # The beginning of an id may mean a run of this process, of which not all is stored yet.
            found = open_runs.find(read.context.run_id) or read
        return TrainingSession(found)
    assert isinstance(item, (TrainingSession, RunContext))
    return item


def _load(item: object, storage_dir: Path | None) -> ComparedRun:
    item = open_target(item, storage_dir)
    target = open_analysis(item)
    return _analyze(_find_stored(item), target, target.load())


def _find_stored(item: TrainingSession | RunContext) -> StoredRun:
    """The run with its configuration and environment, as far as a store has them."""
    context = item.context if isinstance(item, TrainingSession) else item
    known = StoredRun(project=context.project, run=context.run, state=context.status)
    try:
        found = open_runs.find(context.run_id)
        if isinstance(item, TrainingSession):
            found = item.open_run
        elif found is None and context.run_id is not None:
            found = open_for_reading(context.run_id, context.storage_dir)
        if found is None or found.reader is None or context.run_id is None:
            return known
        return found.reader.load_run(context.run_id)
    except SessionStoreError:
        # A context may be of a backend that only reads points back.
        return known


def _analyze(stored: StoredRun, target: AnalysisTarget, data: RunData) -> ComparedRun:
    """Take the stored analysis; what is not there, or is outdated, is found out and not stored."""
    # Late: the rules take long to load, and who asks for runs alone needs none.
    from quark_core.analysis.diagnosis import analyze_run
    from quark_core.analysis.engine import ANALYZER_NAME
    from quark_core.analysis.phases import analyze_phases

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
    try:
        if not alerts and not scores:
            result = analyze_run(data)
            alerts, scores, origin = tuple(result.alerts), tuple(result.health_scores), "in_memory"
        if not phases:
            phases = analyze_phases(data).phases
            origin = "in_memory" if phases else origin
    except Exception as error:  # noqa: BLE001 - a rule of a third party may raise anything
        remark = f"the analysis failed: {type(error).__name__}: {error}"
        return ComparedRun(stored, data, alerts, scores, phases, "none", remark, target.context)
    return ComparedRun(stored, data, alerts, scores, phases, origin, remark, target.context)


def _is_outdated(outputs: Sequence[StreamRecord], data: RunData) -> bool:
    """Whether what was read is newer than what an analysis had seen."""
    return bool(outputs) and min(output.time_us for output in outputs) < data.newest_us


def _read(target: AnalysisTarget, kind: type[AnyRecord], analyzer: str) -> tuple[AnyRecord, ...]:
    if not target.can_store:
        return ()
    return target.read_outputs(kind.KIND, analyzer).to_records()  # type: ignore[return-value]
