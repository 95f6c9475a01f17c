"""Quark: a training tracker that never hurts training and loses nothing.

from quark import MetricsLogger, TrainingSession

Names are imported when they are first used, so that `import quark` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark_core.context import RunContext as RunContext
    from quark_core.delivery.report import DeliveryReport as DeliveryReport
    from quark_core.delivery.report import LaneReport as LaneReport
    from quark_core.errors import InvalidRunStateError as InvalidRunStateError
    from quark_core.errors import QuarkError as QuarkError
    from quark_core.errors import RunNotFoundError as RunNotFoundError
    from quark_core.errors import SchemaMigrationError as SchemaMigrationError
    from quark_core.errors import SchemaValidationError as SchemaValidationError
    from quark_core.errors import SessionStoreError as SessionStoreError
    from quark_core.migration import migrate_store as migrate_store
    from quark_core.records import AlertRecord as AlertRecord
    from quark_core.records import ArtifactRecord as ArtifactRecord
    from quark_core.records import BatchDiagnosticRecord as BatchDiagnosticRecord
    from quark_core.records import EventRecord as EventRecord
    from quark_core.records import EvidenceRecord as EvidenceRecord
    from quark_core.records import HealthScoreRecord as HealthScoreRecord
    from quark_core.records import LayerSummaryRecord as LayerSummaryRecord
    from quark_core.records import LogIdentifier as LogIdentifier
    from quark_core.records import MetricRecord as MetricRecord
    from quark_core.records import ParameterDistributionRecord as ParameterDistributionRecord
    from quark_core.records import ParameterSummaryRecord as ParameterSummaryRecord
    from quark_core.records import PhaseRecord as PhaseRecord
    from quark_core.records import ProjectRecord as ProjectRecord
    from quark_core.records import RunRecord as RunRecord
    from quark_core.records import SystemTelemetryRecord as SystemTelemetryRecord
    from quark_core.run_reading import series as series
    from quark_core.run_summary import MetricSummary as MetricSummary
    from quark_core.run_summary import RunSummary as RunSummary
    from quark_core.schema import CURRENT_SCHEMA_VERSION as CURRENT_SCHEMA_VERSION
    from quark_core.schema import dump_record as dump_record
    from quark_core.schema import validate_record as validate_record
    from quark_core.searching import search_runs as search_runs
    from quark_core.series import Series as Series
    from quark_core.session import TrainingSession as TrainingSession
    from quark_core.shortcuts import add_log as add_log
    from quark_core.shortcuts import add_tag as add_tag
    from quark_core.shortcuts import end_run as end_run
    from quark_core.shortcuts import open_run as open_run
    from quark_core.shortcuts import resume_run as resume_run
    from quark_core.shortcuts import start_run as start_run
    from quark_core.version import __version__ as __version__
    from quark_core.writers.events import EventLogger as EventLogger
    from quark_core.writers.metrics import MetricsLogger as MetricsLogger

_HOMES = {
    "AlertRecord": "quark_core.records",
    "ArtifactRecord": "quark_core.records",
    "BatchDiagnosticRecord": "quark_core.records",
    "CURRENT_SCHEMA_VERSION": "quark_core.schema",
    "DeliveryReport": "quark_core.delivery.report",
    "EventLogger": "quark_core.writers.events",
    "EventRecord": "quark_core.records",
    "EvidenceRecord": "quark_core.records",
    "HealthScoreRecord": "quark_core.records",
    "InvalidRunStateError": "quark_core.errors",
    "LaneReport": "quark_core.delivery.report",
    "LayerSummaryRecord": "quark_core.records",
    "LogIdentifier": "quark_core.records",
    "MetricRecord": "quark_core.records",
    "MetricSummary": "quark_core.run_summary",
    "MetricsLogger": "quark_core.writers.metrics",
    "ParameterDistributionRecord": "quark_core.records",
    "ParameterSummaryRecord": "quark_core.records",
    "PhaseRecord": "quark_core.records",
    "ProjectRecord": "quark_core.records",
    "QuarkError": "quark_core.errors",
    "RunContext": "quark_core.context",
    "RunNotFoundError": "quark_core.errors",
    "RunRecord": "quark_core.records",
    "RunSummary": "quark_core.run_summary",
    "SchemaMigrationError": "quark_core.errors",
    "SchemaValidationError": "quark_core.errors",
    "Series": "quark_core.series",
    "SessionStoreError": "quark_core.errors",
    "SystemTelemetryRecord": "quark_core.records",
    "TrainingSession": "quark_core.session",
    "__version__": "quark_core.version",
    "add_log": "quark_core.shortcuts",
    "add_tag": "quark_core.shortcuts",
    "dump_record": "quark_core.schema",
    "end_run": "quark_core.shortcuts",
    "migrate_store": "quark_core.migration",
    "open_run": "quark_core.shortcuts",
    "resume_run": "quark_core.shortcuts",
    "search_runs": "quark_core.searching",
    "series": "quark_core.run_reading",
    "start_run": "quark_core.shortcuts",
    "validate_record": "quark_core.schema",
}

__all__ = [
    "AlertRecord",
    "ArtifactRecord",
    "BatchDiagnosticRecord",
    "CURRENT_SCHEMA_VERSION",
    "DeliveryReport",
    "EventLogger",
    "EventRecord",
    "EvidenceRecord",
    "HealthScoreRecord",
    "InvalidRunStateError",
    "LaneReport",
    "LayerSummaryRecord",
    "LogIdentifier",
    "MetricRecord",
    "MetricSummary",
    "MetricsLogger",
    "ParameterDistributionRecord",
    "ParameterSummaryRecord",
    "PhaseRecord",
    "ProjectRecord",
    "QuarkError",
    "RunContext",
    "RunNotFoundError",
    "RunRecord",
    "RunSummary",
    "SchemaMigrationError",
    "SchemaValidationError",
    "Series",
    "SessionStoreError",
    "SystemTelemetryRecord",
    "TrainingSession",
    "__version__",
    "add_log",
    "add_tag",
    "dump_record",
    "end_run",
    "migrate_store",
    "open_run",
    "resume_run",
    "search_runs",
    "series",
    "start_run",
    "validate_record",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'quark' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
