"""Quark: a training tracker that never hurts training and loses nothing.

from quark import MetricsLogger, TrainingSession

Names are imported when they are first used, so that `import quark` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark_core.analysis.analyzer_config import AnalyzerEngineConfig as AnalyzerEngineConfig
    from quark_core.analysis.analyzer_config import AnalyzerThresholds as AnalyzerThresholds
    from quark_core.analysis.comparison.config import (
        ComparisonEngineConfig as ComparisonEngineConfig,
    )
    from quark_core.analysis.comparison.config import MetricTargetSpec as MetricTargetSpec
    from quark_core.analysis.comparison.engine import ComparisonEngine as ComparisonEngine
    from quark_core.analysis.comparison.results import RunComparisonResult as RunComparisonResult
    from quark_core.analysis.diagnosis import AnalyzerResult as AnalyzerResult
    from quark_core.analysis.engine import AnalyzerEngine as AnalyzerEngine
    from quark_core.analysis.engine import RuleExplanation as RuleExplanation
    from quark_core.analysis.monitor import TrainingMonitor as TrainingMonitor
    from quark_core.analysis.monitor import monitor as monitor
    from quark_core.analysis.phase_config import PhaseAnalyzerConfig as PhaseAnalyzerConfig
    from quark_core.analysis.phase_config import PhaseAnalyzerThresholds as PhaseAnalyzerThresholds
    from quark_core.analysis.phases import PhaseAnalysisResult as PhaseAnalysisResult
    from quark_core.analysis.phases import PhaseAnalyzer as PhaseAnalyzer
    from quark_core.artifacts.layout import ARTIFACT_STORAGE_LAYOUT as ARTIFACT_STORAGE_LAYOUT
    from quark_core.batch_metadata import BatchMetadata as BatchMetadata
    from quark_core.batch_metadata import BatchMetadataAdapter as BatchMetadataAdapter
    from quark_core.batch_metadata import MappingBatchMetadataAdapter as MappingBatchMetadataAdapter
    from quark_core.batch_summaries import BatchOutlier as BatchOutlier
    from quark_core.batch_summaries import DataDiagnosticsSummary as DataDiagnosticsSummary
    from quark_core.batch_summaries import DiagnosticThresholds as DiagnosticThresholds
    from quark_core.batch_summaries import ExposureSummary as ExposureSummary
    from quark_core.batch_summaries import HardBatchFinding as HardBatchFinding
    from quark_core.batch_summaries import LossSummary as LossSummary
    from quark_core.batch_summaries import SampleExposure as SampleExposure
    from quark_core.batch_summaries import SequenceLengthSummary as SequenceLengthSummary
    from quark_core.context import RunContext as RunContext
    from quark_core.delivery.report import DeliveryReport as DeliveryReport
    from quark_core.delivery.report import LaneReport as LaneReport
    from quark_core.errors import ArtifactDamagedError as ArtifactDamagedError
    from quark_core.errors import ArtifactNotFoundError as ArtifactNotFoundError
    from quark_core.errors import InvalidRunStateError as InvalidRunStateError
    from quark_core.errors import QuarkError as QuarkError
    from quark_core.errors import RetentionHookError as RetentionHookError
    from quark_core.errors import RunNotFoundError as RunNotFoundError
    from quark_core.errors import SchemaMigrationError as SchemaMigrationError
    from quark_core.errors import SchemaValidationError as SchemaValidationError
    from quark_core.errors import SessionStoreError as SessionStoreError
    from quark_core.errors import TrainingHalted as TrainingHalted
    from quark_core.logging_handler import LoggingHandler as LoggingHandler
    from quark_core.migration import migrate_store as migrate_store
    from quark_core.rank_statistics import RankStatistics as RankStatistics
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
    from quark_core.tracker.backends import CSVBackend as CSVBackend
    from quark_core.tracker.backends import MLflowBackend as MLflowBackend
    from quark_core.tracker.backends import TrackerBackend as TrackerBackend
    from quark_core.tracker.backends import WandbBackend as WandbBackend
    from quark_core.tracker.multiplexer import NullTracker as NullTracker
    from quark_core.tracker.multiplexer import Tracker as Tracker
    from quark_core.tracker.setup import register_backend as register_backend
    from quark_core.tracker.setup import setup_tracker as setup_tracker
    from quark_core.version import __version__ as __version__
    from quark_core.writers.artifacts import ArtifactStore as ArtifactStore
    from quark_core.writers.batches import DataDiagnostics as DataDiagnostics
    from quark_core.writers.batches import DataDiagnosticsConfig as DataDiagnosticsConfig
    from quark_core.writers.events import EventLogger as EventLogger
    from quark_core.writers.metrics import MetricsLogger as MetricsLogger
    from quark_core.writers.step_scope import StepTelemetryScope as StepTelemetryScope
    from quark_core.writers.telemetry import SystemTelemetry as SystemTelemetry
    from quark_core.writers.telemetry import SystemTelemetryConfig as SystemTelemetryConfig
    from quark_torch.hook_config import HookEngineConfig as HookEngineConfig
    from quark_torch.hook_engine import HookEngine as HookEngine
    from quark_torch.layer_filter import LayerFilterConfig as LayerFilterConfig
    from quark_torch.parameter_config import (
        ParameterDiagnosticsConfig as ParameterDiagnosticsConfig,
    )
    from quark_torch.parameter_diagnostics import ParameterDiagnostics as ParameterDiagnostics
    from quark_torch.schedule import HookScheduleConfig as HookScheduleConfig
    from quark_torch.watching import TrainingWatch as TrainingWatch
    from quark_torch.watching import watch as watch

_HOMES = {
    "ARTIFACT_STORAGE_LAYOUT": "quark_core.artifacts.layout",
    "AlertRecord": "quark_core.records",
    "AnalyzerEngine": "quark_core.analysis.engine",
    "AnalyzerEngineConfig": "quark_core.analysis.analyzer_config",
    "AnalyzerResult": "quark_core.analysis.diagnosis",
    "AnalyzerThresholds": "quark_core.analysis.analyzer_config",
    "ArtifactDamagedError": "quark_core.errors",
    "ArtifactNotFoundError": "quark_core.errors",
    "ArtifactRecord": "quark_core.records",
    "ArtifactStore": "quark_core.writers.artifacts",
    "BatchDiagnosticRecord": "quark_core.records",
    "BatchMetadata": "quark_core.batch_metadata",
    "BatchMetadataAdapter": "quark_core.batch_metadata",
    "BatchOutlier": "quark_core.batch_summaries",
    "CSVBackend": "quark_core.tracker.backends",
    "CURRENT_SCHEMA_VERSION": "quark_core.schema",
    "ComparisonEngine": "quark_core.analysis.comparison.engine",
    "ComparisonEngineConfig": "quark_core.analysis.comparison.config",
    "DataDiagnostics": "quark_core.writers.batches",
    "DataDiagnosticsConfig": "quark_core.writers.batches",
    "DataDiagnosticsSummary": "quark_core.batch_summaries",
    "DeliveryReport": "quark_core.delivery.report",
    "DiagnosticThresholds": "quark_core.batch_summaries",
    "EventLogger": "quark_core.writers.events",
    "EventRecord": "quark_core.records",
    "EvidenceRecord": "quark_core.records",
    "ExposureSummary": "quark_core.batch_summaries",
    "HardBatchFinding": "quark_core.batch_summaries",
    "HealthScoreRecord": "quark_core.records",
    "HookEngine": "quark_torch.hook_engine",
    "HookEngineConfig": "quark_torch.hook_config",
    "HookScheduleConfig": "quark_torch.schedule",
    "InvalidRunStateError": "quark_core.errors",
    "LaneReport": "quark_core.delivery.report",
    "LayerFilterConfig": "quark_torch.layer_filter",
    "LayerSummaryRecord": "quark_core.records",
    "LogIdentifier": "quark_core.records",
    "LoggingHandler": "quark_core.logging_handler",
    "LossSummary": "quark_core.batch_summaries",
    "MLflowBackend": "quark_core.tracker.backends",
    "MappingBatchMetadataAdapter": "quark_core.batch_metadata",
    "MetricRecord": "quark_core.records",
    "MetricSummary": "quark_core.run_summary",
    "MetricTargetSpec": "quark_core.analysis.comparison.config",
    "MetricsLogger": "quark_core.writers.metrics",
    "NullTracker": "quark_core.tracker.multiplexer",
    "ParameterDiagnostics": "quark_torch.parameter_diagnostics",
    "ParameterDiagnosticsConfig": "quark_torch.parameter_config",
    "ParameterDistributionRecord": "quark_core.records",
    "ParameterSummaryRecord": "quark_core.records",
    "PhaseAnalysisResult": "quark_core.analysis.phases",
    "PhaseAnalyzer": "quark_core.analysis.phases",
    "PhaseAnalyzerConfig": "quark_core.analysis.phase_config",
    "PhaseAnalyzerThresholds": "quark_core.analysis.phase_config",
    "PhaseRecord": "quark_core.records",
    "ProjectRecord": "quark_core.records",
    "QuarkError": "quark_core.errors",
    "RankStatistics": "quark_core.rank_statistics",
    "RetentionHookError": "quark_core.errors",
    "RuleExplanation": "quark_core.analysis.engine",
    "RunComparisonResult": "quark_core.analysis.comparison.results",
    "RunContext": "quark_core.context",
    "RunNotFoundError": "quark_core.errors",
    "RunRecord": "quark_core.records",
    "RunSummary": "quark_core.run_summary",
    "SampleExposure": "quark_core.batch_summaries",
    "SchemaMigrationError": "quark_core.errors",
    "SchemaValidationError": "quark_core.errors",
    "SequenceLengthSummary": "quark_core.batch_summaries",
    "Series": "quark_core.series",
    "SessionStoreError": "quark_core.errors",
    "StepTelemetryScope": "quark_core.writers.step_scope",
    "SystemTelemetry": "quark_core.writers.telemetry",
    "SystemTelemetryConfig": "quark_core.writers.telemetry",
    "SystemTelemetryRecord": "quark_core.records",
    "Tracker": "quark_core.tracker.multiplexer",
    "TrackerBackend": "quark_core.tracker.backends",
    "TrainingHalted": "quark_core.errors",
    "TrainingMonitor": "quark_core.analysis.monitor",
    "TrainingSession": "quark_core.session",
    "TrainingWatch": "quark_torch.watching",
    "WandbBackend": "quark_core.tracker.backends",
    "__version__": "quark_core.version",
    "add_log": "quark_core.shortcuts",
    "add_tag": "quark_core.shortcuts",
    "dump_record": "quark_core.schema",
    "end_run": "quark_core.shortcuts",
    "migrate_store": "quark_core.migration",
    "monitor": "quark_core.analysis.monitor",
    "open_run": "quark_core.shortcuts",
    "register_backend": "quark_core.tracker.setup",
    "resume_run": "quark_core.shortcuts",
    "search_runs": "quark_core.searching",
    "series": "quark_core.run_reading",
    "setup_tracker": "quark_core.tracker.setup",
    "start_run": "quark_core.shortcuts",
    "validate_record": "quark_core.schema",
    "watch": "quark_torch.watching",
}

__all__ = [
    "ARTIFACT_STORAGE_LAYOUT",
    "AlertRecord",
    "AnalyzerEngine",
    "AnalyzerEngineConfig",
    "AnalyzerResult",
    "AnalyzerThresholds",
    "ArtifactDamagedError",
    "ArtifactNotFoundError",
    "ArtifactRecord",
    "ArtifactStore",
    "BatchDiagnosticRecord",
    "BatchMetadata",
    "BatchMetadataAdapter",
    "BatchOutlier",
    "CSVBackend",
    "CURRENT_SCHEMA_VERSION",
    "ComparisonEngine",
    "ComparisonEngineConfig",
    "DataDiagnostics",
    "DataDiagnosticsConfig",
    "DataDiagnosticsSummary",
    "DeliveryReport",
    "DiagnosticThresholds",
    "EventLogger",
    "EventRecord",
    "EvidenceRecord",
    "ExposureSummary",
    "HardBatchFinding",
    "HealthScoreRecord",
    "HookEngine",
    "HookEngineConfig",
    "HookScheduleConfig",
    "InvalidRunStateError",
    "LaneReport",
    "LayerFilterConfig",
    "LayerSummaryRecord",
    "LogIdentifier",
    "LoggingHandler",
    "LossSummary",
    "MLflowBackend",
    "MappingBatchMetadataAdapter",
    "MetricRecord",
    "MetricSummary",
    "MetricTargetSpec",
    "MetricsLogger",
    "NullTracker",
    "ParameterDiagnostics",
    "ParameterDiagnosticsConfig",
    "ParameterDistributionRecord",
    "ParameterSummaryRecord",
    "PhaseAnalysisResult",
    "PhaseAnalyzer",
    "PhaseAnalyzerConfig",
    "PhaseAnalyzerThresholds",
    "PhaseRecord",
    "ProjectRecord",
    "QuarkError",
    "RankStatistics",
    "RetentionHookError",
    "RuleExplanation",
    "RunComparisonResult",
    "RunContext",
    "RunNotFoundError",
    "RunRecord",
    "RunSummary",
    "SampleExposure",
    "SchemaMigrationError",
    "SchemaValidationError",
    "SequenceLengthSummary",
    "Series",
    "SessionStoreError",
    "StepTelemetryScope",
    "SystemTelemetry",
    "SystemTelemetryConfig",
    "SystemTelemetryRecord",
    "Tracker",
    "TrackerBackend",
    "TrainingHalted",
    "TrainingMonitor",
    "TrainingSession",
    "TrainingWatch",
    "WandbBackend",
    "__version__",
    "add_log",
    "add_tag",
    "dump_record",
    "end_run",
    "migrate_store",
    "monitor",
    "open_run",
    "register_backend",
    "resume_run",
    "search_runs",
    "series",
    "setup_tracker",
    "start_run",
    "validate_record",
    "watch",
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
