"""The public surface of Quark for plugins, beside `quark_core.hookspecs`.

Mirrors, instrumentation and plugins of other distributions import these two modules and no other
module of `quark_core`. Each name is imported from its home when it is first used, so that importing
this module costs nothing:

    from quark_core.api import Batch, BackendRejected

A plugin that is opened late should import it the same way; a declaration imports what it declares
with, and nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark_core.artifacts.payload_folder import PayloadFolder as PayloadFolder
    from quark_core.artifacts.payload_folder import is_plain_file as is_plain_file
    from quark_core.artifacts.source_packs import MANIFEST_KEY as MANIFEST_KEY
    from quark_core.artifacts.source_packs import PACK_KEY as PACK_KEY
    from quark_core.artifacts.source_packs import unpack_sources as unpack_sources
    from quark_core.backends.contract import HELD_FILE as HELD_FILE
    from quark_core.backends.contract import SOURCES_OPTION as SOURCES_OPTION
    from quark_core.backends.contract import Backend as Backend
    from quark_core.backends.contract import BackendConfig as BackendConfig
    from quark_core.backends.contract import BackendDefinition as BackendDefinition
    from quark_core.backends.contract import Batch as Batch
    from quark_core.backends.contract import Capability as Capability
    from quark_core.backends.contract import DeliveryReport as DeliveryReport
    from quark_core.backends.contract import MirrorRun as MirrorRun
    from quark_core.backends.contract import Payload as Payload
    from quark_core.backends.contract import RankPolicy as RankPolicy
    from quark_core.backends.contract import TrackerForm as TrackerForm
    from quark_core.backends.registry import default_registry as default_registry
    from quark_core.backends.run_summary import StoredRun as StoredRun
    from quark_core.backends.stored_batches import describe_run as describe_run
    from quark_core.backends.stored_batches import dump_batch as dump_batch
    from quark_core.backends.stored_batches import restore_batch as restore_batch
    from quark_core.backends.stored_batches import select_rows as select_rows
    from quark_core.backends.tracker_backend import MirrorBackend as MirrorBackend
    from quark_core.backends.tracker_backend import ProjectMirror as ProjectMirror
    from quark_core.config.objective import Objective as Objective
    from quark_core.config.objective import choose_objective as choose_objective
    from quark_core.config.objective import find_mode as find_mode
    from quark_core.config.objective import keep_objective as keep_objective
    from quark_core.config.objective import read_objective as read_objective
    from quark_core.config.redaction import cut_text as cut_text
    from quark_core.config.redaction import redact_text as redact_text
    from quark_core.config.settings import exit_timeout_s as exit_timeout_s
    from quark_core.config.settings import uses_helpers as uses_helpers
    from quark_core.config.snapshot import ConfigDescription as ConfigDescription
    from quark_core.delivery.delivery_state import Lease as Lease
    from quark_core.delivery.journal import split_generation as split_generation
    from quark_core.delivery.segments import FrameSearch as FrameSearch
    from quark_core.errors import ArtifactDamagedError as ArtifactDamagedError
    from quark_core.errors import ArtifactNotFoundError as ArtifactNotFoundError
    from quark_core.errors import BackendError as BackendError
    from quark_core.errors import BackendOutcomeUnknown as BackendOutcomeUnknown
    from quark_core.errors import BackendRejected as BackendRejected
    from quark_core.errors import BackendUnauthorized as BackendUnauthorized
    from quark_core.errors import BackendUnavailable as BackendUnavailable
    from quark_core.errors import BackendUnusable as BackendUnusable
    from quark_core.errors import InvalidRunStateError as InvalidRunStateError
    from quark_core.errors import RunNotFoundError as RunNotFoundError
    from quark_core.errors import SchemaValidationError as SchemaValidationError
    from quark_core.errors import SessionStoreError as SessionStoreError
    from quark_core.errors import StopRequested as StopRequested
    from quark_core.errors import StoreUnavailableError as StoreUnavailableError
    from quark_core.hosting.child_process import ChildGone as ChildGone
    from quark_core.hosting.child_process import ChildProcess as ChildProcess
    from quark_core.hosting.protocol import lower_priority as lower_priority
    from quark_core.hosting.protocol import lower_started as lower_started
    from quark_core.hosting.protocol import read_frame as read_frame
    from quark_core.hosting.protocol import serve_parent as serve_parent
    from quark_core.hosting.protocol import write_frame as write_frame
    from quark_core.ranks.launches import parse_ranks as parse_ranks
    from quark_core.records import RECORD_TYPES as RECORD_TYPES
    from quark_core.records import AlertRecord as AlertRecord
    from quark_core.records import ArtifactLinkRecord as ArtifactLinkRecord
    from quark_core.records import ArtifactRecord as ArtifactRecord
    from quark_core.records import BatchDiagnosticRecord as BatchDiagnosticRecord
    from quark_core.records import ConfigSnapshot as ConfigSnapshot
    from quark_core.records import EnvironmentSnapshot as EnvironmentSnapshot
    from quark_core.records import EventRecord as EventRecord
    from quark_core.records import GpuReading as GpuReading
    from quark_core.records import HealthScoreRecord as HealthScoreRecord
    from quark_core.records import LayerSummaryRecord as LayerSummaryRecord
    from quark_core.records import LifecycleRecord as LifecycleRecord
    from quark_core.records import MetricRecord as MetricRecord
    from quark_core.records import ParameterDistributionRecord as ParameterDistributionRecord
    from quark_core.records import ParameterSummaryRecord as ParameterSummaryRecord
    from quark_core.records import PhaseRecord as PhaseRecord
    from quark_core.records import ProjectRecord as ProjectRecord
    from quark_core.records import RunRecord as RunRecord
    from quark_core.records import RunStatus as RunStatus
    from quark_core.records import StreamRecord as StreamRecord
    from quark_core.records import SystemTelemetryRecord as SystemTelemetryRecord
    from quark_core.records import format_time as format_time
    from quark_core.records import parse_time as parse_time
    from quark_core.records.attempts import hide_superseded as hide_superseded
    from quark_core.records.base import FieldRules as FieldRules
    from quark_core.records.base import start_fields as start_fields
    from quark_core.records.checks import check_choice as check_choice
    from quark_core.records.codec import DecodedBody as DecodedBody
    from quark_core.records.codec import decode_body as decode_body
    from quark_core.records.codec import encode_records as encode_records
    from quark_core.records.columns import Columns as Columns
    from quark_core.records.json_object import JsonObject as JsonObject
    from quark_core.records.json_object import decode_json as decode_json
    from quark_core.records.json_object import encode_json as encode_json
    from quark_core.records.json_object import normalize_object as normalize_object
    from quark_core.records.kinds.diagnostics import (
        ParameterDistributionType as ParameterDistributionType,
    )
    from quark_core.records.kinds.diagnostics import ParameterRole as ParameterRole
    from quark_core.records.kinds.findings import ALERT_RAISED as ALERT_RAISED
    from quark_core.records.kinds.findings import is_user_alert as is_user_alert
    from quark_core.records.kinds.provenance import SOURCES_KEY as SOURCES_KEY
    from quark_core.records.kinds.provenance import AggregateRecord as AggregateRecord
    from quark_core.records.kinds.provenance import FingerprintRecord as FingerprintRecord
    from quark_core.records.kinds.samples import SampleRecord as SampleRecord
    from quark_core.records.names import (
        ARTIFACT_STORAGE_LAYOUT as ARTIFACT_STORAGE_LAYOUT,
    )
    from quark_core.records.names import KEPT_SOURCES as KEPT_SOURCES
    from quark_core.records.names import check_name as check_name
    from quark_core.records.names import decode_name as decode_name
    from quark_core.records.names import encode_name as encode_name
    from quark_core.records.names import is_sha256 as is_sha256
    from quark_core.records.names import object_path as object_path
    from quark_core.records.names import split_name as split_name
    from quark_core.records.names import split_path as split_path
    from quark_core.records.query import Query as Query
    from quark_core.records.query import ReadBounds as ReadBounds
    from quark_core.records.query import check_index as check_index
    from quark_core.records.query import check_step as check_step
    from quark_core.records.query import spell_out as spell_out
    from quark_core.records.runs import RunContext as RunContext
    from quark_core.records.runs import RunEnding as RunEnding
    from quark_core.records.runs import change_fields as change_fields
    from quark_core.records.runs import change_groups as change_groups
    from quark_core.records.runs import make_digests as make_digests
    from quark_core.records.schema import RecordField as RecordField
    from quark_core.records.schema import describe_fields as describe_fields
    from quark_core.runs.artifact_versions import HIDDEN_TYPES as HIDDEN_TYPES
    from quark_core.runs.config_reading import read_config as read_config
    from quark_core.runs.open_run import OpenRun as OpenRun
    from quark_core.runs.open_run import RunExtension as RunExtension
    from quark_core.runs.opening import resolve_target as resolve_target
    from quark_core.runs.step_counters import read_step as read_step
    from quark_core.sessions.session import TrainingSession as TrainingSession
    from quark_core.system.process import ProcessIdentity as ProcessIdentity
    from quark_core.system.process import current_process as current_process
    from quark_core.system.process import find_loss as find_loss
    from quark_core.system.process import importing as importing
    from quark_core.system.process import is_alive as is_alive
    from quark_core.system.process import renew_process as renew_process
    from quark_core.system.terminal_text import guard_logger as guard_logger
    from quark_core.writers.buffered_writer import BufferedWriter as BufferedWriter
    from quark_core.writers.events import EventLogger as EventLogger
    from quark_core.writers.metrics import MetricsLogger as MetricsLogger
    from quark_core.writers.metrics import find_next_step as find_next_step
    from quark_core.writers.scalars import to_float as to_float
    from quark_core.writers.step_timing import StepRates as StepRates
    from quark_core.writers.step_timing import StepTelemetryScope as StepTelemetryScope
    from quark_core.writers.telemetry import SystemTelemetry as SystemTelemetry
    from quark_core.writers.telemetry_recording import (
        SystemTelemetryConfig as SystemTelemetryConfig,
    )

_NAMES = {
    # The contract between Quark and a storage backend.
    "quark_core.backends.contract": """
        Backend BackendConfig BackendDefinition Batch Capability DeliveryReport HELD_FILE
        MirrorRun Payload RankPolicy SOURCES_OPTION TrackerForm
    """,
    "quark_core.backends.run_summary": "StoredRun",
    "quark_core.backends.stored_batches": "describe_run dump_batch restore_batch select_rows",
    "quark_core.backends.registry": "default_registry",
    "quark_core.backends.tracker_backend": "MirrorBackend ProjectMirror",
    # Errors.
    "quark_core.errors": """
        ArtifactDamagedError ArtifactNotFoundError BackendError BackendOutcomeUnknown
        BackendRejected BackendUnauthorized BackendUnavailable BackendUnusable
        InvalidRunStateError RunNotFoundError SchemaValidationError SessionStoreError
        StopRequested StoreUnavailableError
    """,
    # Records and how they are stored and read.
    "quark_core.records": """
        AlertRecord ArtifactLinkRecord ArtifactRecord BatchDiagnosticRecord ConfigSnapshot
        EnvironmentSnapshot EventRecord format_time GpuReading HealthScoreRecord
        LayerSummaryRecord LifecycleRecord MetricRecord ParameterDistributionRecord
        ParameterSummaryRecord parse_time PhaseRecord ProjectRecord RECORD_TYPES RunRecord
        RunStatus StreamRecord SystemTelemetryRecord
    """,
    "quark_core.records.kinds.diagnostics": "ParameterDistributionType ParameterRole",
    "quark_core.records.kinds.provenance": "AggregateRecord FingerprintRecord SOURCES_KEY",
    "quark_core.records.kinds.samples": "SampleRecord",
    "quark_core.records.attempts": "hide_superseded",
    "quark_core.records.runs": "change_fields change_groups make_digests RunContext RunEnding",
    "quark_core.records.base": "FieldRules start_fields",
    "quark_core.records.checks": "check_choice",
    "quark_core.records.codec": "decode_body DecodedBody encode_records",
    "quark_core.records.columns": "Columns",
    "quark_core.records.schema": "describe_fields RecordField",
    "quark_core.records.query": "check_index check_step Query ReadBounds spell_out",
    "quark_core.records.kinds.findings": "ALERT_RAISED is_user_alert",
    "quark_core.records.json_object": "decode_json encode_json JsonObject normalize_object",
    "quark_core.records.names": """
        ARTIFACT_STORAGE_LAYOUT check_name decode_name encode_name is_sha256 KEPT_SOURCES
        object_path split_name split_path
    """,
    # Payloads of artifacts.
    "quark_core.artifacts.payload_folder": "is_plain_file PayloadFolder",
    "quark_core.runs.artifact_versions": "HIDDEN_TYPES",
    "quark_core.artifacts.source_packs": "MANIFEST_KEY PACK_KEY unpack_sources",
    # Configuration, objectives and redaction.
    "quark_core.config.objective": """
        choose_objective find_mode keep_objective Objective read_objective
    """,
    "quark_core.config.redaction": "cut_text redact_text",
    "quark_core.config.settings": "exit_timeout_s uses_helpers",
    "quark_core.config.snapshot": "ConfigDescription",
    # Runs and writers, for instrumentation.
    "quark_core.ranks.launches": "parse_ranks",
    "quark_core.runs.config_reading": "read_config",
    "quark_core.runs.open_run": "OpenRun RunExtension",
    "quark_core.runs.opening": "resolve_target",
    "quark_core.runs.step_counters": "read_step",
    "quark_core.sessions.session": "TrainingSession",
    "quark_core.writers.buffered_writer": "BufferedWriter",
    "quark_core.writers.metrics": "find_next_step MetricsLogger",
    "quark_core.writers.events": "EventLogger",
    "quark_core.writers.scalars": "to_float",
    "quark_core.writers.step_timing": "StepRates StepTelemetryScope",
    "quark_core.writers.telemetry": "SystemTelemetry",
    "quark_core.writers.telemetry_recording": "SystemTelemetryConfig",
    # Processes, forks, files and log messages.
    "quark_core.delivery.segments": "FrameSearch",
    "quark_core.delivery.journal": "split_generation",
    "quark_core.delivery.delivery_state": "Lease",
    "quark_core.hosting.child_process": "ChildGone ChildProcess",
    "quark_core.hosting.protocol": """
        lower_priority lower_started read_frame serve_parent write_frame
    """,
    "quark_core.system.process": """
        current_process find_loss importing is_alive ProcessIdentity renew_process
    """,
    "quark_core.system.terminal_text": "guard_logger",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'quark_core.api' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
