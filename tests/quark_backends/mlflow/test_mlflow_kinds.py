"""Every kind of record: what MLflow shows of it, and that all of it is kept."""

import dataclasses
import json
import math

import msgspec
import pytest
from kinds import KindMaker, analysis_of, put, without_ids

from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.query import Query


@pytest.fixture
def maker():
    return KindMaker("run0")


@pytest.mark.long
def test_every_kind_comes_back_as_it_was(backend, maker, tmp_path, definition, config):
    put(backend, tmp_path)
    batches = [
        maker.start(),
        maker.metrics(("a", 1, math.inf), ("a", None, -0.0), description="d"),
        maker.events("saved", severity="error"),
        maker.telemetry(),
        maker.layers(),
        maker.parameters(),
        maker.distributions(),
        maker.batches(),
        maker.artifact(),
        *analysis_of(),
    ]
    for batch in batches:
        backend.write(batch)
    reader = definition.open(dataclasses.replace(config, read_only=True))
    for source in (backend, reader):
        if source is reader:
            backend.close()
        for batch in batches[1:]:
            found = source.read("run0", batch.kind, Query()).to_records()
            kept = [dataclasses.asdict(r) | {"sample_ids": None} for r in found]
            wanted = [dataclasses.asdict(r) | {"sample_ids": None} for r in without_ids(batch)]
            assert repr(kept) == repr(wanted)


@pytest.mark.long
def test_what_mlflow_shows_of_telemetry(backend, maker, find_runs, history):
    backend.write(maker.start())
    backend.write(maker.telemetry())
    other = KindMaker("run0", rank=1, writer_id="rank1")
    backend.write(other.telemetry())
    (run,) = find_runs()
    assert {name: run.data.metrics[name] for name in run.data.metrics if "n1" not in name} == {
        "system/cpu_utilization_percentage": 22.0,
        "system/system_memory_usage_megabytes": 5000.0,
        "system/system_memory_usage_percentage": 30.0,
        "system/gpu_0_utilization_percentage": 50.0,
        "system/gpu_0_memory_usage_megabytes": 2000.0,
        "system/gpu_0_memory_usage_percentage": 25.0,
        "system/gpu_0_power_usage_watts": 120.5,
    }
    assert run.data.metrics["system/n1/cpu_utilization_percentage"] == 22.0
    steps = [step for step, *_ in history(run.info.run_id, "system/cpu_utilization_percentage")]
    assert steps == [0, 1, 2]


@pytest.mark.long
def test_the_worst_layers_become_curves(definition, config, maker, find_runs):
    backend = definition.open(
        dataclasses.replace(config, options={"quark": "full", "layers": "10"})
    )
    backend.write(maker.start())
    backend.write(maker.layers())
    backend.write(maker.parameters())
    (run,) = find_runs()
    shown = {name.split("/")[1] for name in run.data.metrics if name.startswith("layers/")}
    assert shown == {f"block.{index}" for index in [27, 28, 29, *range(24, 27), 21, 22, 23, 18]}
    assert run.data.metrics["layers/block.29/activation/norm"] == 3.0
    assert {n for n in run.data.metrics if n.startswith("layers/block.29/")} == {
        f"layers/block.29/activation/{field}"
        for field in ("mean", "std", "norm", "dead_unit_ratio", "saturation_ratio")
    }
    assert run.data.metrics["params_stats/fc.weight/norm"] == 2.0
    assert math.isnan(run.data.metrics["params_stats/fc.weight/grad_norm"])
    assert run.data.metrics["params_stats/fc.weight/update_ratio"] == 0.001


@pytest.mark.long
def test_what_mlflow_shows_of_batches(backend, maker, find_runs, history):
    backend.write(maker.start())
    backend.write(maker.batches())
    (run,) = find_runs()
    losses = history(run.info.run_id, "data/batch_loss")
    assert [(step, value) for step, value, _ in losses] == [(0, "0.5"), (1, "nan")]
    assert run.data.metrics["data/batch_size"] == 3
    assert run.data.metrics["data/seq_len_mean"] == 7
    assert run.data.tags["quark.nonfinite.data/batch_loss"] == "inf@1"


