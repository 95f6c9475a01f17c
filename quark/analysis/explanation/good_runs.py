"""The last good run of a configuration: what a run is held against that is given alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from quark.analysis.comparison.config import ComparisonEngineConfig
from quark.analysis.explanation.history import PastRun
from quark.analysis.explanation.traits import encode_value, is_incidental
from quark.analysis.observations import format_number
from quark_core.config.arguments import EXCHANGED_FIELD
from quark_core.errors import RunNotFoundError
from quark_core.records.names import decode_name

_MOST_LOOKED_AT = 8
"""Runs whose findings are read, and made where none are stored."""

_DEVIATIONS = 2.0
_NORMAL = 1.4826  # deviations of a normal law in its median distance from the median
_LEAST_RUNS = 3


class NothingGotWorseError(RunNotFoundError):
    """A run is better than all earlier ones of its configuration: none is its last good one."""


@dataclass(frozen=True, slots=True)
class RunInQuestion:
    """The run that is held against its last good one.

    Attributes:
        run_id: The run.
        started_at: When it began.
        digest: Of its configuration, seeds aside, or None.
        metric_key: The metric that it is about, or None.
        direction: higher or lower where one is better, else none.
        store: The store, in words.
    """

    run_id: str
    started_at: str
    digest: str | None
    metric_key: str | None
    direction: str
    store: str = "this store"


def find_good_run(
    history: Sequence[PastRun], asked: RunInQuestion, is_critical: Callable[[str], bool]
) -> PastRun:
    """The newest earlier run of the same configuration that was good.

    A good run has all of these:

    - it began before the run in question;
    - it completed, and has the metric;
    - its metric ends as well as that of half of such runs, and no worse than that of the run in
      question, as far as seeds go: by two deviations between them, or the share within which
      results count as equivalent, whichever is more;
    - nothing critical was found in it;
    - it was not made to check a cause.

    One of the same seed goes before others.

    Args:
        history: Runs of the project, newest first.
        asked: The run in question.
        is_critical: Whether something critical is known of a run, or its health is.

    Raises:
        NothingGotWorseError: All earlier ones ended worse than the run in question.
        RunNotFoundError: There is none; the message says what to do.
    """
    run_id, metric_key = asked.run_id, asked.metric_key
    name_it = f"name the run to hold it against: quark why OTHER {run_id}"
    if asked.digest is None:
        raise RunNotFoundError(
            f"run {run_id} has no configuration, so nobody knows which runs are like it; {name_it}"
        )
    own = next((run for run in history if run.run_id == run_id), None)
    alike = _find_alike(history, asked, own)
    if not alike:
        raise RunNotFoundError(
            f"no other run in {asked.store} has the configuration of {run_id}, seeds aside; "
            f"{name_it}"
        )
    said = f"the configuration of {run_id}, seeds aside"
    earlier = [run for run in alike if run.started_at < asked.started_at]
    if not earlier:
        raise RunNotFoundError(
            f"{_count(alike)} {said}, but none began before it, so it has no last good run; "
            f"{name_it}"
        )
    whole = [run for run in earlier if run.is_whole]
    if not whole:
        named = "a metric" if metric_key is None else decode_name(metric_key)
        raise RunNotFoundError(
            f"{_count(earlier, 'earlier')} {said}, but none has completed with {named}; {name_it}"
        )
    good = _take_good(whole, asked, own)
    good.sort(key=lambda run: own is None or own.seed is None or run.seed != own.seed)
    for run in good[:_MOST_LOOKED_AT]:
        if not is_critical(run.run_id):
            return run
    raise RunNotFoundError(
        f"{_count(whole, 'earlier')} {said}, and completed, but something critical was found in "
        f"each that ended well, such as {good[0].run_id} (quark analyze {good[0].run_id}); "
        f"{name_it}"
    )


def _count(runs: Sequence[PastRun], word: str = "other") -> str:
    return f"1 {word} run has" if len(runs) == 1 else f"{len(runs)} {word} runs have"


def _find_alike(
    history: Sequence[PastRun], asked: RunInQuestion, own: PastRun | None
) -> list[PastRun]:
    settings = None if own is None else _list_settings(own)
    return [
        run
        for run in history
        if run.run_id != asked.run_id
        and run.config_digest is not None
        and EXCHANGED_FIELD not in run.fields
        and (run.config_digest == asked.digest or _list_settings(run) == settings)
    ]


def _list_settings(run: PastRun) -> dict[str, bytes]:
    """A configuration without seeds, and without what only names a run, such as `--name`."""
    return {
        place[1]: encode_value(value)
        for place, value in run.traits.values.items()
        if place[0] == "config" and not is_incidental(place)
    }


def _take_good(runs: Sequence[PastRun], asked: RunInQuestion, own: PastRun | None) -> list[PastRun]:
    """Those that ended well, newest first, of whole runs."""
    sign = {"higher": 1.0, "lower": -1.0}.get(asked.direction)
    if sign is None or asked.metric_key is None:
        return list(runs)
    ends = {run.run_id: sign * (run.value or 0.0) for run in runs}
    ranked = sorted(ends.values(), reverse=True)
    least = ranked[(len(ranked) - 1) // 2]
    if own is not None and own.value is not None:
        bound = sign * own.value - _allow(ranked, own.value)
        if ranked[0] < bound:
            best = max(runs, key=lambda run: ends[run.run_id])
            raise NothingGotWorseError(
                f"{asked.run_id} ended with {decode_name(asked.metric_key)} "
                f"{format_number(own.value)}, better than all earlier runs of its configuration "
                f"(the best, {best.run_id}, with {format_number(best.value or 0.0)}), so nothing "
                f"got worse; ask why it is better: quark why {best.run_id} {asked.run_id}"
            )
        least = max(least, bound)
    return [run for run in runs if ends[run.run_id] >= least]


def _allow(ends: Sequence[float], value: float) -> float:
    """By how much results of one configuration may differ and be as good as one another."""
    spread = 0.0
    if len(ends) >= _LEAST_RUNS:
        middle = median(ends)
        spread = _DEVIATIONS * _NORMAL * median(abs(end - middle) for end in ends)
    return max(spread, ComparisonEngineConfig().relative_tolerance * abs(value))
