"""Every record type of the guide's section 8: it validates, and each bad field is refused."""

import dataclasses
import json
import math

import golden
import pytest
from hypothesis import given
from record_strategies import BATCHES

from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, EvidenceRecord, GpuReading
from quark_core.records.json_object import JsonObject
from quark_core.records.schema import dump_record, validate_record
from quark_core.testing.fakes import make_samples

# Some of the stored ones are not finite on purpose.
GOOD = {kind: make_samples(kind, "run0")[0] for kind in RECORD_TYPES} | {
    kind: next(
        record
        for record in records
        if math.isfinite(getattr(record, {"metric": "value", "batch": "loss"}.get(kind, ""), 0.0))
    )
    for kind, records in golden.RECORDS.items()
}
DIGEST = "0" * 63


@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_a_good_record_of_every_type_validates_and_dumps(kind):
    record = GOOD[kind]
    assert validate_record(record) is record
    dumped = json.loads(json.dumps(dump_record(record), allow_nan=False))
    assert dumped["id"] == record.id
    assert dumped["timestamp"] == record.timestamp
    assert set(dumped) == {"id", "timestamp", *record.__struct_fields__} - {"time_us"}


@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_a_record_is_a_dataclass_that_can_be_replaced(kind):
    @given(BATCHES[kind])
    def check(record):
        assert dataclasses.is_dataclass(record)
        assert [field.name for field in dataclasses.fields(record)] == list(
            record.__struct_fields__
        )
        assert dataclasses.replace(record, sequence=7).sequence == 7

    check()


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("telemetry", "boundary", "minute"),
        ("telemetry", "step_time_ms", math.nan),
        ("telemetry", "compute_time_ms", "1"),
        ("telemetry", "ram_used_bytes", -1),
        ("telemetry", "overflow_count", None),
        ("telemetry", "gpus", [GpuReading(0)]),
        ("telemetry", "gpus", (1,)),
        ("layer", "summary_type", "weight"),
        ("layer", "hook_direction", "up"),
        ("layer", "element_count", -1),
        ("layer", "module_name", ""),
        ("layer", "tensor_shape", (2, -1)),
        ("parameter", "parameter_role", "gain"),
        ("parameter", "parameter_name", ""),
        ("parameter", "in_optimizer", 1),
        ("parameter", "non_finite_value_count", -1),
        ("parameter", "shape", [1]),
        ("parameter_distribution", "distribution_type", "activation"),
        ("parameter_distribution", "bin_edges", (0.0, 1.0)),
        ("parameter_distribution", "bin_edges", (0.0, 0.0, 1.0)),
        ("parameter_distribution", "counts", (1, -2)),
        ("batch", "loss", math.inf),
        ("batch", "loss", None),
        ("batch", "batch_size", -1),
        ("batch", "sample_ids", (1.5, "a", 2)),
        ("batch", "sample_ids", ("a", "b")),
        ("batch", "sequence_lengths", (1, 2, -3)),
        ("batch", "class_counts", JsonObject({"cat": -1})),
        ("batch", "class_counts", JsonObject({"cat": 1.5})),
        ("artifact", "artifact_key", "another/name"),
        ("artifact", "artifact_type", ""),
        ("artifact", "payload_format", "pickle"),
        ("artifact", "size_bytes", -1),
        ("artifact", "sha256", DIGEST),
        ("artifact", "sha256", DIGEST + "A"),
        ("alert", "category", "overall"),
        ("alert", "severity", "debug"),
        ("alert", "evidence", ("fact",)),
        ("health_score", "score", 100.5),
        ("health_score", "score", math.nan),
        ("health_score", "score_key", "speed"),
        ("health_score", "status", "good"),
        ("health_score", "contributing_alert_ids", (1,)),
        ("phase", "step_start", -1),
        ("phase", "summary", None),
    ],
)
def test_a_bad_field_is_refused_by_type_and_field(kind, field, value):
    record = dataclasses.replace(GOOD[kind], **{field: value})
    with pytest.raises(SchemaValidationError) as caught:
        validate_record(record)
    assert str(caught.value).startswith(f"{type(record).__name__}.{field}")


def test_what_is_inside_of_a_record_is_validated_too():
    bad = EvidenceRecord("metric", "loss", "It fell.", step_start=-1)
    with pytest.raises(SchemaValidationError, match=r"^EvidenceRecord\.step_start must not"):
        validate_record(dataclasses.replace(GOOD["alert"], evidence=(bad,)))