@pytest.mark.long
def test_ids_of_samples_are_hashed(backend, maker, definition, config, tmp_path):
    backend.write(maker.start())
    batch = maker.batches()
    backend.write(batch)
    first, second = backend.read("run0", "batch", Query()).to_records()
    assert first.sample_ids == second.sample_ids
    assert len(set(first.sample_ids)) == 3
    assert "patient" not in first.sample_ids
    assert all(isinstance(one, str) and len(one) == 16 for one in first.sample_ids)
    assert first.class_counts == {"cat": 2, "dog": 1}
    plain = definition.open(
        dataclasses.replace(
            config,
            run_id="run1",
            run_path=tmp_path / "r1",
            options={"quark": "full", "sample_ids": "plain"},
        )
    )
    other = KindMaker("run1")
    plain.write(other.start())
    plain.write(other.batches())
    assert plain.read("run1", "batch", Query()).to_records()[0].sample_ids == (11, "patient", 13)


@pytest.mark.long
def test_findings(backend, maker, find_runs, history, fetch):
    backend.write(maker.start())
    for batch in analysis_of():
        backend.write(batch)
        backend.write(batch)
    (run,) = find_runs()
    (alert,) = history(run.info.run_id, "quark/alerts/loss_spike")
    assert alert[:2] == (12, "3.0")
    told = json.loads(run.data.tags["quark.alert.loss_spike"])
    assert told["fact"] == "Up by 3."
    assert told["evidence"][0]["source"] == "loss"
    (score,) = history(run.info.run_id, "quark/health/overall")
    assert score[:2] == (3, "42.5")
    assert run.data.tags["quark.health.overall"] == "degraded"
    phases = history(run.info.run_id, "quark/phase_index")
    assert [one[:2] for one in phases] == [(0, "0.0"), (10, "1.0")]
    assert [one["phase_name"] for one in json.loads(run.data.tags["quark.phases"])] == [
        "warmup",
        "plateau",
    ]
    backend.close()
    assert json.loads(fetch("quark/phases.json"))[0]["evidence"][0]["summary"] == "it rose"


@pytest.mark.long
def test_alerts_of_a_monitor(backend, maker, find_runs, history):
    backend.write(maker.start())
    payload = {"rule_id": "loss_spike", "title": "Spike", "fact": "Up."}
    backend.write(maker.events("alert_raised", severity="critical", step=9, payload=payload))
    (run,) = find_runs()
    (raised,) = history(run.info.run_id, "quark/alerts/loss_spike")
    assert raised[:2] == (9, "4.0")
    assert json.loads(run.data.tags["quark.alert.loss_spike"])["fact"] == "Up."


@pytest.mark.long
def test_an_alert_whose_evidence_does_not_fit_stays_json(backend, maker, find_runs):
    backend.write(maker.start())
    (record,) = analysis_of()[0].to_records()
    large = msgspec.structs.replace(record, evidence=record.evidence * 100)
    writer = KindMaker("run0", writer_id="analyzer.4")
    backend.write(writer.batch([msgspec.structs.replace(large, writer_id="analyzer.4")]))
    told = json.loads(find_runs()[0].data.tags["quark.alert.loss_spike"])
    assert told["evidence"] == []
    (kept,) = backend.read("run0", "alert", Query()).to_records()
    assert len(kept.evidence) == 100


