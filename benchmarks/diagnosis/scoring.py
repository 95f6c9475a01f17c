"""What the analyzers say of a folder of runs, held against what is true of them."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.diagnosis.campaign import TRUTH_FILE
from benchmarks.diagnosis.scenario import RULES, Truth

_ALARMS = ("warning", "error", "critical")
# An alert that begins so many probes before the fault is told apart from a quick one.
_EARLY_PROBES = -2.0


_NO_PROBLEM = "no problem found"


def find_runs(folder: Path, *, family: str = "all", only: Iterable[str] = ()) -> list[Path]:
    """Folders of finished runs below this one, in order.

    Args:
        folder: As given to the campaign.
        family: Such as `first`, or `all`.
        only: Texts, one of which a scenario's name must contain; all where empty.
    """
    wanted = tuple(only)
    found = []
    for path in sorted(folder.rglob(TRUTH_FILE)):
        name = json.loads(path.read_text())["scenario"]
        if family != "all" and not name.startswith(f"{family}/"):
            continue
        if not wanted or any(text in name for text in wanted):
            found.append(path.parent)
    return found


def judge_run(folder: Path) -> dict[str, Any]:
    """Analyse one run, read-only, and set alarms and phases beside its truth.

    Returns:
        The truth file's content; `alarms` (rule, severity, step, culprit,
        title) of severity warning and above, the worst first; `notes`, those
        of severity info; `phases`, names; `status` and `known` of the overall
        health; `analysis_s`; `error` or None.
    """
    import quark

    row: dict[str, Any] = json.loads((folder / TRUTH_FILE).read_text())
    row.update(folder=str(folder), alarms=[], notes=[], phases=[], error=None)
    row.update(status=None, known=False, word=None)
    begun = time.perf_counter()
    try:
        session = quark.open_run(row["run_id"], folder)
        analysis = quark.AnalyzerEngine(session).analyze()
        overall = next(item for item in analysis.health_scores if item.score_key == "overall")
        row.update(status=overall.status, known=overall.known, word=overall.word)
        for alert in analysis.alerts:
            said = {
                "rule": alert.rule_id,
                "severity": alert.severity,
                "step": alert.step,
                "culprit": alert.culprit,
                "title": alert.title,
            }
            row["alarms" if alert.severity in _ALARMS else "notes"].append(said)
        phases = _find_phase_analyzer()(session).analyze().phases
        row["phases"] = [phase.phase_name for phase in phases]
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
    row["analysis_s"] = round(time.perf_counter() - begun, 4)
    return row


def trace_run(folder: Path) -> tuple[int, list[str]]:
    """How many numbers the findings of a finished run show, and what is wrong with them."""
    import quark
    from quark.analysis.engine import analyze_run
    from quark.analysis.monitor_state import list_kinds
    from quark.analysis.observations import Text
    from quark.analysis.outputs import open_analysis
    from quark_core.records.query import Query
    from tests.kit.traced_texts import Records, find_untraced

    truth = json.loads((folder / TRUTH_FILE).read_text())
    session = quark.open_run(truth["run_id"], folder)
    reader = session.open_run.reader
    rows = {kind: reader.read(truth["run_id"], kind, Query()).to_records() for kind in list_kinds()}
    result = analyze_run(open_analysis(session).load())
    findings = list(result.findings.values())
    count = sum(
        len(text.figures) for item in findings for text in item.texts if isinstance(text, Text)
    )
    return count, find_untraced(findings, Records(rows))


def score_folder(
    folder: Path, *, jobs: int = 1, family: str = "all", only: Iterable[str] = ()
) -> dict[str, Any]:
    """Judge every run of a folder and sum up; see `score_rows`."""
    runs = find_runs(folder, family=family, only=only)
    if jobs <= 1:
        return score_rows([judge_run(run) for run in runs])
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return score_rows(list(pool.map(judge_run, runs, chunksize=4)))


def score_rows(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the exam, from what `judge_run` returned.

    Returns:
        `rules`: for each rule the runs that expect it (`faults`), `recall`,
        `precision`, `foreign` (runs where it is neither expected nor
        tolerated), `delay_probes` (median, from the fault's first step to the
        alert's; of overfitting in validations), `early` (alerts that begin
        before the fault), `culprits` (share of hits that name one of the right
        layers) and `culprits_of`.
        `specificity`: share of healthy runs without an alarm that is not
        tolerated. `score`: 100 sqrt(macro recall x specificity).
        `broken_called_healthy`: faults whose overall health is known and said
        to be healthy; `healthy_not_called_so`: the share of healthy runs where
        that is not said. `phases`:
        recall, and how many runs show a forbidden phase. `misses`,
        `false_alarms`, `phase_mistakes`, `errors`: each with its folder.
        None stands for what no run tells.
    """
    judged = [(row, Truth.from_dict(row["truth"])) for row in rows]
    judged = [(row, truth) for row, truth in judged if truth.kind != "unclear"]
    faults = [(row, truth) for row, truth in judged if truth.kind == "fault"]
    healthy = [(row, truth) for row, truth in judged if truth.kind == "healthy"]
    rules = {rule: _score_rule(rule, judged) for rule in RULES}
    recalls = [rule["recall"] for rule in rules.values() if rule["recall"] is not None]
    macro = statistics.fmean(recalls) if recalls else None
    silent = [not _list_foreign(row, truth) and row["error"] is None for row, truth in healthy]
    specificity = _share(sum(silent), len(silent))
    loud = sum(bool(_list_foreign(row, truth)) for row, truth in faults)
    both = macro is not None and specificity is not None
    return {
        "runs": len(rows),
        "faults": len(faults),
        "healthy": len(healthy),
        "unclear": len(rows) - len(judged),
        "score": 100.0 * math.sqrt(macro * specificity) if both else None,
        "macro_recall": macro,
        "specificity": specificity,
        "faults_with_foreign_alarms": _share(loud, len(faults)),
        "broken_called_healthy": [
            _cite(row, truth) for row, truth in faults if _is_called_healthy(row)
        ],
        "healthy_not_called_so": _share(
            sum(not _is_called_healthy(row) for row, _ in healthy), len(healthy)
        ),
        "no_problem_found": {
            name: sum(row.get("word") == _NO_PROBLEM for row, _ in group)
            for name, group in (("faults", faults), ("healthy", healthy))
        },
        "rules": rules,
        "phases": _score_phases(judged),
        "analysis_s": statistics.median(row["analysis_s"] for row in rows) if rows else None,
        "misses": [
            _cite(row, truth, rule=rule)
            for row, truth in faults
            for rule in truth.expected
            if not _list_alarms(row, rule)
        ],
        "false_alarms": [
            _cite(row, truth, **alarm)
            for row, truth in judged
            for alarm in _list_foreign(row, truth)
        ],
        "phase_mistakes": [
            _cite(row, truth, phase=phase, what=what)
            for row, truth in judged
            for what, phase in _list_phase_mistakes(row, truth)
        ],
        "culprit_mistakes": [
            _cite(row, truth, rule=rule, named=_list_alarms(row, rule)[0]["culprit"])
            for row, truth in faults
            for rule in truth.expected
            if truth.culprits and _list_alarms(row, rule) and not _names_culprit(row, truth, rule)
        ],
        "errors": [_cite(row, truth, error=row["error"]) for row, truth in judged if row["error"]],
    }


