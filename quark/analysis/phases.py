"""PhaseAnalyzer: which regimes a training went through, and where one became the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, get_args

import msgspec
import numpy as np

from quark.analysis.config import PhaseAnalyzerConfig
from quark.analysis.outputs import AnalysisTarget, identify, open_analysis
from quark.analysis.phase_findings import PhaseName, find_phases
from quark.analysis.run_data import RunData
from quark_core.errors import SchemaValidationError
from quark_core.records import PhaseRecord
from quark_core.records.checks import check_choice
from quark_core.records.query import check_index

_ANALYZER = "phases"


@dataclass(frozen=True, kw_only=True)
class PhaseAnalysisResult:
    """What `PhaseAnalyzer.analyze` found.

    Attributes:
        run_id: The run.
        phases: The phases in the order of the run: they cover it from its
            first to its last step without overlap or hole.
        generation: Number under which they are stored, 1 for the first; None
            where they are not.
        stored: Whether they are stored.
        notes: What stood in the way: why there are no phases, why they are
            not stored, which curves could not be used.
    """

    run_id: str
    phases: tuple[PhaseRecord, ...]
    generation: int | None = None
    stored: bool = False
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {
            "run_id": self.run_id,
            "generation": self.generation,
            "stored": self.stored,
            "phases": [phase.to_dict() for phase in self.phases],
            "notes": list(self.notes),
        }


class PhaseAnalyzer:
    """Segments a run into training regimes.

    It looks at the training and the validation loss, or where a run has no
    loss at the accuracies; the same records always give the same phases.
    Every method may be called from any thread.

    Args:
        session: A TrainingSession of any state, also from `quark.open_run`,
            or a RunContext. A run that goes on can be analyzed at any time.
        config: See PhaseAnalyzerConfig.

    Raises:
        SchemaValidationError: An argument of another type.
        RunNotFoundError: The store has no such run.
        SessionStoreError: The store cannot be opened.
    """

    def __init__(self, session: object, *, config: PhaseAnalyzerConfig | None = None) -> None:
        if config is not None and not isinstance(config, PhaseAnalyzerConfig):
            raise SchemaValidationError(
                f"config must be a PhaseAnalyzerConfig, not {type(config).__name__}"
            )
        self._config = config or PhaseAnalyzerConfig()
        self._target: AnalysisTarget = open_analysis(session)

    @property
    def config(self) -> PhaseAnalyzerConfig:
        """The settings."""
        return self._config

    def analyze(
        self, *, replace_existing: bool | None = None, store: bool | None = None
    ) -> PhaseAnalysisResult:
        """Flush the run, find its phases and store them, all at once.

        Where the run's store keeps no outputs of analyzers or may only be
        read, the result says so and is not stored. The run's mirrors get them
        as from `AnalyzerEngine.analyze`.

        Args:
            replace_existing: Whether `read_phases` no longer returns what was
                stored before; None takes the configuration's
                `replace_existing_outputs`.
            store: Whether they are stored; None stores them unless the run was
                opened for reading only, as in `AnalyzerEngine.analyze`.

        Raises:
            SchemaValidationError: `replace_existing` or `store` is no bool.
            SessionStoreError: The store cannot be read, or is busy or full;
                nothing was stored.
        """
        replaces = replace_existing
        if replaces is None:
            replaces = self._config.replace_existing_outputs
        if not isinstance(replaces, bool):
            raise SchemaValidationError(
                f"replace_existing must be True, False or None, not {type(replaces).__name__}"
            )
        target = self._target
        refusal = target.refuse(store)
        result = analyze_phases(target.load(), self._config)
        generation = None
        if refusal is None:
            generation = target.write(_ANALYZER, replaces, {PhaseRecord.KIND: result.phases})
            refusal = target.refusal
        notes = result.notes
        if refusal is not None:
            notes = (*notes, f"not stored: {refusal}")
        return PhaseAnalysisResult(
            run_id=target.run_id,
            phases=identify(result.phases, target.run_id, _ANALYZER, generation),
            generation=generation,
            stored=generation is not None,
            notes=notes,
        )

    def read_phases(
        self,
        *,
        phase_name: str | None = None,
        step: int | None = None,
        step_min: int | None = None,
        step_max: int | None = None,
        limit: int | None = None,
    ) -> tuple[PhaseRecord, ...]:
        """The stored phases that fit, in the order of the run.

        Args:
            phase_name: Only this phase.
            step: Only phases that hold this step.
            step_min, step_max: Only phases that overlap these bounds, both
                included. A phase that is known in epochs only fits no bound.
            limit: The last N.

        Raises:
            SchemaValidationError: An unknown phase, or a bound that is no
                non-negative integer.
            SessionStoreError: The store cannot be read, or keeps no outputs of
                analyzers.
        """
        if phase_name is not None:
            check_choice(phase_name, "phase_name", get_args(PhaseName))
        exact, low, high, most = (
            check_index(value, argument)
            for argument, value in (
                ("step", step), ("step_min", step_min), ("step_max", step_max), ("limit", limit),
            )
        )  # fmt: skip
        columns = self._target.read_outputs(PhaseRecord.KIND, _ANALYZER)
        first, last = columns["step_start"], columns["step_end"]
        kept = np.full(columns.count, True)
        if phase_name is not None:
            kept &= columns["phase_name"] == phase_name
        if (exact, low, high) != (None, None, None):
            kept &= first >= 0
        for bound in (exact, low):
            if bound is not None:
                kept &= last >= bound
        for bound in (exact, high):
            if bound is not None:
                kept &= first <= bound
        return columns.take(kept).keep_newest(most).to_records()  # type: ignore[return-value]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PhaseAnalyzer belongs to its process and cannot be pickled or copied: give the "
            "other process session.context, and make a PhaseAnalyzer of it there"
        )


def analyze_phases(data: RunData, config: PhaseAnalyzerConfig | None = None) -> PhaseAnalysisResult:
    """Find the phases of a run that is read already; nothing is stored."""
    found, notes = find_phases(data, config or PhaseAnalyzerConfig())
    phases = [msgspec.structs.replace(phase, time_us=data.newest_us) for phase in found]
    return PhaseAnalysisResult(
        run_id=data.run_id,
        phases=identify(phases, data.run_id, _ANALYZER, None),
        notes=notes,
    )
