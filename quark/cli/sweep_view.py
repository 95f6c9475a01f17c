"""What `quark sweep show` prints: the sweeps there are, or one with its trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.table import Table

from quark.analysis.metric_roles import list_objectives
from quark.analysis.sweep_analysis import SweepVerdict, judge_sweep, measure_importances
from quark.cli.sweep_agent import describe_value
from quark.cli.texts import FOLD, RIGHT, WHOLE, Text, make_grid, make_table
from quark_core.formatting import format_age, format_value
from quark_core.runs.run_ids import shorten_run_id

if TYPE_CHECKING:
    from quark.cli.texts import Console
    from quark_core.records.sweeps import StoredSweep, StoredTrial

STATE_STYLES = {
    "completed": "green",
    "pruned": "yellow",
    "running": "cyan",
    "suspended": "yellow",
    "failed": "red",
    "broken": "red",
    "cancelled": "dim",
    "paused": "yellow",
}
_MOST_CELL = 24
_MOST_REASONS = 5
_GAP = 2
_PADDING = (0, 1, 0, 0)
_HOST_CHARACTERS = 20
_VALUE_DIGITS = 4
_MOST_CHOICES = 12
_NARROW = 80  # columns of a terminal, below which less is shown
_MOST_SHARES = 6
_METHODS = {"ped_anova": "PED-ANOVA", "ranks": "ranks"}


def describe_counts(counts: Mapping[str, Any]) -> Text:
    """How many trials there are of each state, such as `12 completed, 3 running`."""
    told = Text()
    for state, count in counts.items():
        told.append(", " if told.plain else "")
        told.append(f"{count} {state}", STATE_STYLES.get(state, ""))
    return told if told.plain else Text("no trials yet")


def make_sweeps_table(sweeps: Sequence[StoredSweep], width: int) -> Table:
    """A table of sweeps, at least one, for so many columns of the terminal."""
    cells: dict[str, list[Text]] = {
        "sweep": [Text(sweep.name, "bold") for sweep in sweeps],
        "project": [Text(sweep.project) for sweep in sweeps],
        "state": [_describe_state(sweep) for sweep in sweeps],
        "trials": [describe_counts(sweep.counts) for sweep in sweeps],
    }
    if width >= _NARROW:
        cells["search"] = [Text(str(each.definition.get("search") or "")) for each in sweeps]
        cells["metric"] = [Text(_describe_goals(each.definition)) for each in sweeps]
        cells["opened"] = [Text(format_age(sweep.created_at)) for sweep in sweeps]
    heads = {name: FOLD | {"no_wrap": name in ("state", "opened")} for name in cells}
    table = make_table(heads, padding=_PADDING)
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    return table


def _describe_state(sweep: StoredSweep) -> Text:
    """running, paused, cancelled, or done where all that it was to try has ended."""
    if sweep.is_done:
        return Text("done", "green")
    return Text(sweep.state, STATE_STYLES.get(sweep.state, ""))


def _describe_goals(definition: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({mode})" for name, mode in list_objectives(definition)) or "none"


def print_sweep(
    console: Console,
    reader: Any,
    sweep: StoredSweep,
    trials: Sequence[StoredTrial],
    most: int,
) -> None:
    """Print one sweep: what it is, its verdict, what matters, and its trials.

    Args:
        console: Where.
        reader: The store, which is asked what chance does.
        sweep: The sweep.
        trials: All of its trials, with their values resolved.
        most: How many are shown in each table.
    """
    console.print(_make_head(sweep))
    for verdict in judge_sweep(sweep, trials, reader):
        console.print(_describe_verdict(verdict), soft_wrap=False)
    for line in _describe_importances(sweep, trials):
        console.print(line)
    for heading, table in _make_trials_tables(sweep, trials, most, console.width):
        console.print()
        console.print(Text(heading, "bold"))
        console.print(table)


def describe_best(trial: StoredTrial, metrics: Sequence[str]) -> str:
    """The best trial in a line."""
    values = ", ".join(
        f"{name} {format_value(value)}"
        for name, value in zip(metrics, trial.values or (), strict=False)
    )
    return f"trial {trial.number} with {values} ({_join_parameters([trial])[0]})"


def _make_head(sweep: StoredSweep) -> Table:
    definition = sweep.definition
    said = [
        ("sweep", Text(f"{sweep.name} of {sweep.project}", "bold")),
        ("state", _describe_state(sweep)),
        ("trials", describe_counts(sweep.counts)),
        ("metric", Text(_describe_goals(definition))),
        ("search", Text(_describe_search(definition))),
        *((name, Text(text)) for name, text in _describe_space(definition)),
    ]
    table = make_grid(WHOLE, FOLD)
    for name, text in said:
        table.add_row(Text(name, "dim"), text)
    return table


def _describe_search(definition: Mapping[str, Any]) -> str:
    words = [str(definition.get("search") or "?")]
    for name, said in (("trials", "{} trials"), ("budget", "{} steps each"), ("seed", "seed {}")):
        if definition.get(name) is not None:
            words.append(said.format(definition[name]))
    words += _list(definition.get("constraints"))
    words += [name.replace("_", "-") for name in ("stop", "stop_broken") if definition.get(name)]
    return ", ".join(words)


def _describe_space(definition: Mapping[str, Any]) -> list[tuple[str, str]]:
    space = definition.get("space")
    if not isinstance(space, Mapping):
        return []
    return [(str(name), _describe_range(values)) for name, values in space.items()]


def _describe_range(values: object) -> str:
    if not isinstance(values, Mapping):
        return describe_value(values)
    if isinstance(values.get("values"), (list, tuple)):
        return ", ".join(describe_value(value) for value in values["values"][:_MOST_CHOICES])
    kind = "integers " if values.get("type") == "integers" else ""
    scale = " (log)" if values.get("log") else ""
    return f"{kind}{_describe_end(values, 'low')} to {_describe_end(values, 'high')}{scale}"


def _describe_end(values: Mapping[str, Any], name: str) -> str:
    return _describe_parameter(values.get(name, "?"))


def _describe_verdict(verdict: SweepVerdict) -> Text:
    said = ". ".join(filter(None, (verdict.reason.rstrip("."), verdict.advice.rstrip("."))))
    style = {"better": "green", "no_difference": "yellow"}.get(verdict.verdict, "")
    return Text.assemble((f"{verdict.headline}. ", f"bold {style}".strip()), f"{said}.")


def _describe_importances(sweep: StoredSweep, trials: Sequence[StoredTrial]) -> list[Text]:
    lines = []
    for found in measure_importances(sweep, trials):
        shares = sorted(found.shares.items(), key=lambda pair: -pair[1])[:_MOST_SHARES]
        if shares:
            listed = ", ".join(f"{name} {share:.0%}" for name, share in shares)
            by = _METHODS.get(found.method, found.method)
            lines.append(Text(f"Importance for {found.metric} ({by}): {listed}"))
    return lines


def _make_trials_tables(
    sweep: StoredSweep, trials: Sequence[StoredTrial], most: int, width: int
) -> list[tuple[str, Table]]:
    """Tables of a sweep's trials, each under its heading; those without a row are left out.

    Args:
        sweep: The sweep.
        trials: Its trials, with their values resolved.
        most: How many are shown in each table.
        width: Columns of the terminal.
    """
    judged = _rank(sweep, [trial for trial in trials if _has_value(trial)])
    running = [trial for trial in trials if trial.state == "running"]
    bad = [trial for trial in trials if trial.state in ("failed", "broken")]
    # Of the newest one learns the most.
    waiting = [t for t in trials if t.state == "suspended" or (t.state == "waiting" and t.failures)]
    tables = []
    if judged:
        said = "Pareto front first" if len(list_objectives(sweep.definition)) > 1 else "best first"
        tables.append((_head("trials with a result", judged, most, said),
                       _make_result_table(sweep, judged[:most], width)))  # fmt: skip
    if running:
        tables.append((_head("running", running, most), _make_running_table(running[:most], width)))
    if bad:
        shown = bad[::-1][: max(1, min(most, _MOST_REASONS))]
        tables.append((_head("failed", bad, len(shown), "newest first"),
                       _make_reason_table(shown, width)))  # fmt: skip
    if waiting:
        shown = waiting[: max(1, min(most, _MOST_REASONS))]
        tables.append((_head("waiting to be resumed", waiting, len(shown)),
                       _make_reason_table(shown, width)))  # fmt: skip
    return tables


def _head(what: str, trials: Sequence[StoredTrial], most: int, order: str = "") -> str:
    count = f"{most} of {len(trials)}" if len(trials) > most else str(len(trials))
    return f"{what} ({', '.join(filter(None, (count, order)))})"


def _has_value(trial: StoredTrial) -> bool:
    return (
        trial.state in ("completed", "pruned")
        and trial.values is not None
        and any(value is not None and math.isfinite(value) for value in trial.values)
    )


def _rank(sweep: StoredSweep, trials: list[StoredTrial]) -> list[StoredTrial]:
    """The best first: of one metric by its value, of several those that none is better than."""
    modes = [mode for _, mode in list_objectives(sweep.definition)] or ["min"]
    costs = {
        trial.number: tuple(_cost(trial, place, mode) for place, mode in enumerate(modes))
        for trial in trials
    }

    def count_better(trial: StoredTrial) -> int:
        own = costs[trial.number]
        return sum(
            other != own and all(a <= b for a, b in zip(other, own, strict=True))
            for other in costs.values()
        )

    # A trial that was stopped early has come less far than one that was not.
    if len(modes) == 1:
        return sorted(trials, key=lambda t: (t.state != "completed", costs[t.number], t.number))
    return sorted(trials, key=lambda t: (t.state != "completed", count_better(t), t.number))


def _cost(trial: StoredTrial, place: int, mode: str) -> float:
    values = trial.values or ()
    value = values[place] if place < len(values) else None
    if value is None or value != value:
        return math.inf
    return -value if mode == "max" else value


def _make_result_table(sweep: StoredSweep, trials: Sequence[StoredTrial], width: int) -> Table:
    metrics = [name for name, _ in list_objectives(sweep.definition)]
    values = [
        (name, [_describe_figure(trial, place) for trial in trials])
        for place, name in enumerate(metrics)
    ]
    fixed = [("trial", [str(trial.number) for trial in trials]), *values]
    if len({trial.origin.get("rung") for trial in trials}) > 1:
        fixed.append(("rung", [str(trial.origin.get("rung", "")) for trial in trials]))
    if any(trial.state != "completed" for trial in trials):
        fixed.append(("state", [trial.state for trial in trials]))
    run = ("run", [shorten_run_id(trial.run_id) if trial.run_id else "" for trial in trials])
    parameters = _list_parameters(trials)
    table = make_table({}, padding=_PADDING)
    # The parameters side by side where they fit, else one below the other in one column.
    if _measure([*fixed, *parameters, run]) <= width:
        columns, is_folded = [*fixed, *parameters, run], False
    elif _measure([*fixed, run]) + _MOST_CELL <= width:
        columns, is_folded = [*fixed, ("parameters", _join_parameters(trials)), run], True
    else:
        columns, is_folded = [*fixed, ("parameters", _join_parameters(trials))], True
    for name, _ in columns:
        is_figure = name in ("trial", "rung") or (name, _) in values
        table.add_column(
            Text(name),
            justify="right" if is_figure else "left",
            overflow="fold",
            no_wrap=not (is_folded and name == "parameters") and name not in metrics,
        )
    for row, trial in enumerate(trials):
        style = "" if trial.state == "completed" else "dim"
        table.add_row(*(Text(cells[row], style) for _, cells in columns))
    return table


def _list_parameters(trials: Sequence[StoredTrial]) -> list[tuple[str, list[str]]]:
    names = list(dict.fromkeys(name for trial in trials for name in trial.parameters))
    return [
        (name, [_describe_parameter(trial.parameters.get(name, "")) for trial in trials])
        for name in names
    ]


def _join_parameters(trials: Sequence[StoredTrial]) -> list[str]:
    return [
        " ".join(f"{name}={_describe_parameter(value)}" for name, value in trial.parameters.items())
        for trial in trials
    ]


def _describe_parameter(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.{_VALUE_DIGITS}g}"
    text = describe_value(value)
    return text if len(text) <= _MOST_CELL else f"{text[: _MOST_CELL - 1]}…"


def _describe_figure(trial: StoredTrial, place: int) -> str:
    values = trial.values or ()
    return format_value(values[place]) if place < len(values) else "-"


def _measure(columns: Sequence[tuple[str, Sequence[str]]]) -> int:
    """Columns of the terminal that a table takes."""
    widths = [max(cell_len(Text(text).plain) for text in (name, *cells)) for name, cells in columns]
    return sum(widths) + _GAP * len(widths)


def _make_running_table(trials: Sequence[StoredTrial], width: int) -> Table:
    leases = [_describe_lease(trial.lease_until) for trial in trials]
    cells: dict[str, list[Text]] = {
        "trial": [Text(str(trial.number)) for trial in trials],
        "since": [Text(format_age(t.claimed_at) if t.claimed_at else "-") for t in trials],
        "lease": [Text(left, "magenta" if left == "over" else "") for left in leases],
        "worker": [Text(_describe_worker(trial.worker)) for trial in trials],
    }
    if width >= _NARROW:
        runs = [trial.run_id for trial in trials]
        cells["run"] = [Text(shorten_run_id(run_id) if run_id else "-") for run_id in runs]
    parameters = _join_parameters(trials)
    heads = {name: RIGHT if name == "trial" else WHOLE for name in cells}
    least = FOLD | {"min_width": _find_least(parameters)}
    table = make_table({**heads, "parameters": least}, padding=_PADDING)
    for place, text in enumerate(parameters):
        table.add_row(*(column[place] for column in cells.values()), Text(text))
    return table


def _make_reason_table(trials: Sequence[StoredTrial], width: int) -> Table:
    parameters = _join_parameters(trials)
    told = ("parameters",) if width >= _NARROW else ()
    least = FOLD | {"min_width": _find_least(parameters)}
    heads = {"trial": RIGHT, "state": WHOLE, "why": FOLD, told: least}
    table = make_table(heads, padding=_PADDING)
    for trial, text in zip(trials, parameters, strict=True):
        row = [
            Text(str(trial.number)),
            Text(trial.state, STATE_STYLES.get(trial.state, "")),
            Text(trial.reason or "-"),
        ]
        table.add_row(*row, *([Text(text)] if width >= _NARROW else ()))
    return table


def _find_least(texts: Sequence[str]) -> int:
    """Columns of the terminal in which no word of these must be broken, up to a bound."""
    longest = max((cell_len(word) for text in texts for word in text.split()), default=0)
    return min(longest, _MOST_CELL)


def _describe_worker(worker: Mapping[str, Any] | None) -> str:
    """Host and process, as `ProcessIdentity` has them."""
    if not worker:
        return "-"
    host = str(worker.get("host", "")).partition("|")[0][:_HOST_CHARACTERS]
    return f"{host or '?'}:{worker.get('pid', '?')}"


def _describe_lease(until: str | None) -> str:
    """How long a trial is held still; the clock of the store and this one may differ."""
    if until is None:
        return "-"
    try:
        left_s = (datetime.fromisoformat(until) - datetime.now(UTC)).total_seconds()
    except ValueError:
        return "-"
    return f"{left_s:.0f} s" if left_s > 0 else "over"


def _list(value: object) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [str(each) for each in value]
    return [] if value is None else [str(value)]
