"""ArtifactStore as the guide shows it: store, name, read, load."""

import json

import numpy as np
import pytest
from payload_tools import assert_whole, list_objects, sha256

import quark
from quark import ARTIFACT_STORAGE_LAYOUT, ArtifactStore, TrainingSession


def test_the_guides_first_program(tmp_path):
    storage_dir = (tmp_path / "quark-runs").resolve()
    with (
        TrainingSession.start_run(project="artifact-demo", storage_dir=storage_dir) as session,
        ArtifactStore(session) as artifacts,
    ):
        histogram = artifacts.log_histogram(
            "activation",
            bins=[-1.0, 0.0, 1.0],
            counts=[12, 4],
            step=120,
            epoch=2,
            namespace="layers/encoder",
            metadata={"module": "encoder.0"},
        )
        snapshot = artifacts.log_snapshot(
            "warmup",
            {"checkpoint_path": "checkpoints/step-120.pt", "checkpoint_size_bytes": 8192},
            snapshot_type="checkpoint_metadata",
            step=120,
            epoch=2,
            namespace="trainer",
            metadata={"phase": "warmup"},
        )
        assert artifacts.load(snapshot) == {
            "checkpoint_path": "checkpoints/step-120.pt",
            "checkpoint_size_bytes": 8192,
        }
        assert artifacts.load(histogram) == {"bins": [-1.0, 0.0, 1.0], "counts": [12, 4]}
        assert artifacts.read() == (histogram, snapshot)
    assert (histogram.artifact_type, histogram.payload_format) == ("histogram", "json")
    assert (histogram.artifact_key, histogram.namespace, histogram.artifact_name) == (
        "layers/encoder/activation",
        "layers/encoder",
        "activation",
    )
    assert (histogram.step, histogram.epoch) == (120, 2)
    assert histogram.metadata == {"module": "encoder.0"}
    assert (snapshot.artifact_type, snapshot.artifact_key) == (
        "checkpoint_metadata",
        "trainer/warmup",
    )
    for record in (histogram, snapshot):
        assert_files_agree(session, record)


def assert_files_agree(session, record):
    payload = session.run_path / record.payload_relative_path
    data = payload.read_bytes()
    assert (len(data), sha256(data)) == (record.size_bytes, record.sha256)
    stem = payload.name.removesuffix(f".{payload.suffix[1:]}")
    assert stem.startswith(f"step-{record.step:08d}-")
    head = {"artifact_type": record.artifact_type, "artifact_key": record.artifact_key}
    assert record.payload_relative_path == ARTIFACT_STORAGE_LAYOUT["payload"].format(
        **head, stem=stem, extension="json"
    )
    assert record.metadata_relative_path == ARTIFACT_STORAGE_LAYOUT["metadata"].format(
        **head, stem=stem
    )
    kept = ARTIFACT_STORAGE_LAYOUT["object"].format(
        sha256_head=record.sha256[:2], sha256=record.sha256
    )
    assert (session.run_path / kept).read_bytes() == data
    said = json.loads((session.run_path / record.metadata_relative_path).read_text())
    told = record.to_dict()
    assert said == {name: told[name] for name in said}
    assert {"sha256", "size_bytes", "step", "epoch", "timestamp", "metadata"} <= said.keys()


def test_the_guides_generic_program(artifacts):
    record = artifacts.store(
        "tensor_summary",
        "layers/encoder/weights",
        {"mean": 0.02, "std": 0.31},
        step=120,
        payload_format="json",
    )
    artifacts.store("tensor_summary", "layers/encoder/weights", {"mean": 0.5}, step=99)
    artifacts.store("tensor_summary", "layers/decoder/weights", {"mean": 0.5}, step=120)
    artifacts.store("embedding_snapshot", "layers/encoder/weights", {"mean": 0.5}, step=120)
    records = artifacts.read(
        artifact_type="tensor_summary", namespace="layers/encoder", step_min=100
    )
    assert records == (record,)
    assert artifacts.load(record) == artifacts.load(record.id) == {"mean": 0.02, "std": 0.31}


def test_the_guides_retention_hook(session, capsys):
    def keep_only_metadata(store, record):
        if record.artifact_type == "checkpoint_metadata":
            print(record.artifact_key, record.size_bytes)

    with ArtifactStore(
        session, retention_hooks=(keep_only_metadata,), raise_on_retention_error=False
    ) as artifacts:
        first = artifacts.log_snapshot("latest", {"checkpoint": "step-120.pt"})
        second = artifacts.log_snapshot("latest", {"a": 1}, snapshot_type="checkpoint_metadata")
    assert first.artifact_type == "batch_diagnostics_snapshot"
    assert capsys.readouterr().out == f"latest {second.size_bytes}\n"


