"""The last good run of a configuration: what a run is held against that is given alone."""

from __future__ import annotations

from collections.abc import Sequence

from quark_core.analysis.comparison.directions import infer_direction
from quark_core.analysis.explanation.history import PastRun
from quark_core.analysis.explanation.traits import encode_value, is_incidental
from quark_core.errors import RunNotFoundError
from quark_core.records.names import decode_name

__all__ = ["find_good_run"]


def find_good_run(
    history: Sequence[PastRun], run_id: str, digest: str | None, metric_key: str | None
) -> PastRun:
    """The newest run of the same configuration that was good.

    Good is a run that completed, and whose metric is as good as that of half of the runs
    of its configuration. One of the same seed goes before others, and one that began before
    the run in question before one that began later.

    Args:
        history: Runs of the project, newest first.
        run_id: The run in question.
        digest: Its configuration, seeds aside.
        metric_key: The metric that it is about.

    Raises:
        RunNotFoundError: There is none; the message says what to do.
    """
    if digest is None:
        raise RunNotFoundError(
            f"run {run_id} has no configuration, so nobody knows which runs are like it; "
            f"name the run to hold it against: quark why OTHER {run_id}"
        )
    own = next((run for run in history if run.run_id == run_id), None)
    settings = None if own is None else _list_settings(own)
    alike = [
        run
        for run in history
        if run.run_id != run_id
        and run.config_digest is not None
        and (run.config_digest == digest or _list_settings(run) == settings)
    ]
    if not alike:
        raise RunNotFoundError(
            f"no other run has the configuration of {run_id}, seeds aside; name the run to hold "
            f"it against: quark why OTHER {run_id}"
        )
    whole = [run for run in alike if run.is_whole]
    if not whole:
        named = "a metric" if metric_key is None else decode_name(metric_key)
        raise RunNotFoundError(
            f"{len(alike)} other runs have the configuration of {run_id}, but none has completed "
            f"with {named}; name the run to hold it against: quark why OTHER {run_id}"
        )
    good = _take_better_half(whole, metric_key)
    places = {run.run_id: place for place, run in enumerate(history)}
    place = places.get(run_id, -1)
    return min(
        good,
        key=lambda run: (
            own is None or own.seed is None or run.seed != own.seed,
            places[run.run_id] < place,
            places[run.run_id],
        ),
    )


def _list_settings(run: PastRun) -> dict[str, bytes]:
    """A configuration without seeds, and without what only names a run, such as `--name`."""
    return {
        place[1]: encode_value(value)
        for place, value in run.traits.values.items()
        if place[0] == "config" and not is_incidental(place)
    }


def _take_better_half(runs: Sequence[PastRun], metric_key: str | None) -> list[PastRun]:
    sign = {"higher": 1.0, "lower": -1.0}.get(
        "none" if metric_key is None else infer_direction(metric_key)
    )
    if sign is None:
        return list(runs)
    ranked = sorted(runs, key=lambda run: -sign * (run.value or 0.0))
    least = ranked[(len(ranked) - 1) // 2]
    return [run for run in runs if sign * (run.value or 0.0) >= sign * (least.value or 0.0)]
