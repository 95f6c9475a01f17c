"""What a type checker must see in the public API; read by mypy, never run."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import quark


def use(session: quark.TrainingSession) -> None:
    assert_type(session.run_id, str | None)
    assert_type(session.reload(), quark.RunContext)
    assert_type(session.add_log("x"), quark.EventRecord)
    metrics = quark.MetricsLogger(session)
    assert_type(metrics.log("m", np.float32(1.0).item(), step=0), quark.MetricRecord)
    assert_type(metrics.read(), tuple[quark.MetricRecord, ...])
    assert_type(metrics.flush(), tuple[quark.MetricRecord, ...])
    assert_type(metrics.columns()["value"], NDArray[Any])
    with quark.EventLogger(session) as events:
        assert_type(events, quark.EventLogger)
        assert_type(events.read(), tuple[quark.EventRecord, ...])
    assert_type(session.end_run("failed"), quark.RunContext)
    session.end_run("lost")  # type: ignore[arg-type]
    metrics.log("m", "high", step=0)  # type: ignore[arg-type]
    metrics.log("m", 1.0, steps=0)  # type: ignore[call-arg]
    metrics.read()[0].value = 2.0  # type: ignore[misc]
