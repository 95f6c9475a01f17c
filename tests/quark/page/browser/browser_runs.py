"""Runs that the tests of the page look at, and what they are made of."""

import logging
import random

import pytest

import quark
from quark_core.records import LayerSummaryRecord
from quark_core.records.base import start_fields


def log_run(
    storage_dir, run_id, values=(), *, status="completed", analyzes=True, more=None, **start
):
    """One run under this id: values by metric key, in steps from 0; then `more(session)`.

    Without a status, that ends it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUARK_RUN_ID", run_id)
        session = quark.start_run(storage_dir=storage_dir, **{"project": "digits", **start})
    with quark.MetricsLogger(session) as metrics:
        for key, points in dict(values).items():
            for step, value in enumerate(points):
                metrics.log(key, value, step=step)
    if more is not None:
        more(session)
    if status is not None:
        session.end_run(status)
    if analyzes:
        quark.AnalyzerEngine(session).analyze()
        quark.PhaseAnalyzer(session).analyze()


HOSTILE = (
    "<img src=x onerror=\"window.ran='img'\"><script>window.ran='script'</script>"
    "'\"`]]>{{7*7}}${7*7} javascript:window.ran=1 http://evil.example/x https://evil.example/y"
)


def log_hostile_things(session):
    with quark.EventLogger(session) as events:
        events.log("odd.event", severity="error", status=HOSTILE, payload={HOSTILE: HOSTILE})
    handler = quark.LoggingHandler(session)
    logger = logging.Logger(HOSTILE)
    logger.addHandler(handler)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("%s", HOSTILE)
    handler.close()
    with quark.ArtifactStore(session) as artifacts:
        artifacts.store("odd", HOSTILE[:60], f"<svg onload=alert(1)>{HOSTILE}")
    steps = range(0, 100, 5)
    session.write(make_layers(HOSTILE, steps, [1e-3 * 1.5 ** max(0, step - 40) for step in steps]))


def make_layers(name, steps, norms):
    """Summaries of one layer's gradient."""
    return [
        LayerSummaryRecord(
            *start_fields(None), name, "Linear", "gradient", "backward", 0, 100, step,
            norm=norm, mean=0.0, std=norm, nan_count=0, inf_count=0,
        )
        for step, norm in zip(steps, norms, strict=True)
    ]  # fmt: skip


def make_falling(count, *, noise=0.01):
    """A loss that falls from 2.3 as one of a training that goes well."""
    chance = random.Random(7)
    return [0.2 + 2.1 * 0.97**step + chance.gauss(0, noise) for step in range(count)]


def make_exploding(count):
    """The same, but from two thirds on it is a million times as large."""
    values = make_falling(count)
    at = 2 * count // 3
    return values[:at] + [1e6 + step for step in range(count - at)]


def make_dying(count):
    """A figure that rises from 0.01 by eight decades, and is exactly zero from then on."""
    at = count // 2
    return [
        0.01 if step < at else 0.01 * 10 ** ((step - at) / 4) if step < at + 32 else 0.0
        for step in range(count)
    ]


def log_ranked(root, run_id, ranks, steps):
    """One run that so many ranks have logged to: rank r the values 6 * r**2 + step."""
    sessions = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUARK_RUN_ID", run_id)
        patch.setenv("WORLD_SIZE", str(ranks))
        for rank in range(ranks):
            patch.setenv("RANK", str(rank))
            patch.setenv("LOCAL_RANK", str(rank))
            start = {"project": "ranks", "storage_dir": root, "ranks": "all"}
            sessions.append(quark.start_run(**start))
        for rank, session in enumerate(sessions):
            with quark.MetricsLogger(session) as metrics:
                for step in range(steps):
                    metrics.log("train/loss", 6.0 * rank**2 + step, step=step)
        # The leading rank ends the run, after the others.
        for session in reversed(sessions):
            session.end_run("completed")


def log_hostile(root):
    """A run all of whose names and texts would be markup or script, were they not text."""
    values = {HOSTILE[:60]: [1.0, 2.0], "__proto__/constructor": [1.0, 2.0]}
    log_run(
        root,
        "hostile",
        {**values, "train/loss": make_exploding(120)},
        project="<b onmouseover=alert(1)>p</b>",
        name=HOSTILE,
        tags=[HOSTILE[:80]],
        notes=HOSTILE,
        config={HOSTILE: HOSTILE, "__proto__": {"x": 1}},
        more=log_hostile_things,
    )
