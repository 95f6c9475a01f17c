"""AnalyzerEngine: alerts and health scores of a run, made, stored and read back."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, NoReturn, get_args

from quark.analysis.baseline import HealthyBaseline, is_alike
from quark.analysis.case import Case
from quark.analysis.config import AnalyzerEngineConfig
from quark.analysis.diagnosis import AnalyzerResult, analyze_run
from quark.analysis.learning import is_sound, judge_learning
from quark.analysis.outputs import AnalysisTarget, identify, open_analysis
from quark.analysis.run_data import RunData
from quark_core.errors import SchemaValidationError
from quark_core.presentation import note_runs
from quark_core.records import AlertRecord, HealthScoreRecord
from quark_core.records.checks import check_choice
from quark_core.records.kinds.findings import AlertCategory, AlertSeverity, HealthScoreKey
from quark_core.records.query import Query

ANALYZER_NAME = "analyzer"
"""Under this name its generations are stored."""

_MOST_BASELINES = 3


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

    def analyze(
        self,
        *,
        replace_existing: bool | None = None,
        store: bool | None = None,
        against: object = None,
    ) -> AnalyzerResult:
        """Look at all that the run has now, and store what was found as one generation.

        Readers see it all at once. On a backend that keeps no outputs, such as
        another tool's, the result is returned only (`stored` is False). The
        run's mirrors get it too: in the background while the run is open in
        this process; of one that has ended, this waits for them for
        QUARK_EXIT_TIMEOUT_SECONDS (10) at most, and `quark sync` does the rest.

        Args:
            replace_existing: Whether earlier outputs are no longer seen; None
                takes `replace_existing_outputs` of the settings.
            store: Whether what was found is stored. None stores it, unless the
                run was opened for reading only: by `quark.open_run`, or from
                the context of such a session. The result's `refusal` says why
                it was not.
            against: A TrainingSession or a RunContext of a run that went well, or
                several of them. What holds there and breaks here is found by
                `healthy_baseline`. Without it the newest completed runs of the
                project that have the same parameters, optimizer and first
                learning rate, and are stored as healthy, are taken, and what
                they show is a note (info).

        Raises:
            SchemaValidationError: `replace_existing` or `store` is no bool, or
                `against` is no run, or one that did not learn.
            RunNotFoundError: The store has no such run.
            SessionStoreError: The store cannot be read or written.
        """
        replaces = self.config.replace_existing_outputs
        if replace_existing is not None:
            if not isinstance(replace_existing, bool):
                raise SchemaValidationError("replace_existing must be True, False or None")
            replaces = replace_existing
        target = self._target
        refusal = target.refuse(store)
        with self._lock:
            place = 0 if replaces or refusal else self._count_generations()
            run = target.load()
            baseline = _choose_baseline(run, target, against, self.config)
            result = analyze_run(run, self.config, place=place, baseline=baseline)
            outputs = {
                AlertRecord.KIND: result.alerts,
                HealthScoreRecord.KIND: result.health_scores,
            }
            number = None if refusal else target.write(ANALYZER_NAME, replaces, outputs)
            result = replace(
                result,
                alerts=identify(result.alerts, target.run_id, ANALYZER_NAME, number),
                health_scores=identify(result.health_scores, target.run_id, ANALYZER_NAME, number),
                generation=number,
                stored=number is not None,
                refusal=refusal or target.refusal,
            )
            self._latest = result
            note_runs(result, [target.context])
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
        check_choice(rule_id, "rule_id", result.verdicts)
        verdict = result.verdicts[rule_id]
        reason = verdict.reason
        if verdict.findings:
            facts = " ".join(finding.fact for finding in verdict.findings)
            reason = facts if verdict.state == "fired" else f"{reason}. Note: {facts}"
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
        if category is not None:
            check_choice(category, "category", get_args(AlertCategory))
        if severity is not None:
            check_choice(severity, "severity", get_args(AlertSeverity))
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
        if score_key is not None:
            check_choice(score_key, "score_key", get_args(HealthScoreKey))
        if category is not None:
            check_choice(category, "category", get_args(HealthScoreKey))
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


def _choose_baseline(
    run: RunData, target: AnalysisTarget, against: object, config: AnalyzerEngineConfig
) -> HealthyBaseline | None:
    """What holds a run against healthy ones: those that were named, or its project's."""
    if against is not None:
        return load_baseline(against)
    if config.rules is not None or not run.parameters:
        return None
    alike = (
        other
        for other in target.iterate_healthy(ANALYZER_NAME)
        if is_alike(run, other) and is_sound(judge_learning(Case(other, config)))
    )
    found = list(islice(alike, _MOST_BASELINES))
    return HealthyBaseline(found, severity="info") if found else None


def load_baseline(against: object) -> HealthyBaseline:
    """The rule that holds a run against those that are given; see `AnalyzerEngine.analyze`.

    Raises:
        SchemaValidationError: It is no run, or one that did not learn: none to be like.
    """
    given = against if isinstance(against, (list, tuple)) else (against,)
    if not given:
        raise SchemaValidationError("against must name a run at least")
    runs = [open_analysis(one).load() for one in given]
    for run in runs:
        learning = judge_learning(Case(run, AnalyzerEngineConfig()))
        if learning.state == "not_learned":
            raise SchemaValidationError(
                f"against: run {run.run_id} did not go well, so nothing can be held against it: "
                f"{learning.reason}; name another run"
            )
    return HealthyBaseline(runs)
