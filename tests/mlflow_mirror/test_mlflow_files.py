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

from quark_backends.mlflow import files as files_module
from quark_backends.mlflow import segments as segments_module
from quark_core.errors import ArtifactNotFoundError
from quark_core.query import Query
from quark_core.testing.batches import FIRST_TIME_US


@pytest.fixture
def maker():
    return KindMaker("run0")


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
    assert reader.read("run0", "layer", Query()).count == 130


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


def test_tables_without_pyarrow(backend, maker, list_paths, fetch, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    backend.write(maker.start())
    backend.write(maker.parameters())
    backend.close()
    (path,) = list_paths("quark/tables")
    assert path == "quark/tables/parameter/writer0-0001.jsonl.gz"
    (row,) = [json.loads(line) for line in gzip.decompress(fetch(path)).splitlines()]
    assert (row["parameter_name"], row["gradient_norm"]) == ("fc.weight", "nan")


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


def test_a_payload_that_is_too_large_is_left_out(definition, config, maker, tmp_path, list_paths):
    backend = definition.open(dataclasses.replace(config, options={"max_payload_mb": "0"}))
    backend.write(maker.start())
    put(backend, tmp_path)
    backend.write(maker.artifact())
    backend.close()
    (path,) = list_paths("artifacts")
    assert path.endswith(".metadata.json")


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
    assert sum("cannot go among" in record.getMessage() for record in caplog.records) == 1
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
