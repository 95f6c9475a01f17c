"""One batch of each kind of record, with every field in use."""

import hashlib

import msgspec

from quark_core.backends.contract import Payload
from quark_core.records import (
    AlertRecord,
    ArtifactRecord,
    BatchDiagnosticRecord,
    EvidenceRecord,
    GpuReading,
    HealthScoreRecord,
    LayerSummaryRecord,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
    PhaseRecord,
    SystemTelemetryRecord,
)
from quark_core.records.json_object import JsonObject
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker

PAYLOAD = b"\x00payload\xff" * 100
EVIDENCE = (EvidenceRecord("metric", "loss", "it rose", 2.0, 1.0, 3, 9),)


class KindMaker(BatchMaker):
    """A writer that makes records of the other kinds too."""

    def head(self, kind):
        self._sequences.setdefault(kind, iter(range(10**9)))
        return self._head(kind)

    def of(self, record_type, *values, **fields):
        return record_type(*self.head(record_type.KIND), *values, **fields)

    def telemetry(self):
        gpus = (GpuReading(0, "G", "u", 50.0, 2 * 10**9, 8 * 10**9, 25.0, 60.0, 120.5),)
        return self.batch(
            [
                self.of(
                    SystemTelemetryRecord,
                    "step",
                    step,
                    1,
                    step_time_ms=10.0 + step,
                    cpu_usage_percent=20.0 + step,
                    ram_usage_percent=30.0,
                    ram_used_bytes=5 * 10**9,
                    overflow_count=step,
                    gpus=gpus,
                    node="n1",
                    metadata=JsonObject({"reading_age_ms": 3}),
                )
                for step in range(3)
            ]
        )

    def layers(self, count=30):
        return self.batch(
            [
                self.of(
                    LayerSummaryRecord,
                    f"block.{index}",
                    "Linear",
                    "activation",
                    "forward",
                    0,
                    64,
                    7,
                    2,
                    (8, 8),
                    mean=0.5,
                    std=1.5,
                    norm=3.0,
                    # The later a layer is, the worse.
                    dead_unit_ratio=index / count,
                    saturation_ratio=0.0,
                )
                for index in range(count)
            ]
        )

    def parameters(self):
        return self.batch(
            [
                self.of(
                    ParameterSummaryRecord,
                    "fc",
                    "Linear",
                    "fc.weight",
                    "weight",
                    "float32",
                    12,
                    step=7,
                    shape=(3, 4),
                    value_norm=2.0,
                    gradient_norm=float("nan"),
                    update_to_parameter_ratio=0.001,
                    value_near_zero_ratio=0.25,
                    metadata=JsonObject({"accumulated": 2}),
                )
            ]
        )

    def distributions(self):
        return self.batch(
            [
                self.of(
                    ParameterDistributionRecord,
                    "fc",
                    "Linear",
                    "fc.weight",
                    "weight",
                    "gradient",
                    6,
                    12,
                    step=7,
                    bin_edges=(0.0, 0.5, 1.0),
                    counts=(4, 2),
                )
            ]
        )

    def batches(self):
        return self.batch(
            [
                self.of(
                    BatchDiagnosticRecord,
                    float("inf") if step == 1 else 0.5,
                    step,
                    0,
                    3,
                    (11, "patient", 13),
                    JsonObject({"cat": 2, "dog": 1}),
                    (5, 6, 10),
                )
                for step in range(2)
            ]
        )

    def artifact(self, key="plots/loss", payload=PAYLOAD, **fields):
        name = key.rpartition("/")[2]
        path = f"artifacts/image/{key}/step-00000004-ab.png"
        return self.batch(
            [
                self.of(
                    ArtifactRecord,
                    "image",
                    key,
                    key.rpartition("/")[0] or None,
                    name,
                    "bytes",
                    len(payload),
                    hashlib.sha256(payload).hexdigest(),
                    4,
                    **{
                        "payload_relative_path": path,
                        "metadata_relative_path": path.replace(".png", ".metadata.json"),
                        **fields,
                    },
                )
            ]
        )


def analysis_of(run_id="run0", generation=3):
    """An analyzer's outputs as a writer of their own."""
    maker = KindMaker(run_id, writer_id=f"analyzer.{generation}", started_us=FIRST_TIME_US + 10**6)
    alerts = maker.batch(
        [
            maker.of(
                AlertRecord,
                "loss_spike",
                "optimization",
                "error",
                "Spike",
                "It jumped.",
                "Up by 3.",
                "Too high a rate.",
                step=12,
                culprit="train/loss",
                evidence=EVIDENCE,
                metadata=JsonObject({"confidence": 0.9}),
                alert_id="abc",
            )
        ]
    )
    scores = maker.batch(
        [
            maker.of(
                HealthScoreRecord,
                "overall",
                "overall",
                42.5,
                "degraded",
                "Meh.",
                EVIDENCE,
                ("abc",),
            )
        ]
    )
    phases = maker.batch(
        [
            maker.of(PhaseRecord, "warmup", "Warm-up", "Slow.", 0, 9, evidence=EVIDENCE),
            maker.of(PhaseRecord, "plateau", "Plateau", "Flat.", 10, 20),
        ]
    )
    return [alerts, scores, phases]


def without_ids(batch):
    """The batch's records with the sample ids that a mirror may not keep left out."""
    return [
        msgspec.structs.replace(record, sample_ids=None)
        if isinstance(record, BatchDiagnosticRecord)
        else record
        for record in batch.to_records()
    ]


def put(backend, tmp_path, content=PAYLOAD):
    """Give a backend a payload; returns its hash."""
    sha256 = hashlib.sha256(content).hexdigest()
    path = tmp_path / sha256
    path.write_bytes(content)
    backend.put_payload(Payload(run_id="run0", sha256=sha256, size_bytes=len(content), path=path))
    return sha256


def read_table(path):
    """Rows of a Parquet file as dicts."""
    import pyarrow.parquet as parquet

    return parquet.read_table(path).to_pylist()
