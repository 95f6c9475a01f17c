"""What goes among a run's artifacts: records, tables, payloads, and their way there."""

import dataclasses
import gzip
import hashlib
import importlib.util
import io
import json
import logging

import pytest
from kinds import PAYLOAD, KindMaker, put, read_table

from quark_backends.mlflow import artifacts as files_module
from quark_backends.mlflow import outbox as segments_module
from quark_backends.mlflow.client import Refused
from quark_core.errors import ArtifactNotFoundError
from quark_core.records.query import Query
from quark_core.testing.fakes import FIRST_TIME_US


@pytest.fixture
def maker():
    return KindMaker("run0")


@pytest.mark.long
def test_files_of_further_writers_and_sizes(definition, config, maker, list_paths, monkeypatch):
    monkeypatch.setattr(files_module, "_EVENTS_LIMIT_BYTES", 100)
    monkeypatch.setattr(segments_module, "_LIMIT_BYTES", 1000)
    backend = definition.open(config)
    backend.write(maker.start())
    resumed = KindMaker("run0", attempt=1, writer_id="w1", started_us=FIRST_TIME_US + 10**6)
    batches = [
        maker.events("one"),
        maker.layers(),
        maker.layers(),
        maker.layers(),
        maker.events("two"),
    ]
    batches += [resumed.start(), resumed.events("three"), resumed.layers(40)]
    for batch in batches:
        backend.write(batch)
    backend.close()
    assert [p for p in list_paths("quark") if "events" in p] == [
        "quark/events-0002.jsonl",
        "quark/events.jsonl",
        "quark/events.w1.jsonl",
    ]
    assert len([p for p in list_paths("quark/records") if "writer0" in p]) >= 2
    reader = definition.open(dataclasses.replace(config, read_only=True))
    assert reader.read("run0", "event", Query()).count == 3
    # The second attempt repeats the steps of the first, all of which are kept.
    assert reader.read("run0", "layer", Query()).count == 40
    assert reader.read("run0", "layer", Query(all_attempts=True)).count == 130


@pytest.mark.long
def test_tables_for_other_tools(backend, maker, list_paths, fetch, monkeypatch):
    backend.write(maker.start())
    backend.write(maker.layers())
    backend.write(maker.distributions())
    backend.close()
    paths = list_paths("quark/tables")
    if importlib.util.find_spec("pyarrow") is None:
        assert paths == [
            "quark/tables/layer/writer0-0001.jsonl.gz",
            "quark/tables/parameter_distribution/writer0-0001.jsonl.gz",
        ]
        rows = [json.loads(line) for line in gzip.decompress(fetch(paths[0])).splitlines()]
    else:
        assert paths == [
            "quark/tables/layer/writer0-0001.parquet",
            "quark/tables/parameter_distribution/writer0-0001.parquet",
        ]
        rows = read_table(io.BytesIO(fetch(paths[0])))
    assert [row["module_name"] for row in rows] == [f"block.{index}" for index in range(30)]