def _score_rule(rule: str, judged: Sequence[tuple[dict[str, Any], Truth]]) -> dict[str, Any]:
    expecting = [(row, truth) for row, truth in judged if rule in truth.expected]
    hits = [(row, truth) for row, truth in expecting if _list_alarms(row, rule)]
    foreign = sum(
        any(alarm["rule"] == rule for alarm in _list_foreign(row, truth)) for row, truth in judged
    )
    delays = [
        (first - truth.onset_step) / _find_cadence(row, rule)
        for row, truth in hits
        if truth.onset_step is not None
        and (first := _find_first_step(_list_alarms(row, rule))) is not None
    ]
    named = [_names_culprit(row, truth, rule) for row, truth in hits if truth.culprits]
    return {
        "faults": len(expecting),
        "recall": _share(len(hits), len(expecting)),
        "precision": _share(len(hits), len(hits) + foreign),
        "foreign": foreign,
        "delay_probes": statistics.median(delays) if delays else None,
        "early": sum(delay < _EARLY_PROBES for delay in delays),
        "culprits": _share(sum(named), len(named)),
        "culprits_of": len(named),
    }


def _find_cadence(row: dict[str, Any], rule: str) -> int:
    """Steps from look to look at what the rule looks at: overfitting shows at validations only."""
    validations = row.get("val_every") if rule == "overfitting_onset" else None
    return max(row["every"], validations or 0)


def _score_phases(judged: Sequence[tuple[dict[str, Any], Truth]]) -> dict[str, Any]:
    wanted = [phase in row["phases"] for row, truth in judged for phase in truth.phases_expected]
    forbidding = [(row, truth) for row, truth in judged if truth.phases_forbidden]
    broken = sum({*truth.phases_forbidden} & {*row["phases"]} != set() for row, truth in forbidding)
    healthy = [(row, truth) for row, truth in forbidding if truth.kind == "healthy"]
    return {
        "recall": _share(sum(wanted), len(wanted)),
        "expected": len(wanted),
        "runs_with_forbidden": broken,
        "runs_that_forbid": len(forbidding),
        "healthy_with_forbidden": sum(
            {*truth.phases_forbidden} & {*row["phases"]} != set() for row, truth in healthy
        ),
    }


def _list_alarms(row: dict[str, Any], rule: str) -> list[dict[str, Any]]:
    return [alarm for alarm in row["alarms"] if alarm["rule"] == rule]


def _list_foreign(row: dict[str, Any], truth: Truth) -> list[dict[str, Any]]:
    allowed = {*truth.expected, *truth.tolerated}
    return [alarm for alarm in row["alarms"] if alarm["rule"] not in allowed]


def _is_called_healthy(row: dict[str, Any]) -> bool:
    return row["error"] is None and row["known"] and row["status"] == "healthy"


def _find_first_step(alarms: Sequence[dict[str, Any]]) -> int | None:
    return min((alarm["step"] for alarm in alarms if alarm["step"] is not None), default=None)


def _names_culprit(row: dict[str, Any], truth: Truth, rule: str) -> bool:
    """Whether the first alarm names a right layer, or a parameter or a part of one."""
    named = _list_alarms(row, rule)[0]["culprit"]
    return named is not None and any(
        named == right or named.startswith(f"{right}.") for right in truth.culprits
    )


def _list_phase_mistakes(row: dict[str, Any], truth: Truth) -> list[tuple[str, str]]:
    missing = [("missing", p) for p in truth.phases_expected if p not in row["phases"]]
    return missing + [("forbidden", p) for p in truth.phases_forbidden if p in row["phases"]]


def _cite(row: dict[str, Any], truth: Truth, **more: Any) -> dict[str, Any]:
    return {
        "scenario": row["scenario"],
        "seed": row["seed"],
        **more,
        "truth": truth.reason,
        "folder": row["folder"],
    }


def _share(count: int, whole: int) -> float | None:
    return count / whole if whole else None


def _find_phase_analyzer() -> Any:
    import quark

    try:
        return quark.PhaseAnalyzer
    except AttributeError:
        from quark.analysis.phases import PhaseAnalyzer

        return PhaseAnalyzer
