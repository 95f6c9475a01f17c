"""`quark analyze`: what is wrong with a run, where, since when, and how well it does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import click

from quark.cli.completion import RUN, complete_metrics, complete_runs
from quark.cli.options import FILE, option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    SOURCE,
    RunSource,
    print_json,
    usage_mistakes,
    write_file,
)
from quark_core.formatting import format_bytes
from quark_core.records.kinds.findings import AlertSeverity
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark.analysis.config import AnalyzerEngineConfig, PhaseAnalyzerConfig
    from quark.analysis.engine import AnalyzerResult
    from quark.analysis.phases import PhaseAnalysisResult
    from quark_core.backends.run_summary import StoredRun
    from quark_core.runs.run_reader import RunReader

FAILED_CHECK = 3
"""Exit status where a check that was asked for did not hold; 1 and 2 are mistakes and errors."""

_LEVELS = ("warning", "error", "critical")
# Some mirrors take seconds to open; nobody waits for them where the run has none.
_MIRRORS_TIMEOUT_S = 30.0


@click.command()
@takes_options
def analyze(
    *,
    run: str = RUN,
    source: RunSource = SOURCE,
    fail_on: str | None = option(
        "Exit with code 3 if an alert is at least this severe.", type=click.Choice(_LEVELS)
    ),
    mode: Literal["adaptive", "absolute"] = option(
        "Compare with the run's own history, or use the documented thresholds.", default="adaptive"
    ),
    rules: tuple[str, ...] = option("Apply only this rule. Repeatable.", "--rule", metavar="ID"),
    explain: str | None = option("Print only why a rule fired or did not fire.", metavar="ID|all"),
    objective: str | None = option(
        "Metric to judge the run by.",
        metavar="METRIC[:min|max]",
        shell_complete=complete_metrics,
        show_default="the run's objective, else its loss",
    ),
    allow_unknown: bool = option("With --fail-on: pass if the health is not known."),
    against: tuple[str, ...] = option(
        "Healthy run to compare with. Repeatable.", metavar="RUN", shell_complete=complete_runs
    ),
    report_path: Path | None = option("Write an HTML report to this file.", "--report", type=FILE),
    summary_path: Path | None = option(
        "Append a Markdown summary to this file, such as $GITHUB_STEP_SUMMARY.",
        "--summary",
        type=FILE,
    ),
    no_store: bool = option("Do not store the result with the run."),
    as_json: bool = AS_JSON,
) -> None:
    """Diagnose RUN: alerts, health scores and training phases.

    RUN is a run ID, unique prefix or name. It may still be running. The result is
    stored with the run, replaces the previous analysis, and is sent to the run's
    mirrors. With --backend, --rule, --explain or --no-store, it is not stored.

    RUN is also compared with similar healthy runs of the project, which adds notes.
    To add alerts, name healthy runs with --against.

    If no loss is recognized or the run is too short, its health is "not known".
    Name the metric with --objective. With --fail-on, "not known" fails too, unless
    you pass --allow-unknown. A failed, interrupted or lost run fails as well.

    In CI: quark analyze RUN --fail-on error --report report.html --summary FILE

    \b
    Exit codes:
      0    analyzed
      1    the run or the store cannot be read or written
      2    usage error
      3    with --fail-on: an alert is at least this severe, the health is not known,
           or the run did not complete
    """  # noqa: D301 - click wants the character
    from quark.analysis.outputs import gather_outputs

    stored = source.find(run)
    run_id = str(stored.run.id)
    reader = source.read(stored)
    if allow_unknown and fail_on is None:
        raise click.UsageError("--allow-unknown requires --fail-on.")
    config = _configure(mode, rules, objective)
    if config.objective is not None:
        _check_objective(source, run_id, config.objective)
    # Another tool's store takes no outputs, and that needs no word.
    is_partial = bool(rules) or explain is not None or source.backend is not None
    with show_warnings(), gather_outputs() as gathered:
        _check_rules(rules, explain, mode)
        good = [source.open(name) for name in against]
        result, phases = _analyze(reader, config, good, keep=not (no_store or is_partial))
    if as_json:
        _print_as_json(result, phases)
    elif explain is not None:
        from quark.cli.analysis_view import print_explanations

        print_explanations(result, None if explain == "all" else explain)
    else:
        from quark.analysis.analysis_context import Case
        from quark.analysis.outputs import open_analysis
        from quark.cli.analysis_view import print_analysis

        # A view of its own: its columns are read only where a curve is drawn.
        case = Case(open_analysis(reader).load(), config)
        print_analysis(stored, result, phases, case)
        if line := source.describe_unstored(run_id):
            click.echo(line)
    if report_path is not None or summary_path is not None:
        with show_warnings():
            _write_report(reader, result, phases, report_path, summary_path)
    with show_warnings():
        # After all is said: whoever reads it need not wait for them.
        gathered.deliver(_MIRRORS_TIMEOUT_S)
    if fail_on is not None and not (
        _is_whole(stored, fail_on) and _passes(result, fail_on, rules, allow_unknown=allow_unknown)
    ):
        sys.exit(FAILED_CHECK)


def _check_objective(source: RunSource, run_id: str, metric: str) -> None:
    """Refuse an objective that the run does not have: what is stored would judge nothing."""
    from quark_core.runs.reading import refuse_unknown_metric
    from quark_core.runs.run_search import summarize_run

    with usage_mistakes():
        keys = summarize_run(source.reader, run_id).metrics
        refuse_unknown_metric(metric, keys, "--objective", "the run")


def _print_as_json(result: AnalyzerResult, phases: PhaseAnalysisResult) -> None:
    print_json(
        {
            **result.to_dict(),
            "phases": [phase.to_dict() for phase in phases.phases],
            "phase_notes": list(phases.notes),
        }
    )


def _write_report(
    reader: RunReader,
    result: AnalyzerResult,
    phases: PhaseAnalysisResult,
    report_path: Path | None,
    summary_path: Path | None,
) -> None:
    """What this analysis has found as a file for people, and in short for a CI job's page."""
    from quark.page.report import compose_report, open_reader_source
    from quark.page.report_contents import ReportOptions
    from quark.page.routes.run_analysis import Analysis, RuleCoverage

    analysis = Analysis(
        state="stored" if result.stored else "computed",
        alerts=result.alerts,
        scores=result.health_scores,
        phases=phases.phases,
        phase_notes=phases.notes,
        coverage=RuleCoverage.measure(result.verdicts),
        generation=result.generation,
    )
    runs = [(open_reader_source(reader), result.run_id)]
    report = compose_report(runs, ReportOptions(), [analysis])
    if report_path is not None:
        path = write_file(report_path, "--report", report.save)
        click.echo(f"Wrote {path} ({format_bytes(path.stat().st_size)}).", err=True)
    if summary_path is not None:
        write_file(summary_path, "--summary", lambda path: _append(path, report.to_markdown()))


