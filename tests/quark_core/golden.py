"""Records whose encoded form of every schema version is kept in `tests/assets`.

Run as a script after the schema version has grown, to add files of the new one.
"""

from pathlib import Path

from quark_core.records import (
    AlertRecord,
    ArtifactRecord,
    BatchDiagnosticRecord,
    EventRecord,
    EvidenceRecord,
    GpuReading,
    HealthScoreRecord,
    LayerSummaryRecord,
    LifecycleRecord,
    MetricRecord,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
    PhaseRecord,
    SystemTelemetryRecord,
)
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject
from quark_core.records.schema import CURRENT_SCHEMA_VERSION

ASSETS = Path(__file__).parent.parent / "assets"
ORIGIN = {"run_id": "run-0", "writer_id": "writer-0", "attempt": 1, "rank": 2}

_FIRST_TIME_US = 1_767_225_600_000_000
_VALUES = [0.5, -0.0, 5e-324, 1.7976931348623157e308, float("inf"), float("-inf"), 0.1, 2.0]


def _head(sequence):
    return (*ORIGIN.values(), sequence, _FIRST_TIME_US + 1_000 * sequence)


_EVIDENCE = (
    EvidenceRecord("metric", "train/loss", "The loss doubled.", 2.5, 1.25, 10, 20),
    EvidenceRecord("layer", "encoder.0", "No gradient 😀"),
)

