"""The immutable records that writers make and readers return.

Each is a frozen msgspec Struct, which takes a third of the time of a frozen
dataclass to make, and is a dataclass to whoever asks: `is_dataclass`,
`fields`, `asdict`, `replace` and `to_dict()` all work, and records pickle.

Fields that every record of a stream begins with:
    run_id: The run; None only on a rank that cannot know it.
    writer_id: One process's stream into one run.
    attempt: 0 for the first start, one more at each resume.
    rank: Global rank of the writing process.
    sequence: Counts per run, kind and writer; orders records, with gaps allowed.
    time_us: Microseconds since the epoch, UTC.

`id` and `timestamp` derive from these when asked for.
"""

from importlib import import_module
from pkgutil import iter_modules

from quark_core.records import kinds
from quark_core.records.base import RECORD_TYPES, Record, StreamRecord, format_time, parse_time
from quark_core.records.kinds.artifact_links import ArtifactLinkRecord
from quark_core.records.kinds.basic import (
    EventRecord,
    EventSeverity,
    LifecycleAction,
    LifecycleRecord,
    LogIdentifier,
    MetricRecord,
)
from quark_core.records.kinds.diagnostics import (
    ArtifactRecord,
    BatchDiagnosticRecord,
    GpuReading,
    LayerSummaryRecord,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
    SystemTelemetryRecord,
)
from quark_core.records.kinds.findings import (
    AlertRecord,
    EvidenceRecord,
    HealthScoreRecord,
    PhaseRecord,
)
from quark_core.records.runs import (
    ConfigSnapshot,
    EnvironmentSnapshot,
    ProjectRecord,
    RunRecord,
    RunStatus,
)

__all__ = [
    "RECORD_TYPES",
    "AlertRecord",
    "ArtifactLinkRecord",
    "ArtifactRecord",
    "BatchDiagnosticRecord",
    "ConfigSnapshot",
    "EnvironmentSnapshot",
    "EventRecord",
    "EventSeverity",
    "EvidenceRecord",
    "GpuReading",
    "HealthScoreRecord",
    "LayerSummaryRecord",
    "LifecycleAction",
    "LifecycleRecord",
    "LogIdentifier",
    "MetricRecord",
    "ParameterDistributionRecord",
    "ParameterSummaryRecord",
    "PhaseRecord",
    "ProjectRecord",
    "Record",
    "RunRecord",
    "RunStatus",
    "StreamRecord",
    "SystemTelemetryRecord",
    "format_time",
    "parse_time",
]

for _module in iter_modules(kinds.__path__):
    import_module(f"{kinds.__name__}.{_module.name}")