def _append(path: Path, text: str) -> Path:
    with path.open("a", encoding="utf-8") as file:
        file.write(text + "\n")
    return path


@contextmanager
def show_warnings() -> Iterator[None]:
    """Print what analyzers warn of meanwhile as one line each, never with a traceback.

    What a rule of another distribution prints goes to stderr as well.
    """
    logger, handler = logging.getLogger("quark"), _Lines(logging.WARNING)
    logger.addHandler(handler)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logger.removeHandler(handler)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # That outputs are not stored is said in the report, with the reason.
        if not getattr(record, "is_reported", False):
            click.echo(f"quark: {record.getMessage()}", err=True)


def _check_rules(rules: tuple[str, ...], explain: str | None, mode: str) -> None:
    from quark.analysis.fixes import read_fixes
    from quark.analysis.rules.registry import DOCUMENTED_RULES, list_rules

    known = [rule.rule_id for rule in list_rules()]
    if mode == "absolute":
        known = [rule_id for rule_id in known if rule_id in DOCUMENTED_RULES]
    choices = ", ".join(map(repr, known))
    for name in rules:
        if name not in known:
            where = " in the absolute mode" if mode == "absolute" else ""
            raise click.UsageError(f"--rule: no rule {name!r}{where}. Choose {choices}.")
    if explain is None or explain == "all":
        return
    if explain not in known and explain not in read_fixes():
        raise click.UsageError(f"--explain: no rule {explain!r}. Choose {choices}, or 'all'.")
    if rules and explain not in rules:
        raise click.UsageError(f"--explain {explain!r} is not among the rules of --rule.")


