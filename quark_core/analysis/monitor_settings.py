"""What a monitor is told, checked."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args

from quark_core.analysis.analyzer_config import AnalyzerEngineConfig
from quark_core.analysis.rule import SEVERITIES
from quark_core.errors import SchemaValidationError

__all__ = ["HaltOn", "MonitorSettings"]

HaltOn = Literal["error", "critical"]


@dataclass(frozen=True)
class MonitorSettings:
    """Arguments of a TrainingMonitor; see there.

    Raises:
        SchemaValidationError: A bad one; the message names it.
    """

    every_n_steps: Any
    on_alert: Any
    halt_on: Any
    config: Any
    min_interval_s: Any

    def __post_init__(self) -> None:
        steps, interval = self.every_n_steps, self.min_interval_s
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise SchemaValidationError(f"every_n_steps must be a positive integer, got {steps!r}")
        if self.on_alert is not None and not callable(self.on_alert):
            raise SchemaValidationError(
                f"on_alert must be a function of one alert, not {type(self.on_alert).__name__}"
            )
        if self.halt_on is not None and self.halt_on not in get_args(HaltOn):
            raise SchemaValidationError(
                f"halt_on must be {' or '.join(get_args(HaltOn))}, or None, got {self.halt_on!r}"
            )
        if self.config is not None and not isinstance(self.config, AnalyzerEngineConfig):
            raise SchemaValidationError(
                f"config must be an AnalyzerEngineConfig, not {type(self.config).__name__}"
            )
        is_number = isinstance(interval, (int, float)) and not isinstance(interval, bool)
        if not is_number or not isfinite(interval) or interval <= 0:
            raise SchemaValidationError(
                f"min_interval_s must be a positive number of seconds, got {interval!r}"
            )

    @property
    def halt_rank(self) -> int:
        """Place among the severities from which on the training is halted."""
        return len(SEVERITIES) if self.halt_on is None else SEVERITIES.index(self.halt_on)
