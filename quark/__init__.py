"""Quark: records training runs, and explains what goes wrong in them.

from quark import MetricsLogger, TrainingSession

Names are imported when they are first used, so that `import quark` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark.analysis.comparison.engine import ComparisonEngine as ComparisonEngine
    from quark.analysis.comparison.results import RunComparisonResult as RunComparisonResult
    from quark.analysis.config import AnalyzerEngineConfig as AnalyzerEngineConfig
    from quark.analysis.config import AnalyzerThresholds as AnalyzerThresholds
    from quark.analysis.config import (
        ComparisonEngineConfig as ComparisonEngineConfig,
    )
    from quark.analysis.config import MetricTargetSpec as MetricTargetSpec
    from quark.analysis.config import PhaseAnalyzerConfig as PhaseAnalyzerConfig
    from quark.analysis.config import PhaseAnalyzerThresholds as PhaseAnalyzerThresholds
    from quark.analysis.engine import AnalyzerEngine as AnalyzerEngine
    from quark.analysis.engine import AnalyzerResult as AnalyzerResult
    from quark.analysis.engine import RuleExplanation as RuleExplanation
    from quark.analysis.explanation.engine import explain_change as explain_change
    from quark.analysis.explanation.results import ChangeExplanation as ChangeExplanation
    from quark.analysis.monitor import TrainingMonitor as TrainingMonitor
    from quark.analysis.monitor import monitor as monitor
    from quark.analysis.phases import PhaseAnalysisResult as PhaseAnalysisResult
    from quark.analysis.phases import PhaseAnalyzer as PhaseAnalyzer
    from quark.analysis.run_search import SimilarRun as SimilarRun
    from quark.analysis.run_search import best_run as best_run
    from quark.analysis.run_search import find_similar_runs as find_similar_runs
    from quark.analysis.sweep_analysis import Importances as Importances
    from quark.analysis.sweep_analysis import SweepVerdict as SweepVerdict
    from quark.analysis.trace_statistics import TraceStatistics as TraceStatistics
    from quark.analysis.trace_statistics import TraceVersion as TraceVersion
    from quark.analysis.trace_statistics import trace_statistics as trace_statistics
    from quark.configuration.layering.layered_config import LayeredConfig as LayeredConfig
    from quark.configuration.layering.layers import Layers as Layers
    from quark.page.report import RunReport as RunReport
    from quark.page.report import report as report
    from quark.projects import RunGroup as RunGroup
    from quark.projects import RunProject as RunProject
    from quark.projects import project as project
    from quark.provenance.run_sources import read_sources as read_sources
    from quark.provenance.sources import KeptSource as KeptSource
    from quark.provenance.sources import KeptSources as KeptSources
    from quark.provenance.tracing import trace as trace
    from quark.sweeps.space import integers as integers
    from quark.sweeps.space import uniform as uniform
    from quark.sweeps.sweep import Sweep as Sweep
    from quark.sweeps.sweep import sweep as sweep
    from quark.sweeps.trial import Trial as Trial
    from quark.tracker.mirrors import CSVBackend as CSVBackend
    from quark.tracker.mirrors import MLflowBackend as MLflowBackend
    from quark.tracker.mirrors import WandbBackend as WandbBackend
    from quark.tracker.tracker import NullTracker as NullTracker
    from quark.tracker.tracker import Tracker as Tracker
    from quark.tracker.tracker import register_backend as register_backend
    from quark.tracker.tracker import setup_tracker as setup_tracker
    from quark_core.backends.contract import DeliveryReport as DeliveryReport
    from quark_core.backends.contract import LaneReport as LaneReport
    from quark_core.backends.registry import migrate_store as migrate_store
    from quark_core.backends.run_summary import MetricSummary as MetricSummary
    from quark_core.backends.run_summary import RunSummary as RunSummary
    from quark_core.backends.series import Series as Series
    from quark_core.backends.tracker_backend import TrackerBackend as TrackerBackend
    from quark_core.config.snapshot import tracked as tracked
    from quark_core.errors import ArtifactDamagedError as ArtifactDamagedError
    from quark_core.errors import ArtifactNotFoundError as ArtifactNotFoundError
    from quark_core.errors import InvalidRunStateError as InvalidRunStateError
    from quark_core.errors import QuarkError as QuarkError
    from quark_core.errors import RetentionHookError as RetentionHookError
    from quark_core.errors import RunNotFoundError as RunNotFoundError
    from quark_core.errors import SchemaMigrationError as SchemaMigrationError
    from quark_core.errors import SchemaValidationError as SchemaValidationError
    from quark_core.errors import SessionStoreError as SessionStoreError
    from quark_core.errors import StopRequested as StopRequested
    from quark_core.errors import TrainingHalted as TrainingHalted
    from quark_core.ranks.statistics import RankStatistics as RankStatistics
    from quark_core.records import AlertRecord as AlertRecord
    from quark_core.records import ArtifactLinkRecord as ArtifactLinkRecord
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
    from quark_core.records.kinds.samples import SampleRecord as SampleRecord
    from quark_core.records.names import (
        ARTIFACT_STORAGE_LAYOUT as ARTIFACT_STORAGE_LAYOUT,
    )
    from quark_core.records.runs import RunContext as RunContext
    from quark_core.records.runs import StopRequest as StopRequest
    from quark_core.records.schema import CURRENT_SCHEMA_VERSION as CURRENT_SCHEMA_VERSION
    from quark_core.records.schema import dump_record as dump_record
    from quark_core.records.schema import validate_record as validate_record
    from quark_core.records.sweeps import StoredTrial as StoredTrial
    from quark_core.runs.artifact_versions import ArtifactVersion as ArtifactVersion
    from quark_core.runs.run_editing import edit_run as edit_run
    from quark_core.runs.run_editing import stop_run as stop_run
    from quark_core.runs.run_search import search_runs as search_runs
    from quark_core.runs.sample_search import find_samples as find_samples
    from quark_core.samples.metadata import BatchMetadata as BatchMetadata
    from quark_core.samples.metadata import BatchMetadataAdapter as BatchMetadataAdapter
    from quark_core.samples.metadata import (
        MappingBatchMetadataAdapter as MappingBatchMetadataAdapter,
    )
    from quark_core.samples.survey import BatchOutlier as BatchOutlier
    from quark_core.samples.survey import DataDiagnosticsSummary as DataDiagnosticsSummary
    from quark_core.samples.survey import DiagnosticThresholds as DiagnosticThresholds
    from quark_core.samples.survey import ExposureSummary as ExposureSummary
    from quark_core.samples.survey import HardBatchFinding as HardBatchFinding
    from quark_core.samples.survey import LossSummary as LossSummary
    from quark_core.samples.survey import SampleExposure as SampleExposure
    from quark_core.samples.survey import SequenceLengthSummary as SequenceLengthSummary
    from quark_core.sessions.session import TrainingSession as TrainingSession
    from quark_core.sessions.session import add_log as add_log
    from quark_core.sessions.session import add_tag as add_tag
    from quark_core.sessions.session import end_run as end_run
    from quark_core.sessions.session import open_run as open_run
    from quark_core.sessions.session import resume_run as resume_run
    from quark_core.sessions.session import start_run as start_run
    from quark_core.sessions.session import watch_data as watch_data
    from quark_core.version import __version__ as __version__
    from quark_core.writers.artifact_links import UsedArtifact as UsedArtifact
    from quark_core.writers.artifact_writing import PendingArtifact as PendingArtifact
    from quark_core.writers.artifacts import ArtifactStore as ArtifactStore
    from quark_core.writers.data_diagnostics import DataDiagnostics as DataDiagnostics
    from quark_core.writers.data_diagnostics import DataDiagnosticsConfig as DataDiagnosticsConfig
    from quark_core.writers.events import EventLogger as EventLogger
    from quark_core.writers.events import LoggingHandler as LoggingHandler
    from quark_core.writers.metrics import MetricsLogger as MetricsLogger
    from quark_core.writers.metrics import series as series
    from quark_core.writers.samples import SampleLogger as SampleLogger
    from quark_core.writers.step_timing import StepTelemetryScope as StepTelemetryScope
    from quark_core.writers.telemetry import SystemTelemetry as SystemTelemetry
    from quark_core.writers.telemetry_recording import (
        SystemTelemetryConfig as SystemTelemetryConfig,
    )
    from quark_torch.instruments.attention_entropy import AttentionEntropy as AttentionEntropy
    from quark_torch.instruments.instrument import Instrument as Instrument
    from quark_torch.instruments.router_load import RouterLoad as RouterLoad
    from quark_torch.instruments.router_load import Routing as Routing
    from quark_torch.layer_filter import LayerFilterConfig as LayerFilterConfig
    from quark_torch.layers.config import HookEngineConfig as HookEngineConfig
    from quark_torch.layers.hook_engine import HookEngine as HookEngine
    from quark_torch.parameters.config import (
        ParameterDiagnosticsConfig as ParameterDiagnosticsConfig,
    )
    from quark_torch.parameters.diagnostics import ParameterDiagnostics as ParameterDiagnostics
    from quark_torch.schedule import HookScheduleConfig as HookScheduleConfig
    from quark_torch.watching import TrainingWatch as TrainingWatch
    from quark_torch.watching import count_flops as count_flops
    from quark_torch.watching import watch as watch

_HOMES = {
    "ARTIFACT_STORAGE_LAYOUT": "quark_core.records.names",
    "AlertRecord": "quark_core.records",
    "AnalyzerEngine": "quark.analysis.engine",
    "AnalyzerEngineConfig": "quark.analysis.config",
    "AnalyzerResult": "quark.analysis.engine",
    "AnalyzerThresholds": "quark.analysis.config",
    "ArtifactDamagedError": "quark_core.errors",
    "ArtifactNotFoundError": "quark_core.errors",
    "ArtifactLinkRecord": "quark_core.records",
    "ArtifactRecord": "quark_core.records",
    "ArtifactStore": "quark_core.writers.artifacts",
    "ArtifactVersion": "quark_core.runs.artifact_versions",
    "BatchDiagnosticRecord": "quark_core.records",
    "BatchMetadata": "quark_core.samples.metadata",
    "BatchMetadataAdapter": "quark_core.samples.metadata",
    "BatchOutlier": "quark_core.samples.survey",
    "CSVBackend": "quark.tracker.mirrors",
    "CURRENT_SCHEMA_VERSION": "quark_core.records.schema",
    "ChangeExplanation": "quark.analysis.explanation.results",
    "ComparisonEngine": "quark.analysis.comparison.engine",
    "ComparisonEngineConfig": "quark.analysis.config",
    "DataDiagnostics": "quark_core.writers.data_diagnostics",
    "DataDiagnosticsConfig": "quark_core.writers.data_diagnostics",
    "DataDiagnosticsSummary": "quark_core.samples.survey",
    "DeliveryReport": "quark_core.backends.contract",
    "DiagnosticThresholds": "quark_core.samples.survey",
    "EventLogger": "quark_core.writers.events",
    "EventRecord": "quark_core.records",
    "EvidenceRecord": "quark_core.records",
    "ExposureSummary": "quark_core.samples.survey",
    "HardBatchFinding": "quark_core.samples.survey",
    "HealthScoreRecord": "quark_core.records",
    "HookEngine": "quark_torch.layers.hook_engine",
    "HookEngineConfig": "quark_torch.layers.config",
    "HookScheduleConfig": "quark_torch.schedule",
    "Importances": "quark.analysis.sweep_analysis",
    "InvalidRunStateError": "quark_core.errors",
    "KeptSource": "quark.provenance.sources",
    "KeptSources": "quark.provenance.sources",
    "LaneReport": "quark_core.backends.contract",
    "LayerFilterConfig": "quark_torch.layer_filter",
    "LayerSummaryRecord": "quark_core.records",
    "LayeredConfig": "quark.configuration.layering.layered_config",
    "Layers": "quark.configuration.layering.layers",
    "LogIdentifier": "quark_core.records",
    "LoggingHandler": "quark_core.writers.events",
    "LossSummary": "quark_core.samples.survey",
    "MLflowBackend": "quark.tracker.mirrors",
    "MappingBatchMetadataAdapter": "quark_core.samples.metadata",
    "MetricRecord": "quark_core.records",
    "MetricSummary": "quark_core.backends.run_summary",
    "MetricTargetSpec": "quark.analysis.config",
    "MetricsLogger": "quark_core.writers.metrics",
    "NullTracker": "quark.tracker.tracker",
    "ParameterDiagnostics": "quark_torch.parameters.diagnostics",
    "ParameterDiagnosticsConfig": "quark_torch.parameters.config",
    "ParameterDistributionRecord": "quark_core.records",
    "ParameterSummaryRecord": "quark_core.records",
    "PendingArtifact": "quark_core.writers.artifact_writing",
    "PhaseAnalysisResult": "quark.analysis.phases",
    "PhaseAnalyzer": "quark.analysis.phases",
    "PhaseAnalyzerConfig": "quark.analysis.config",
    "PhaseAnalyzerThresholds": "quark.analysis.config",
    "PhaseRecord": "quark_core.records",
    "RunProject": "quark.projects",
    "ProjectRecord": "quark_core.records",
    "QuarkError": "quark_core.errors",
    "RankStatistics": "quark_core.ranks.statistics",
    "RetentionHookError": "quark_core.errors",
    "RuleExplanation": "quark.analysis.engine",
    "RunComparisonResult": "quark.analysis.comparison.results",
    "RunContext": "quark_core.records.runs",
    "RunNotFoundError": "quark_core.errors",
    "RunGroup": "quark.projects",
    "RunRecord": "quark_core.records",
    "RunReport": "quark.page.report",
    "RunSummary": "quark_core.backends.run_summary",
    "SampleExposure": "quark_core.samples.survey",
    "SampleLogger": "quark_core.writers.samples",
    "SampleRecord": "quark_core.records.kinds.samples",
    "SchemaMigrationError": "quark_core.errors",
    "SchemaValidationError": "quark_core.errors",
    "SequenceLengthSummary": "quark_core.samples.survey",
    "Series": "quark_core.backends.series",
    "SessionStoreError": "quark_core.errors",
    "StoredTrial": "quark_core.records.sweeps",
    "StopRequest": "quark_core.records.runs",
    "StopRequested": "quark_core.errors",
    "SimilarRun": "quark.analysis.run_search",
    "StepTelemetryScope": "quark_core.writers.step_timing",
    "SystemTelemetry": "quark_core.writers.telemetry",
    "SystemTelemetryConfig": "quark_core.writers.telemetry_recording",
    "SystemTelemetryRecord": "quark_core.records",
    "Tracker": "quark.tracker.tracker",
    "TrackerBackend": "quark_core.backends.tracker_backend",
    "TrainingHalted": "quark_core.errors",
    "TrainingMonitor": "quark.analysis.monitor",
    "TrainingSession": "quark_core.sessions.session",
    "TrainingWatch": "quark_torch.watching",
    "UsedArtifact": "quark_core.writers.artifact_links",
    "WandbBackend": "quark.tracker.mirrors",
    "__version__": "quark_core.version",
    "add_log": "quark_core.sessions.session",
    "add_tag": "quark_core.sessions.session",
    "best_run": "quark.analysis.run_search",
    "dump_record": "quark_core.records.schema",
    "explain_change": "quark.analysis.explanation.engine",
    "edit_run": "quark_core.runs.run_editing",
    "end_run": "quark_core.sessions.session",
    "find_similar_runs": "quark.analysis.run_search",
    "find_samples": "quark_core.runs.sample_search",
    "migrate_store": "quark_core.backends.registry",
    "monitor": "quark.analysis.monitor",
    "open_run": "quark_core.sessions.session",
    "project": "quark.projects",
    "read_sources": "quark.provenance.run_sources",
    "register_backend": "quark.tracker.tracker",
    "report": "quark.page.report",
    "resume_run": "quark_core.sessions.session",
    "search_runs": "quark_core.runs.run_search",
    "series": "quark_core.writers.metrics",
    "setup_tracker": "quark.tracker.tracker",
    "start_run": "quark_core.sessions.session",
    "stop_run": "quark_core.runs.run_editing",
    "Sweep": "quark.sweeps.sweep",
    "SweepVerdict": "quark.analysis.sweep_analysis",
    "Trial": "quark.sweeps.trial",
    "integers": "quark.sweeps.space",
    "sweep": "quark.sweeps.sweep",
    "uniform": "quark.sweeps.space",
    "tracked": "quark_core.config.snapshot",
    "validate_record": "quark_core.records.schema",
    "AttentionEntropy": "quark_torch.instruments.attention_entropy",
    "Instrument": "quark_torch.instruments.instrument",
    "RouterLoad": "quark_torch.instruments.router_load",
    "Routing": "quark_torch.instruments.router_load",
    "count_flops": "quark_torch.watching",
    "watch": "quark_torch.watching",
    "TraceStatistics": "quark.analysis.trace_statistics",
    "TraceVersion": "quark.analysis.trace_statistics",
    "trace": "quark.provenance.tracing",
    "trace_statistics": "quark.analysis.trace_statistics",
    "watch_data": "quark_core.sessions.session",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        value = _find_record_type(name)
        if value is None:
            habits = import_module("quark_core.config.migration_hints")
            raise habits.explain_attribute(import_module("quark"), name, "module", "module 'quark'")
    else:
        if home.endswith(".tracker_backend"):
            # A mirror that stands alone begins its run with it.
            import_module("quark.tracker.tracker")
        value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _find_record_type(name: str) -> Any:
    """A type of record that has been added; None where there is none of this name."""
    if not name.endswith("Record"):
        return None
    from quark_core.records import RECORD_TYPES

    return next((each for each in RECORD_TYPES.values() if each.__name__ == name), None)
