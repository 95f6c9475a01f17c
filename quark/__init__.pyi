"""The public names of Quark and the modules that they are in.

Type checkers read this file, and `__init__.py` reads it to find what is asked for: a name is
listed here alone.
"""

from typing import Any

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
from quark.provenance.sources import SourceFile as SourceFile
from quark.provenance.sources import SourceSnapshot as SourceSnapshot
from quark.provenance.tracing import trace as trace
from quark.sweeps.space import integers as integers
from quark.sweeps.space import uniform as uniform
from quark.sweeps.sweep import Sweep as Sweep
from quark.sweeps.sweep import sweep as sweep
from quark.sweeps.trial import Trial as Trial
from quark.tracker.tracker import NullTracker as NullTracker
from quark.tracker.tracker import Tracker as Tracker
from quark.tracker.tracker import register_backend as register_backend
from quark.tracker.tracker import setup_tracker as setup_tracker
from quark_backends.csv.tracker_backend import CSVBackend as CSVBackend
from quark_backends.mlflow.tracker_backend import MLflowBackend as MLflowBackend
from quark_backends.wandb.tracker_backend import WandbBackend as WandbBackend
from quark_core.backends.contract import BackendDelivery as BackendDelivery
from quark_core.backends.contract import DeliveryReport as DeliveryReport
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

__all__: list[str]

def __getattr__(name: str) -> Any: ...
