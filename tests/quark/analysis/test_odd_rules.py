"""Rules of others may answer anything: it is stored as plain numbers, or the rule has failed."""

import json
import sys

import numpy as np
import pytest
from run_builder import RunBuilder, falling

import quark
from quark.analysis.config import AnalyzerEngineConfig, AnalyzerThresholds
from quark.analysis.engine import analyze_run
from quark.analysis.rule import Finding, Verdict
from quark.analysis.rules import registry
from quark_core.records.kinds.findings import EvidenceRecord


class OddRule:
    rule_id = "odd"
    category = "optimization"

    def __init__(self, answer):
        self._answer = answer

    def check(self, case):
        return self._answer()


def make_finding(**values):
    plain = {
        "culprit": "x", "severity": "error", "title": "t", "fact": "f", "inference": "i",
        "suggested_check": "c", "evidence": (), "step": 3,
    }  # fmt: skip
    return Finding(**{**plain, **values})


@pytest.fixture
def ask(monkeypatch):
    builder = RunBuilder().metric("train/loss", falling())

    def ask(answer):
        rule = OddRule(answer)
        monkeypatch.setattr(registry, "list_rules", lambda: (*registry.BUILTIN_RULES, rule))
        return analyze_run(builder.build())

    return ask


ODD_ANSWERS = {
    "it exits": lambda: sys.exit(3),
    "no severity": lambda: Verdict(findings=(make_finding(severity="fatal"),)),
    "no finding": lambda: Verdict(findings=("oops",)),
    "a confidence of NaN": lambda: Verdict(findings=(make_finding(confidence=float("nan")),)),
    "a negative step": lambda: Verdict(findings=(make_finding(step=-5),)),
    "half a step": lambda: Verdict(findings=(make_finding(step=3.5),)),
    "a step beyond 64 bits": lambda: Verdict(findings=(make_finding(step=10**30),)),
    "a culprit of another type": lambda: Verdict(findings=(make_finding(culprit=7),)),
    "evidence of another type": lambda: Verdict(findings=(make_finding(evidence=["x"]),)),
    "a lone surrogate": lambda: Verdict(findings=(make_finding(fact="\ud800"),)),
    "one text in place of several": lambda: Verdict(missing="abc"),
    "a figure that is a text": lambda: Verdict(observed="much"),
}


@pytest.mark.parametrize("name", list(ODD_ANSWERS))
def test_a_rule_with_an_odd_answer_has_failed_and_silences_no_other(ask, name):
    result = ask(ODD_ANSWERS[name])
    assert result.verdicts["odd"].state == "no_data"
    assert result.verdicts["odd"].reason.startswith("the rule failed: ")
    assert result.verdicts["plateau"].state == "quiet"
    assert result.alerts == ()


def test_for_want_of_memory_nothing_is_judged(ask):
    def need_too_much():
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        ask(need_too_much)


def test_numbers_of_numpy_and_figures_that_are_not_finite_become_plain(ask):
    evidence = EvidenceRecord("k", "s", "x", float("nan"), np.float32(0.5), np.int64(3), None)
    finding = make_finding(
        step=np.int64(4), step_end=np.int64(9), confidence=np.float32(2.5), evidence=[evidence],
        affected=["a", "b"],
    )  # fmt: skip
    result = ask(
        lambda: Verdict(findings=[finding], observed=np.float32(3), threshold=float("inf"))
    )
    (alert,) = result.alerts
    assert (type(alert.step), alert.step) == (int, 4)
    assert alert.metadata["confidence"] == 1.0
    assert alert.evidence[0].observed_value is None
    assert alert.evidence[0].threshold_value == 0.5
    verdict = result.verdicts["odd"]
    assert (verdict.observed, verdict.threshold) == (3.0, None)
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False)) == result.to_dict()


def test_findings_alike_have_ids_of_their_own(ask):
    result = ask(lambda: Verdict(findings=(make_finding(), make_finding(fact="g"))))
    again = ask(lambda: Verdict(findings=(make_finding(), make_finding(fact="g"))))
    assert len({alert.id for alert in result.alerts}) == 2
    assert [alert.id for alert in result.alerts] == [alert.id for alert in again.alerts]


def test_several_limits_at_one_metric_are_alerts_of_their_own(tmp_path):
    config = AnalyzerEngineConfig(
        thresholds=AnalyzerThresholds(
            runtime_warning_step_time_ms=1.0, runtime_warning_data_fraction=0.01
        ),
        rules=("runtime_bottleneck_risk",),
    )
    with (
        quark.start_run(project="p", storage_dir=tmp_path) as session,
        quark.MetricsLogger(session) as metrics,
    ):
        for step in range(20):
            times = {"system/runtime/step_time_ms": 30.0, "system/runtime/data_time_ms": 0.9}
            metrics.log_many(times, step=step)
    analyzer = quark.AnalyzerEngine(session, config=config)
    analyzer.analyze()
    limits = [alert for alert in analyzer.read_alerts() if alert.metadata.get("hard_limit")]
    assert len(limits) == 2
    assert len({alert.id for alert in limits}) == 2
