"""Whole runs into event files, with kills, and every kind of record."""

import hashlib
import io
import math
import os
import struct
import sys
from collections import Counter

import msgspec
import pytest

import quark
from quark_core.backends.contract import Payload
from quark_core.errors import BackendUnavailable
from quark_core.records import (
    AlertRecord,
    ArtifactRecord,
    BatchDiagnosticRecord,
    HealthScoreRecord,
    LayerSummaryRecord,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
    PhaseRecord,
    SystemTelemetryRecord,
)
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.samples import SampleRecord
from quark_core.records.names import encode_name
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker

pytest.importorskip("tensorboard")


def as_float32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:metric .* breaks Quark's naming rule:RuntimeWarning")
def test_every_point_is_there_once(start, read_events):
    names = ["train/loss", "val/AR@100", "top 5 %", "损失", "a.b", "_step"]
    values = (math.nan, math.inf, -math.inf, 0.1, -0.0, 1e300, -1e300, 3)
    with start() as session:
        metrics = quark.MetricsLogger(session)
        for index in range(300):
            for position, name in enumerate(names):
                value = values[(index + position) % len(values)]
                metrics.log(name, value, step=(index * 7) % 100)
        metrics.log("by_epoch", 1.0, epoch=3)
        records = metrics.read(include_non_finite=True)
    folder = read_events(session.run_path / "tensorboard")
    assert len(records) == 300 * len(names) + 1
    for name in names:
        ours = Counter()
        for record in records:
            if record.metric_key == encode_name(name):
                big = abs(record.value) > 1e299
                value = math.copysign(math.inf, record.value) if big else record.value
                ours[record.step, repr(as_float32(value))] += 1
        assert Counter((s, repr(v)) for s, v in folder.points(name)) == ours, name
    assert folder.points("by_epoch") == [(3, 1.0)]
    assert session.report_delivery().complete


@pytest.mark.long
def test_a_named_folder_has_one_folder_per_run(start, read_events, tmp_path):
    sessions = [start("tensorboard:boards") for _ in range(2)]
    for number, session in enumerate(sessions):
        quark.MetricsLogger(session).log("m", float(number), step=1)
        session.end_run()
    assert {path.name for path in (tmp_path / "boards").iterdir()} == {s.run_id for s in sessions}
    for number, session in enumerate(sessions):
        assert read_events(tmp_path / "boards" / session.run_id).points("m") == [(1, number)]


@pytest.mark.long
def test_a_resumed_run_has_a_folder_per_attempt(start, read_events, tmp_path):
    session = start()
    quark.MetricsLogger(session).log("m", 1.0, step=5)
    session.end_run("failed")
    again = quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, backends="tensorboard")
    quark.MetricsLogger(again).log("m", 2.0, step=3)
    again.end_run()
    folder = session.run_path / "tensorboard"
    assert read_events(folder / "attempt-1").points("m") == [(3, 2.0)]
    files = [path.name for path in folder.iterdir() if "tfevents" in path.name]
    assert len(files) == 1


def test_what_a_killed_process_left_is_cut_off(backend, config, definition, read_events):
    maker = BatchMaker("run0")
    backend.write(maker.start())
    backend.write(maker.metrics(("m", 0, 0.0)))
    (path,) = (config.run_path / "tensorboard").glob("*tfevents*")
    acknowledged = path.read_bytes()
    batch = maker.metrics(("m", 1, 1.0), ("m", 2, 2.0))
    backend.write(batch)
    whole = path.read_bytes()
    for cut in range(len(acknowledged), len(whole), 7):
        state = next(config.run_path.glob("tensorboard/state/writer-*.json"))
        saved = state.read_bytes()
        found = msgspec.json.decode(saved)
        found["number"], found["sizes_bytes"]["main"] = batch.number - 1, len(acknowledged)
        state.write_bytes(msgspec.json.encode(found))
        path.write_bytes(whole[:cut])
        definition.open(config).write(batch)
        # The same bytes, so a reader that was here before has missed nothing.
        assert path.read_bytes() == whole
    assert read_events(config.run_path / "tensorboard").points("m") == [(0, 0), (1, 1), (2, 2)]


def test_writers_of_one_attempt_have_folders_of_their_own(backend, config, read_events):
    first, second = BatchMaker("run0"), BatchMaker("run0", writer_id="child")
    backend.write(first.start())
    backend.write(second.metrics(("m", 1, 1.0)))
    backend.write(first.metrics(("m", 2, 2.0)))
    folder = config.run_path / "tensorboard"
    assert read_events(folder / "writer-child").points("m") == [(1, 1)]
    assert len([path for path in folder.iterdir() if "tfevents" in path.name]) == 1


def make(record_type, sequence=0, /, **fields):
    return record_type("run0", "writer0", 0, 0, sequence, FIRST_TIME_US, **fields)