@pytest.mark.parametrize(
    ("payload", "payload_format", "data", "loaded"),
    [
        ("text äß", "text", "text äß".encode(), "text äß"),
        ("", "text", b"", ""),
        (b"\0\xff", "bytes", b"\0\xff", b"\0\xff"),
        (b"", "bytes", b"", b""),
        (bytearray(b"ab"), "bytes", b"ab", b"ab"),
        (memoryview(b"abcd")[::2], "bytes", b"ac", b"ac"),
        ({"a": [1, None, True]}, "json", b'{"a":[1,null,true]}', {"a": [1, None, True]}),
        ([], "json", b"[]", []),
        ({}, "json", b"{}", {}),
        (None, "json", b"null", None),
        (1.5, "json", b"1.5", 1.5),
        ((1, 2), "json", b"[1,2]", [1, 2]),
        (np.float32(0.5), "json", b"0.5", 0.5),
    ],
)
def test_the_format_follows_from_the_payload(artifacts, payload, payload_format, data, loaded):
    record = artifacts.store("t", "n", payload)
    assert record.payload_format == payload_format
    assert_whole(artifacts, record, data)
    found = artifacts.load(record)
    assert found == loaded
    assert type(found) is type(loaded)


def test_a_format_that_is_given_counts(artifacts):
    assert artifacts.load(artifacts.store("t", "n", "text", payload_format="json")) == "text"
    numbers = np.arange(6, dtype="<i4").reshape(2, 3)
    record = artifacts.store("t", "n", np.asfortranarray(numbers), payload_format="bytes")
    assert artifacts.load(record) == numbers.tobytes()
    record = artifacts.store("t", "n", numbers.astype(">f8"), payload_format="bytes")
    assert artifacts.load(record) == numbers.astype(">f8").tobytes()


@pytest.fixture
def many(artifacts):
    """Ten artifacts: steps 0 to 9, two types, three formats, two namespaces."""
    records = []
    for step in range(10):
        payload = [{"n": step}, f"text {step}", bytes([step])][step % 3]
        records.append(
            artifacts.store(
                "even" if step % 2 == 0 else "odd",
                f"name{step % 4}",
                payload,
                step=step,
                epoch=step // 5,
                namespace=None if step < 5 else "deep/er",
            )
        )
    return records


FILTERS = [
    ({}, range(10)),
    ({"artifact_type": "odd"}, [1, 3, 5, 7, 9]),
    ({"artifact_types": ["odd", "even"], "limit": 3}, [7, 8, 9]),
    ({"artifact_types": iter(["odd"])}, [1, 3, 5, 7, 9]),
    ({"artifact_types": []}, []),
    ({"artifact_type": "odd", "artifact_types": ["even"]}, []),
    ({"namespace": "deep/er"}, [5, 6, 7, 8, 9]),
    ({"namespace": "deep"}, []),
    ({"artifact_name": "name1"}, [1, 5, 9]),
    ({"artifact_key": "name1"}, [1]),
    ({"artifact_key": "deep/er/name1"}, [5, 9]),
    ({"payload_format": "text"}, [1, 4, 7]),
    ({"payload_format": "bytes", "artifact_type": "even"}, [2, 8]),
    ({"step": 4}, [4]),
    ({"step_min": 3, "step_max": 5}, [3, 4, 5]),
    ({"epoch": 1, "step_max": 6}, [5, 6]),
    ({"epoch_min": 1}, [5, 6, 7, 8, 9]),
    ({"epoch_max": 0, "limit": 2}, [3, 4]),
    ({"limit": 0}, []),
    ({"artifact_type": "odd", "limit": 1}, [9]),
]


@pytest.mark.long
def test_every_filter(artifacts, many):
    for filters, steps in FILTERS:
        assert artifacts.read(**filters) == tuple(many[step] for step in steps)


def test_an_id_finds_its_artifact_and_goes_with_the_other_filters(artifacts, many):
    for record in many:
        assert artifacts.read(artifact_id=record.id) == (record,)
    record = many[3]
    assert artifacts.read(artifact_id=record.id, artifact_type="odd", limit=1) == (record,)
    assert artifacts.read(artifact_id=record.id, limit=0) == ()
    assert artifacts.read(artifact_id=record.id, artifact_type="even") == ()