RECORDS = {
    "metric": [
        MetricRecord(
            *_head(i),
            metric_key=("train/loss", "lr", "mean_x40_1")[i % 3],
            namespace=("train", None, None)[i % 3],
            metric_name=("loss", "lr", "mean_x40_1")[i % 3],
            value=_VALUES[i % 8],
            step=None if i % 5 == 4 else 2**62 * (i == 9) + 100 * i,
            epoch=i // 8 if i % 5 == 4 or i % 2 else None,
            description=(None, "per batch", "é 😀")[i % 3],
            metadata=None if i % 4 else JsonObject({"i": i, "nested": [{"lr": 1e-3}, None]}),
        )
        for i in range(24)
    ],
    "event": [
        EventRecord(*_head(0), "training_started", "info"),
        EventRecord(
            *_head(4), "user_log", "error", 7, 1, "bad", JsonObject({"message": "loss is NaN 😀"})
        ),
    ],
    "layer": [
        LayerSummaryRecord(
            *_head(i),
            module_name=("encoder.0", "encoder.1", "head")[i % 3],
            module_type=("Conv2d", "Conv2d", "Linear")[i % 3],
            summary_type=("activation", "gradient")[i % 2],
            hook_direction=("forward", "backward")[i % 2],
            call_index=i // 6,
            element_count=64 * (i + 1),
            step=None if i == 11 else 10 * (i // 6),
            epoch=1 if i == 11 else None,
            tensor_shape=None if i % 3 == 1 else (8, 16, 4)[: 1 + i % 3],
            mean=None if i == 4 else _VALUES[i % 8],
            std=float("inf") if i == 5 else 0.25 * i,
            norm=1.5 * i,
            variance=None,
            dead_unit_ratio=None if i % 2 else i / 12,
            saturation_ratio=0.125,
            metadata=None if i else JsonObject({"output": "logits"}),
        )
        for i in range(12)
    ],
    "telemetry": [
        SystemTelemetryRecord(
            *_head(i),
            boundary=("step", "time")[i % 2],
            step=None if i % 2 else 10 * i,
            epoch=i // 4,
            step_time_ms=12.5 + i,
            data_time_ms=None if i == 3 else 0.25 * i,
            cpu_usage_percent=37.5,
            ram_used_bytes=2**40 + i,
            worker_count=i,
            gpu_index=None if i < 4 else 1,
            overflow_count=i // 3,
            gpus=None
            if i < 4
            else (GpuReading(0, "A", "GPU-0", 50.0, 1, 2, 50.0, 60.0, 250.5), GpuReading(i)),
            node="node-7",
            metadata=JsonObject({"reading_age_ms": 12.5}) if i % 2 else None,
        )
        for i in range(8)
    ],
    "parameter": [
        ParameterSummaryRecord(
            *_head(i),
            module_name="encoder.0",
            module_type="Linear",
            parameter_name=f"encoder.0.{('weight', 'bias')[i % 2]}",
            parameter_role=("weight", "bias")[i % 2],
            dtype="float32",
            element_count=64,
            requires_grad=i != 2,
            in_optimizer=(True, False, None)[i % 3],
            step=5 * i,
            shape=(8, 8) if i % 2 else (),
            value_mean=0.5 * i,
            value_norm=float("nan") if i == 1 else 2.0,
            non_finite_value_count=i,
            optimizer_group_index=0,
            learning_rate=1e-3,
        )
        for i in range(5)
    ],
    "parameter_distribution": [
        ParameterDistributionRecord(
            *_head(i),
            *("encoder.0", "Linear", "encoder.0.weight", "weight"),
            ("value", "gradient", "update")[i],
            3,
            4,
            step=i,
            bin_edges=(-1.0, 0.0, 1.5),
            counts=(1, 2),
        )
        for i in range(3)
    ],
    "batch": [
        BatchDiagnosticRecord(
            *_head(i),
            loss=_VALUES[i],
            step=i,
            batch_size=None if i == 2 else 3,
            sample_ids=None if i == 2 else (i, "img-😀", 2**40),
            class_counts=JsonObject({"cat": 2, "1": i}) if i % 2 else None,
            sequence_lengths=(5, 0, 7) if i else None,
            metadata=JsonObject({"loader": "train"}) if i == 1 else None,
        )
        for i in range(6)
    ],
    "artifact": [
        ArtifactRecord(
            *_head(i),
            *("histogram", "layers/encoder/activation", "layers/encoder", "activation"),
            ("json", "text", "bytes")[i],
            2**33 + i,
            f"{i:064x}",
            step=120,
            payload_relative_path=None if i else "artifacts/histogram/a.json",
        )
        for i in range(3)
    ],
    "alert": [
        AlertRecord(
            *_head(0),
            *("exploding_gradients", "optimization", "critical", "Exploding", "It explodes."),
            *("The norm is 50.", "The rate is too high.", 40, 2, "encoder.0", "Lower it."),
            _EVIDENCE,
            JsonObject({"root": True}),
        ),
        AlertRecord(*_head(1), "r", "runtime", "info", "t", "s", "f", "i"),
    ],
    "health_score": [
        HealthScoreRecord(
            *(*_head(0), "overall", "overall", 87.5, "healthy", "Well.", _EVIDENCE, ("a-1", "b"))
        ),
        HealthScoreRecord(*_head(1), "runtime", "runtime", 0.0, "critical"),
    ],
    "phase": [
        PhaseRecord(*_head(0), "divergence", "Divergence", "It diverges.", 5, 9, 0, 1, _EVIDENCE),
        PhaseRecord(*_head(1), "stagnation", "Stagnation", "Nothing moves."),
    ],
    "lifecycle": [
        LifecycleRecord(
            *_head(0),
            "start",
            JsonObject(
                {
                    "project": {"id": "p-0", "name": "vision", "root_path": "/data/runs"},
                    "run": {"name": "first", "tags": ["a", "b"], "strict_mode": False},
                    "process": {"host": "node|boot|pid", "pid": 42, "started": "1234"},
                }
            ),
        ),
        LifecycleRecord(*_head(1), "tag", JsonObject({"tag": "good"})),
        LifecycleRecord(*_head(2), "heartbeat"),
        LifecycleRecord(*_head(3), "status", JsonObject({"status": "completed"})),
    ],
}
"""Kind -> the records that every stored file of that kind holds."""


def write_files(folder):
    """Encode the records into files of a new version; a file that is there is never replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, records in RECORDS.items():
        with (folder / f"{kind}_batch.body").open("xb") as file:
            file.write(encode_records(records))


if __name__ == "__main__":
    write_files(ASSETS / str(CURRENT_SCHEMA_VERSION))