def test_every_kind_of_record(backend, config, read_events, tmp_path):
    maker = BatchMaker("run0")

    def add(*records):
        backend.write(maker.batch(records))

    backend.write(maker.start())
    backend.write(maker.events("checkpoint_saved", step=1, payload=JsonObject({"path": "a.pt"})))
    logged = JsonObject({"message": "no memory", "identifier": "Error"})
    backend.write(maker.events("user_log", severity="error", step=2, payload=logged))
    add(make(SystemTelemetryRecord, boundary="step", step=3, step_time_ms=12.5, node="host"))
    add(make(SystemTelemetryRecord, 9, boundary="time", cpu_usage_percent=25.0, node="host"))
    common = {"module_name": "a", "module_type": "Linear"}
    layer = {"summary_type": "activation", "hook_direction": "forward", "call_index": 0}
    add(make(LayerSummaryRecord, **common, **layer, element_count=4, step=1, mean=0.5))
    common |= {"parameter_name": "a.weight", "parameter_role": "weight"}
    add(
        make(
            ParameterSummaryRecord,
            **common,
            dtype="float32",
            element_count=4,
            step=1,
            value_norm=1.5,
        )
    )
    counted = {"sample_count": 3, "total_count": 3, "counts": (1, 2), "bin_edges": (0.0, 1.0, 2.0)}
    add(make(ParameterDistributionRecord, **common, **counted, distribution_type="value", step=1))
    add(make(BatchDiagnosticRecord, loss=0.5, step=4, batch_size=8))
    text = {"category": "optimization", "title": "T", "summary": "S", "fact": "F", "inference": "I"}
    add(make(AlertRecord, **text, rule_id="spike", severity="critical", step=5))
    add(make(HealthScoreRecord, score_key="overall", category="overall", score=40.0, status="x"))
    add(make(PhaseRecord, phase_name="w", display_name="Warm", summary="s", step_start=6))
    row = {"prompt": "# 2+2?", "completion": "4", "reward": 1.0, "set_name": "eval"}
    add(make(SampleRecord, **row, step=8))
    content = png()
    sha256 = hashlib.sha256(content).hexdigest()
    (tmp_path / "image.png").write_bytes(content)
    size = len(content)
    backend.put_payload(
        Payload(run_id="run0", sha256=sha256, size_bytes=size, path=tmp_path / "image.png")
    )
    names = {"artifact_key": "samples/grid", "namespace": "samples", "artifact_name": "grid"}
    kept = {"payload_format": "bytes", "size_bytes": size, "sha256": sha256, "step": 7}
    add(make(ArtifactRecord, artifact_type="image", **names, **kept))
    backend.write(maker.lifecycle(("status", {"status": "completed"})))

    folder = read_events(config.run_path / "tensorboard")
    assert folder.points("quark/events/info") == [(1, 1)]
    assert folder.points("quark/events/error") == [(2, 1)]
    assert "a.pt" in folder.texts("events/checkpoint_saved")[0][1]
    assert folder.texts("logs/error") == [(2, "no memory")]
    assert folder.points("system/runtime/step_time_ms") == [(3, 12.5)]
    assert folder.points("system/host/cpu/utilization_percent") == [(9, 25)]
    assert folder.points("layers/a/activation/mean") == [(1, 0.5)]
    assert folder.points("params_stats/a.weight/norm") == [(1, 1.5)]
    assert folder.points("data/batch_loss") == [(4, 0.5)]
    assert folder.points("quark/alerts/spike") == [(5, 4)]
    assert folder.texts("alerts/spike")[0][1].startswith("critical")
    assert folder.points("quark/health/overall") == [(0, 40)]
    assert folder.points("quark/phase_index") == [(6, 0)]
    assert folder.texts("phases") == [(6, "Warm\n\ns")]
    ((step, text),) = folder.texts("samples/eval")
    assert step == 8
    assert '    {\n      "prompt": "# 2+2?"' in text
    assert '"lr": 0.1' in folder.texts("run/config")[0][1]
    assert "_hparams_/session_start_info" in folder.read.Tags()["tensors"]
    assert "_hparams_/session_end_info" in folder.read.Tags()["tensors"]
    media = read_events(config.run_path / "tensorboard" / "media").read
    ((step, image),) = [(e.step, e) for e in media.Images("artifacts/samples/grid")]
    assert (step, image.width, image.height) == (7, 3, 2)
    assert image.encoded_image_string == content
    (histogram,) = media.Histograms("dist/a.weight/value")
    value = histogram.histogram_value
    assert (value.num, value.min, value.max, value.sum) == (3, 0, 2, 3.5)
    assert (list(value.bucket_limit), list(value.bucket)) == ([0, 1, 2], [0, 1, 2])


def png():
    pil = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pil.new("RGB", (3, 2)).save(file, "png")
    return file.getvalue()


def test_a_full_disk_delays_and_loses_nothing(backend, config, monkeypatch, read_events):
    maker = BatchMaker("run0")
    backend.write(maker.start())
    batch = maker.metrics(("m", 1, 1.0), ("m", 2, 2.0))
    real = os.write

    def fill(descriptor, data):
        real(descriptor, bytes(data)[:11])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr("quark_backends.tensorboard.backend.os.write", fill)
        with pytest.raises(BackendUnavailable, match="No space"):
            backend.write(batch)
    backend.write(batch)
    assert read_events(config.run_path / "tensorboard").points("m") == [(1, 1), (2, 2)]


def test_options_are_refused(definition, config):
    wrong = {name: getattr(config, name) for name in config.__dataclass_fields__}
    wrong["options"] = {"colour": "red"}
    with pytest.raises(BackendUnavailable, match="'colour'"):
        definition.open(type(config)(**wrong))


def test_a_missing_library_is_named_with_its_extra(definition, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in list(sys.modules):
        if name.startswith("tensorboard.") and "_pb2" not in name:
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(BackendUnavailable, match=r"quark-tracker\[tensorboard\]"):
        definition.open(config)