def _analyze(
    reader: RunReader,
    config: object,
    good: list[RunReader],
    *,
    keep: bool,
) -> tuple[AnalyzerResult, PhaseAnalysisResult]:
    from quark.analysis.config import AnalyzerEngineConfig
    from quark.analysis.engine import AnalyzerEngine, analyze_run, load_baseline
    from quark.analysis.outputs import open_analysis
    from quark.analysis.phases import PhaseAnalyzer, analyze_phases

    assert isinstance(config, AnalyzerEngineConfig)
    phases = _choose_phase_config(config)
    if not keep:
        data = open_analysis(reader).load()
        baseline = load_baseline(good) if good else None
        return analyze_run(data, config, baseline=baseline), analyze_phases(data, phases)
    result = AnalyzerEngine(reader, config=config).analyze(store=True, against=good or None)
    if not result.stored:
        return result, analyze_phases(open_analysis(reader).load(), phases)
    return result, PhaseAnalyzer(reader, config=phases).analyze(store=True)


def _choose_phase_config(config: AnalyzerEngineConfig) -> PhaseAnalyzerConfig:
    """Phases of the same curves: a loss that was named comes before those of the conventions."""
    from quark.analysis.config import PhaseAnalyzerConfig
    from quark.analysis.metric_roles import prefer_objective

    objective = config.objective, config.objective_mode
    return PhaseAnalyzerConfig(
        train_loss_metric_keys=prefer_objective(
            config.train_loss_metric_keys, *objective, held_out=False
        ),
        val_loss_metric_keys=prefer_objective(
            config.val_loss_metric_keys, *objective, held_out=True
        ),
    )


def _configure(mode: str, rules: tuple[str, ...], objective: str | None) -> AnalyzerEngineConfig:
    from quark.analysis.config import AnalyzerEngineConfig
    from quark_core.config.objective import parse_objective

    with usage_mistakes():
        named = None if objective is None else parse_objective(objective, "--objective")
    return AnalyzerEngineConfig(
        mode="absolute" if mode == "absolute" else "adaptive",
        rules=rules or None,
        objective=None if named is None else named.metric,
        objective_mode=None if named is None else named.mode,
    )


def _is_whole(stored: StoredRun, fail_on: str) -> bool:
    """Whether a run did not break off: one that did is no result, whatever rules say of it."""
    from quark.analysis.health import say_end

    if stored.is_broken_off:
        told = clean_line(say_end(stored, "the run"))
        click.echo(f"quark: --fail-on {fail_on}: {told}", err=True)
    return not stored.is_broken_off


def _passes(
    result: AnalyzerResult, fail_on: str, rules: tuple[str, ...], *, allow_unknown: bool
) -> bool:
    """Whether nothing is as severe as that, and something could be judged at all."""
    unknown = None if allow_unknown else _find_unknown(result, is_asked=bool(rules))
    if unknown is not None:
        click.echo(f"quark: --fail-on {fail_on}: not known: {unknown}", err=True)
    return unknown is None and not _reaches(result, fail_on)


def _find_unknown(result: AnalyzerResult, *, is_asked: bool) -> str | None:
    """Why nothing could be judged, or None; of rules that were asked for by name, those alone."""
    if is_asked:
        blind = [f"{name} lacks {', '.join(v.missing)}" for name, v in result.verdicts.items()
                 if v.state == "no_data"]  # fmt: skip
        return "; ".join(blind) if blind and len(blind) == len(result.verdicts) else None
    overall = result.health_scores[0]
    never_logged = dict(overall.metadata or {}).get("learning", {}).get("never_logged")
    if overall.known and never_logged is not None:
        return f"the objective {never_logged} was never logged"
    return None if overall.known else overall.unknown_reason


def _reaches(result: AnalyzerResult, level: str) -> bool:
    order = get_args(AlertSeverity)
    return any(order.index(alert.severity) >= order.index(level) for alert in result.alerts)