NO_IDS = (
    *("", "x", "x-artifact-0", "-artifact-", "x-artifact-²", "x-metric-0", "x-artifact--1"),
    *(f"x-artifact-{'9' * digits}" for digits in (18, 19, 30, 5_000)),
    *("9" * 5_000, "\ud800-artifact-0"),
)


def test_an_id_of_nothing_finds_nothing(artifacts, many):
    for artifact_id in NO_IDS:
        assert artifacts.read(artifact_id=artifact_id) == ()
        with pytest.raises(quark.ArtifactNotFoundError, match="no artifact"):
            artifacts.load(artifact_id)


BAD_FILTERS = [
    ({"artifact_types": "odd"}, "artifact_types"),
    ({"artifact_types": 5}, "artifact_types"),
    ({"payload_format": "yaml"}, "payload_format"),
    ({"limit": -1}, "limit"),
    ({"step_min": -1}, "step_min"),
    ({"artifact_key": ""}, "artifact_key"),
    ({"artifact_key": 3}, "artifact_key"),
    ({"namespace": "x" * 251}, "namespace"),
]


def test_a_bad_filter_is_refused_by_name(artifacts):
    for filters, named in BAD_FILTERS:
        with pytest.raises(quark.SchemaValidationError, match=f"^{named}"):
            artifacts.read(**filters)


@pytest.mark.parametrize("artifact", [None, 5, object(), b"id", ["id"]])
def test_load_wants_a_record_or_an_id(artifacts, artifact):
    for call in (artifacts.load, artifacts.open):
        with pytest.raises(quark.SchemaValidationError, match=r"^artifact must be"):
            call(artifact)


@pytest.mark.long
def test_what_a_resumed_run_does_again_is_hidden(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        artifacts = ArtifactStore(session)
        first = [artifacts.store("t", "n", f"first {step}", step=step) for step in range(4)]
        timeless = artifacts.store("t", "n", "no step")
        session.end_run("interrupted")
    with quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, from_step=2) as resumed:
        artifacts = ArtifactStore(resumed)
        again = artifacts.store("t", "n", "second 2", step=2)
        # Without a step, nothing says which attempt it belongs to but the time.
        seen = artifacts.read()
        assert again in seen
        assert first[0] in seen
        assert first[1] in seen
        assert first[2] not in seen
        assert first[3] not in seen
        everything = artifacts.read(all_attempts=True)
        assert everything == (*first, timeless, again)
        assert artifacts.read(all_attempts=True, step=2) == (first[2], again)
        assert artifacts.read(artifact_id=first[3].id) == ()
        assert artifacts.load(first[3].id) == artifacts.load(first[3]) == "first 3"
    found = ArtifactStore(quark.open_run(session.run_id, tmp_path))
    assert [found.load(record) for record in found.read(all_attempts=True)] == [
        *(f"first {step}" for step in range(4)),
        "no step",
        "second 2",
    ]


def test_each_artifact_has_names_of_its_own(artifacts, session):
    records = [artifacts.store("t", "same", {"n": n % 2}, step=1) for n in range(6)]
    assert len({record.payload_relative_path for record in records}) == 6
    assert len({record.metadata_relative_path for record in records}) == 6
    assert len(list_objects(session)) == 2
    for index, record in enumerate(records):
        assert artifacts.load(record) == {"n": index % 2}


def test_a_runs_folder_may_be_moved(artifacts, session, tmp_path):
    record = artifacts.store("t", "a/b", b"payload", step=3)
    moved = tmp_path / "moved"
    session.run_path.joinpath("artifacts").rename(moved)
    (tmp_path / "elsewhere").mkdir()
    target = moved / record.payload_relative_path.removeprefix("artifacts/")
    assert target.read_bytes() == b"payload"
    moved.rename(session.run_path / "artifacts")


@pytest.mark.parametrize(
    ("step", "epoch", "stem"), [(7, 1, "step-00000007-"), (None, 3, "epoch-000003-")]
)
def test_names_sort_by_step_or_epoch(artifacts, step, epoch, stem):
    record = artifacts.store("t", "n", "x", step=step, epoch=epoch)
    assert record.payload_relative_path.startswith(f"artifacts/t/n/{stem}")
    assert (record.step, record.epoch) == (step, epoch)


def test_the_timestamp_may_be_given(artifacts):
    record = artifacts.store("t", "n", "x", timestamp="2026-01-01T00:00:00Z")
    assert record.timestamp == "2026-01-01T00:00:00.000000Z"
    assert artifacts.read() == (record,)