@pytest.mark.long
def test_events(backend, maker, find_runs, history, fetch):
    backend.write(maker.start())
    backend.write(maker.events("saved", "loaded", step=3))
    backend.write(maker.events("broke", severity="error", step=4, payload={"message": "no!"}))
    backend.write(maker.events("saved", step=5))
    backend.write(maker.events("late", severity="warning"))
    (run,) = find_runs()
    infos = history(run.info.run_id, "quark/events/info")
    assert [(step, value) for step, value, _ in infos] == [(3, "2.0"), (5, "3.0")]
    assert run.data.metrics["quark/events/error"] == 1
    last = json.loads(run.data.tags["quark.last_error"])
    assert (last["event_type"], last["step"], last["message"]) == ("broke", 4, "no!")
    backend.close()
    lines = [json.loads(line) for line in fetch("quark/events.jsonl").splitlines()]
    assert [line["event_type"] for line in lines] == ["saved", "loaded", "broke", "saved", "late"]


@pytest.mark.long
def test_events_that_come_again_after_a_crash_are_written_once(
    definition, config, maker, fetch, monkeypatch
):
    backend = definition.open(config)
    backend.write(maker.start())
    backend.write(maker.events("first"))
    second = maker.events("second")
    save = backend._writing._state.save_writer
    monkeypatch.setattr(backend._writing._state, "save_writer", _refuse)
    with pytest.raises(RuntimeError):
        backend.write(second)
    monkeypatch.setattr(backend._writing._state, "save_writer", save)
    again = definition.open(config)
    again.write(second)
    again.close()
    lines = [json.loads(line) for line in fetch("quark/events.jsonl").splitlines()]
    assert [line["event_type"] for line in lines] == ["first", "second"]


def _refuse(*_):
    raise RuntimeError("planted")


@pytest.mark.long
def test_a_gap_a_heartbeat_and_texts(backend, maker, find_runs, fetch):
    backend.write(maker.start(from_step=None))
    backend.write(maker.metrics(("val/AR_x40_1", 0, 1.0), description="Recall."))
    backend.write(maker.lifecycle(("environment", {"process": {"argv": ["train.py", "-v"]}})))
    backend.write(maker.lifecycle(("gap", {"records": {"metric": 3}}), ("heartbeat", {})))
    backend.write(maker.lifecycle(("gap", {"records": {"metric": 2, "event": 1}})))
    (run,) = find_runs()
    assert json.loads(run.data.tags["quark.gap.writer0"]) == {"metric": 5, "event": 1}
    assert run.data.tags["quark.heartbeat_at"].startswith("2026-01-01T")
    assert run.data.tags["mlflow.source.name"] == "train.py"
    assert run.data.tags["quark.name_map_version"] == "1"
    backend.close()
    assert json.loads(fetch("quark/config.json"))["values"] == {"lr": 0.1}
    assert json.loads(fetch("quark/environment.json"))["process"]["argv"] == ["train.py", "-v"]
    assert json.loads(fetch("quark/name_map.json"))["metrics"]["val/AR_x40_1"] == "val/AR_at_1"
    assert json.loads(fetch("quark/metrics_meta.json")) == {
        "val/AR_at_1": {"key": "val/AR_x40_1", "description": "Recall."}
    }


@pytest.mark.long
def test_ranks_have_names_of_their_own(backend, maker, find_runs, history):
    backend.write(maker.start())
    backend.write(maker.metrics(("m", 0, 1.0)))
    other = KindMaker("run0", rank=2, writer_id="rank2")
    backend.write(other.metrics(("m", 0, 1.0)))
    (run,) = find_runs()
    assert set(run.data.metrics) == {"m", "rank2/m"}
    columns = backend.read("run0", "metric", Query())
    assert (columns["metric_key"].tolist(), columns["rank"].tolist()) == (["m", "m"], [0, 2])


def test_what_data_a_run_had_is_a_tag(backend, maker, find_runs):
    backend.write(maker.start())
    fingerprints = [
        maker.of(FingerprintRecord, "data", "train", digest, level)
        for digest, level in (("ab", "sample"), ("cd", "full"))
    ]
    backend.write(maker.batch(fingerprints))
    (run,) = find_runs()
    assert run.data.tags["quark.data.train"] == "full cd"
