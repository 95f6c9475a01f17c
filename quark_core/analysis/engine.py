"""AnalyzerEngine: alerts and health scores of a run, made, stored and read back."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Literal, NoReturn, get_args

from quark_core.analysis.analyzer_config import AnalyzerEngineConfig
from quark_core.analysis.diagnosis import AnalyzerResult, analyze_run
from quark_core.analysis.outputs import identify, open_analysis
from quark_core.analysis_records import AlertCategory, AlertSeverity, HealthScoreKey
from quark_core.errors import SchemaValidationError
from quark_core.query import Query
from quark_core.records import AlertRecord, HealthScoreRecord

__all__ = ["ANALYZER_NAME", "AnalyzerEngine", "RuleExplanation"]

ANALYZER_NAME = "analyzer"
"""Under this name its generations are stored."""


@dataclass(frozen=True, kw_only=True)
class RuleExplanation:
    """Why a rule fired, or did not.

    Attributes:
        rule_id: The rule.
        state: `fired`, `quiet`, or `no_data` where it could not look.
        reason: In one sentence.
        missing: Which data it lacked.
        observed: The figure that came nearest to firing, or None.
        threshold: What it would have had to reach, or None.
    """

    rule_id: str
    state: Literal["fired", "quiet", "no_data"]
    reason: str
    missing: tuple[str, ...]
    observed: float | None
    threshold: float | None

    def __str__(self) -> str:
        text = f"{self.rule_id}: {self.state}: {self.reason}"
        if self.missing:
            text += f"; missing: {', '.join(self.missing)}"
        if self.observed is not None and self.threshold is not None:
            text += f" (observed {self.observed:.3g}, threshold {self.threshold:.3g})"
        return text


class AnalyzerEngine:
    """Finds out what goes wrong in a run, and how well it does.

    Works on a run that goes on, one that has ended, and one from
    `quark.open_run`, over any backend that reads. Every method may be called
    from any thread.

    Args:
        session: A TrainingSession or a RunContext.
        config: Settings; see AnalyzerEngineConfig.

    Raises:
        SchemaValidationError: `session` or `config` is of another type, or the
            settings name a rule that there is not.
        RunNotFoundError: The store has no such run.
        SessionStoreError: The store cannot be opened.
    """

    def __init__(self, session: object, *, config: AnalyzerEngineConfig | None = None) -> None:
        if config is not None and not isinstance(config, AnalyzerEngineConfig):
            raise SchemaValidationError(
                f"config must be an AnalyzerEngineConfig, not {type(config).__name__}"
            )
        self.config = config or AnalyzerEngineConfig()
        self._target = open_analysis(session)
        self._lock = threading.Lock()
        self._latest: AnalyzerResult | None = None

    @property
    def run_id(self) -> str:
        """The run."""
        return self._target.run_id

    def analyze(self, *, replace_existing: bool | None = None) -> AnalyzerResult:
        """Look at all that the run has now, and store what was found as one generation.

        Readers see it all at once. On a backend that keeps no outputs, such as
        another tool's, the result is returned only (`stored` is False). The
        run's mirrors get it too: in the background while the run is open in
        this process; of one that has ended, this waits for them for
        QUARK_EXIT_TIMEOUT_SECONDS (10) at most, and `quark sync` does the rest.

        Args:
            replace_existing: Whether earlier outputs are no longer seen; None
                takes `replace_existing_outputs` of the settings.

        Raises:
            SchemaValidationError: `replace_existing` is no bool.
            SessionStoreError: The store cannot be read or written.
        """
        replaces = self.config.replace_existing_outputs
        if replace_existing is not None:
            if not isinstance(replace_existing, bool):
                raise SchemaValidationError("replace_existing must be True, False or None")
            replaces = replace_existing
        target = self._target
        with self._lock:
            place = 0 if replaces or not target.can_store else self._count_generations()
            result = analyze_run(target.load(), self.config, place=place)
            outputs = {
                AlertRecord.KIND: result.alerts,
                HealthScoreRecord.KIND: result.health_scores,
            }
            number = target.write(ANALYZER_NAME, replaces, outputs)
            result = replace(
                result,
                alerts=identify(result.alerts, target.run_id, ANALYZER_NAME, number),
                health_scores=identify(result.health_scores, target.run_id, ANALYZER_NAME, number),
                generation=number,
                stored=number is not None,
                refusal=target.refusal,
            )
            self._latest = result
            return result

    def explain(self, rule_id: str) -> RuleExplanation:
        """Why a rule fired or was quiet at the last `analyze()`; analyzes in memory before one.

        Raises:
            SchemaValidationError: There is no such rule, or the settings leave it out.
            SessionStoreError: The store cannot be read.
        """
        result = self._latest
        if result is None:
            result = analyze_run(self._target.load(), self.config)
        if rule_id not in result.verdicts:
            raise SchemaValidationError(
                f"rule_id must be one of {', '.join(result.verdicts)}, got {rule_id!r:.80}"
            )
        verdict = result.verdicts[rule_id]
        reason = verdict.reason
        if verdict.findings:
            reason = " ".join(finding.fact for finding in verdict.findings)
        return RuleExplanation(
            rule_id=rule_id,
            state=verdict.state,
            reason=reason,
            missing=verdict.missing,
            observed=verdict.observed,
            threshold=verdict.threshold,
        )

    def read_alerts(
        self,
        *,
        rule_id: str | None = None,
        category: str | None = None,
        severity: str | None = None,
        step: int | None = None,
        step_min: int | None = None,
        step_max: int | None = None,
        limit: int | None = None,
    ) -> tuple[AlertRecord, ...]:
        """Stored alerts that fit, in the order in which they were found.

        Args:
            rule_id, category, severity: Only of these.
            step, step_min, step_max: Bounds on the first step, inclusive.
            limit: The newest N.

        Raises:
            SchemaValidationError: An unknown category or severity, or a bound that is no
                non-negative integer.
            SessionStoreError: The store cannot be read, or keeps no outputs.
        """
        _check_choice(category, "category", get_args(AlertCategory))
        _check_choice(severity, "severity", get_args(AlertSeverity))
        query = Query.build(
            equals={"rule_id": rule_id, "category": category, "severity": severity},
            step=step,
            step_min=step_min,
            step_max=step_max,
            limit=limit,
        )
        columns = self._target.read_outputs(AlertRecord.KIND, ANALYZER_NAME)
        return columns.select(query).to_records()  # type: ignore[return-value]

    def read_health_scores(
        self,
        *,
        score_key: str | None = None,
        category: str | None = None,
        limit: int | None = None,
    ) -> tuple[HealthScoreRecord, ...]:
        """Stored health scores that fit.

        Args:
            score_key, category: Only of these.
            limit: The newest N.

        Raises:
            SchemaValidationError: An unknown key or category, or `limit` is no
                non-negative integer.
            SessionStoreError: The store cannot be read, or keeps no outputs.
        """
        _check_choice(score_key, "score_key", get_args(HealthScoreKey))
        _check_choice(category, "category", get_args(HealthScoreKey))
        query = Query.build(equals={"score_key": score_key, "category": category}, limit=limit)
        columns = self._target.read_outputs(HealthScoreRecord.KIND, ANALYZER_NAME)
        return columns.select(query).to_records()  # type: ignore[return-value]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an AnalyzerEngine belongs to its process and cannot be pickled or copied: give the "
            "other process session.context, and make an AnalyzerEngine of it there"
        )

    def _count_generations(self) -> int:
        """How many generations readers see now."""
        scores = self._target.read_outputs(HealthScoreRecord.KIND, ANALYZER_NAME)
        return len(set(scores["writer_id"].tolist()))


def _check_choice(value: object, argument: str, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise SchemaValidationError(
            f"{argument} must be one of {', '.join(choices)}, got {value!r:.60}"
        )