@pytest.mark.long
def test_tables_without_pyarrow(backend, maker, list_paths, fetch, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    backend.write(maker.start())
    backend.write(maker.parameters())
    backend.close()
    (path,) = list_paths("quark/tables")
    assert path == "quark/tables/parameter/writer0-0001.jsonl.gz"
    (row,) = [json.loads(line) for line in gzip.decompress(fetch(path)).splitlines()]
    assert (row["parameter_name"], row["gradient_norm"]) == ("fc.weight", "nan")


@pytest.mark.long
def test_payloads_lie_under_their_names(backend, maker, tmp_path, fetch, definition, config):
    backend.write(maker.start())
    sha256 = put(backend, tmp_path)
    backend.write(maker.artifact())
    path = "artifacts/image/plots/loss/step-00000004-ab.png"
    assert fetch(path) == PAYLOAD
    described = json.loads(fetch(path.replace(".png", ".metadata.json")))
    assert (described["sha256"], described["artifact_key"]) == (sha256, "plots/loss")
    backend.close()
    reader = definition.open(dataclasses.replace(config, read_only=True))
    with reader.open_payload("run0", sha256) as file:
        assert file.read() == PAYLOAD
    with pytest.raises(ArtifactNotFoundError):
        reader.open_payload("run0", "0" * 64)


@pytest.mark.long
def test_a_payload_that_is_too_large_is_left_out(definition, config, maker, tmp_path, list_paths):
    backend = definition.open(
        dataclasses.replace(config, options={"quark": "full", "max_payload_mb": "0"})
    )
    backend.write(maker.start())
    put(backend, tmp_path)
    backend.write(maker.artifact())
    backend.close()
    (path,) = list_paths("artifacts")
    assert path.endswith(".metadata.json")


@pytest.mark.long
def test_artifacts_that_cannot_be_stored_hold_no_metric_back(
    maker, config, find_runs, monkeypatch, caplog, definition, tmp_path
):
    backend = definition.open(config)

    def refuse(*_):
        raise PermissionError("planted")

    client = backend._server._client
    monkeypatch.setattr(client, "log_artifact", refuse)
    put(backend, tmp_path)
    with caplog.at_level(logging.WARNING, "quark"):
        batches = [maker.start(), maker.artifact(), maker.metrics(("m", 0, 0.0)), maker.layers()]
        for batch in batches:
            backend.write(batch)
        backend._writing.send_files()
        backend._writing.send_files()
    assert set(find_runs()[0].data.metrics) >= {"m"}
    assert sum("cannot be added to" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(Exception, match="files wait"):
        backend.close()
    # The next process that opens the mirror sends them.
    again = definition.open(config)
    again.write(maker.metrics(("m", 1, 1.0)))
    again.close()
    reader = definition.open(dataclasses.replace(config, read_only=True))
    assert reader.read("run0", "layer", Query()).count == 30
    with reader.open_payload("run0", hashlib.sha256(PAYLOAD).hexdigest()) as file:
        assert file.read() == PAYLOAD


@pytest.mark.long
def test_artifacts_over_http(definition, config, client, maker, tmp_path, server, project):
    """The server takes the artifacts itself, and nobody else can reach their place."""
    client.create_experiment(project, artifact_location=f"mlflow-artifacts:/{tmp_path.name}")
    backend = definition.open(config)
    backend.write(maker.start())
    sha256 = put(backend, tmp_path)
    backend.write(maker.artifact())
    backend.write(maker.layers())
    with pytest.raises(ArtifactNotFoundError):
        backend.open_payload("run0", "0" * 64)
    backend.close()
    reader = definition.open(dataclasses.replace(config, read_only=True))
    assert reader.read("run0", "layer", Query()).count == 30
    with reader.open_payload("run0", sha256) as file:
        assert file.read() == PAYLOAD
    assert any((server.folder / "proxied" / tmp_path.name).rglob("records/*"))


@pytest.mark.long
def test_segments_of_a_lost_folder_are_not_written_over(definition, config, maker, tmp_path):
    backend = definition.open(config)
    backend.write(maker.start())
    backend.write(maker.metrics(("m", 0, 0.0)))
    backend.close()
    other = definition.open(dataclasses.replace(config, run_path=tmp_path / "elsewhere"))
    other.write(maker.metrics(("m", 1, 1.0)))
    other.close()
    reader = definition.open(dataclasses.replace(config, read_only=True))
    assert reader.read("run0", "metric", Query())["value"].tolist() == [0.0, 1.0]


def list_left(config):
    (folder,) = (config.run_path / "mirrors" / "mlflow").iterdir()
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


SETTLED = ["held", "names.json", "run.json", "writers", "writers/writer0.json"]


@pytest.mark.long
def test_a_closed_mirror_keeps_no_copy_of_what_mlflow_has(definition, config, maker, tmp_path):
    backend = definition.open(config)
    sha256 = put(backend, tmp_path)
    for batch in (
        maker.start(),
        maker.metrics(("m", 0, 0.0)),
        maker.events("one"),
        maker.layers(),
        maker.artifact(),
        maker.lifecycle(("status", {"status": "completed"})),
    ):
        backend.write(batch)
    backend.close()
    assert list_left(config) == SETTLED
    reader = definition.open(dataclasses.replace(config, read_only=True))
    assert reader.read("run0", "layer", Query()).count == 30
    assert reader.load_run("run0").state == "completed"
    with reader.open_payload("run0", sha256) as file:
        assert file.read() == PAYLOAD


@pytest.mark.long
def test_what_comes_after_a_close_goes_beside_what_was_there(
    definition, config, maker, fetch, list_paths
):
    for number in range(3):
        backend = definition.open(config)
        if not number:
            backend.write(maker.start())
        backend.write(maker.events(f"event {number}"))
        backend.write(maker.metrics(("m", number, float(number))))
        backend.close()
        assert list_left(config) == SETTLED
    names = [path for path in list_paths("quark") if "events" in path]
    lines = [json.loads(line) for name in names for line in fetch(name).splitlines()]
    assert sorted(line["event_type"] for line in lines) == ["event 0", "event 1", "event 2"]
    reader = definition.open(dataclasses.replace(config, read_only=True))
    assert reader.read("run0", "metric", Query())["value"].tolist() == [0.0, 1.0, 2.0]
    assert reader.read("run0", "event", Query()).count == 3


@pytest.mark.long
def test_what_a_killed_attempt_left_goes_with_the_attempt_after_it(definition, config, maker):
    backend = definition.open(config)
    for batch in (maker.start(), maker.events("one"), maker.layers()):
        backend.write(batch)
    # Killed here: nothing of it is closed.
    later = {"attempt": 1, "writer_id": "w1", "started_us": FIRST_TIME_US + 10**6}
    resumed = KindMaker("run0", **later)
    again = definition.open(config)
    for batch in (resumed.start(), resumed.events("two")):
        again.write(batch)
    again.close()
    assert list_left(config) == [*SETTLED[:-1], "writers/w1.json", SETTLED[-1]]
    reader = definition.open(dataclasses.replace(config, read_only=True))
    assert reader.read("run0", "event", Query()).count == 2
    assert reader.read("run0", "layer", Query()).count == 30


@pytest.mark.long
def test_what_of_an_earlier_attempt_is_delivered_meanwhile_loses_nothing(
    definition, config, maker, fetch, list_paths
):
    """Whoever delivers what a killed process left need not be done when its successor ends."""
    late = definition.open(config)
    for batch in (maker.start(), maker.events("one"), maker.layers()):
        late.write(batch)
    later = {"attempt": 1, "writer_id": "w1", "started_us": FIRST_TIME_US + 10**6}
    resumed = KindMaker("run0", **later)
    again = definition.open(config)
    for batch in (resumed.start(), resumed.events("two")):
        again.write(batch)
    again.close()
    for batch in (maker.events("three"), maker.layers(20), maker.events("four")):
        late.write(batch)
    late.close()
    assert list_left(config) == [*SETTLED[:-1], "writers/w1.json", SETTLED[-1]]
    names = [path for path in list_paths("quark") if "events" in path]
    lines = [json.loads(line) for name in names for line in fetch(name).splitlines()]
    assert sorted(line["event_type"] for line in lines) == ["four", "one", "three", "two"]
    reader = definition.open(dataclasses.replace(config, read_only=True))
    assert reader.read("run0", "event", Query()).count == 4
    assert reader.read("run0", "layer", Query()).count == 50


@pytest.mark.long
def test_another_writer_of_the_attempt_keeps_its_files(definition, config, maker, fetch):
    backend = definition.open(config)
    backend.write(maker.start())
    backend.write(maker.events("one"))
    other = KindMaker("run0", writer_id="w1")
    forked = definition.open(config)
    forked.write(other.events("of the child"))
    forked.close()
    backend.write(maker.events("two"))
    backend.close()
    assert len(fetch("quark/events.jsonl").splitlines()) == 2
    reader = definition.open(dataclasses.replace(config, read_only=True))
    assert reader.read("run0", "event", Query()).count == 3


@pytest.mark.long
def test_a_file_that_another_mirror_of_the_run_has_brought_there_meanwhile(
    definition, config, maker, monkeypatch, fetch
):
    backend = definition.open(config)
    backend.write(maker.start())
    real = backend._server.upload

    def upload(run_id, path, folder):
        real(run_id, path, folder)
        if path.name == "name_map.json":
            path.unlink()
            real(run_id, path, folder)

    monkeypatch.setattr(backend._server, "upload", upload)
    backend.close()
    assert list_left(config) == SETTLED
    assert json.loads(fetch("quark/name_map.json"))


def test_what_mlflow_refuses_stays_here(definition, config, maker, monkeypatch):
    backend = definition.open(config)
    backend.write(maker.start())
    backend.write(maker.events("one"))
    real = backend._server.upload

    def upload(run_id, path, folder):
        if path.name == "events.jsonl":
            raise Refused("planted")
        real(run_id, path, folder)

    monkeypatch.setattr(backend._server, "upload", upload)
    backend.close()
    assert "outbox/quark/events.jsonl" in list_left(config)
