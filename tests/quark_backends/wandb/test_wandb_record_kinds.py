"""Every kind of record, and what of it is to be found in W&B."""

import hashlib
import json
from importlib.util import find_spec

import pytest

from quark_core.backends.contract import Payload
from quark_core.records import (
    RECORD_TYPES,
    AlertRecord,
    ArtifactRecord,
    BatchDiagnosticRecord,
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

if find_spec("wandb") is None:
    pytest.skip("needs wandb", allow_module_level=True)

HEAD = ("run0", "writer0", 0, 0)


def make(record_type, sequence=0, /, **fields):
    rank = fields.pop("rank", 0)
    return record_type(
        run_id="run0",
        writer_id="writer0",
        attempt=0,
        rank=rank,
        sequence=sequence,
        time_us=FIRST_TIME_US,
        **fields,
    )


def layer(name, step, sequence=0, **fields):
    kind = {"summary_type": "activation", "hook_direction": "forward", "call_index": 0}
    kind = {**kind, "module_type": "Linear", "element_count": 4, **fields}
    return make(LayerSummaryRecord, sequence, module_name=name, step=step, **kind)


@pytest.fixture
def written(backend, config, read_mirror):
    """Write records, one batch per call, and read what W&B has at the end."""
    maker = BatchMaker("run0")
    backend.write(maker.start())

    class Written:
        def add(self, *records):
            backend.write(maker.batch(records))

        def events(self, *types, **fields):
            backend.write(maker.events(*types, **fields))

        def payload(self, path, content):
            path.write_bytes(content)
            sha256 = hashlib.sha256(content).hexdigest()
            backend.put_payload(
                Payload(run_id="run0", sha256=sha256, size_bytes=len(content), path=path)
            )
            return sha256

        def read(self):
            backend.close()
            return read_mirror(config.run_path)

    return Written()


@pytest.mark.long
def test_telemetry(written):
    gpus = (GpuReading(0, utilization_percent=50.0), GpuReading(1, power_watts=300.0))
    common = {"node": "host", "cpu_usage_percent": 25.0, "gpus": gpus}
    step = {"boundary": "step", "step": 3, "step_time_ms": 12.5, "overflow_count": 2}
    written.add(make(SystemTelemetryRecord, **common, **step))
    written.add(make(SystemTelemetryRecord, 1, boundary="time", node="host", ram_used_bytes=7))
    mirrored = written.read()
    # The writer mirrors these into metrics, which are not written here.
    assert mirrored.points("system/runtime/step_time_ms") == []
    assert mirrored.points("system/runtime/overflow_count") == []
    assert mirrored.points("system_quark/host/cpu/utilization_percent") == [(3, 25)]
    assert mirrored.points("system_quark/host/gpu.0/utilization_percent") == [(3, 50)]
    assert mirrored.points("system_quark/host/gpu.1/power_watts") == [(3, 300)]
    assert mirrored.points("system_quark/host/ram/used_bytes") == [(None, 7)]
    axes = {each.name: each.step_metric for each in mirrored.of("metric")}
    assert axes["system_quark/host/ram/used_bytes"] == "quark/telemetry_time"


@pytest.mark.long
def test_layers_and_parameters(written, backend):
    written.add(
        layer("a", 1, mean=0.5, dead_unit_ratio=0.25, nan_count=0),
        layer("a", 1, 1, call_index=1, mean=0.75),
        layer("a", 1, 2, summary_type="gradient", norm=2.0, inf_count=3),
    )
    backend.write(BatchMaker("run0", rank=1, writer_id="rank1").start())
    other = BatchMaker("run0", rank=1, writer_id="rank1")
    other.metrics(("m", 0, 0.0))
    backend.write(other.metrics(("m", 1, 2.0)))
    which = {"module_name": "a", "module_type": "Linear", "parameter_name": "a.weight"}
    which["parameter_role"] = "weight"
    written.add(
        make(
            ParameterSummaryRecord,
            **which,
            dtype="float32",
            element_count=4,
            step=1,
            value_norm=1.5,
            update_to_parameter_ratio=0.125,
        )
    )
    histogram = {"bin_edges": tuple(map(float, range(1001))), "counts": (1,) * 1000}
    counted = {"sample_count": 1000, "total_count": 1000, "distribution_type": "gradient"}
    written.add(make(ParameterDistributionRecord, **which, **histogram, **counted, step=1))
    mirrored = written.read()
    assert mirrored.points("layers/a/activation/mean") == [(1, 0.5)]
    assert mirrored.points("layers/a/activation/dead_unit_ratio") == [(1, 0.25)]
    assert mirrored.points("layers/a.call1/activation/mean") == [(1, 0.75)]
    assert mirrored.points("layers/a/gradient/norm") == [(1, 2)]
    assert mirrored.points("layers/a/gradient/inf_count") == [(1, 3)]
    assert mirrored.points("layers/a/activation/nan_count") == []
    assert mirrored.points("rank1/m") == [(1, 2)]
    assert mirrored.points("params_stats/a.weight/norm") == [(1, 1.5)]
    assert mirrored.points("params_stats/a.weight/update_ratio") == [(1, 0.125)]
    ((step, found),) = mirrored.points("dist/a.weight/gradient")
    assert (step, found["_type"]) == (1, "histogram")
    assert found["values"] == [2] * 500
    assert found["bins"] == [float(edge) for edge in range(0, 1001, 2)]


@pytest.mark.long
def test_of_many_layers_some_have_series_and_the_others_are_counted(written):
    names = [f"block{index}" for index in range(200)]
    for step in range(3):
        written.add(*[layer(name, step, mean=1.0) for name in names])
    alert = {"category": "optimization", "title": "T", "summary": "S", "fact": "F"}
    alert["inference"] = "I"
    written.add(
        make(AlertRecord, **alert, rule_id="dead", severity="warning", culprit="block1", step=2)
    )
    written.add(*[layer(name, 3, mean=1.0) for name in names])
    mirrored = written.read()
    keys = [key for key in mirrored.keys if key.startswith("layers/")]
    assert len(keys) == 51
    assert mirrored.points("layers/block0/activation/mean") == [(s, 1) for s in range(4)]
    assert mirrored.points("layers/block1/activation/mean") == [(3, 1)]
    assert mirrored.summary["quark/left_out/layer"] == 3 * 150 + 149


@pytest.mark.long
def test_batches_end_in_a_table_of_the_hardest(written, config):
    written.add(
        *[
            make(
                BatchDiagnosticRecord,
                step,
                loss=float(step % 7),
                step=step,
                batch_size=8,
                sample_ids=(step, "b"),
                sequence_lengths=(1, 3),
            )
            for step in range(300)
        ]
    )
    mirrored = written.read()
    assert len(mirrored.points("data/batch_loss")) == 300
    assert mirrored.points("data/seq_len_mean")[0] == (0, 2)
    table = read_table(mirrored, "quark/tables/hard_batches")
    assert table["columns"] == ["step", "epoch", "loss", "batch_size", "sample_ids"]
    assert [row[2] for row in table["data"]] == [6.0] * 42 + [5.0] * 43 + [4.0] * 15


def read_table(mirrored, key):
    ((_, found),) = mirrored.points(key)
    return json.loads((mirrored.paths[0].parent / "files" / found["path"]).read_text())


@pytest.mark.long
def test_alerts_are_told_when_they_come_and_when_they_get_worse(written):
    text = {"category": "optimization", "title": "T" * 100, "summary": "S", "fact": "F"}
    text["inference"] = "I"
    for index, severity in enumerate(["info", "warning", "info", "warning", "critical"]):
        alert = make(AlertRecord, index, **text, rule_id="spike", severity=severity, step=index)
        written.add(alert)
    health = make(
        HealthScoreRecord, score_key="overall", category="overall", score=40.0, status="x"
    )
    written.add(health)
    phases = [
        make(PhaseRecord, i, phase_name=n, display_name=n.title(), summary="s", step_start=10 * i)
        for i, n in enumerate(["warmup", "plateau"])
    ]
    written.add(*phases)
    mirrored = written.read()
    assert [value for _, value in mirrored.points("quark/alerts/spike")] == [1, 2, 1, 2, 4]
    assert [(alert.title, alert.level) for alert in mirrored.of("alert")] == [
        ("T" * 60, "WARN"),
        ("T" * 60, "ERROR"),
    ]
    assert mirrored.points("quark/health/overall") == [(None, 40)]
    assert mirrored.points("quark/phase_index") == [(0, 0), (10, 1)]
    assert len(read_table(mirrored, "quark/tables/alerts")["data"]) == 5
    assert read_table(mirrored, "quark/tables/phases")["data"][1][0] == "Plateau"


@pytest.mark.long
def test_events_are_counted_and_kept_as_a_file(written):
    written.events("checkpoint_saved", "user_log", step=1)
    written.events("oom", severity="error", step=2, payload=JsonObject({"message": "no memory"}))
    written.events("oom", severity="error", step=3)
    mirrored = written.read()
    # Of counters, a row has the newest.
    assert mirrored.points("quark/events/info")[-1][1] == 2
    assert mirrored.points("quark/events/error")[-1] == (3, 2)
    # One alert a minute at most.
    assert [(alert.title, alert.text) for alert in mirrored.of("alert")] == [("oom", "no memory")]
    lines = (mirrored.paths[0].parent / "files" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event_type"] for line in lines] == [
        "checkpoint_saved",
        "user_log",
        "oom",
        "oom",
    ]


@pytest.mark.long
def test_what_somebody_raises_is_told_each_time_and_a_finding_once(written):
    own = JsonObject({"title": "Slow", "message": "it waits", "rule_id": "user_alert_slow"})
    found = JsonObject({"title": "Spike", "message": "it rises", "rule_id": "spike"})
    for step in range(2):
        written.events("alert_raised", severity="info", step=step, payload=own)
        written.events("alert_raised", severity="info", step=step, payload=found)
        written.events("alert_raised", severity="warning", step=step, payload=found)
    mirrored = written.read()
    assert [(alert.title, alert.text, alert.level) for alert in mirrored.of("alert")] == [
        ("Slow", "it waits", "INFO"),
        ("Spike", "it rises", "WARN"),
        ("Slow", "it waits", "INFO"),
    ]


@pytest.mark.long
def test_times_are_those_of_the_run(written):
    written.events("user_log", step=1)
    mirrored = written.read()
    run = mirrored.of("run")[0]
    assert run.start_time.ToMicroseconds() == FIRST_TIME_US
    assert {row["_timestamp"] for row in mirrored.rows} == {
        row["quark/time"] for row in mirrored.rows
    }
    assert all(abs(row["_timestamp"] - FIRST_TIME_US / 1e6) < 60 for row in mirrored.rows)


@pytest.mark.long
def test_artifacts(written, tmp_path):
    content = b'{"accuracy": 0.5}'
    sha256 = written.payload(tmp_path / "source", content)
    fields = {"artifact_type": "report", "payload_format": "json", "size_bytes": len(content)}
    fields |= {"artifact_key": "eval/final é", "namespace": "eval", "artifact_name": "final é"}
    written.add(
        make(
            ArtifactRecord,
            **fields,
            sha256=sha256,
            step=7,
            payload_relative_path="artifacts/report/eval/final/7.json",
            metadata=JsonObject({"split": "test"}),
        ),
        make(ArtifactRecord, 1, **fields, sha256="0" * 64, step=8),
    )
    mirrored = written.read()
    whole, lost = mirrored.of("artifact")
    assert whole.type == "report"
    assert whole.name.startswith("eval.final__-")
    assert sorted(whole.aliases) == ["latest", "step-7"]
    assert json.loads(whole.metadata)["split"] == "test"
    assert json.loads(whole.metadata)["sha256"] == sha256
    (entry,) = whole.manifest.contents
    assert entry.size == len(content)
    assert entry.path.endswith(".json")
    with open(entry.local_path, "rb") as file:
        assert file.read() == content
    assert not lost.manifest.contents


@pytest.mark.long
def test_lifecycle_of_every_action(written, backend, read_mirror, config):
    maker = BatchMaker("run0", writer_id="other")
    backend.write(
        maker.lifecycle(
            ("environment", {"python": "3.11"}),
            ("heartbeat", {}),
            ("gap", {"metric": 2}),
            (
                "status",
                {"status": "failed", "ending": {"cause": "exception", "message": "OSError: full"}},
            ),
        )
    )
    mirrored = written.read()
    files = mirrored.paths[0].parent / "files"
    assert json.loads((files / "environment.json").read_text()) == {"python": "3.11"}
    assert mirrored.summary["quark/status"] == "failed"
    assert mirrored.summary["quark/ending"] == "OSError: full"
    assert mirrored.exit_codes == [1]


def test_there_is_no_kind_without_a_test():
    assert set(RECORD_TYPES) == {
        *("metric", "event", "telemetry", "layer", "parameter", "parameter_distribution"),
        *("batch", "artifact", "alert", "health_score", "phase", "lifecycle"),
        *("sample", "artifact_link"),  # test_wandb_media.py
        *("console", "aggregate", "fingerprint"),  # which are not sent
    }
